"""What `forge plugins` shows: every installed plugin, and one plugin's configuration, traits and hooks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from trainforge.discovery import Catalog, Source, scan
from trainforge.errors import SelectionError
from trainforge.hooks import PROVIDER_HOOKS, Hooks, implemented
from trainforge.provider import Provider, Section, Traits


@dataclass(frozen=True)
class KeyInfo:
    """A key of a plugin's recipe section, in words."""

    name: str
    type: str
    default: str
    description: str


@dataclass(frozen=True)
class PluginInfo:
    """An installed plugin.

    Attributes:
        problem: why it cannot be used, or empty; then nothing below is known.
        serves: the stages (and `"observer"`) that it gives a provider for.
        default: whether it serves one of them when nobody else is asked for.
        summary: first paragraph of its docstring.
        hooks: the hooks it implements.
        traits: its facts in words, by stage.
        keys: its configuration by recipe section.
    """

    name: str
    distribution: str
    version: str
    problem: str = ""
    serves: tuple[str, ...] = ()
    default: bool = False
    summary: str = ""
    hooks: tuple[str, ...] = ()
    traits: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, tuple[KeyInfo, ...]] = field(default_factory=dict)


def describe_all() -> list[PluginInfo]:
    """Every installed plugin by name; one that cannot be loaded says why instead of disturbing the others."""
    catalog = scan()
    return [_try(catalog, source) for _, claims in sorted(catalog.plugins.items()) for source in claims]


def describe(reference: str) -> PluginInfo:
    """One plugin, by name or file.

    Raises:
        SelectionError: it is unknown or cannot be loaded.
    """
    catalog = scan()
    return _describe(catalog, catalog.find(reference))


def section_keys(section: type[Section]) -> tuple[KeyInfo, ...]:
    """The keys of a recipe section."""
    return tuple(
        KeyInfo(
            info.alias or name,
            _type_name(info.annotation),
            _default(info.get_default(call_default_factory=False)),
            info.description or "",
        )
        for name, info in section.model_fields.items()
    )


def _try(catalog: Catalog, source: Source) -> PluginInfo:
    try:
        if len(catalog.plugins[source.name]) > 1:
            catalog.find(source.name)
        return _describe(catalog, source)
    except SelectionError as error:
        return PluginInfo(source.name, source.distribution, source.version, problem=str(error))


def _describe(catalog: Catalog, source: Source) -> PluginInfo:
    plugin = catalog.load(source)
    hooks = Hooks([plugin])
    providers: dict[str, Provider] = {
        hook.removeprefix("forge_"): hooks.provider(hook, plugin)
        for hook in PROVIDER_HOOKS
        if plugin in hooks.owners(hook)
    }
    sections = {
        ("model" if stage == "model" else source.name): given.config for stage, given in providers.items()
    }
    return PluginInfo(
        source.name,
        source.distribution,
        source.version,
        serves=tuple(providers),
        default=any(given.default for given in providers.values()),
        summary=(inspect.getdoc(plugin.implementation) or "").partition("\n\n")[0],
        hooks=tuple(sorted(implemented(plugin.implementation))),
        traits={stage: _traits(given.traits) for stage, given in providers.items()},
        keys={section: section_keys(model) for section, model in sections.items()},
    )


def _traits(traits: Traits) -> str:
    """The traits that differ from the usual ones."""
    usual = Traits()
    told = [
        f"{f.name} {_words(getattr(traits, f.name))}"
        for f in fields(Traits)
        if getattr(traits, f.name) != getattr(usual, f.name)
    ]
    return ", ".join(told) or "any device, any number of ranks"


def _words(value: Any) -> str:
    return " or ".join(sorted(value)) if isinstance(value, frozenset) else str(value)


def _type_name(annotation: Any) -> str:
    """A type in words: `number or auto`, without pydantic's constraints."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(inner[0])
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " or ".join(_type_name(one) for one in inner)
    if origin is not None:
        return f"{origin.__name__}[{', '.join('...' if one is ... else _type_name(one) for one in inner)}]"
    return "null" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def _default(value: Any) -> str:
    return "(required)" if value is PydanticUndefined else ("null" if value is None else str(value))
