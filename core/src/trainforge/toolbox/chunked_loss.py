"""Cross-entropy through the output head, chunk by chunk, so that `[tokens, vocab]` never exists whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainforge.stages import IGNORED

Head = Callable[[Tensor], Tensor]


def chunked_cross_entropy(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
    head_parameters: Sequence[Tensor],
    chunk: int,
    scale: float,
) -> Tensor:
    """Summed cross-entropy of `head(hidden)` against `labels`, times `scale`, with exact gradients.

    The gradient of each chunk's logits is taken while they exist and goes at once through the head, so one chunk
    of logits is the most that is ever held, and nothing is computed twice. (The idea of fusing head and loss so is
    that of Liger Kernel and of Cut Cross-Entropy; here it is plain PyTorch and works with any `head`.) Gradients
    of the head's parameters are added up in fp32 over the chunks and reach autograd once, in the parameter's dtype.

    Args:
        hidden: `[rows, tokens, width]`.
        labels: int64 `[rows, tokens]`; tokens labelled `IGNORED` contribute nothing.
        head: logits `[n, vocab]` of hidden states `[n, width]`; any function of `head_parameters`.
        head_parameters: what `head` uses; those that need no gradient get none.
        chunk: tokens per chunk.
        scale: what the sum is multiplied with.

    Returns:
        0-dim fp32. No host sync happens.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    trained = [parameter for parameter in head_parameters if parameter.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden, labels, head, chunk, scale, *trained)  # type: ignore[no-untyped-call]
        return loss
    total = torch.zeros((), device=hidden.device)
    for states, targets in zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True):
        total += _loss(torch.log_softmax(head(states), -1, dtype=torch.float32), targets, scale)[0]
    return total


def _loss(log_probabilities: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The scaled sum of one chunk, each row's weight and its label made safe for indexing (both `[n, 1]`)."""
    weights = (targets != IGNORED).to(log_probabilities.dtype).mul_(scale).unsqueeze(-1)
    index = targets.clamp_min(0).unsqueeze(-1)
    return -(log_probabilities.gather(-1, index) * weights).sum(), weights, index


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, head: Head, chunk: int, scale: float, *parameters: Tensor
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        hidden_grads: list[Tensor] = []
        sums: dict[int, Tensor] = {}
        for states, targets in zip(
            torch.split(hidden.detach(), chunk), torch.split(labels, chunk), strict=True
        ):
            loss, (hidden_grad, *grads) = _chunk_gradients(states, targets, head, scale, parameters)
            total += loss
            hidden_grads.append(torch.zeros_like(states) if hidden_grad is None else hidden_grad)
            for index, grad in enumerate(grads):
                if grad is None:
                    continue
                if index in sums:
                    sums[index].add_(grad)
                else:  # a copy: autograd may have given an expanded tensor, or one tensor twice
                    sums[index] = grad.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            del grads
        ctx.grads = [torch.cat(hidden_grads)]
        for index, parameter in enumerate(parameters):
            ctx.grads.append(sums.pop(index).to(parameter.dtype) if index in sums else None)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the chunked loss was already taken through backward; its gradients are gone")
        hidden_grad, *parameter_grads = (held if held is None else held.mul_(grad) for held in ctx.grads)
        ctx.grads = None
        return (hidden_grad, None, None, None, None, *parameter_grads)


def _chunk_gradients(
    states: Tensor, targets: Tensor, head: Head, scale: float, parameters: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Loss of one chunk, and its gradients for the hidden states and each parameter (None: not used)."""
    with torch.enable_grad():
        states = states.requires_grad_()
        logits = head(states)
    # softmax minus one at the label, written into the log-probabilities: fewer passes than autograd's
    probabilities = torch.log_softmax(logits.detach(), -1, dtype=torch.float32)
    loss, weights, index = _loss(probabilities, targets, scale)
    probabilities.exp_().scatter_add_(-1, index, probabilities.new_full((1, 1), -1.0).expand_as(index))
    logits_grad = torch.empty_like(logits)
    torch.mul(probabilities, weights, out=logits_grad)
    del probabilities
    return loss, torch.autograd.grad(logits, [states, *parameters], logits_grad, allow_unused=True)
