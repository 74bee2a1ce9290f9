"""`make_plan`: from a recipe and the command line to a checked plan, in under a second and without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainforge.checks import check
from trainforge.discovery import LOCAL_FILE, Catalog, Source, scan
from trainforge.errors import ConfigError
from trainforge.provider import STAGES, StageName
from trainforge.recipe import Recipe, recipe_plugins, validate
from trainforge.recipe_file import apply_overrides, parse_recipe, read_recipe
from trainforge.selection import Chosen, Selection, select, split_names

HOUSE_RECIPE = Path("forge.yaml")
"""The recipe that is taken from the current folder when none is named."""


@dataclass(frozen=True)
class Plan:
    """Exactly one provider per stage for this run, the observers, and the validated recipe.

    Attributes:
        selection: who does what.
        recipe: the validated recipe.
    """

    selection: Selection
    recipe: Recipe

    @property
    def chosen(self) -> Mapping[StageName, Chosen]:
        """The provider of each stage."""
        return self.selection.stages

    @property
    def observers(self) -> tuple[Chosen, ...]:
        """The observers, in the order in which they are told."""
        return self.selection.observers

    @property
    def listeners(self) -> tuple[tuple[str, object], ...]:
        """(name, object) of chosen plugins that implement events themselves."""
        return tuple((plugin.name, plugin.implementation) for plugin in self.selection.listeners)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that the person should see before the run."""
        return self.selection.notes

    @property
    def origin(self) -> str:
        """Where the recipe came from, in words: its file, or whose quickstart recipe it is."""
        return str(self.recipe.source or f"the quickstart recipe of {self.chosen['data'].plugin}")

    @cached_property
    def hash(self) -> str:
        """SHA-256 over plugins, versions and the effective recipe, however chosen: every rank must have the same.

        A plugin that is a file counts by its name and content: it may lie elsewhere on another host.
        """
        roles = {chosen.stage: chosen.plugin for chosen in self.chosen.values()}
        plugins = {
            name: (source.distribution, source.version) for name, source in self.selection.sources().items()
        }
        sections = {name: value for name, value in self.recipe.effective().items() if name != "plugins"}
        facts = json.dumps([roles, plugins, sections], sort_keys=True, default=str)
        return hashlib.sha256(facts.encode()).hexdigest()

    def check(self, device_type: str, world: int) -> None:
        """Apply the checks again, now that device and ranks are known.

        Raises:
            IncompatibleError: something does not fit.
        """
        check(self.chosen, device_type, world)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data, for plan.json."""
        return {
            "hash": self.hash,
            **self._facts(),
            "source": None if self.recipe.source is None else str(self.recipe.source),
            "recipe": self.recipe.effective(),
        }

    def _facts(self) -> dict[str, Any]:
        others = [*(p.source for p in self.selection.listeners), *self.selection.wrappers]
        return {
            "stages": {stage: _record(self.chosen[stage].source, self.chosen[stage].how) for stage in STAGES},
            "observers": [_record(chosen.source, chosen.how) for chosen in self.observers],
            "others": [_record(source) for source in others],
        }


def _record(source: Source, how: str | None = None) -> dict[str, Any]:
    record = {"plugin": source.name, "distribution": source.distribution, "version": source.version}
    if source.distribution == LOCAL_FILE:
        record["reference"] = source.reference
    return record if how is None else {**record, "how": how}


def make_plan(
    recipe: Path | str | None = None,
    *,
    plugins: Sequence[str] = (),
    only: bool = False,
    without: Sequence[str] = (),
    stages: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    device: str | None = None,
    world: int = 1,
    catalog: Catalog | None = None,
) -> Plan:
    """Choose plugins, validate the recipe, check that everything fits. Imports neither torch nor heavy libraries.

    Args:
        recipe: the file; None takes ./forge.yaml, else the quickstart recipe of the chosen data provider.
        plugins: names or files (`./mine.py`), which win stage by stage over those that the recipe names.
        only: leave out the plugins that the recipe names.
        without: observers to leave out.
        stages: `{stage: plugin}` that settles a stage.
        overrides: `section.key=value`, laid over the recipe.
        leave_out: files among the recipe's plugins that are not imported; their sections are not looked at.
        device: the device's type, when it is known already; else the recipe's, and with `auto` the runner checks.
        world: number of ranks.
        catalog: what is installed; scanned when None.

    Raises:
        UserError: the person must change something; the message says what.
    """
    catalog = catalog or scan()
    asked, left_out = split_names(plugins), split_names(without)

    def choose(names: Sequence[str]) -> Selection:
        return select(
            catalog, recipe=() if only else names, command_line=asked, without=left_out, stages=stages
        )

    source = Path(recipe) if recipe is not None else (HOUSE_RECIPE if HOUSE_RECIPE.exists() else None)
    raw = read_recipe(source) if source is not None else _quickstart(choose(()).stages["data"])
    raw, overridden = apply_overrides(raw, overrides)
    for name in (Path(reference).stem for reference in leave_out):
        raw.pop(name, None)
    selection = choose([name for name in recipe_plugins(raw) if name not in leave_out])
    validated = validate(raw, selection, [*catalog.plugins], overridden=overridden, source=source)
    check(selection.stages, device or _device_type(validated.run.device), world)
    return Plan(selection.configured(validated.model, validated.sections), validated)


def _quickstart(data: Chosen) -> dict[str, Any]:
    """The recipe in package data that a data provider offers when there is no other."""
    resource = data.provider.quickstart
    if resource is None:
        raise ConfigError(
            f"there is no recipe: give one (forge run recipe.yaml) or write {HOUSE_RECIPE}; the data plugin "
            f"{data.plugin} brings none of its own"
        )
    package, _, path = resource.partition(":")
    try:
        text = files(package).joinpath(path).read_text(encoding="utf-8")
    except (ModuleNotFoundError, OSError) as error:
        raise ConfigError(
            f"the quickstart recipe {resource} of {data.plugin} cannot be read: {error}"
        ) from error
    return parse_recipe(text, resource)


def _device_type(device: str) -> str | None:
    return None if device == "auto" else device.partition(":")[0]
