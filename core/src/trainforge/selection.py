"""Choosing exactly one provider per stage, and the observers, from what was asked for and the defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainforge.discovery import Catalog, Plugin, Source
from trainforge.errors import SelectionError
from trainforge.hooks import EVENT_HOOKS, HOOKS, Hooks, implemented
from trainforge.provider import STAGES, Provider, Section, StageName
from trainforge.wording import did_you_mean, listed

How = Literal["recipe", "command line", "default"]


@dataclass(frozen=True)
class Chosen:
    """The provider that serves a stage (or is an observer) in this run.

    Attributes:
        stage: a stage's name, or `"observer"`.
        source: the plugin that gives it: `source.name`, `source.distribution`, `source.version`.
        provider: what the plugin gave.
        how: who chose it.
        config: its validated configuration, what `provider.build` gets; None until the recipe is validated.
    """

    stage: str
    source: Source
    provider: Provider
    how: How
    config: Any = None

    @property
    def plugin(self) -> str:
        """The plugin's name."""
        return self.source.name

    @property
    def distribution(self) -> str:
        """The distribution that installed the plugin."""
        return self.source.distribution

    @property
    def version(self) -> str:
        """That distribution's version."""
        return self.source.version


@dataclass(frozen=True)
class Selection:
    """Who does what in this run.

    Attributes:
        stages: one provider per stage.
        observers: in the order in which they are told; a plugin that implements events directly is not among them.
        listeners: plugins that implement events themselves, without `forge_observer`.
        wrappers: plugins that only wrap the providers of others.
        notes: lines for the person: default observers that could not be loaded.
    """

    stages: Mapping[StageName, Chosen]
    observers: tuple[Chosen, ...]
    listeners: tuple[Plugin, ...] = ()
    wrappers: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()

    def sources(self) -> dict[str, Source]:
        """Every plugin that takes part, by name."""
        chosen = [*self.stages.values(), *self.observers]
        extra = [*(p.source for p in self.listeners), *self.wrappers]
        return {source.name: source for source in [*(c.source for c in chosen), *extra]}

    def sections(self) -> dict[str, type[Section]]:
        """The configuration of each plugin's own section; the model's is the section `model` instead."""
        return {
            chosen.plugin: chosen.provider.config
            for chosen in [*self.stages.values(), *self.observers]
            if chosen.stage != "model"
        }

    def configured(self, model: Any, sections: Mapping[str, Any]) -> Selection:
        """The same selection, every provider with its validated configuration."""

        def fill(chosen: Chosen) -> Chosen:
            return replace(chosen, config=model if chosen.stage == "model" else sections[chosen.plugin])

        stages = {stage: fill(chosen) for stage, chosen in self.stages.items()}
        return replace(self, stages=stages, observers=tuple(map(fill, self.observers)))


def split_names(values: Iterable[str]) -> list[str]:
    """Names given as `a,b` or one by one, each once, in order."""
    parts = (name.strip() for value in values for name in value.split(","))
    return list(dict.fromkeys(name for name in parts if name))


def select(
    catalog: Catalog,
    *,
    recipe: Sequence[str] = (),
    command_line: Sequence[str] = (),
    without: Sequence[str] = (),
    stages: Mapping[str, str] | None = None,
) -> Selection:
    """Choose the providers of a run. Only plugins that are asked for, or serve as defaults, are imported.

    Args:
        catalog: what is installed.
        recipe: plugins that the recipe names.
        command_line: plugins that win, stage by stage, over the recipe's.
        without: observers to leave out.
        stages: `{stage: plugin}` that settles a stage.

    Raises:
        SelectionError: a plugin is unknown, cannot be loaded, implements a hook wrongly; a stage has two owners.
    """
    return _Selector(catalog, recipe, command_line, without, stages or {}).select()


class _Selector:
    def __init__(
        self,
        catalog: Catalog,
        recipe: Sequence[str],
        command_line: Sequence[str],
        without: Sequence[str],
        settled: Mapping[str, str],
    ) -> None:
        for stage in settled:
            if stage not in STAGES:
                raise SelectionError(
                    f"there is no stage {stage}{did_you_mean(stage, STAGES) or '.'} Stages: {', '.join(STAGES)}"
                )
        self.catalog, self.without = catalog, list(without)
        self.asked: dict[str, tuple[Plugin, How]] = {}
        self.settled = {stage: self._ask(name, "command line") for stage, name in settled.items()}
        for name in command_line:
            self._ask(name, "command line")
        for name in recipe:
            self._ask(name, "recipe")
        self.default_stages: dict[StageName, Plugin] = {}
        self.default_observers: list[Plugin] = []
        self.notes: list[str] = []

    def _ask(self, name: str, how: How) -> Plugin:
        plugin = self.catalog.load(self.catalog.find(name))
        for known, _ in self.asked.values():
            if known.implementation is plugin.implementation:
                return known
        if plugin.name in self.asked:
            raise SelectionError(
                f"two plugins are called {plugin.name}: {self.asked[plugin.name][0].source} and {plugin.source}. "
                "Rename the file or leave one out"
            )
        self.asked[plugin.name] = (plugin, how)
        return plugin

    def select(self) -> Selection:
        hooks = Hooks([plugin for plugin, _ in self.asked.values()])
        owners = {stage: self._owner(hooks, stage) for stage in STAGES}
        self._add_defaults([stage for stage, owner in owners.items() if owner is None])
        hooks = Hooks(self._everyone())
        stages: dict[StageName, Chosen] = {}
        for stage, owner in owners.items():
            plugin = owner or self.default_stages[stage]
            how = self.asked[plugin.name][1] if owner else "default"
            stages[stage] = Chosen(stage, plugin.source, hooks.provider(f"forge_{stage}", plugin), how)
            if how == "default" and not stages[stage].provider.default:
                raise SelectionError(
                    f"plugin {plugin.source} is named as the default of {stage} in its metadata, but its provider "
                    "does not say default=True"
                )
        observers = self._observers(hooks)
        serving = {id(c.source) for c in [*stages.values(), *observers]}
        idle = [p for p, _ in self.asked.values() if id(p.source) not in serving]
        self._check_sections([*stages.values(), *observers])
        return Selection(
            stages,
            tuple(observers),
            tuple(p for p in idle if self._listens(hooks, p)),
            tuple(p.source for p in idle if hooks.wraps(p)),
            tuple(self.notes),
        )

    def _owner(self, hooks: Hooks, stage: StageName) -> Plugin | None:
        """The plugin that was asked to serve a stage: settled, else from the command line, else from the recipe."""
        owners = hooks.owners(f"forge_{stage}")
        settled = self.settled.get(stage)
        if settled is not None:
            if settled not in owners:
                raise SelectionError(
                    f"plugin {settled.source} does not serve {stage}; it implements {_serves(settled)}"
                )
            return settled
        for how in ("command line", "recipe"):
            group = [plugin for plugin in owners if self.asked[plugin.name][1] == how]
            if len(group) > 1:
                raise SelectionError(_two_owners(stage, [plugin.source for plugin in group]))
            if group:
                return group[0]
        return None

    def _add_defaults(self, missing: Sequence[StageName]) -> None:
        for stage in missing:
            claims = self.catalog.defaults.get(stage, [])
            if not claims:
                raise SelectionError(
                    f"nothing installed serves the stage {stage} by default: pip install trainforge-plugins, or "
                    f"choose a plugin with --plugins"
                )
            if len(claims) > 1:
                raise SelectionError(_two_owners(stage, claims, "claim to be the default of"))
            self.default_stages[stage] = self._load_default(self.catalog.find(claims[0].name))
        for source in self.catalog.defaults.get("observer", []):
            if source.name in self.without or source.name in self.asked:
                continue
            try:
                plugin = self._load_default(self.catalog.find(source.name))
                Hooks([plugin])
                self.default_observers.append(plugin)
            except SelectionError as error:  # nobody asked for it, so it must not disturb the run
                self.notes.append(f"the observer {source.name} is left out: {error}")

    def _load_default(self, source: Source) -> Plugin:
        plugin = self.catalog.load(source)
        asked = self.asked.get(plugin.name)
        if asked is not None and asked[0].implementation is not plugin.implementation:
            raise SelectionError(
                f"two plugins are called {plugin.name}: {asked[0].source} and {plugin.source}. Rename the file"
            )
        return asked[0] if asked else plugin

    def _everyone(self) -> list[Plugin]:
        """Everybody who may take part, each once."""
        plugins = [p for p, _ in self.asked.values()] + [
            *self.default_stages.values(),
            *self.default_observers,
        ]
        return list({id(plugin.implementation): plugin for plugin in plugins}.values())

    def _observers(self, hooks: Hooks) -> list[Chosen]:
        watching = hooks.owners("forge_observer")
        names = {plugin.name for plugin in watching} | {
            s.name for s in self.catalog.defaults.get("observer", [])
        }
        for name in self.without:
            if name not in names:
                raise SelectionError(
                    f"--without {name}: no observer of this run is called so{did_you_mean(name, names) or '.'} "
                    f"Observers: {listed(names)}"
                )
        defaults = [id(plugin) for plugin in self.default_observers]
        chosen: list[Chosen] = []
        for plugin in sorted(watching, key=lambda p: id(p) not in defaults):
            if plugin.name in self.without or not (plugin.name in self.asked or id(plugin) in defaults):
                continue
            how = self.asked[plugin.name][1] if plugin.name in self.asked else "default"
            chosen.append(Chosen("observer", plugin.source, hooks.provider("forge_observer", plugin), how))
        return chosen

    def _listens(self, hooks: Hooks, plugin: Plugin) -> bool:
        """Whether a plugin without a provider implements events. One that lost its stage to another is idle."""
        mine = implemented(plugin.implementation)
        owns = any(hook not in EVENT_HOOKS and plugin in hooks.owners(hook) for hook in mine)
        return not owns and any(hook in EVENT_HOOKS for hook in mine)

    def _check_sections(self, chosen: Sequence[Chosen]) -> None:
        configs: dict[str, Chosen] = {}
        for one in chosen:
            if one.stage == "model":
                continue
            first = configs.setdefault(one.plugin, one)
            if first.provider.config is not one.provider.config:
                raise SelectionError(
                    f"plugin {one.source} gives different configurations for {first.stage} and {one.stage}; both "
                    f"are validated against the one section {one.plugin}"
                )


def _two_owners(stage: str, owners: Sequence[Source], verb: str = "both serve") -> str:
    flags = " or ".join(f"--stage {stage}={source.reference}" for source in owners)
    return f"{' and '.join(map(str, owners))} {verb} {stage}. Settle it with {flags}"


def _serves(plugin: Plugin) -> str:
    return listed(hook for hook in implemented(plugin.implementation) if hook in HOOKS)
