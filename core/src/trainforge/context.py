"""`Context`: what a provider's `build` gets: the run's facts, and the stages that were built before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from rich.console import Console as RichConsole

    from trainforge.sections import RunSection, TrainSection
    from trainforge.stages import Comm, Data, Memory, ModelSpec, Optimizer


class Task(Protocol):
    """Long work in progress."""

    def advance(self, amount: float = 1) -> None:
        """Say that `amount` more units are done."""


class Console(Protocol):
    """How stages speak to the person at the terminal. Ranks other than 0 are silent."""

    @property
    def terminal(self) -> RichConsole | None:
        """The rich console behind it, for live displays; None where there is none."""

    def note(self, text: str) -> None:
        """Show a line that a person wants to see (and keep it in the run's log)."""

    def warn(self, text: str) -> None:
        """Show a line that a person must not miss; the same text is shown once."""

    def log(self, text: str) -> None:
        """Keep a line in the run's log without showing it: what the screen shows in another form."""

    def task(self, label: str, total: float | None = None, unit: str = "") -> AbstractContextManager[Task]:
        """Show progress of work that takes more than a moment. `unit` is `"B"` for bytes, or a noun."""


@dataclass(frozen=True)
class Batching:
    """How a global batch is cut: `global_batch = micro_batch * accumulate * world` samples per step."""

    global_batch: int
    micro_batch: int
    accumulate: int


@dataclass
class Context:
    """The run's facts and the stages built so far. Stage attributes raise until that stage is built.

    Attributes:
        run, train: the recipe's sections of the same name, validated.
        model_config: the validated `model` section (its type is the model provider's).
        plugin: the name of the plugin being built.
        doing: (stage, what it is doing), for messages when it fails or keeps other ranks waiting.
        device: this rank's device.
        rank, world, local_rank, local_world: this process among all, and among those of this host.
        batching: samples per step, micro-batch and rank.
        run_dir: the run's folder; while planning it need not exist.
        cache_dir: where derived data may be kept between runs.
        console: for lines and progress bars.
        row_tokens: tokens of the longest rows, when the data stage could tell; known once data is built or estimated.
        restored: a checkpoint of this run fills the trained weights and the buffers: their initial values are not asked
            for, only those of frozen parameters.
    """

    run: RunSection
    train: TrainSection
    model_config: Any
    device: torch.device
    rank: int
    world: int
    local_rank: int
    local_world: int
    batching: Batching
    run_dir: Path
    cache_dir: Path
    console: Console
    plugin: str = ""
    doing: tuple[str, str] = ("comm", "starting")
    row_tokens: int | None = None
    restored: bool = False
    built: dict[str, Any] = field(default_factory=dict)

    def _stage(self, name: str) -> Any:
        if name not in self.built:
            raise AssertionError(f"{self.plugin} asked for the {name} stage before it was built")
        return self.built[name]

    @property
    def comm(self) -> Comm:
        """The comm stage."""
        return self._stage("comm")  # type: ignore[no-any-return]

    @property
    def model(self) -> ModelSpec:
        """The model, on the meta device."""
        return self._stage("model")  # type: ignore[no-any-return]

    @property
    def data(self) -> Data:
        """The data stage."""
        return self._stage("data")  # type: ignore[no-any-return]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer stage."""
        return self._stage("optimizer")  # type: ignore[no-any-return]

    @property
    def memory(self) -> Memory:
        """The memory stage."""
        return self._stage("memory")  # type: ignore[no-any-return]


class SilentConsole:
    """A console that shows nothing; keeps what it was told, for tests."""

    terminal: RichConsole | None = None

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        """Keep the line."""
        self.lines.append(text)

    warn = log = note

    def task(self, label: str, total: float | None = None, unit: str = "") -> AbstractContextManager[Task]:
        """Show nothing."""
        from contextlib import contextmanager

        @contextmanager
        def silent() -> Iterator[Task]:
            yield _NoTask()

        return silent()


class _NoTask:
    def advance(self, amount: float = 1) -> None:
        """Do nothing."""
