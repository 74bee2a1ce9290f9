"""`model.trust_remote_code`: Python files that a model folder brings for an architecture of its own.

A folder says in its config.json (`auto_map`) which class lies in which of its files. Importing them runs them, so
nothing here imports any unless the person who trains has allowed it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainforge.errors import ConfigError
from trainforge_plugins.hf.turns import turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainforge.context import Context

_IMPORT_S = 600.0
_MODELS = ("AutoModelForCausalLM", "AutoModelForImageTextToText")


@dataclass(frozen=True)
class OwnClass:
    """A folder's own model class, and the auto class of transformers that builds it."""

    auto: Any
    model: type[PreTrainedModel]


def files_of(folder: Path) -> list[str]:
    """The files that the folder's configuration names, as `auto_map` has them; of another repository with its name."""
    try:
        mapped = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map")
    except (OSError, ValueError, AttributeError):
        return []
    if not isinstance(mapped, Mapping):
        return []
    references = [str(value) for value in mapped.values() if isinstance(value, str)]
    return sorted({f"{reference.rpartition('.')[0]}.py" for reference in references})


def runs_code(ctx: Context, folder: Path, allowed: bool) -> bool:
    """Whether code of the folder is to run; says so, or that transformers' own class is taken instead.

    Raises:
        ConfigError: the architecture needs the folder's code and it is not allowed to run.
    """
    files = files_of(folder)
    if not files:
        return False
    names = ", ".join(files)
    if allowed:
        ctx.console.warn(f"model.trust_remote_code: running {names} of {folder}")
        return True
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if not _is_known(kind):
        raise ConfigError(
            f"model.hf: {folder} is of an architecture ({kind}) that needs Python code of its own: {names}. That code "
            "could do anything that you can: read it, then allow it with model.trust_remote_code: true"
        )
    ctx.console.note(
        f"model: {folder} brings code of its own ({names}), which is not run: transformers' own {kind} is taken"
    )
    return False


def class_of(ctx: Context, config: Any, folder: Path) -> OwnClass:
    """Import the folder's model class.

    Ranks of a host take turns: transformers copies the files to a cache that they share.

    Raises:
        ConfigError: there is no such class, or the files cannot be imported.
    """
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    mapped = getattr(config, "auto_map", None) or {}
    name = next((name for name in _MODELS if name in mapped), None)
    if name is None:
        raise ConfigError(
            f"model.hf: auto_map in {folder / 'config.json'} names no class for {' or '.join(_MODELS)}"
        )
    with code_turn(ctx):
        try:
            found = get_class_from_dynamic_module(mapped[name], str(folder))
        except Exception as error:
            raise ConfigError(
                f"model.hf: the code of {folder} cannot be used: {type(error).__name__}: {error}"
            ) from error
    return OwnClass(getattr(transformers, name), found)


def code_turn(ctx: Context) -> AbstractContextManager[None]:
    """A lock that one rank of this host holds at a time, while transformers copies and imports a folder's files."""
    return turn(ctx.cache_dir / "code.lock", "importing a model folder's code", ctx.console, _IMPORT_S)


def comes_from_a_folder(kind: type) -> bool:
    """Whether transformers has imported the class from a folder's own files."""
    return kind.__module__.partition(".")[0] == "transformers_modules"


def copy_code(folder: Path, out: Path) -> None:
    """Copy the folder's Python files, subfolders included."""
    for file in sorted(folder.rglob("*.py")):
        target = out / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _is_known(kind: Any) -> bool:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    mappings = (AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping)
    return kind in CONFIG_MAPPING and any(CONFIG_MAPPING[kind] in mapping for mapping in mappings)
