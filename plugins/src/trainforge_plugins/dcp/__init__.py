"""`dcp`: checkpoints through torch.distributed.checkpoint, without pickle and with a checksum for every byte.

The default of its stage. The format is described in `manifest.py`; how a save is
committed in `trainforge.toolbox.checkpointing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainforge.hookspecs import hookimpl
from trainforge.provider import Estimate, Provider, Section
from trainforge.units import Seconds

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.stages import Checkpoint, ModelSpec


class DcpSection(Section):
    """How checkpoints are written. How often, and how many are kept, is said in `train`."""

    background: bool | Literal["auto"] = Field(
        "auto",
        description="write while training goes on, from a copy of the state in host RAM; false: training waits for the "
        "disk, and no copy is made. auto: in the background where there is RAM for the copy",
    )
    verify: bool = Field(
        True,
        description="read every file back from the disk and compare checksums before a checkpoint counts",
    )
    timeout: Seconds = Field(1800.0, gt=0, description="longest wait for the files of another rank")


def build(ctx: Context, config: DcpSection) -> Checkpoint:
    """Make the checkpoint stage; in a run, rank 0 removes what saves that were cut short have left."""
    from trainforge_plugins.dcp.checkpoint import DcpCheckpoint

    return DcpCheckpoint(ctx, config)


def estimate(ctx: Context, model: ModelSpec, config: DcpSection) -> Estimate:
    """Bytes of the checkpoints on disk while one more is written, and of the snapshot in host RAM."""
    from trainforge.toolbox.checkpointing.layout import state_bytes

    total = state_bytes(model, ctx.optimizer)
    return Estimate(
        host={} if config.background is False else {"snapshot of a save": total // max(1, ctx.world)},
        disk={f"{ctx.train.keep} checkpoints and the next one": total * (ctx.train.keep + 1)},
    )


@hookimpl
def forge_checkpoint() -> Provider:
    """Give the provider."""
    return Provider(build=build, config=DcpSection, default=True, estimate=estimate)
