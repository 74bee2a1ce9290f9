"""Observer `progress`: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge_plugins.progress.display import ProgressDisplay


class ProgressSection(Section):
    """The progress display has no options; `train.log_every` says how often its numbers change."""


def build(ctx: Context, config: ProgressSection) -> ProgressDisplay:
    """Make the observer."""
    from trainforge_plugins.progress.display import ProgressDisplay

    return ProgressDisplay()


@hookimpl
def forge_observer() -> Provider:
    """Give the observer."""
    return Provider(build=build, config=ProgressSection, default=True)
