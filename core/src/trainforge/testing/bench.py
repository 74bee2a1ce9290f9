"""A workbench for one plugin: its stages built beside the reference ones, and a step to take with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainforge.context import Batching, Context, SilentConsole
from trainforge.discovery import Catalog, Plugin, Source, scan
from trainforge.hooks import implemented
from trainforge.provider import Provider
from trainforge.sections import RunSection, TrainSection
from trainforge.seeding import micro_batch_seed
from trainforge.stages import Batch, Checkpoint, Comm, Data, Memory, ModelSpec, Optimizer, Part, Update

REFERENCE = "trainforge.testing.reference"
BUILD_ORDER = ("comm", "model", "data", "optimizer", "memory", "checkpoint")

PluginReference = str | Path
"""A plugin's name (`"mine"`), its file (`"./mine.py"`), `"package.module"` or `"package.module:object"`."""

_catalog: list[Catalog] = []


def load_plugin(reference: PluginReference) -> Plugin:
    """Import a plugin by name, file, module or `module:object`.

    Raises:
        SelectionError: there is none, or it cannot be imported.
    """
    if not _catalog:
        _catalog.append(scan())
    text = str(reference)
    is_file = text.endswith(".py") or "/" in text
    if not is_file and ("." in text or ":" in text):
        name = text.replace(":", ".").rpartition(".")[2]
        return _catalog[0].load(Source(name, text, text.partition(".")[0], "installed", Path()))
    return _catalog[0].load(_catalog[0].find(text))


def providers_of(plugin: Plugin) -> dict[str, Provider]:
    """The providers that a plugin gives, by stage (and `"observer"`)."""
    found = {}
    for hook in implemented(plugin.implementation):
        stage = hook.removeprefix("forge_")
        if stage in (*BUILD_ORDER, "observer"):
            found[stage] = getattr(plugin.implementation, hook)()
    return found


def tiny_context(
    run_dir: Path,
    *,
    model: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str = "cpu",
    rank: int = 0,
    world: int = 1,
    micro_batch: int = 1,
    accumulate: int = 3,
) -> Context:
    """A context for tests: the given keys of the recipe's sections over small defaults, a silent console."""
    numbers = {"steps": 8, "lr": 0.01, "dtype": "fp32", "clip": 0.5, "schedule": "constant", **(train or {})}
    return Context(
        run=RunSection.model_validate({"seed": seed}),
        train=TrainSection.model_validate(numbers),
        model_config=dict(model or {}),
        device=torch.device(device),
        rank=rank,
        world=world,
        local_rank=rank,
        local_world=world,
        batching=Batching(micro_batch * accumulate * world, micro_batch, accumulate),
        run_dir=run_dir,
        cache_dir=run_dir / "cache",
        console=SilentConsole(),
    )


@dataclass
class Stages:
    """The six stages of a bench, and the context they were built with."""

    ctx: Context
    comm: Comm
    model: ModelSpec
    data: Data
    optimizer: Optimizer
    memory: Memory
    checkpoint: Checkpoint

    def parts(self) -> dict[str, Part]:
        """What a checkpoint of this bench holds."""
        return {"memory": self.memory, "data": self.data, "comm": self.comm}

    def close(self) -> None:
        """Close every stage in reverse build order."""
        for stage in reversed(BUILD_ORDER):
            getattr(self, stage).close()


def build_stage(ctx: Context, plugin: Plugin, stage: str, config: Mapping[str, Any]) -> Any:
    """Build one stage of a plugin, as core does; `config` is its recipe section (for the model: `ctx.model_config`)."""
    provider = providers_of(plugin)[stage]
    section = ctx.model_config if stage == "model" else config
    given = section if isinstance(section, provider.config) else provider.config.model_validate(dict(section))
    if stage == "model":
        ctx.model_config = given
    ctx.plugin = plugin.name
    ctx.built[stage] = provider.build(ctx, given)
    return ctx.built[stage]


def build_stages(
    ctx: Context,
    plugins: Sequence[PluginReference] = (),
    sections: Mapping[str, Mapping[str, Any]] | None = None,
) -> Stages:
    """Build all six stages: those that `plugins` own (the first one wins), and the reference ones.

    Args:
        ctx: from `tiny_context`.
        plugins: names, files or modules.
        sections: recipe sections by plugin name.
    """
    owners: dict[str, Plugin] = {}
    for plugin in [load_plugin(reference) for reference in (*plugins, REFERENCE)]:
        for stage in providers_of(plugin):
            owners.setdefault(stage, plugin)
    for stage in BUILD_ORDER:
        build_stage(ctx, owners[stage], stage, (sections or {}).get(owners[stage].name, {}))
    return Stages(ctx, **{stage: ctx.built[stage] for stage in BUILD_ORDER})


@dataclass(frozen=True)
class StepResult:
    """What a step gave: this step's mean loss over all ranks, the norm before clipping, who was used."""

    loss: float
    norm: float
    used: frozenset[str]
    sample_ids: tuple[int, ...]


class Walker:
    """Takes steps with the stages of a bench, in the order in which core's loop does."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.step = 0
        self.sink = stages.comm.watch(stages.memory.gradients)

    def take(self) -> StepResult:
        """Take the next batches and one whole step with them."""
        batches = self.stages.data.take(self.stages.ctx.batching.accumulate)
        return self.walk(batches)

    def walk(self, batches: Sequence[Batch]) -> StepResult:
        """One step with these batches."""
        stages, train = self.stages, self.stages.ctx.train
        self.step += 1
        for batch in batches:
            batch.seed = micro_batch_seed(stages.ctx.run.seed, self.step, batch.index)
        (tokens,) = stages.comm.control([float(sum(batch.supervised for batch in batches))])
        ids = tuple(sample for batch in batches for sample in batch.sample_ids)
        if not tokens:
            return StepResult(0.0, 0.0, frozenset(), ids)
        loss = stages.memory.forward_backward(batches, 1 / tokens, self.sink)
        used = stages.comm.finish()
        norm = stages.memory.grad_norm()
        update = make_update(self.step, train.lr, norm, train.clip)
        stages.memory.apply(lambda slots: stages.optimizer.update(slots, update), used)
        total = stages.comm.sum_ranks(loss.detach().clone())
        return StepResult(float(total), float(norm), used, ids)

    def save(self) -> Path:
        """Save this step and wait for it; gives the folder."""
        self.stages.memory.drain()
        self.stages.checkpoint.save(self.step, self.stages.parts())
        self.stages.checkpoint.wait()
        return self.stages.ctx.run_dir / "checkpoints" / f"step-{self.step:08d}"

    def restore(self, checkpoint: Checkpoint, path: Path, step: int) -> None:
        """Go on from a checkpoint that `checkpoint` can read."""
        checkpoint.restore(self.stages.parts(), path)
        self.step = step

    def weights(self) -> dict[str, Tensor]:
        """Every weight, after draining."""
        self.stages.memory.drain()
        return {spec.name: self.stages.memory.weights(spec.name) for spec in self.stages.model.parameters}


def make_update(step: int, lr: float, norm: Tensor, clip: float | None) -> Update:
    """The update of a step from the norm of its gradients: scaled down to `clip`, skipped when it is not finite."""
    finite = torch.isfinite(norm)
    limit = math.inf if clip is None else clip
    scale = torch.clamp(limit / (norm.double() + 1e-6), max=1.0)
    scale = torch.where(finite, scale, torch.zeros_like(scale))
    return Update(step, lr, scale.float(), (~finite).float())
