"""TrainForge: one recipe, and a choice per run of how each stage of training is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainforge.api import plan, run

__version__ = "0.1.0"
__all__ = ["__version__", "plan", "run"]


def __getattr__(name: str) -> Any:
    """Import `plan` and `run` when they are used first, so that the command line starts fast."""
    if name in ("plan", "run"):
        from trainforge import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
