"""The run folder: what it holds, who may use it, and whether the run in it can be resumed with this recipe."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from trainforge.checkpoints import bring_back
from trainforge.errors import ConfigError, IncompatibleError, TrainForgeError, UserError
from trainforge.recipe_file import dump_recipe, read_recipe
from trainforge.stages import is_checkpoint_name

FIXED = (
    "model.*",
    "run.seed",
    "train.global_batch",
    "train.lr",
    "train.lr_groups",
    "train.schedule",
    "train.warmup",
    "train.decay",
    "train.lr_end",
    "train.betas",
    "train.eps",
    "train.weight_decay",
    "train.decay_exclude",
    "train.clip",
    "train.dtype",
)
"""Recipe keys that decide what is trained: they must not change when a run is resumed. The data stage guards its
own by a fingerprint. Plugins, ranks, steps (the schedule is then laid over the new length), cadences and how a step
is cut may change."""

HOW_IT_IS_COMPUTED = ("model.attn", "model.experts", "model.trust_remote_code")
"""Keys of the model section that change how it is computed or what may run for it, not what it is."""


class RunFolder:
    """A run's folder, held by one run at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    def open(self, *, fresh: bool) -> Path | None:
        """Create the folder and lock it against a second run. The lock goes with the process.

        Args:
            fresh: move what an earlier run left there aside.

        Returns:
            Where the earlier run's folder was moved to, or None.

        Raises:
            UserError: it cannot be written, another run holds it, or a recipe.yaml that is no run's lies in it.
        """
        try:
            self._refuse_a_recipe_of_somebody()
            self._take()
            moved = self._move_aside() if fresh and self._holds_a_run() else None
            self.checkpoints.mkdir(exist_ok=True)
            bring_back(self.checkpoints)
        except OSError as error:
            raise UserError(
                f"the run folder {self.path} cannot be written ({error.strerror}): choose another with --run-dir"
            ) from error
        return moved

    def check_resumable(self, recipe: Mapping[str, Any], allowed: Iterable[str]) -> None:
        """Compare the recipe with the one this folder was trained with.

        Raises:
            IncompatibleError: a fixed key differs; both values are in the message.
            ConfigError: a key of `allowed` is none that this comparison knows.
        """
        saved = self.saved_recipe()
        if saved is None:
            return
        old, new = flatten(saved), flatten(recipe)
        allowed = tuple(allowed)
        for pattern in allowed:
            if not any(_matches(key, (pattern,)) for key in old.keys() | new.keys() if _is_of_core(key)):
                raise ConfigError(
                    f"--allow-change {pattern}: no key of run, model or train matches it. Those that a resumed run "
                    f"holds fixed are {', '.join(FIXED)}; data is compared by the data plugin, and other data is "
                    "another run (--run-dir or --fresh)"
                )
        changed = [
            f"  {key}: {_shown(old.get(key))} in the folder, {_shown(new.get(key))} now"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and _is_fixed(key) and not _matches(key, allowed)
        ]
        if changed:
            raise IncompatibleError(
                f"{self.path} holds a run that was trained with another recipe:\n"
                + "\n".join(changed)
                + "\nUse another --run-dir (or run.name), start over with --fresh, or accept the change with "
                "--allow-change KEY."
            )

    def saved_recipe(self) -> dict[str, Any] | None:
        """The effective recipe of the run in this folder, or None."""
        path = self.path / "recipe.yaml"
        if not path.exists():
            return None
        return read_recipe(path)

    def resumable_recipe(self) -> dict[str, Any] | None:
        """The effective recipe of the run that can be resumed here; None when it left no checkpoint."""
        names = (path.name for path in self.checkpoints.glob("*"))
        return self.saved_recipe() if any(is_checkpoint_name(name) is not None for name in names) else None

    def write_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Keep the effective recipe."""
        self.write_text("recipe.yaml", dump_recipe(recipe))

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file of the folder, whole or not at all. Numbers that JSON cannot hold become null."""
        plain = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False, default=str)
        self.write_text(name, plain + "\n")

    def read_json(self, name: str) -> Any:
        """The content of a JSON file of the folder, or None when there is none that can be read."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the folder, whole or not at all.

        Raises:
            TrainForgeError: it cannot be written (a full disk, for example).
        """
        path, aside = self.path / name, self.path / f".{name}.tmp"
        try:
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise TrainForgeError(
                f"{path} cannot be written ({error.strerror}): make room or choose another folder with --run-dir"
            ) from error

    def close(self) -> None:
        """Let another run have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _holds_a_run(self) -> bool:
        return (self.path / "recipe.yaml").exists() or any(self.checkpoints.glob("*"))

    def _refuse_a_recipe_of_somebody(self) -> None:
        ours = (self.path / ".lock").exists() or self.checkpoints.exists()
        if not ours and (self.path / "recipe.yaml").exists():
            raise UserError(
                f"{self.path} holds a recipe.yaml that no run wrote and that this run would replace: choose another "
                "folder with --run-dir"
            )

    def _take(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if not isinstance(error, BlockingIOError):
                raise
            raise UserError(
                f"another run is using {self.path}: wait for it, or choose another folder with --run-dir"
            ) from None
        self._lock = lock

    def _move_aside(self) -> Path:
        if Path.cwd().is_relative_to(self.path.resolve()):
            raise UserError(f"--fresh would move {self.path}, where you are: start from another folder")
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        self.close()
        self.path.rename(target)
        self._take()
        return target


@contextlib.contextmanager
def held_apart(path: Path) -> Iterator[None]:
    """Keep runs out of a run's folder for a while.

    A folder without a lock file, as a copy of checkpoints alone, is no run's: there is nothing to hold.

    Raises:
        UserError: a run is using it, or it cannot be locked.
    """
    file = path / ".lock"
    if not file.exists():
        yield
        return
    try:
        lock = file.open("r+")
    except OSError as error:
        raise UserError(f"{file} cannot be opened ({error.strerror}): see its permissions") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                raise UserError(f"{file} cannot be locked ({error.strerror})") from error
            raise UserError(f"a run is using {path}: wait for it, or stop it first") from None
        yield


def flatten(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested recipe as dotted keys: `{"train": {"lr": 1}}` becomes `{"train.lr": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _is_of_core(key: str) -> bool:
    return key.partition(".")[0] in ("run", "model", "train")


def _is_fixed(key: str) -> bool:
    return _matches(key, FIXED) and key not in HOW_IT_IS_COMPUTED


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) or key.startswith(f"{pattern}.") for pattern in patterns)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
