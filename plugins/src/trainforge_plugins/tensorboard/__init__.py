"""Observer `tensorboard`: every logged metric as a scalar in the run folder's tensorboard/."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainforge.errors import ConfigError
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainforge.context import Context
    from trainforge.live import Run
    from trainforge.planning import Plan

_FLUSH_S = 10  # what a killed run may lose of its curves


class TensorboardSection(Section):
    """The TensorBoard observer has no options."""


class TensorboardWriter:
    """Writes scalars. After a resume, TensorBoard drops those of steps that are trained again.

    Args:
        make_writer: `SummaryWriter` of torch.utils.tensorboard.
    """

    def __init__(self, make_writer: Callable[..., Any]) -> None:
        self._make_writer = make_writer
        self._writer: Any = None

    @hookimpl
    def forge_run_started(self, run: Run, plan: Plan) -> None:
        """Open a file of events that takes the place of all events from the next step on."""
        self._writer = self._make_writer(
            log_dir=str(run.path / "tensorboard"), purge_step=run.state.step + 1, flush_secs=_FLUSH_S
        )

    @hookimpl
    def forge_metrics_logged(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    @hookimpl
    def forge_run_ended(self, run: Run, error: BaseException | None) -> None:
        """Put what is left on disk."""
        if self._writer is not None:
            self._writer.close()


def build(ctx: Context, config: TensorboardSection) -> TensorboardWriter:
    """Make the observer.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ConfigError(
            f"the observer tensorboard needs a package that is not installed ({error}): "
            "pip install 'trainforge-plugins[tensorboard]'"
        ) from None
    return TensorboardWriter(module.SummaryWriter)


@hookimpl
def forge_observer() -> Provider:
    """Give the observer."""
    return Provider(build=build, config=TensorboardSection)
