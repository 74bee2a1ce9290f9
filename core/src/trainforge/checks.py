"""Do the chosen providers fit together, and the machine? One pure rule per trait of `provider.Traits`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from trainforge.errors import IncompatibleError
from trainforge.provider import StageName
from trainforge.selection import Chosen
from trainforge.wording import listed

Stages = Mapping[StageName, Chosen]
Rule = Callable[[Stages, str | None, int], Iterator[str]]


def devices(stages: Stages, device_type: str | None, world: int) -> Iterator[str]:
    """Every provider runs on this run's device."""
    for stage, chosen in stages.items():
        allowed = chosen.provider.traits.devices
        if device_type is not None and allowed is not None and device_type not in allowed:
            yield (
                f"{chosen.plugin} ({stage}) runs on {listed(allowed)}, and this run is on {device_type}: choose "
                f"another plugin for {stage}, or another run.device"
            )


def max_world(stages: Stages, device_type: str | None, world: int) -> Iterator[str]:
    """No provider gets more ranks than it supports."""
    for stage, chosen in stages.items():
        most = chosen.provider.traits.max_world
        if most is not None and world > most:
            yield (
                f"{chosen.plugin} ({stage}) supports {most} rank{'s' * (most > 1)}, and this run has {world}: choose "
                f"another plugin for {stage}, or start fewer ranks"
            )


def gradients(stages: Stages, device_type: str | None, world: int) -> Iterator[str]:
    """Comm and optimizer take gradients from where memory leaves them (`gradients_on`, `takes_gradients_on`)."""
    memory = stages["memory"]
    place = memory.provider.traits.gradients_on
    for stage in ("comm", "optimizer"):
        taker = stages[stage]
        takes = taker.provider.traits.takes_gradients_on
        if place not in takes:
            where = "on the host" if place == "host" else "on the device"
            yield (
                f"{memory.plugin} (memory) leaves gradients {where}; {taker.plugin} ({stage}) takes "
                f"{' or '.join(sorted(takes))} gradients"
            )


def shards(stages: Stages, device_type: str | None, world: int) -> Iterator[str]:
    """Memory can hold a part of the optimizer state when comm gives it only a part (`shards_state`)."""
    comm, memory = stages["comm"], stages["memory"]
    if world > 1 and comm.provider.traits.shards_state and not memory.provider.traits.holds_shards:
        yield (
            f"{comm.plugin} (comm) gives each rank a part of the optimizer state; {memory.plugin} (memory) can "
            "only hold all of it"
        )


RULES: tuple[Rule, ...] = (devices, max_world, gradients, shards)


def check(chosen: Stages, device_type: str | None, world: int) -> None:
    """Apply every rule.

    Args:
        chosen: one provider per stage.
        device_type: `"cpu"`, `"cuda"`, ...; None while it is not known, which skips the rule about devices.
        world: number of ranks.

    Raises:
        IncompatibleError: all that does not fit, one sentence each.
    """
    problems = [problem for rule in RULES for problem in rule(chosen, device_type, world)]
    if problems:
        raise IncompatibleError("\n".join(problems))
