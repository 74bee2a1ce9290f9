"""`forge sample`: let the model of a run continue a text, from one of its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainforge.blame import blaming
from trainforge.errors import UserError
from trainforge.ranks import Ranks, pick_device
from trainforge.stages import Optimizer, ParameterSpec, Slot, StateSpec, Update
from trainforge.stored_run import build_model, build_stage, build_tokenizer, open_run, reading

if TYPE_CHECKING:
    from trainforge.context import Console
    from trainforge.stages import Memory


@dataclass(frozen=True)
class Sample:
    """A continuation, its number of tokens, and how long it took to draw them."""

    step: int
    text: str
    tokens: int
    seconds: float


class _NoOptimizer(Optimizer):
    """Asks memory for no state, so that none is allocated or read."""

    def state(self, spec: ParameterSpec) -> dict[str, StateSpec]:
        return {}

    def update(self, slots: Sequence[Slot], update: Update) -> None:
        raise AssertionError("a model that is only sampled from is not updated")


def sample_run(
    run_dir: Path,
    prompt: str,
    console: Console,
    *,
    tokens: int = 128,
    temperature: float = 0.8,
    seed: int = 0,
    step: int | None = None,
    trust_code: bool = False,
) -> Sample:
    """Continue `prompt` with the weights of a run's checkpoint, by the memory plugin that trained it.

    The run's device is used when this machine has it. The data is not touched, only its tokenizer is loaded.

    Args:
        tokens: how many to draw.
        temperature: 0 takes the likeliest token each time.
        step: of the checkpoint; None takes the newest.
        trust_code: run code that the run's recipe names and that is not installed (see `trust.py`).

    Raises:
        UserError: the run or the checkpoint cannot be used, or there is nothing to tokenise or generate with.
        CheckpointError: the checkpoint is damaged.
    """
    stored = open_run(
        run_dir,
        step,
        ["train.compile=false", "train.recompute=false", "run.devices=null"],
        needs=("model", "data", "memory"),
        allowed=None if trust_code else (),
    )
    run = stored.plan.recipe.run
    device = pick_device(run if run.device == "cpu" else run.model_copy(update={"device": "auto"}), Ranks())
    ctx = build_model(stored, device, console)
    data, plugin = stored.plan.chosen["data"].plugin, stored.plan.chosen["memory"].plugin
    tokenizer = build_tokenizer(stored, ctx)
    if tokenizer is None:
        raise UserError(f"{run_dir} cannot be sampled from: its data plugin {data} has no tokenizer")
    ids = tokenizer.encode(prompt)
    if not ids:
        raise UserError("the prompt holds no token: give some text to continue")
    if max(ids) >= ctx.model.vocab_size:
        raise UserError(f"the tokenizer of {data} gives token ids that the model does not have")
    ctx.built["optimizer"] = _NoOptimizer()
    memory: Memory = build_stage(stored, ctx, "memory")
    try:
        with reading(stored, ctx) as reader:
            reader.restore({"memory": memory}, stored.checkpoint.path)
        began = time.perf_counter()
        with blaming(ctx, plugin, "memory", "generating"):
            drawn = memory.generate(ids, tokens, temperature=temperature, seed=seed)
        seconds = time.perf_counter() - began
    finally:
        memory.close()
        ctx.model.close()
    if not drawn:
        raise UserError(f"{run_dir} cannot be sampled from: its memory plugin {plugin} does not generate")
    return Sample(stored.checkpoint.step, tokenizer.decode(drawn), len(drawn), seconds)
