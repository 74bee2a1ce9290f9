"""Checkpoints of a run as core sees them: folders with a certain name and a checkpoint.json, whoever wrote them."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainforge.blame import STARTING, blaming
from trainforge.discovery import load_provider
from trainforge.errors import CheckpointError, ConfigError, UserError
from trainforge.stages import CheckpointInfo, is_checkpoint_name
from trainforge.toolbox.checkpointing.folders import fsync_folder
from trainforge.trust import may_have_come_along
from trainforge.values import REPLACED

if TYPE_CHECKING:
    from trainforge.context import Console, Context
    from trainforge.stages import Checkpoint


def checkpoints_folder(run_dir: Path) -> Path:
    """The folder with a run's checkpoints: `run_dir/checkpoints`, or `run_dir` when it is that folder itself.

    Raises:
        UserError: there is no such folder.
    """
    folder = run_dir if run_dir.name == "checkpoints" else run_dir / "checkpoints"
    if not folder.is_dir():
        raise UserError(f"{run_dir} is no run folder: it holds no checkpoints/")
    return folder


@dataclass(frozen=True)
class Unreadable:
    """A committed checkpoint that does not say what it is.

    Attributes:
        path: its folder.
        about: what is wrong with it, the beginning of a sentence.
    """

    path: Path
    about: str


def list_checkpoints(folder: Path, unreadable: list[Unreadable] | None = None) -> list[CheckpointInfo]:
    """The committed checkpoints in `folder`, oldest step first; an empty list when it does not exist.

    Args:
        folder: of a run's checkpoints.
        unreadable: takes those that cannot be read, which are left out then.

    Raises:
        CheckpointError: a committed checkpoint has no readable checkpoint.json, and nobody takes that.
    """
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := is_checkpoint_name(path.name)) is not None]
    infos = []
    for step, path in sorted(found):
        try:
            if path.is_dir():
                infos.append(_info(step, path))
        except (CheckpointError, FileNotFoundError) as error:
            if not path.exists():  # a run that saves here has deleted it since
                continue
            if _was_refused(error):
                raise CheckpointError(
                    f"{error}: see its permissions and the system's limits, and try again"
                ) from error
            if unreadable is None:
                raise CheckpointError(f"{error}: move it away") from error
            unreadable.append(Unreadable(path, str(error)))
    return infos


def _was_refused(error: Exception) -> bool:
    """Whether the system would not let it be read, for now: too many open files, say. That is no damage."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | NotADirectoryError)


def bring_back(folder: Path) -> None:
    """Give checkpoints their names back that were making way for others when their writer was killed.

    Nobody may be saving there: the caller holds the run's lock.
    """
    for path in sorted(folder.glob(f"{REPLACED}*")):
        final = path.with_name(path.name.removeprefix(REPLACED))
        if is_checkpoint_name(final.name) is not None and not final.exists():
            path.rename(final)
            fsync_folder(folder)


def verify_checkpoint(info: CheckpointInfo) -> list[str]:
    """Problems of a checkpoint, found by the plugin that wrote it; an empty list when it is sound.

    Raises:
        SelectionError: that plugin is not installed.
    """
    with contextlib.closing(open_reader(info)) as reader:
        return reader.verify(info.path)


def remove_checkpoints(infos: Sequence[CheckpointInfo]) -> int:
    """Delete checkpoints, each through the plugin that wrote it; gives the bytes freed.

    Raises:
        SelectionError: such a plugin is not installed. Nothing was deleted.
    """
    with open_readers(infos) as readers:
        return sum(
            reader.remove([info.path for info in infos if info.writer == writer])
            for writer, reader in readers.items()
        )


def remove_folder(path: Path) -> int:
    """Delete a checkpoint's folder and give its size.

    It loses its name first, on the disk too, so that half a checkpoint never looks like one.
    """
    aside = path.with_name(f".removing-{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    size = _size(path)
    path.rename(aside)
    fsync_folder(path.parent)
    shutil.rmtree(aside)
    return size


@contextlib.contextmanager
def open_readers(infos: Sequence[CheckpointInfo]) -> Iterator[dict[str, Checkpoint]]:
    """A reader for each plugin that wrote some of these checkpoints, by its name; closed at the end.

    Raises:
        SelectionError: such a plugin is not installed.
    """
    with contextlib.ExitStack() as closing:
        first = {info.writer: info for info in reversed(infos)}
        yield {
            writer: closing.enter_context(contextlib.closing(open_reader(info)))
            for writer, info in first.items()
        }


def kept_by_recipe(folder: Path) -> tuple[int | None, str | None]:
    """`train.keep_every` and `train.best` of the recipe beside the folder of checkpoints; None twice without a recipe.

    Raises:
        ConfigError: the recipe cannot be read.
    """
    from trainforge.recipe_file import read_recipe
    from trainforge.sections import TrainSection

    recipe = folder.parent / "recipe.yaml"
    if not recipe.is_file():
        return None, None
    try:
        train = TrainSection.model_validate(read_recipe(recipe).get("train", {}))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigError(
            f"{recipe} does not say which checkpoints stay: train.{where} is not right"
        ) from None
    return train.keep_every, train.best


def _about(path: Path) -> dict[str, Any]:
    """The fields of the contract. Whoever wrote them may have meant harm: the writer names a plugin, never a file."""
    try:
        about = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
        facts: dict[str, Any] = {
            "writer": str(about["writer"]),
            "step": int(about["step"]),
            "saved_at": float(about["saved_at"]),
            "metrics": {str(name): float(value) for name, value in dict(about.get("metrics", {})).items()},
            "finite": about.get("finite", True) is True,
            "bytes": about.get("bytes"),
        }
        if not re.fullmatch(r"[A-Za-z_][\w.-]*(?<!\.py)", facts["writer"]):
            raise ValueError("writer is no name of a plugin")
        if not math.isfinite(facts["saved_at"]):
            raise ValueError("saved_at is no time")
        if facts["bytes"] is not None and not (type(facts["bytes"]) is int and facts["bytes"] >= 0):
            raise ValueError("bytes is no size")
        return facts
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"the checkpoint {path} has no usable checkpoint.json ({type(error).__name__}: {error})"
        ) from error


def _info(step: int, path: Path) -> CheckpointInfo:
    about = _about(path)
    if about["step"] != step:
        raise CheckpointError(
            f"the checkpoint {path} says in checkpoint.json that it is of step {about['step']}"
        )
    size = _size(path) if about["bytes"] is None else about["bytes"]
    return CheckpointInfo(
        step,
        path,
        about["writer"],
        size,
        about["saved_at"],
        about["metrics"],
        about["finite"],
        shares=about["bytes"] is not None,
    )


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def open_reader(info: CheckpointInfo) -> Checkpoint:
    """The checkpoint stage that wrote it, built for one process. The caller closes it.

    Raises:
        SelectionError: the plugin that wrote it is not installed.
    """
    from trainforge.context import SilentConsole

    run_dir = info.path.parent.parent
    ctx = context_outside(run_dir, SilentConsole())
    return build_reader(info.writer, writer_reference(run_dir, info.writer), ctx)


def context_outside(run_dir: Path, console: Console) -> Context:
    """What a checkpoint stage is built in outside a run: one process, comm alone, and no checkpoint to be deleted."""
    import torch

    from trainforge.context import Batching, Context
    from trainforge.sections import RunSection, TrainSection
    from trainforge.stages import Comm

    return Context(
        run=RunSection(),
        train=TrainSection(steps=1, keep=sys.maxsize),
        model_config=None,
        device=torch.device("cpu"),
        rank=0,
        world=1,
        local_rank=0,
        local_world=1,
        batching=Batching(1, 1, 1),
        run_dir=run_dir,
        cache_dir=run_dir,
        console=console,
        built={"comm": Comm()},
    )


def build_reader(writer: str, reference: str, ctx: Context) -> Checkpoint:
    """The checkpoint stage of another plugin than the chosen one, to read what it wrote; or to convert to it.

    Its configuration is the default one: it plays no part in reading.

    Raises:
        SelectionError: the plugin is not installed.
    """
    provider = load_provider(reference, "checkpoint")
    with blaming(ctx, writer, "checkpoint", STARTING):
        reader: Checkpoint = provider.build(ctx, provider.config())
    return reader


def writer_reference(run_dir: Path, writer: str) -> str:
    """What names the writer: its plugin name, or the file that plan.json says it came from.

    A file within the run folder does not count, nor does a relative path: no program that comes with a checkpoint is
    run.
    """
    try:
        record = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))["stages"]["checkpoint"]
        if record["plugin"] != writer:
            return writer
        reference = str(record.get("reference", writer))
        foreign = may_have_come_along(reference, run_dir)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return writer
    return writer if foreign else reference
