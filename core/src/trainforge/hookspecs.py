"""The hooks a plugin may implement. pluggy decides *who* serves a stage, once; the hot path calls plain objects.

The first seven hand over a provider while the run is planned: they must be cheap, touch no device and import
nothing heavy. `firstresult` hides nobody there: planning counts the owners of a stage and refuses two; it is set so
that a wrapper receives and returns one provider. The last five are events: something has happened. They observe and
do not steer; one that fails is named and muted, and the run goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from trainforge.live import Run
    from trainforge.planning import Plan
    from trainforge.provider import Provider

PROJECT = "trainforge"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def forge_model() -> Provider:  # type: ignore[empty-body]
    """Give the provider of the model stage: the thing trained. `build` returns a `ModelSpec`."""


@hookspec(firstresult=True)
def forge_data() -> Provider:  # type: ignore[empty-body]
    """Give the provider of the data stage: where batches come from. `build` returns a `Data`."""


@hookspec(firstresult=True)
def forge_memory() -> Provider:  # type: ignore[empty-body]
    """Give the provider of the memory stage: where weights live and how a step walks through them.

    `build` returns a `Memory`.
    """


@hookspec(firstresult=True)
def forge_comm() -> Provider:  # type: ignore[empty-body]
    """Give the provider of the comm stage: how gradients and weights travel between ranks. `build` returns a `Comm`."""


@hookspec(firstresult=True)
def forge_optimizer() -> Provider:  # type: ignore[empty-body]
    """Give the provider of the optimizer stage: the update's math. `build` returns an `Optimizer`."""


@hookspec(firstresult=True)
def forge_checkpoint() -> Provider:  # type: ignore[empty-body]
    """Give the provider of the checkpoint stage: how a run survives. `build` returns a `Checkpoint`."""


@hookspec
def forge_observer() -> Provider:  # type: ignore[empty-body]
    """Give the provider of an observer: `build` returns an object that implements some of the events below.

    Any number of plugins may give one.
    """


@hookspec
def forge_run_started(run: Run, plan: Plan) -> None:
    """A run is about to take its first step: every stage is built and a checkpoint, if any, is restored."""


@hookspec
def forge_step_ended(run: Run, step: int) -> None:
    """Step number `step` (from 1) has been handed to the device. Carries no tensor, so nobody can force a sync."""


@hookspec
def forge_metrics_logged(run: Run, step: int, metrics: dict[str, float]) -> None:
    """Metrics were read from the device after step `step`, every `train.log_every` steps."""


@hookspec
def forge_checkpoint_saved(run: Run, step: int, path: Path) -> None:
    """The checkpoint of step `step` is committed at `path` (asynchronous savers: durable by now)."""


@hookspec
def forge_run_ended(run: Run, error: BaseException | None) -> None:
    """The run is over; `error` is None when it did what it was asked to do."""
