"""A run as its folder holds it: its plan, one of its checkpoints, and the weights in that, one tensor at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainforge.assembly import cache_dir
from trainforge.blame import STARTING, blaming
from trainforge.checkpoints import checkpoints_folder, list_checkpoints, open_reader
from trainforge.context import Batching, Context
from trainforge.digest import combined_digest, content_digest
from trainforge.errors import UserError
from trainforge.planning import make_plan
from trainforge.retention import newest_usable
from trainforge.stages import Comm, Extent, NamedTensor, PartState

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trainforge.context import Console
    from trainforge.planning import Plan
    from trainforge.stages import Checkpoint, CheckpointInfo, ModelSpec, Tokenizer


@dataclass(frozen=True)
class StoredRun:
    """A run folder, the plan that its recipe makes, and the checkpoint that was asked for."""

    path: Path
    plan: Plan
    checkpoint: CheckpointInfo


def open_run(run_dir: Path, step: int | None, overrides: Sequence[str] = ()) -> StoredRun:
    """Look into a run folder; `step` None takes the newest checkpoint. `overrides` are laid over its recipe.

    Raises:
        UserError: it is no run folder, or holds no checkpoint, or none of that step.
    """
    folder = checkpoints_folder(run_dir)
    found = list_checkpoints(folder)
    if not found:
        raise UserError(f"{run_dir} holds no committed checkpoint yet: train until it has saved one")
    chosen = newest_usable(found) if step is None else next((i for i in found if i.step == step), None)
    if chosen is None and step is None:
        raise UserError(f"no checkpoint in {run_dir} has weights that are all finite: name one with --step")
    if chosen is None:
        kept = ", ".join(str(info.step) for info in found)
        raise UserError(f"--step {step}: there is no such checkpoint in {run_dir}; kept are {kept}")
    recipe = folder.parent / "recipe.yaml"
    if not recipe.is_file():
        raise UserError(f"{run_dir} holds no recipe.yaml, so nothing says which model its checkpoints are of")
    return StoredRun(folder.parent, make_plan(recipe, overrides=overrides), chosen)


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
        built={"comm": Comm()},
    )
    ctx.built["model"] = build_stage(stored, ctx, "model")
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
    """The checkpoint stage that wrote the checkpoint; closed at the end."""
    reader = open_reader(stored.checkpoint)
    try:
        with blaming(ctx, stored.checkpoint.writer, "checkpoint", f"reading {stored.checkpoint.path}"):
            yield reader
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
