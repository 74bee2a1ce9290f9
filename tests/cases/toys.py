"""A plugin whose micro-batches and model do what the cases need; one step of it is a pure function of its number.

`rows` says which micro-batches there are, `spoil` which gradients are not finite. What happened is left in the run
folder: weights-STEP.pt after each step, draws-RANK.jsonl with random numbers, reductions-RANK.jsonl.
"""

from __future__ import annotations

import json
import random
from typing import Any, Literal

import numpy
import torch
from pydantic import Field
from tests.support.toy_model import ToyConfig, ToyModel, toy_batches
from torch import Tensor

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section
from trainforge.stages import IGNORED, Batch, Data, PartState

SUPERVISED = (3, 97, 10, 0)
TOKENS = 100
EPOCH = 4
CONFIG = ToyConfig(layers=1, max_positions=TOKENS)


class ToysSection(Section):
    """What the four micro-batches of a step are."""

    rows: Literal["branch", "uneven", "plain"] = Field(
        "plain",
        description="plain; branch: some go through a branch; uneven: 3, 97, 10 and 0 supervised tokens",
    )


class ModelSection(Section):
    """What the model does."""

    branch: bool = Field(
        False, description="a branch that few micro-batches take, and a layer that none takes"
    )
    dropout: float = Field(0.0, description="dropout in the block")
    spoil: tuple[str, ...] = Field(
        (),
        description="for each step what the gradient of the second micro-batch becomes (zero: those of all that reach "
        "the hidden states; none: those of all)",
    )


def config_of(section: ModelSection) -> ToyConfig:
    return ToyConfig(
        layers=1,
        max_positions=TOKENS,
        branch=section.branch,
        unused=section.branch,
        dropout=section.dropout,
    )


def takes_branch(step: int, index: int) -> bool:
    """Rank 0 of two in odd steps, rank 1 in even ones, nobody in every third."""
    return step % 3 != 0 and index == (0 if step % 2 else 3)


def micro_batch(rows: str, step: int, index: int) -> Batch:
    """Micro-batch `index` of the four of a step; in every third step no uneven one has a supervised token."""
    if rows == "uneven":
        count = 0 if step % 3 == 2 else SUPERVISED[index]
        (batch,) = toy_batches(CONFIG, 1, step=step, rows=1, tokens=TOKENS, supervised=[count], seed=index)
    else:
        (batch,) = toy_batches(CONFIG, 1, step=step, rows=1, seed=index)
        batch.input_ids[0, 0] = 1 if rows == "branch" and takes_branch(step, index) else 2
    batch.index, batch.sample_ids = index, (step * 100 + index,)
    return batch


def joined(batches: list[Batch]) -> Batch:
    """One micro-batch of the rows of several."""
    return Batch(
        torch.cat([batch.input_ids for batch in batches]),
        torch.cat([batch.labels for batch in batches]),
        torch.cat([batch.position_ids for batch in batches]),
        None,
        sum(batch.supervised for batch in batches),
        sum(batch.real for batch in batches),
        sample_ids=tuple(i for batch in batches for i in batch.sample_ids),
    )


class ToyRows(Data):
    """Four rows a step, cut as the run asks."""

    samples, steps_per_epoch = 4 * EPOCH, EPOCH

    def __init__(self, ctx: Any, config: ToysSection) -> None:
        self.ctx, self.config, self.step = ctx, config, 0
        self.reductions = counted_reductions() if ctx.world > 1 else []

    def take(self, count: int) -> list[Batch]:
        self.step += 1
        if self.reductions:
            append(self.ctx, "reductions", self.reductions.copy())
            self.reductions.clear()
        size = self.ctx.batching.micro_batch
        batches = []
        for i in range(count):
            index = i * self.ctx.world + self.ctx.rank
            rows = [micro_batch(self.config.rows, self.step, index * size + row) for row in range(size)]
            batch = rows[0] if size == 1 else joined(rows)
            batch.index = index
            append(self.ctx, "draws", {"who": "data", "step": self.step, "index": index, "drawn": draw()})
            batches.append(batch)
        return batches

    def validation(self):
        append(self.ctx, "draws", {"who": "validation", "step": self.step, "drawn": draw()})
        yield micro_batch("plain", 0, self.ctx.rank)

    def state(self) -> PartState:
        return PartState(data={"step": self.step})

    def load(self, version: int, data: dict[str, Any]) -> None:
        self.step = data["step"]


class Drawing(ToyModel):
    """The toy model; draws random numbers in every forward and may spoil gradients."""

    def __init__(self, ctx: Any, section: ModelSection) -> None:
        super().__init__(config_of(section))
        self.ctx, self.spoil = ctx, section.spoil

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        hidden, aux = super().hidden(batch)
        if not self.module.training:
            return hidden, aux
        step = batch.sample_ids[0] // 100
        append(self.ctx, "draws", {"who": "model", "step": step, "index": batch.index, "drawn": draw()})
        self.how = how = self.spoil[step - 1] if step <= len(self.spoil) else ""
        if how in ("zero", "none") or (how and batch.index == 1):
            factor = {"nan": float("nan"), "inf": float("inf")}.get(how, 0.0)
            hidden.register_hook(lambda gradient: gradient * factor)
        return hidden, aux

    def head(self, hidden: Tensor) -> Tensor:
        logits = super().head(hidden)
        if self.module.training and self.how == "none":
            logits.register_hook(torch.zeros_like)
        return logits


class Weights:
    """Keeps the weights of every step."""

    @hookimpl
    def forge_step_ended(self, run: Any, step: int) -> None:
        memory, model = run.stages.memory, run.stages.model
        weights = {spec.name: memory.weights(spec.name).clone() for spec in model.parameters}
        torch.save(weights, run.path / f"weights-{step}.pt")


def draw() -> list[float]:
    """One number of each generator."""
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def counted_reductions() -> list[int]:
    """Collects the sizes of asynchronous reductions: those of gradients."""
    import torch.distributed as dist

    sizes: list[int] = []
    plain = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if async_op:
            sizes.append(tensor.numel())
        return plain(tensor, *args, async_op=async_op, **kwargs)

    dist.all_reduce = counting
    return sizes


def append(ctx: Any, name: str, value: Any) -> None:
    with (ctx.run_dir / f"{name}-{ctx.rank}.jsonl").open("a") as file:
        file.write(json.dumps(value) + "\n")


@hookimpl
def forge_model() -> Provider:
    return Provider(build=Drawing, config=ModelSection)


@hookimpl
def forge_data() -> Provider:
    return Provider(build=ToyRows, config=ToysSection)


@hookimpl
def forge_observer() -> Provider:
    return Provider(build=lambda ctx, config: Weights(), config=ToysSection)


def supervised_loss(module: Any, batch: Batch) -> Tensor:
    """Summed cross-entropy of a micro-batch by plain PyTorch, for reference loops."""
    logits = module.logits(module(batch)[0])
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
