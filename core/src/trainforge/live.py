"""A run in progress: what the loop, the stages' builders and observers see of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from trainforge.provider import StageName
from trainforge.run_state import RunState

if TYPE_CHECKING:
    from trainforge.context import Console, Context
    from trainforge.events import Events
    from trainforge.ledger import Ledger
    from trainforge.options import RunOptions
    from trainforge.planning import Plan
    from trainforge.runfolder import RunFolder
    from trainforge.sections import TrainSection
    from trainforge.stages import Checkpoint, Comm, Data, Memory, ModelSpec, Optimizer, Part, Sink, Stage

BUILD_ORDER: tuple[StageName, ...] = ("comm", "model", "data", "optimizer", "memory", "checkpoint")
"""The optimizer comes before memory, which allocates the state that the optimizer asks for."""


@dataclass
class Stages:
    """The built stages of a run."""

    comm: Comm
    model: ModelSpec
    data: Data
    optimizer: Optimizer
    memory: Memory
    checkpoint: Checkpoint

    def named(self) -> list[tuple[StageName, Stage]]:
        """The stages with their names, in build order."""
        return [(name, getattr(self, name)) for name in BUILD_ORDER]


@dataclass
class Run:
    """A plan being carried out, and its folder. What observers get to see.

    Attributes:
        plan, options: what was asked for.
        ctx: the facts that stages were built with.
        folder: the run folder (on every rank; only rank 0 writes to it).
        stages: the built stages.
        events: tells observers.
        steps: steps of the whole run; the schedule is laid over them.
        last_step: the step after which this start ends (differs from `steps` under `--max-steps`).
        sink: what memory calls when a gradient is final.
        state: step, token counts and losses so far; part of every checkpoint.
        ledger: where the time went.
        resumed_from: step of the checkpoint that this start went on from, or None.
        save_blocked_ms: how long each save kept training waiting.
        row_tokens: the longest padded row so far, in tokens.
        tokens_measured, seconds_measured: real tokens and wall time of the logged intervals of this start, saves,
            evaluation and the start-up of the first step included.
        began: `time.perf_counter` at the start.
    """

    plan: Plan
    options: RunOptions
    ctx: Context
    folder: RunFolder
    stages: Stages
    events: Events
    steps: int
    last_step: int
    sink: Sink
    ledger: Ledger
    state: RunState = field(default_factory=RunState)
    resumed_from: int | None = None
    save_blocked_ms: list[float] = field(default_factory=list)
    row_tokens: int = 0
    tokens_measured: int = 0
    seconds_measured: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    @property
    def doing(self) -> tuple[StageName, str]:
        """(stage, what it is doing), for messages; kept where the other ranks' messages find it too."""
        stage, doing = self.ctx.doing
        return cast("StageName", stage), doing  # observers are built before there is a run

    @doing.setter
    def doing(self, doing: tuple[StageName, str]) -> None:
        self.ctx.doing = doing

    @property
    def train(self) -> TrainSection:
        """The recipe's `train` section."""
        return self.ctx.train

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.ctx.run.seed

    @property
    def console(self) -> Console:
        """For lines to the person at the terminal."""
        return self.ctx.console

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def parts(self) -> dict[str, Part]:
        """Everything with state that belongs in a checkpoint."""
        return {
            "loop": self.state,
            "data": self.stages.data,
            "memory": self.stages.memory,
            "comm": self.stages.comm,
        }
