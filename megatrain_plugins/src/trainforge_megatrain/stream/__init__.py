"""Memory `stream`: weights and optimizer state in host RAM, streamed to the device block by block.

For models far larger than the card, at full precision: fp32 masters always, each block's update hidden behind the next
forward, exact clipping, no stale weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section, Traits

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.stages import Memory


class StreamSection(Section):
    """How much of the device may be used, and how masters are kept in host RAM."""

    master: Literal["split", "fp32"] = Field(
        "split",
        description="how bf16 training keeps its fp32 masters: `split` in two halves, the upper one being the bf16 "
        "weight that is streamed (4 bytes per parameter); `fp32` beside the bf16 weights (6 bytes)",
    )
    slots: int = Field(2, ge=2, le=8, description="blocks that have room on the device at the same time")
    pin: bool = Field(
        True,
        description="page-lock weights and gradients in host RAM; without it copies are slower and do not overlap",
    )


def _build(ctx: Context, config: StreamSection) -> Memory:
    from concurrent.futures import ThreadPoolExecutor

    from trainforge.toolbox.streams import Streams
    from trainforge_megatrain.stream.memory import Stream

    def place(units):
        pass

    return Stream(ctx, config, Streams(ctx.device), ThreadPoolExecutor(1, "update"), place)


@hookimpl
def forge_memory() -> Provider:
    """Give the streaming memory."""
    return Provider(
        build=_build, config=StreamSection, traits=Traits(gradients_on="host", holds_shards=False, max_world=1)
    )
