"""`stream` beside `resident` on the same batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainforge.testing import Walker, build_stages, load_plugin, tiny_context

STREAM = "trainforge_megatrain.stream"
"""By its module: so it is found whether or not the plugin is installed."""

NAME = load_plugin(STREAM).name


def walker(
    folder: Path,
    memory: str,
    others: tuple[str, ...] = ("adamw", "dcp"),
    *,
    model: Mapping[str, Any] | None = None,
    section: Mapping[str, Any] | None = None,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
    train: Mapping[str, Any] | None = None,
    accumulate: int = 3,
    micro_batch: int = 1,
) -> Walker:
    """Takes steps with a memory, clipped; `section` is that of `stream`, `sections` are those of others."""
    numbers = {"clip": 0.5, "lr": 1e-3, "eps": 1e-6, **(train or {})}
    ctx = tiny_context(folder, model=model, train=numbers, accumulate=accumulate, micro_batch=micro_batch)
    given = {**(sections or {}), NAME: dict(section or {})}
    return Walker(build_stages(ctx, (memory, *others), given))


def pair(
    folder: Path, *args: Any, section: Mapping[str, Any] | None = None, **facts: Any
) -> tuple[Walker, Walker]:
    """`stream` and `resident`, built alike."""
    ours = walker(folder / "stream", STREAM, *args, section=section, **facts)
    return ours, walker(folder / "resident", "resident", *args, **facts)


def train_alike(ours: Walker, default: Walker, steps: int, tolerance: float = 0.0) -> list[float]:
    """Take steps with both and compare losses, norms, who was used, and at the end every weight; gives the losses.

    With a tolerance of 0 every bit must be the same.
    """
    losses = []
    for step in range(steps):
        got, wanted = ours.take(), default.take()
        losses.append(wanted.loss)
        assert got.used == wanted.used, f"step {step + 1}"
        assert abs(got.loss - wanted.loss) <= tolerance * abs(wanted.loss), f"loss of step {step + 1}"
        assert abs(got.norm - wanted.norm) <= tolerance * wanted.norm, f"norm of step {step + 1}"
    compare_weights(ours, default, tolerance)
    return losses


def compare_weights(ours: Walker, default: Walker, tolerance: float = 0.0) -> None:
    """Whether every weight is the same."""
    weights = default.weights()
    for name, weight in ours.weights().items():
        if tolerance:
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=tolerance)
        else:
            assert torch.equal(weight, weights[name]), name
