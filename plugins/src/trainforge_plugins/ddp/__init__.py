"""`ddp`: every rank holds the whole model and gradients are summed over ranks while backward still runs.

The default of its stage. On one rank there is nothing to communicate and core's own `Comm` is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section
from trainforge.stages import Comm
from trainforge.units import Seconds

if TYPE_CHECKING:
    from trainforge.context import Context


class DdpSection(Section):
    """How gradients are summed over ranks."""

    bucket_mb: float = Field(25.0, gt=0, description="megabytes of gradients that are reduced at a time")
    timeout: Seconds = Field(
        600.0, gt=0, description="longest wait for another rank, after which it is named"
    )


def build(ctx: Context, config: DdpSection) -> Comm:
    """Make the comm stage and meet the other ranks."""
    if ctx.world == 1:
        return Comm()
    from trainforge.toolbox.process_group import start_process_group
    from trainforge_plugins.ddp.comm import DdpComm

    group = start_process_group(ctx, config.timeout)
    return DdpComm(group, ctx.device, round(config.bucket_mb * 1e6), ctx.console)


@hookimpl
def forge_comm() -> Provider:
    """Give the provider."""
    return Provider(build=build, config=DdpSection, default=True)
