"""Reading a recipe's YAML and overrides into plain data, with line numbers in what is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainforge.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """The safe loader with YAML 1.2's plain values: `1e-6` is a number; `no`, `on` and `2024-01-01` are text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the name is PyYAML's

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise _Problem(f"line {line}: the key {key!r} must be text")
            if key in seen and key != "<<":
                raise _Problem(f"line {line}: {key} is given twice (first in line {seen[key]})")
            seen[key] = line
        return super().construct_mapping(node, deep)


class _Problem(Exception):
    pass


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes wherever `_Loader` (or an older YAML) would take it for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+", [*"-+0123456789"]),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        [*"-+.0123456789"],
    ),
    ("merge", r"<<", ["<"]),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe file into plain data. Relative paths inside it are left alone: they count from the current folder.

    Raises:
        ConfigError: it cannot be read, is not YAML, is no mapping, or holds a key twice; with the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the recipe {path} is not UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error.strerror}") from error
    return parse_recipe(text, str(path))


def parse_recipe(text: str, name: str) -> dict[str, Any]:
    """Parse a recipe's text; `name` is what messages call it.

    Raises:
        ConfigError: as for `read_recipe`.
    """
    try:
        loaded = _load(text)
    except _Problem as problem:
        raise ConfigError(f"the recipe {name}, {problem}") from None
    if not isinstance(loaded, dict):
        found = "is empty" if loaded is None else f"line 1: holds {_kind(loaded)}"
        raise ConfigError(f"the recipe {name} {found}; it must be a mapping of sections such as `train:`")
    return loaded


def apply_overrides(recipe: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Lay `section.key=value` overrides over a recipe; a value is parsed as YAML.

    Returns:
        The new recipe, and the dotted keys that were set.

    Raises:
        ConfigError: an override cannot be understood.
    """
    result = dict(recipe)
    keys: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if parts[0] == "plugins":
            raise ConfigError(f"--set {override}: plugins are chosen with --plugins")
        if not equals or len(parts) < 2 or not all(parts):
            raise ConfigError(
                f"--set {override}: must look like section.key=value, for example train.lr=1e-3"
            )
        try:
            value = _load(text)
        except _Problem as problem:
            raise ConfigError(f"--set {override}: the value is not YAML ({problem})") from None
        result[parts[0]] = _with(result.get(parts[0]), parts[1:], value, override)
        keys.append(".".join(parts))
    return result, keys


def dump_recipe(recipe: Mapping[str, Any]) -> str:
    """A recipe as YAML that `parse_recipe` reads back as the same data."""
    return yaml.dump(dict(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _with(node: Any, parts: Sequence[str], value: Any, override: str) -> Any:
    if not parts:
        return value
    if node is not None and not isinstance(node, dict):
        raise ConfigError(f"--set {override}: what holds {parts[0]} is no mapping but {_kind(node)}")
    return {**(node or {}), parts[0]: _with((node or {}).get(parts[0]), parts[1:], value, override)}


def _load(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise _Problem(f"{line}not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _Problem(f"not YAML: {error}") from None


def _kind(value: Any) -> str:
    return {list: "a list", str: "plain text", bool: "true or false"}.get(type(value), "a number")
