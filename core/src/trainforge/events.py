"""Telling observers what has happened. One that fails is named and muted; the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from trainforge import hookspecs
from trainforge.errors import ProviderError

if TYPE_CHECKING:
    from trainforge.context import Console
    from trainforge.live import Run
    from trainforge.planning import Plan

_EVENTS = (
    "forge_run_started",
    "forge_step_ended",
    "forge_metrics_logged",
    "forge_checkpoint_saved",
    "forge_run_ended",
)


class Events:
    """Calls the event hooks of observers in the order in which they were chosen.

    pluggy checks names and arguments when they are registered; the calls go straight to the functions, because a
    pluggy call would stop at the first exception and would not say whose it was.

    Args:
        observers: (plugin name, object) pairs; an object's methods marked with `hookimpl` receive events.
        console: where a muted observer is named.
        strict: raise instead of muting. Only for a single rank: elsewhere the others would wait for this one.
    """

    def __init__(
        self, observers: Iterable[tuple[str, object]], console: Console, *, strict: bool = False
    ) -> None:
        self._console, self._strict = console, strict
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        names: dict[int, str] = {}
        for name, observer in reversed(list(observers)):
            manager.register(observer, name=f"{name}-{id(observer)}")
            names[id(observer)] = name
        manager.check_pending()
        self._calls: dict[str, list[tuple[str, Callable[..., object], tuple[str, ...]]]] = {
            event: [
                (names[id(impl.plugin)], impl.function, tuple(impl.argnames))
                for impl in reversed(getattr(manager.hook, event).get_hookimpls())
            ]
            for event in _EVENTS
        }
        self.muted: set[str] = set()

    def run_started(self, run: Run, plan: Plan) -> None:
        """A run is about to take its first step."""
        self._tell("forge_run_started", run=run, plan=plan)

    def step_ended(self, run: Run, step: int) -> None:
        """A step has been handed to the device."""
        self._tell("forge_step_ended", run=run, step=step)

    def metrics_logged(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Metrics were read from the device."""
        self._tell("forge_metrics_logged", run=run, step=step, metrics=metrics)

    def checkpoint_saved(self, run: Run, step: int, path: Path) -> None:
        """A checkpoint is committed."""
        self._tell("forge_checkpoint_saved", run=run, step=step, path=path)

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        """The run is over."""
        self._tell("forge_run_ended", run=run, error=error)

    def _tell(self, event: str, **values: Any) -> None:
        for plugin, function, names in self._calls[event]:
            if plugin in self.muted:
                continue
            try:
                function(*(values[name] for name in names))
            except Exception as error:
                if self._strict:
                    raise ProviderError(plugin, "observer", f"handling {event}", error) from error
                self.muted.add(plugin)
                self._console.warn(
                    f"{plugin} (observer) failed in {event} and is muted for the rest of the run: "
                    f"{type(error).__name__}: {error}"
                )
