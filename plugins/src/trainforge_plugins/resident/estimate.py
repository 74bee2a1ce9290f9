"""What resident training needs, for `forge plan`."""

from __future__ import annotations

import math

import torch

from trainforge.context import Context
from trainforge.provider import Estimate
from trainforge.stages import ModelSpec, ParameterSpec
from trainforge_plugins.resident.buffers import working_dtype

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int8": 1, "uint8": 1}


def estimate(ctx: Context, model: ModelSpec) -> Estimate:
    """Bytes on the device by what holds them; activations are a rough guess of a transformer's."""
    trainable = [spec for spec in model.parameters if spec.trainable]
    owned = sum(extent.length for extent in _partition(ctx, trainable))
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
    needs["activations (rough)"] = _activations(ctx, model, dtype)
    needs["logits of one chunk"] = ctx.train.loss_chunk * model.vocab_size * (8 + 2 * dtype.itemsize)
    return Estimate(device=needs)


def _partition(ctx: Context, trainable: list[ParameterSpec]) -> list:
    comm = ctx.built.get("comm")
    return [spec.extent for spec in trainable] if comm is None else comm.partition(trainable)


def _moments(ctx: Context, trainable: list[ParameterSpec], owned: int) -> int:
    """The optimizer's state of the owned share of elements (two fp32 moments when no optimizer is built yet)."""
    optimizer = ctx.built.get("optimizer")
    if optimizer is None:
        return 8 * owned
    total = sum(
        spec.elements * _BYTES[state.dtype]
        for spec in trainable
        for state in optimizer.state(spec).values()
        if state.per_element
    )
    return math.ceil(total * owned / max(1, sum(spec.elements for spec in trainable)))


def _activations(ctx: Context, model: ModelSpec, dtype: torch.dtype) -> int:
    """About 34 values of the hidden width per token and block (Korthikanti et al., 2022), 2 when recomputing."""
    tokens = ctx.batching.micro_batch * min(model.max_positions or 4096, 4096)
    widths = [spec.shape[-1] for spec in model.parameters if spec.kind == "norm" and spec.shape]
    width = max(widths, default=1)
    blocks = max(1, len(model.blocks))
    kept = 2 * blocks + 34 if ctx.train.recompute else 34 * blocks
    return tokens * width * kept * dtype.itemsize // 2
