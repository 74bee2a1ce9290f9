"""`Recipe`: everything a run was told, validated by the models of core and of the chosen plugins."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trainforge.discovery import RESERVED
from trainforge.errors import ConfigError
from trainforge.provider import Section
from trainforge.sections import RunSection, TrainSection
from trainforge.selection import Selection, split_names
from trainforge.wording import did_you_mean, listed


@dataclass(frozen=True)
class Recipe:
    """A validated recipe.

    Attributes:
        run, train: the sections that core owns.
        model: the `model` section; its type is the chosen model provider's.
        sections: the section of every other chosen plugin, by plugin name; defaults where the file says nothing.
        plugins: what `--plugins` would take to choose the same providers.
        source: the file it was read from, or None.
    """

    run: RunSection
    train: TrainSection
    model: Any
    sections: Mapping[str, Section]
    plugins: tuple[str, ...]
    source: Path | None = None

    def effective(self) -> dict[str, Any]:
        """The whole recipe as plain data (JSON types), defaults filled in: what recipe.yaml of a run folder holds."""
        effective: dict[str, Any] = {"plugins": list(self.plugins)}
        for name, section in {
            "run": self.run,
            "model": self.model,
            "train": self.train,
            **self.sections,
        }.items():
            effective[name] = section.model_dump(mode="json")
        return {name: value for name, value in effective.items() if value or name in RESERVED}


def recipe_plugins(raw: Mapping[str, Any]) -> list[str]:
    """The plugins that a recipe names.

    Raises:
        ConfigError: `plugins` is neither a list of names nor names separated by commas.
    """
    value = raw.get("plugins") or []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"plugins: must be a list of plugin names, not {value!r}")
    return split_names(names)


def validate(
    raw: Mapping[str, Any],
    selection: Selection,
    installed: Sequence[str],
    *,
    overridden: Sequence[str] = (),
    source: Path | None = None,
) -> Recipe:
    """Check every section against its model.

    Args:
        raw: plain data, overrides already laid over it.
        selection: the chosen providers, whose configurations are used.
        installed: names of installed plugins: a section for one that is not chosen is left alone.
        overridden: the dotted keys that came from `--set`: those must belong to a chosen plugin.
        source: the file, for the record.

    Raises:
        ConfigError: everything that is wrong, one line each: dotted key, found value, nearest valid key.
    """
    models: dict[str, type[Section]] = {
        "run": RunSection,
        "model": selection.stages["model"].provider.config,
        "train": TrainSection,
        **dict(sorted(selection.sections().items())),
    }
    problems = [*_unknown_sections(raw, models, selection, installed, overridden)]
    sections: dict[str, Any] = {}
    for name, model in models.items():
        value = raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            problems.append(f"{name}: must be a mapping of keys, not {_shown(value)}")
            continue
        try:
            sections[name] = model.model_validate(dict(value or {}))
        except ValidationError as error:
            problems += _explain(name, model, error)
    if problems:
        where = f"the recipe {source}" if source else "the recipe"
        raise ConfigError("\n  ".join([f"{where} cannot be used:", *problems]))
    run, model_section, train = sections.pop("run"), sections.pop("model"), sections.pop("train")
    return Recipe(run, train, model_section, sections, _references(selection), source)


def _references(selection: Selection) -> tuple[str, ...]:
    chosen = [*selection.stages.values(), *(o for o in selection.observers if o.how != "default")]
    sources = [*(c.source for c in chosen), *(p.source for p in selection.listeners), *selection.wrappers]
    return tuple(dict.fromkeys(source.reference for source in sources))


def _unknown_sections(
    raw: Mapping[str, Any],
    models: Mapping[str, type[Section]],
    selection: Selection,
    installed: Sequence[str],
    overridden: Sequence[str],
) -> Iterator[str]:
    known = {*models, *installed, "plugins"}
    by_override = {key.partition(".")[0] for key in overridden}
    for name in raw:
        if name in models or name == "plugins":
            continue
        keys = ", ".join(key for key in overridden if key.startswith(f"{name}.")) or name
        if name == selection.stages["model"].plugin:
            yield f"{keys}: {name} is the model plugin; its configuration is the section model"
        elif name in selection.sources():
            yield f"{keys}: the plugin {name} has no configuration of its own"
        elif name not in installed:
            meant = did_you_mean(name, known) or f" (sections: {listed(models)})"
            yield f"{keys}: there is no section {name} and no plugin of that name{meant}"
        elif name in by_override:
            yield (
                f"{keys}: the plugin {name} is not chosen in this run, so --set would change nothing: add it to "
                f"--plugins, or set a chosen one's key (sections: {listed(models)})"
            )


def _explain(section: str, model: type[BaseModel], error: ValidationError) -> Iterator[str]:
    """One line per wrong key; the alternatives of a union are joined."""
    lines: dict[str, list[str]] = {}
    for one in error.errors(include_url=False):
        path, owner = _path(model, one["loc"])
        key = ".".join([section, *path])
        if one["type"] == "extra_forbidden" and owner is not None:
            choices = [field.alias or name for name, field in owner.model_fields.items()]
            prefix = key.rpartition(".")[0]
            meant = did_you_mean(path[-1], choices).replace("mean ", f"mean {prefix}.")
            known = f" (keys: {listed(choices)})"
            text = f"unknown key, found {_shown(one['input'])}{meant or known}"
        elif one["type"] == "missing":
            text = "is required"
        elif path:
            text = f"{_plain(one)}, found {_shown(one['input'])}"
        else:
            text = _plain(one)
        lines.setdefault(key, []).append(text)
    for key, texts in lines.items():
        first, *rest = dict.fromkeys(texts)
        if rest:  # keep what was found once, at the end
            found = first.rpartition(", found ")[2]
            texts = [text.rpartition(", found ")[0] or text for text in [first, *rest]]
            if all(text.startswith("must be ") for text in texts):
                texts = [texts[0], *(text.removeprefix("must be ") for text in texts[1:])]
            first = f"{' or '.join(dict.fromkeys(texts))}, found {found}"
        yield f"{key}: {first}"


def _plain(error: Any) -> str:
    """What pydantic or a validator says of a value, in our words; what was found is told by the caller."""
    message = str(error["msg"]).removeprefix("Value error, ").removesuffix(f", not {error['input']!r}")
    message = message.partition(", unable to ")[0].replace("a valid boolean", "true or false")
    return message.replace("Input should be", "must be").replace("Input should have", "must have")


def _path(model: type[BaseModel], location: Sequence[str | int]) -> tuple[list[str], type[BaseModel] | None]:
    """The keys of a pydantic location without its union labels, and the model that the last key belongs to.

    pydantic puts the label of a union's member (`int`, `literal['auto']`, a class name) among the keys.
    """
    path: list[str] = []
    owners: list[type[BaseModel]] = [model]
    inside_model, owner = True, None
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(part, int):
            path.append(str(part))
        elif inside_model and owners:
            known = next((o for o in owners if part in _fields(o)), None)
            labelled = next((o for o in owners if part == o.__name__), None)
            if known is None and labelled is not None and not last:
                owners = [labelled]
                continue
            path.append(part)
            owner = known or owners[0]
            annotation = _fields(owner).get(part)
            owners = [*_models(annotation)]
            inside_model = bool(owners)
        elif _is_key(part):
            path.append(part)
    return path, owner


def _is_key(part: str) -> bool:
    """Whether a location below a plain field is a mapping's key and not the label of a union's member."""
    labels = (
        "int",
        "float",
        "str",
        "bool",
        "none",
        "function-",
        "literal[",
        "constrained-",
        "tuple[",
        "list[",
        "dict[",
    )
    return not part.startswith(labels)


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models inside an annotation."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models(argument)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
