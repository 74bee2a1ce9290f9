"""What the progress observer shows: step, loss, speed, memory, where the step time went, time to go."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from trainforge.hookspecs import hookimpl
from trainforge.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from trainforge.live import Run
    from trainforge.planning import Plan

_SHOWN_SHARE = 0.02


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
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=terminal, transient=True)
        self._task = self._progress.add_task("first step ...", total=run.last_step, completed=run.state.step)
        self._progress.start()

    @hookimpl
    def forge_step_ended(self, run: Run, step: int) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    @hookimpl
    def forge_metrics_logged(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Show the figures."""
        eta = (time.monotonic() - self._began) / max(step - self._first_step, 1) * (run.last_step - step)
        text = figures(metrics) + f" · {format_seconds(eta)} to go"
        if self._progress is None:
            run.console.note(f"step {step}/{run.last_step} · {text}")
        else:
            self._progress.update(self._task, completed=step, description=text)

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


def figures(metrics: dict[str, float]) -> str:
    """One line of figures: loss, real tokens per second, utilisation, memory, where the step time went."""
    parts = [f"loss {metrics['loss']:.4f}" if "loss" in metrics else "loss n/a"]
    parts.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    if "mfu" in metrics:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    memory = metrics.get("device_peak_bytes", metrics["host_peak_bytes"])
    parts.append(format_bytes(memory))
    parts.append(f"{metrics['step_ms']:.0f} ms: {shares(metrics)}")
    if metrics["skipped_steps"]:
        parts.append(f"{metrics['skipped_steps']:.0f} skipped")
    return " · ".join(parts)


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
