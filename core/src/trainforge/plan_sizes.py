"""What a plan needs: the model on the meta device, and every provider's own estimate. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainforge.assembly import cache_dir
from trainforge.batching import choose_micro_batch, resolve_batching
from trainforge.blame import blaming
from trainforge.context import Batching, Context, SilentConsole
from trainforge.errors import ConfigError
from trainforge.provider import STAGES, Estimate
from trainforge.stages import Comm

if TYPE_CHECKING:
    import torch

    from trainforge.planning import Plan
    from trainforge.stages import ModelSpec


@dataclass(frozen=True)
class PlanSizes:
    """What a run needs, before anything is allocated.

    Attributes:
        parameters, trainable: elements, tied ones once.
        blocks: number of repeated blocks.
        batching: how a step is cut.
        world: number of ranks that it was planned for.
        device: where it would run.
        estimates: by stage; bytes are per rank.
    """

    parameters: int
    trainable: int
    blocks: int
    batching: Batching
    world: int
    device: str
    estimates: Mapping[str, Estimate]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def describe_model(plan: Plan, world: int = 1) -> tuple[ModelSpec, Context]:
    """Build the plan's model on the meta device, in this process alone and without a run folder.

    Raises:
        TrainForgeError: the model cannot be built.
    """
    ctx = Context(
        run=plan.recipe.run,
        train=plan.recipe.train,
        model_config=plan.recipe.model,
        device=_device(plan.recipe.run.device),
        rank=0,
        world=world,
        local_rank=0,
        local_world=world,
        batching=resolve_batching(plan.recipe.train, world),
        run_dir=Path("runs") / plan.recipe.run.name,
        cache_dir=cache_dir(),
        console=SilentConsole(),
        built={"comm": Comm()},
    )
    chosen = plan.chosen["model"]
    with blaming(ctx, chosen.plugin, "model", "describing the model"):
        ctx.built["model"] = chosen.provider.build(ctx, chosen.config)
    return ctx.model, ctx


def measure(plan: Plan, world: int = 1) -> PlanSizes:
    """Ask every stage what it would need. The optimizer is built for it: it is pure math, and says what state it keeps.

    Raises:
        TrainForgeError: the model cannot be built, an estimate fails, or the chosen providers do not fit the device.
    """
    model, ctx = describe_model(plan, world)
    plan.check(ctx.device.type, world)
    optimizer = plan.chosen["optimizer"]
    with blaming(ctx, optimizer.plugin, "optimizer", "being asked for its state"):
        ctx.built["optimizer"] = optimizer.provider.build(ctx, optimizer.config)
    choose_micro_batch(plan, ctx)
    estimates: dict[str, Estimate] = {}
    for stage in STAGES:
        chosen = plan.chosen[stage]
        if chosen.provider.estimate is not None:
            with blaming(ctx, chosen.plugin, stage, "estimating what it needs"):
                estimates[stage] = chosen.provider.estimate(ctx, model, chosen.config)
            ctx.row_tokens = estimates[stage].row_tokens or ctx.row_tokens
    return PlanSizes(
        parameters=sum(spec.elements for spec in model.parameters),
        trainable=sum(spec.elements for spec in model.parameters if spec.trainable),
        blocks=len(model.blocks),
        batching=ctx.batching,
        world=world,
        device=str(ctx.device),
        estimates=estimates,
    )


def _device(name: str) -> torch.device:
    import torch

    if name != "auto":
        try:
            return torch.device(name)
        except RuntimeError:
            raise ConfigError(
                f"run.device is {name!r}; it must be auto, cpu, or a device such as cuda or cuda:1"
            ) from None
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
