"""The plugin with which `tiny_run` watches a run: it notes sample ids and metrics in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.live import Run
    from trainforge.stages import Batch, Data

SAMPLES = "samples-{rank}.jsonl"
METRICS = "recorded-metrics.jsonl"


@hookimpl(wrapper=True)
def forge_data() -> Generator[None, Provider, Provider]:
    """Note which samples the chosen data stage hands out."""
    provider = yield
    return replace(provider, build=partial(_build_recorded, provider.build))


@hookimpl
def forge_observer() -> Provider:
    """Note every step's metrics."""
    return Provider(build=lambda ctx, config: Recorder(ctx.run_dir / METRICS))


class Recorder:
    """Appends the metrics of each step to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @hookimpl
    def forge_metrics_logged(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Append them."""
        append(self._path, {"step": step, **metrics})


def _build_recorded(build: Callable[[Context, Any], Data], ctx: Context, config: Any) -> Data:
    data = build(ctx, config)
    take, path = data.take, ctx.run_dir / SAMPLES.format(rank=ctx.rank)

    def recorded(count: int) -> list[Batch]:
        batches = take(count)
        append(path, [[batch.index, list(batch.sample_ids)] for batch in batches])
        return batches

    data.take = recorded  # type: ignore[method-assign]
    return data


def append(path: Path, value: Any) -> None:
    """Append a line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(value) + "\n")
