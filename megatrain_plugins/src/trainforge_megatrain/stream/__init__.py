"""Memory `stream`: weights and optimizer state in host RAM, streamed to the device block by block.

For models far larger than the card, at full precision: fp32 masters always, each block's update hidden behind the next
forward, exact clipping, no stale weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainforge.hookspecs import hookimpl
from trainforge.provider import Estimate, Provider, Section, Traits
from trainforge.units import ByteCount

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.stages import Memory, ModelSpec, Optimizer


class StreamSection(Section):
    """How much of the device may be used, and how masters are kept in host RAM."""

    gpu_budget: Literal["auto"] | ByteCount = Field(
        "auto",
        description="device memory that the run may take, such as 24GiB: a hard limit. What is left beside slots and "
        "activations holds whole blocks, which are then updated there. auto: what is free",
    )
    master: Literal["split", "fp32"] = Field(
        "split",
        description="how bf16 training keeps its fp32 masters: `split` in two halves, the upper one being the bf16 "
        "weight that is streamed (4 bytes per parameter); `fp32` beside the bf16 weights (6 bytes)",
    )
    slots: int = Field(2, ge=2, le=8, description="blocks that have room on the device at the same time")
    grads: Literal["bf16", "fp32"] = Field(
        "bf16",
        description="in which dtype a bf16 run's gradients travel to host RAM; micro-batches are added up in fp32 "
        "on the device either way, and with a single one nothing is lost",
    )
    inputs: Literal["auto", "device", "host"] = Field(
        "auto",
        description="where the inputs of recomputed blocks wait for backward: on the device, or in page-locked host "
        "RAM; auto: in host RAM where that lets the budget hold more of the model, or is the only way",
    )
    pin: bool = Field(
        True,
        description="page-lock weights and gradients in host RAM; without it copies are slower and do not overlap",
    )
    oversubscribe: bool = Field(
        False,
        description="start although the plan needs more than host RAM or the device has; a warning says so",
    )


def _build(ctx: Context, config: StreamSection) -> Memory:
    from trainforge_megatrain.stream.building import build

    return build(ctx, config)


def _estimate(ctx: Context, model: ModelSpec, config: StreamSection) -> Estimate:
    from trainforge_megatrain.stream.estimate import estimate

    return estimate(ctx, model, config)


def _micro_batch(ctx: Context, model: ModelSpec, optimizer: Optimizer, config: StreamSection) -> int | None:
    from trainforge_megatrain.stream.micro_batch import micro_batch

    return micro_batch(ctx, model, optimizer, config)


@hookimpl
def forge_memory() -> Provider:
    """Give the streaming memory."""
    return Provider(
        build=_build,
        config=StreamSection,
        estimate=_estimate,
        micro_batch=_micro_batch,
        traits=Traits(gradients_on="host", holds_shards=False, max_world=1),
    )
