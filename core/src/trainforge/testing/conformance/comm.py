"""The rules of the comm stage, checked on one rank and on two (processes of their own, meeting on this machine)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainforge.stages import Comm, Extent, FlatBuffer, ParameterSpec, Ready
from trainforge.testing.bench import PluginReference, build_stage, load_plugin, tiny_context
from trainforge.testing.conformance.base import PluginConformance
from trainforge.testing.ranks import run_ranks

SPECS = (
    ParameterSpec("stem.weight", (11, 4), "embedding"),
    ParameterSpec("blocks.0.weight", (7, 5), block=0),
    ParameterSpec("blocks.0.frozen", (9,), trainable=False, block=0),
    ParameterSpec("blocks.0.bias", (1,), "bias", block=0),
    ParameterSpec("blocks.1.weight", (3, 13), block=1),
    ParameterSpec("blocks.1.scale", (), "norm", block=1),
    ParameterSpec("head.empty", (0, 6)),
    ParameterSpec("head.weight", (10, 3)),
)
TRAINABLE = tuple(spec for spec in SPECS if spec.trainable)
EVERYTHING = frozenset(spec.name for spec in TRAINABLE if spec.elements)

USED: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (EVERYTHING, EVERYTHING),
    (EVERYTHING - {"blocks.1.weight", "blocks.0.bias"}, EVERYTHING - {"blocks.0.bias", "head.weight"}),
    (frozenset({"blocks.1.weight"}), frozenset()),
    (EVERYTHING, EVERYTHING),
)
"""What ranks 0 and 1 use in each step: all; some on one rank only and one nowhere; almost nothing; all again."""


class CommConformance(PluginConformance):
    """Whether every rank ends a step with the same sums, owns its share of the state, and gets all weights.

    Attributes:
        tolerance: of sums, relative to the largest magnitude. (Lossy compression: as much as it is allowed to lose.)
    """

    stage = "comm"
    tolerance: ClassVar[float] = 1e-6
    _seen: ClassVar[dict[tuple[type, int], list[dict[str, Any]]]] = {}

    def worlds(self) -> tuple[int, ...]:
        """The numbers of ranks it supports, of 1 and 2."""
        most = self.provider().traits.max_world
        return (1,) if most == 1 else (1, 2)

    def seen(self, folder: Path, world: int) -> list[dict[str, Any]]:
        """What each rank saw while it went through all calls once; done once per class."""
        key = (type(self), world)
        if key not in self._seen:
            arguments = (str(self.plugin), dict(self.config), dict(self.train), self.device, folder)
            self._seen[key] = run_ranks(exercise, world, *arguments)
        return self._seen[key]

    def test_ranks_know_their_place(self, tmp_path: Path) -> None:
        """`rank` and `world` are those of the context; `gather` and `control` reach all ranks."""
        for world in self.worlds():
            for rank, seen in enumerate(self.seen(tmp_path, world)):
                assert seen["place"] == (rank, world), f"rank {rank} of {world} calls itself {seen['place']}"
                wanted = [{"rank": r, "note": "ä"} for r in range(world)]
                assert seen["gathered"] == wanted, (
                    f"gather() on rank {rank} gave {seen['gathered']}, by rank: {wanted}"
                )
                total = [float(sum(range(world))), 2.5 * world, 2.0**40 * world + sum(range(world))]
                assert seen["control"] == total, (
                    f"control() gave {seen['control']} on rank {rank}; the sums are {total}"
                )

    def test_gradients_are_summed_in_place(self, tmp_path: Path) -> None:
        """After `finish` every rank has, in memory's buffer, the sum over ranks; nothing of an earlier step."""
        for world in self.worlds():
            for rank, seen in enumerate(self.seen(tmp_path, world)):
                for step, sums in enumerate(seen["sums"]):
                    for spec in TRAINABLE:
                        wanted = torch.zeros(spec.elements)
                        for other in range(world):
                            if spec.name in USED[step][other]:
                                wanted += gradient(spec, other, step)
                        owned = spans(seen["extents"], spec)
                        limit = self.tolerance * max(1.0, float(wanted.abs().max()) if spec.elements else 1.0)
                        for first, last in owned:
                            difference = (sums[spec.name][first:last] - wanted[first:last]).abs()
                            assert not difference.numel() or difference.max() <= limit, (
                                f"step {step}, rank {rank} of {world}: the gradient of {spec.name} is not the sum over "
                                "ranks (a sum, not a mean; in place; `ready` must be waited for before it is read)"
                            )

    def test_used_tells_of_any_rank(self, tmp_path: Path) -> None:
        """`finish` names the parameters with a gradient on any rank, the same on every rank, of this step only."""
        for world in self.worlds():
            for rank, seen in enumerate(self.seen(tmp_path, world)):
                for step, used in enumerate(seen["used"]):
                    wanted = frozenset().union(*USED[step][:world])
                    assert used == wanted, (
                        f"step {step}, rank {rank} of {world}: finish() gave {sorted(used)}; a gradient somewhere had "
                        f"{sorted(wanted)}"
                    )

    def test_every_element_has_an_owner(self, tmp_path: Path) -> None:
        """`partition` covers each element of the trainable parameters equally often: once, or on every rank."""
        sharded = self.provider().traits.shards_state
        for world in self.worlds():
            counts = {spec.name: torch.zeros(spec.elements) for spec in TRAINABLE}
            for rank, seen in enumerate(self.seen(tmp_path, world)):
                for extent in seen["extents"]:
                    assert extent.name in counts, (
                        f"partition() on rank {rank} gives {extent.name}: frozen or unknown"
                    )
                    spec = next(spec for spec in SPECS if spec.name == extent.name)
                    assert extent.global_shape == spec.shape, (
                        f"{extent.name}: global_shape must be {spec.shape}"
                    )
                    last = extent.offset + extent.length
                    assert 0 <= extent.offset <= last <= spec.elements, (
                        f"{extent} reaches beyond the parameter"
                    )
                    counts[extent.name][extent.offset : last] += 1
            wanted = 1 if sharded else world
            for name, count in counts.items():
                assert (count == wanted).all(), (
                    f"partition() over {world} ranks covers elements of {name} {set(count.int().tolist())} times; "
                    + (
                        "each must lie on exactly one rank"
                        if sharded
                        else "without shards_state each lies on every rank"
                    )
                )

    def test_partition_does_not_change(self, tmp_path: Path) -> None:
        """The same extents for the same parameters, also when they are asked for again."""
        for world in self.worlds():
            for seen in self.seen(tmp_path, world):
                assert seen["extents"] == seen["again"], "partition() gave other extents the second time"

    def test_published_weights_reach_every_rank(self, tmp_path: Path) -> None:
        """Once `publish` (and its `Ready`) is through, every rank has every owner's values; others are untouched."""
        for world in self.worlds():
            for rank, seen in enumerate(self.seen(tmp_path, world)):
                for dtype, weights in seen["published"].items():
                    for spec in TRAINABLE:
                        same = torch.equal(
                            weights[spec.name].float(), weight(spec).to(getattr(torch, dtype)).float()
                        )
                        assert same, (
                            f"rank {rank} of {world}: after publish() {spec.name} ({dtype}) is not what its owners have"
                        )

    def test_publishing_a_part(self, tmp_path: Path) -> None:
        """A memory that walks block by block publishes some parameters at a time, in its own order."""
        for world in self.worlds():
            for rank, seen in enumerate(self.seen(tmp_path, world)):
                for name, values in seen["pieces"].items():
                    spec = next(spec for spec in SPECS if spec.name == name)
                    same = torch.equal(values, weight(spec))
                    assert same, (
                        f"rank {rank} of {world}: publish() of {name} alone did not bring its owners' values"
                    )

    def test_sums_over_shards_and_ranks(self, tmp_path: Path) -> None:
        """`sum_shards` counts every element of one replica once; `sum_ranks` adds all ranks."""
        elements = float(sum(spec.elements for spec in TRAINABLE))
        for world in self.worlds():
            for rank, seen in enumerate(self.seen(tmp_path, world)):
                assert seen["shards"] == elements, (
                    f"rank {rank} of {world}: sum_shards() of the number of own elements gave {seen['shards']:g}; one "
                    f"replica has {elements:g} (each replica once: sharded state is added, whole replicas are not)"
                )
                total = [float(sum(range(1, world + 1))), 0.5 * world]
                assert seen["ranks"] == total, (
                    f"rank {rank} of {world}: sum_ranks() gave {seen['ranks']}, not {total}"
                )

    def test_its_state_is_plain(self, tmp_path: Path) -> None:
        """`state().data` is JSON and the same on every rank; `load` takes it back."""
        for world in self.worlds():
            states = [seen["state"] for seen in self.seen(tmp_path, world)]
            assert all(state == states[0] for state in states), "state().data differs between ranks"


def gradient(spec: ParameterSpec, rank: int, step: int) -> Tensor:
    """The gradient of a parameter on a rank, `[elements]`."""
    generator = torch.Generator().manual_seed(100 * step + 10 * spec.elements + rank)
    return torch.randn(spec.elements, generator=generator)


def weight(spec: ParameterSpec) -> Tensor:
    """The new value of a parameter, `[elements]`; the same on whichever rank computes it."""
    return torch.arange(spec.elements, dtype=torch.float32) + 100 * spec.elements


def spans(extents: Sequence[Extent], spec: ParameterSpec) -> list[tuple[int, int]]:
    """The spans of a parameter among extents, as (first, last)."""
    return [(e.offset, e.offset + e.length) for e in extents if e.name == spec.name]


class Landing:
    """A gradient that is still on its way: its bytes are in the buffer once somebody has waited."""

    def __init__(self, span: Tensor, values: Tensor) -> None:
        self._span, self._values = span, values

    def wait(self) -> None:
        """Let it land."""
        self._span.copy_(self._values)


def exercise(
    rank: int,
    world: int,
    plugin: PluginReference,
    config: Mapping[str, Any],
    train: Mapping[str, Any],
    device: str,
    folder: Path,
) -> dict[str, Any]:
    """Go through every call of a comm once, as a run does, on one rank; gives what this rank saw."""
    ctx = tiny_context(folder, rank=rank, world=world, train=train, device=device)
    comm: Comm = build_stage(ctx, load_plugin(plugin), "comm", config)
    try:
        extents = comm.partition(SPECS)
        sums, used = _steps(comm, ctx.device)
        state = comm.state()
        comm.load(state.version, json.loads(json.dumps(state.data)))
        own = torch.tensor(float(sum(e.length for e in extents)), dtype=torch.float64, device=ctx.device)
        added = comm.sum_ranks(torch.tensor([rank + 1.0, 0.5], device=ctx.device))
        seen: dict[str, Any] = {
            "place": (comm.rank, comm.world),
            "gathered": comm.gather({"rank": rank, "note": "ä"}),
            "control": comm.control([float(rank), 2.5, 2.0**40 + rank]),
            "extents": extents,
            "again": comm.partition(SPECS),
            "sums": sums,
            "used": used,
            "published": {d: _publish(comm, extents, SPECS, d, ctx.device) for d in ("float32", "bfloat16")},
            "pieces": {},
            "shards": float(comm.sum_shards(own)),
            "ranks": added.tolist(),
            "state": state.data,
        }
        for spec in TRAINABLE[1::2]:
            seen["pieces"] |= _publish(comm, extents, [spec], "float32", ctx.device)
        comm.gather(None)
        return seen
    finally:
        comm.close()


def _steps(comm: Comm, device: torch.device) -> tuple[list[dict[str, Tensor]], list[frozenset[str]]]:
    """All steps of `USED`: half of the gradients are final at the call of the sink, half land when waited for."""
    order = [spec.extent for spec in reversed(TRAINABLE)]
    starts = [sum(e.length for e in order[:i]) for i in range(len(order))]
    buffer = FlatBuffer(torch.zeros(sum(e.length for e in order), device=device), tuple(order), tuple(starts))
    by_name = {spec.name: spec for spec in SPECS}
    sink = comm.watch([buffer])
    sums, told = [], []
    for step, used in enumerate(USED):
        buffer.tensor.zero_()
        landings = []
        for index, extent in enumerate(order):
            if extent.name not in used[comm.rank]:
                continue
            values = gradient(by_name[extent.name], comm.rank, step)
            landing = Landing(buffer.span(index), values)
            landings.append(landing)
            ready: Ready | None = landing if index % 2 else None
            if ready is None:
                landing.wait()
            sink(extent, ready)
        if (
            comm.world == 1
        ):  # nothing travels, so comm need not have waited; if it reads anything, it must have
            for landing in landings:
                landing.wait()
        told.append(comm.finish())
        sums.append({extent.name: buffer.span(i).cpu().clone() for i, extent in enumerate(order)})
    return sums, told


def _publish(
    comm: Comm, extents: Sequence[Extent], specs: Sequence[ParameterSpec], dtype: str, device: torch.device
) -> dict[str, Tensor]:
    """Publish parameters of which only the own spans are up to date; gives what is there afterwards."""
    weights = {}
    for spec in specs:
        if spec.trainable:
            fresh, values = weight(spec), torch.full((spec.elements,), -1.0)
            for first, last in spans(extents, spec):
                values[first:last] = fresh[first:last]
            weights[spec.name] = values.to(device, getattr(torch, dtype))
    ready = comm.publish(weights)
    if ready is not None:
        ready.wait()
    return {name: tensor.cpu() for name, tensor in weights.items()}
