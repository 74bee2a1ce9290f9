"""A run as its folder holds it: its plan, one of its checkpoints, and the weights in that, one tensor at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainforge.assembly import cache_dir
from trainforge.blame import STARTING, blaming
from trainforge.checkpoints import checkpoints_folder, list_checkpoints, open_reader
from trainforge.context import Batching, Context
from trainforge.digest import combined_digest, content_digest
from trainforge.errors import CheckpointError, UserError
from trainforge.planning import make_plan
from trainforge.restored import leave_out_initial_weights
from trainforge.retention import best_of, newest_usable
from trainforge.stages import Comm, Extent, NamedTensor, PartState, is_checkpoint_name
from trainforge.trust import plugins_to_leave_out, refuse_code

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trainforge.context import Console
    from trainforge.planning import Plan
    from trainforge.provider import StageName
    from trainforge.stages import Checkpoint, CheckpointInfo, ModelSpec, Tokenizer

Step = int | Literal["best"] | None
"""A step of a run's checkpoints; None is the newest with finite weights."""


@dataclass(frozen=True)
class StoredRun:
    """A run folder, the plan that its recipe makes, and the checkpoint that was asked for."""

    path: Path
    plan: Plan
    checkpoint: CheckpointInfo


def parse_reference(reference: str) -> tuple[Path, Step]:
    """The run folder and the step that `RUN`, `RUN@STEP`, `RUN@best` or a checkpoint's folder names.

    Raises:
        UserError: what follows the @ is neither a step nor `best`.
    """
    folder, at, step = reference.rpartition("@")
    if not at or "/" in step:
        path = Path(reference).expanduser()
        found = is_checkpoint_name(path.name)
        return (path, None) if found is None else (path.parent.parent, found)
    if step != "best" and not (step.isascii() and step.isdigit()):
        raise UserError(f"{reference}: after the @ stands a step, such as {folder}@1000, or best")
    return Path(folder).expanduser(), "best" if step == "best" else int(step)


def choose_checkpoint(run_dir: Path, step: Step, asked: str = "--step") -> CheckpointInfo:
    """A checkpoint of a run folder; `step` None takes the newest one with finite weights, `best` the lowest eval loss.

    Args:
        asked: where a person names the step, for messages.

    Raises:
        UserError: it is no run folder, or holds no checkpoint, or none of that step.
    """
    found = list_checkpoints(checkpoints_folder(run_dir))
    if not found:
        raise UserError(f"{run_dir} holds no committed checkpoint yet: train until it has saved one")
    kept = ", ".join(str(info.step) for info in found)
    if step is None:
        chosen = newest_usable(found)
        problem = f"no checkpoint in {run_dir} has weights that are all finite: name one with {asked}"
    elif step == "best":
        chosen = best_of(found, "eval_loss")
        problem = (
            f"no checkpoint in {run_dir} holds a validation loss: name a step with {asked}; kept are {kept}"
        )
    else:
        chosen = next((info for info in found if info.step == step), None)
        problem = f"{asked} {step}: there is no such checkpoint in {run_dir}; kept are {kept}"
    if chosen is None:
        raise UserError(problem)
    return chosen


def recipe_of(run_dir: Path) -> Path:
    """The effective recipe of a run folder (or of the run whose folder of checkpoints it is).

    Raises:
        UserError: there is none.
    """
    recipe = checkpoints_folder(run_dir).parent / "recipe.yaml"
    if not recipe.is_file():
        raise UserError(f"{run_dir} holds no recipe.yaml, so nothing says which model its checkpoints are of")
    return recipe


def open_run(
    run_dir: Path,
    step: Step,
    overrides: Sequence[str] = (),
    *,
    needs: Sequence[StageName] = ("model", "data"),
    allowed: Collection[str] | None = (),
    asked: str = "--step",
) -> StoredRun:
    """Look into a run folder; see `choose_checkpoint`.

    Args:
        overrides: laid over its recipe.
        needs: the stages that will be built.
        allowed: code that its recipe may have run, as `Section.runs_code` gives it; None allows all of it.

    Raises:
        UserError: it is no run folder, or holds no checkpoint, or none of that step; or its recipe has code run that
            is not allowed.
    """
    chosen = choose_checkpoint(run_dir, step, asked)
    recipe = recipe_of(run_dir)
    leave_out = [] if allowed is None else plugins_to_leave_out(recipe, needs)
    plan = make_plan(recipe, overrides=overrides, leave_out=leave_out)
    if allowed is not None:
        refuse_code(recipe.parent, plan, needs, allowed)
    return StoredRun(recipe.parent, plan, chosen)


def build_model(stored: StoredRun, device: torch.device, console: Console) -> Context:
    """Build comm (of one rank) and the run's model, without weights; gives the context that holds both.

    Raises:
        TrainForgeError: the model cannot be built.
    """
    recipe = stored.plan.recipe
    ctx = Context(
        run=recipe.run,
        train=recipe.train,
        model_config=recipe.model,
        device=device,
        rank=0,
        world=1,
        local_rank=0,
        local_world=1,
        batching=Batching(1, 1, 1),
        run_dir=stored.path,
        cache_dir=cache_dir(),
        console=console,
        restored=True,
        built={"comm": Comm()},
    )
    ctx.built["model"] = build_stage(stored, ctx, "model")
    leave_out_initial_weights(ctx.model)
    return ctx


def build_stage(stored: StoredRun, ctx: Context, stage: Any) -> Any:
    """Build one stage of the run's plan in `ctx`."""
    chosen = stored.plan.chosen[stage]
    with blaming(ctx, chosen.plugin, stage, STARTING):
        return chosen.provider.build(ctx, chosen.config)


def build_tokenizer(stored: StoredRun, ctx: Context) -> Tokenizer | None:
    """The tokenizer of the run's data, or None when it has none."""
    chosen = stored.plan.chosen["data"]
    if chosen.provider.tokenizer is None:
        return None
    with blaming(ctx, chosen.plugin, "data", "loading the tokenizer"):
        return chosen.provider.tokenizer(ctx, chosen.config)


@contextlib.contextmanager
def reading(stored: StoredRun, ctx: Context) -> Iterator[Checkpoint]:
    """The checkpoint stage that wrote the checkpoint; closed at the end.

    Raises:
        CheckpointError: it is damaged; says which older one there is.
    """
    reader = open_reader(stored.checkpoint)
    try:
        with blaming(ctx, stored.checkpoint.writer, "checkpoint", f"reading {stored.checkpoint.path}"):
            yield reader
    except CheckpointError as error:
        folder, step = stored.checkpoint.path.parent, stored.checkpoint.step
        older = [info.step for info in list_checkpoints(folder, []) if info.step < step]
        if not older:
            raise
        raise CheckpointError(f"{error}. The newest before it is that of step {older[-1]}") from error
    finally:
        reader.close()


class StoredWeights:
    """Gives the weights of a checkpoint by name, each read when it is asked for. No module is filled.

    Frozen parameters are in no checkpoint: they are the model's initial ones.

    Args:
        read: the checkpoint stage that wrote it.
        path: the checkpoint's folder.
        model: the run's model.
    """

    def __init__(self, read: Checkpoint, path: Path, model: ModelSpec) -> None:
        self._reader, self._path, self._model = read, path, model
        self._specs = {name: spec for spec in model.parameters for name in (spec.name, *spec.aliases)}
        self._contents: dict[str, str] = {}

    def __call__(self, name: str) -> Tensor:
        """A parameter's fp32 master, or a persistent buffer, whole and on the CPU.

        Raises:
            CheckpointError: the checkpoint lacks it or is damaged.
        """
        import torch

        spec = self._specs.get(name)
        if spec is None:
            buffer = self._model.module.get_buffer(name)
            value = torch.empty(buffer.numel(), dtype=buffer.dtype)
            extent = Extent(name, tuple(buffer.shape), 0, buffer.numel())
            self._fill(NamedTensor("buffer", extent, value))
            return value.view(buffer.shape)
        value = torch.empty(spec.elements)
        if spec.trainable:
            self._fill(NamedTensor("master", spec.extent, value))
            self._contents[spec.name] = content_digest(value)
        else:
            self._model.load(spec.name, value, spec.extent)
        return value.view(spec.shape)

    def digest(self) -> str:
        """The `weights_digest`; parameters that nobody has asked for are read now."""

        def content(name: str) -> str:
            if name not in self._contents:
                self(name)
            return self._contents[name]

        return combined_digest(self._model.parameters, content)

    def _fill(self, tensor: NamedTensor) -> None:
        self._reader.restore({"memory": _OneTensor(tensor)}, self._path)


class _OneTensor:
    """A part of a single tensor: what else the checkpoint holds is not read."""

    def __init__(self, tensor: NamedTensor) -> None:
        self._tensor = tensor

    def state(self) -> PartState:
        return PartState(tensors=(self._tensor,))

    def load(self, version: int, data: dict[str, Any]) -> None:
        """Nothing to do: the tensor was filled in place."""
