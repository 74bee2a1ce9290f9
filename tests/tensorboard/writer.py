"""Stands in for torch.utils.tensorboard, whose package is not among what tests need: keeps what it is told."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import ClassVar


class SummaryWriter:
    """Takes the arguments that the real one has (torch 2.11 to 2.13), and keeps calls by writer."""

    made: ClassVar[list[SummaryWriter]] = []

    def __init__(self, log_dir=None, comment="", purge_step=None, max_queue=10, flush_secs=120):
        self.log_dir, self.purge_step, self.flush_secs = log_dir, purge_step, flush_secs
        self.scalars: list[tuple[str, float, int]] = []
        self.closed = False
        self.made.append(self)

    def add_scalar(self, tag, scalar_value, global_step=None):
        assert not self.closed
        self.scalars.append((tag, float(scalar_value), global_step))

    def close(self):
        self.closed = True


def install(monkeypatch):
    """Put it in the place of the real one; gives the list of writers that are made."""
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(SummaryWriter, "made", [])
    return SummaryWriter.made


def shown(writers):
    """What TensorBoard would show: a later writer's purge_step takes away all that earlier ones have from there on."""
    points = {}
    for writer in writers:
        points = {key: value for key, value in points.items() if key[1] < writer.purge_step}
        points |= {(tag, step): value for tag, value, step in writer.scalars}
    return points
