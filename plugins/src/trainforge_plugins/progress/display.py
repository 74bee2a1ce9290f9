"""What the progress observer shows: step, loss, speed, memory, where the step time went, time to go."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from trainforge.hookspecs import hookimpl
from trainforge.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainforge.live import Run
    from trainforge.planning import Plan

_SHOWN_SHARE = 0.02
_BAR_WIDTH = 10
_SEPARATOR = " · "


class FiguresColumn(ProgressColumn):
    """As many of the task's figures, most important first, as fit beside the bar on one line."""

    def __init__(self, width: Callable[[], int]) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._width = width

    def render(self, task: Task) -> Text:
        """Leave out what would push the step number off the line or wrap."""
        beside = len("step ") + 2 * len(str(task.total)) + len("/ ") + _BAR_WIDTH + 1
        return Text(fitting(task.fields["figures"], self._width() - beside))


class ProgressDisplay:
    """A bar with the last figures on a terminal; a line for every log entry when the output goes elsewhere."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._began = 0.0
        self._first_step = 0

    @hookimpl
    def forge_run_started(self, run: Run, plan: Plan) -> None:
        """Start the bar where the run starts."""
        self._began, self._first_step = time.monotonic(), run.state.step
        terminal = run.console.terminal
        if terminal is None or not terminal.is_terminal:
            return
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=_BAR_WIDTH),
            FiguresColumn(lambda: terminal.width),
        )
        self._progress = Progress(*columns, console=terminal, transient=True)
        self._task = self._progress.add_task(
            "", total=run.last_step, completed=run.state.step, figures=["first step ..."]
        )
        self._progress.start()

    @hookimpl
    def forge_step_ended(self, run: Run, step: int) -> None:
        """Move the bar. The first step, which may compile or warm up, says nothing about the time to go."""
        if step == self._first_step + 1:
            self._began = time.monotonic()
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    @hookimpl
    def forge_metrics_logged(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Show the figures."""
        left = run.last_step - step
        timed = step - self._first_step - 1
        eta = format_seconds((time.monotonic() - self._began) / timed * left) if timed and left else None
        shown = figures(metrics, eta)
        line = _SEPARATOR.join([f"step {step}/{run.last_step}", *shown])
        if self._progress is None:
            run.console.note(line)
        else:
            run.console.log(line)
            self._progress.update(self._task, completed=step, figures=shown)

    @hookimpl
    def forge_checkpoint_saved(self, run: Run, step: int, path: Path) -> None:
        """Say that the checkpoint is durable."""
        run.console.note(f"checkpoint of step {step} is on disk: {path}")

    @hookimpl
    def forge_run_ended(self, run: Run, error: BaseException | None) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def figures(metrics: dict[str, float], to_go: str | None = None) -> list[str]:
    """The figures of a log entry, most important first: losses, speed, time to go, utilisation, times, memory."""
    parts = [f"loss {metrics['loss']:.4f}" if "loss" in metrics else "loss n/a"]
    if metrics["skipped_steps"]:
        parts.append(f"{metrics['skipped_steps']:.0f} skipped")
    parts.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    if to_go is not None:
        parts.append(f"{to_go} to go")
    if "eval_loss" in metrics:
        parts.append(f"validation {metrics['eval_loss']:.4f}")
    if "mfu" in metrics:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    parts.append(f"{metrics['step_ms']:.0f} ms: {shares(metrics)}")
    parts.append(format_bytes(metrics.get("device_peak_bytes", metrics["host_peak_bytes"])))
    return parts


def fitting(parts: Sequence[str], width: int) -> str:
    """The longest beginning of `parts` that fits into `width` characters; the first one in any case."""
    text = parts[0]
    for part in parts[1:]:
        longer = f"{text}{_SEPARATOR}{part}"
        if len(longer) > width:
            break
        text = longer
    return text


def shares(metrics: dict[str, float]) -> str:
    """Where the step time went, largest first: `compute 91% optimizer 6%`."""
    prefix, suffix = "ledger/", "_ms"
    total = max(metrics["step_ms"], 1e-9)
    named = {
        name[len(prefix) : -len(suffix)]: value / total
        for name, value in metrics.items()
        if name.startswith(prefix)
    }
    shown = sorted(named.items(), key=lambda item: -item[1])
    return " ".join(f"{name} {share:.0%}" for name, share in shown if share >= _SHOWN_SHARE)
