"""Sampling from a model without a cache: slow and simple, for a look at what was learned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from trainforge.stages import Batch, ModelSpec


def sample(
    model: ModelSpec,
    prompt: Sequence[int],
    count: int,
    temperature: float,
    seed: int,
    device: torch.device,
    *,
    compiled: bool,
) -> list[int]:
    """Sample `count` tokens after `prompt`; temperature 0 takes the likeliest. Leaves other generators alone.

    Where blocks are `compiled` they run as they are: every length of the text would be compiled anew.
    """
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        return _sample(model, prompt, count, temperature, seed, device)


def _sample(
    model: ModelSpec, prompt: Sequence[int], count: int, temperature: float, seed: int, device: torch.device
) -> list[int]:
    generator = torch.Generator(device).manual_seed(seed)
    ids = list(prompt) or [0]
    for _ in range(count):
        context = ids[-model.max_positions :] if model.max_positions else ids
        hidden, _ = model.hidden(_batch(context, device))
        logits = model.head(hidden[0, -1:]).float()
        ids.append(int(_draw(logits[0], temperature, generator)))
    return ids[len(ids) - count :]


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


def _batch(ids: Sequence[int], device: torch.device) -> Batch:
    tokens = torch.tensor([list(ids)], device=device)
    positions = torch.arange(len(ids), device=device)[None]
    return Batch(tokens, torch.full_like(tokens, -100), positions, None, supervised=0, real=len(ids))
