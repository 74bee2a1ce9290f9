"""Contexts for tests: one rank on the CPU, a silent console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainforge.context import Batching, Context, SilentConsole
from trainforge.sections import RunSection, TrainSection


def make_context(
    *,
    device: str = "cpu",
    rank: int = 0,
    world: int = 1,
    run_dir: Path = Path("unused"),
    built: dict[str, Any] | None = None,
    plugin: str = "test",
    run: dict[str, Any] | None = None,
    accumulate: int = 1,
    **train: Any,
) -> Context:
    """Gives a context; further arguments are keys of the recipe's `train` section.

    `built` holds the stages that exist already: `make_context(built={"model": model, "comm": Comm()}, clip=0.1)`.
    """
    train.setdefault("steps", 8)
    return Context(
        run=RunSection(**(run or {})),
        train=TrainSection(**train),
        model_config=None,
        device=torch.device(device),
        rank=rank,
        world=world,
        local_rank=rank,
        local_world=world,
        batching=Batching(2 * accumulate * world, 2, accumulate),
        run_dir=run_dir,
        cache_dir=run_dir / "cache",
        console=SilentConsole(),
        plugin=plugin,
        built=dict(built or {}),
    )
