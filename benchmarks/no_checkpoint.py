"""A checkpoint plugin that keeps nothing: for timing steps of models whose state would take a minute to write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainforge.context import Context
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider
from trainforge.stages import Checkpoint, Part


class NoCheckpoint(Checkpoint):
    """Saves nothing and says so."""

    def save(self, step: int, parts: Mapping[str, Part]) -> None:
        """Save nothing."""

    def wait(self) -> None:
        """Wait for nothing."""

    def restore(self, parts: Mapping[str, Part], path: Path) -> None:
        """There is nothing to restore."""
        raise NotImplementedError("nothing was saved")

    def verify(self, path: Path) -> list[str]:
        """There is nothing to verify."""
        return [f"{path}: this plugin keeps no checkpoints"]


def build(ctx: Context, config: Any) -> NoCheckpoint:
    """Make the stage."""
    ctx.console.warn("no checkpoints are kept: this run is a measurement")
    return NoCheckpoint()


@hookimpl
def forge_checkpoint() -> Provider:
    """Give the provider."""
    return Provider(build=build)
