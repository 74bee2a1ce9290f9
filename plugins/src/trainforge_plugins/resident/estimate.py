"""What resident training needs, for `forge plan`."""

from __future__ import annotations

import math

import torch

from trainforge.context import Context
from trainforge.provider import Estimate
from trainforge.stages import ModelSpec, ParameterSpec
from trainforge.toolbox.dtypes import working_dtype

_GUESSED_ROW_TOKENS = 4096


def estimate(ctx: Context, model: ModelSpec) -> Estimate:
    """Bytes on the device by what holds them; activations are a rough guess of a transformer's."""
    trainable = [spec for spec in model.parameters if spec.trainable]
    owned = sum(extent.length for extent in ctx.comm.partition(trainable))
    elements = sum(spec.elements for spec in trainable)
    dtype = working_dtype(ctx.train, ctx.device)
    working = sum(spec.elements for spec in model.parameters) * dtype.itemsize
    needs = {
        "working copies": working,
        "gradients": 4 * elements,
        "optimizer state": _moments(ctx, trainable, owned),
    }
    if dtype != torch.float32:
        needs["masters"] = 4 * owned
    tokens = ctx.row_tokens or min(model.max_positions or _GUESSED_ROW_TOKENS, _GUESSED_ROW_TOKENS)
    needs[f"activations (roughly, at {tokens:,} tokens per row)"] = _activations(ctx, model, dtype, tokens)
    chunk = min(ctx.train.loss_chunk, ctx.batching.micro_batch * tokens)
    needs["logits of one chunk"] = chunk * model.vocab_size * (8 + 2 * dtype.itemsize)
    return Estimate(device=needs)


def _moments(ctx: Context, trainable: list[ParameterSpec], owned: int) -> int:
    """The optimizer's state of the owned share of elements; its single numbers are not worth counting."""
    total = sum(
        spec.elements * getattr(torch, state.dtype).itemsize
        for spec in trainable
        for state in ctx.optimizer.state(spec).values()
        if state.per_element
    )
    return math.ceil(total * owned / max(1, sum(spec.elements for spec in trainable)))


def _activations(ctx: Context, model: ModelSpec, dtype: torch.dtype, row_tokens: int) -> int:
    """About 34 bytes in bf16 per token, block and channel (Korthikanti et al., 2022), and 2 where blocks recompute."""
    tokens = ctx.batching.micro_batch * row_tokens
    widths = [spec.shape[-1] for spec in model.parameters if spec.kind == "norm" and spec.shape]
    width = max(widths, default=1)
    blocks = max(1, len(model.blocks))
    kept = 2 * blocks + 34 if ctx.train.recompute is True else 34 * blocks
    return tokens * width * kept * dtype.itemsize // 2
