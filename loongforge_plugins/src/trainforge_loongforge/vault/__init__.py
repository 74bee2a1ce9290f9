"""`vault`: incremental checkpoints. What has not changed since the last one, or lies there already, is not written.

State is cut into chunks that are stored once, by what they hold (`store.py`); a step is a list of them
(`manifest.py`). How a save is taken without stopping training is in `snapshot.py`. (Content-addressed chunks are the
idea of Venti, Quinlan and Dorward 2002, and of backup programs such as restic.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trainforge.hookspecs import hookimpl
from trainforge.provider import Estimate, Provider, Section
from trainforge.units import Seconds

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.stages import Checkpoint, ModelSpec


class VaultSection(Section):
    """How checkpoints are written. How often, and how many are kept, is said in `train`."""

    background: bool | Literal["auto"] = Field(
        "auto",
        description="write while training goes on; false: training waits for the disk, and nothing is copied. auto: in "
        "the background where there is RAM for a copy of what lies on the device",
    )
    storage: Literal["auto", "gds", "posix"] = Field(
        "auto",
        description="how bytes reach the disk. posix: past the page cache where the file system allows it; gds: "
        "through KvikIO (GPUDirect Storage); auto: gds where it really goes directly",
    )
    compress: bool = Field(
        False, description="compress new chunks (zstd) where that makes them smaller; weights hardly shrink"
    )
    copies: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = Field(
        "auto",
        description="share of free host RAM that may hold copies of state which the update overtakes while it is still "
        "being written, 0 to 1; the rest is waited for. auto: half",
    )
    timeout: Seconds = Field(1800.0, gt=0, description="longest wait for the files of another rank")


def build(ctx: Context, config: VaultSection) -> Checkpoint:
    """Make the checkpoint stage; in a run, rank 0 removes what saves that were cut short have left."""
    from trainforge_loongforge.vault.checkpoint import VaultCheckpoint

    return VaultCheckpoint(ctx, config)


def estimate(ctx: Context, model: ModelSpec, config: VaultSection) -> Estimate:
    """Bytes on disk while one more is written, at most; and of the copies in host RAM, at most."""
    from trainforge.toolbox.checkpointing.layout import state_bytes

    total = state_bytes(model, ctx.optimizer)
    return Estimate(
        host={}
        if config.background is False
        else {"copies while a checkpoint is written": total // ctx.world},
        disk={
            f"{ctx.train.keep} checkpoints and the next one, when all of it changes": total
            * (ctx.train.keep + 1)
        },
    )


@hookimpl
def forge_checkpoint() -> Provider:
    """Give the provider."""
    return Provider(build=build, config=VaultSection, estimate=estimate)
