"""The rules of observers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainforge.hooks import EVENT_HOOKS, implemented
from trainforge.testing.bench import load_plugin, tiny_context
from trainforge.testing.conformance.base import PluginConformance
from trainforge.testing.tiny import TinyRun, tiny_run


class ObserverConformance(PluginConformance):
    """Whether an observer observes: the run is the same with it as without."""

    stage = "observer"

    def run(self, folder: Path, plugins: tuple[Any, ...], max_steps: int | None = None) -> TinyRun:
        """A tiny run with these plugins."""
        sections = {load_plugin(p).name: self.config for p in plugins if p == self.plugin and self.config}
        train = {"eval_every": 3, "save_every": 2, **self.train}
        return tiny_run(
            folder, plugins, train=train, sections={**sections, **self.sections}, max_steps=max_steps
        )

    def test_it_observes_something(self, tmp_path: Path) -> None:
        """What `build` gives implements at least one event, and no provider."""
        provider = self.provider()
        ctx = tiny_context(tmp_path)
        ctx.plugin = load_plugin(self.plugin).name
        observer = provider.build(ctx, provider.config.model_validate(dict(self.config)))
        hooks = set(implemented(observer))
        assert hooks, f"{type(observer).__name__} receives no event: mark its methods with @hookimpl"
        wrong = hooks - set(EVENT_HOOKS)
        assert not wrong, (
            f"{type(observer).__name__} implements {sorted(wrong)}; events are {', '.join(EVENT_HOOKS)}"
        )

    def test_the_run_is_the_same_with_it(self, tmp_path: Path) -> None:
        """Same losses, samples and weights; it was not muted, neither at first nor after resuming."""
        plain = self.run(tmp_path / "plain", ())
        self.run(tmp_path / "watched", (self.plugin,), max_steps=3)
        watched = self.run(tmp_path / "watched", (self.plugin,))
        muted = watched.summary["muted_observers"]
        assert not muted, (
            f"{', '.join(muted)} raised an exception and was muted; log.txt in the run folder says where"
        )
        assert watched.losses == plain.losses, (
            "the losses differ with this observer: it must not use the generators"
        )
        assert watched.sample_ids == plain.sample_ids, "the samples differ with this observer"
        assert watched.digest == plain.digest, "the weights differ with this observer"
