"""Observer `jsonl`: every logged metric as one JSON line in the run folder's metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
import time
from typing import TYPE_CHECKING

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section

if TYPE_CHECKING:
    from pathlib import Path

    from trainforge.context import Context
    from trainforge.live import Run
    from trainforge.planning import Plan


class JsonlSection(Section):
    """The metrics file has no options."""


class MetricsFile:
    """Appends metrics to metrics.jsonl. After a resume, lines of steps that are trained again are dropped."""

    @hookimpl
    def forge_run_started(self, run: Run, plan: Plan) -> None:
        """Drop what a killed run wrote after the checkpoint that this run resumes from."""
        path = metrics_path(run)
        if not path.exists():
            return
        kept = [
            line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= run.state.step
        ]
        aside = path.with_name(".metrics.jsonl.tmp")
        aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(aside, path)

    @hookimpl
    def forge_metrics_logged(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Append one line; numbers that JSON cannot hold become null."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with metrics_path(run).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time": round(time.time(), 3)} | numbers) + "\n")


def metrics_path(run: Run) -> Path:
    """Where the metrics of a run are kept."""
    return run.path / "metrics.jsonl"


def build(ctx: Context, config: JsonlSection) -> MetricsFile:
    """Make the observer."""
    return MetricsFile()


@hookimpl
def forge_observer() -> Provider:
    """Give the observer."""
    return Provider(build=build, config=JsonlSection, default=True)


def _step_of(line: str) -> float:
    """The step of a line; a line that was cut off by a kill belongs to no step that is kept."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
