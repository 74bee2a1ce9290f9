"""Cross-entropy through the output head, chunk by chunk, so that `[tokens, vocab]` never exists whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainforge.stages import IGNORED

Head = Callable[[Tensor], Tensor]
Collect = Callable[[Tensor, Tensor], None]
"""`collect(parameter, gradient)`: the whole gradient of a parameter of the head, scaled, fp32."""


def chunked_cross_entropy(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
    head_parameters: Sequence[Tensor],
    chunk: int,
    scale: float,
    collect: Collect | None = None,
) -> Tensor:
    """Summed cross-entropy of `head(hidden)` against `labels`, times `scale`, with exact gradients.

    The gradient of each chunk's logits is taken while they exist and goes at once through the head, so one chunk
    of logits is the most that is ever held, and nothing is computed twice. (The idea of fusing head and loss so is
    that of Liger Kernel and of Cut Cross-Entropy; here it is plain PyTorch and works with any `head`.) Gradients
    of the head's parameters are added up and scaled in fp32 and reach autograd once, rounded to the parameter's dtype.

    Args:
        hidden: `[rows, tokens, width]`.
        labels: int64 `[rows, tokens]`; tokens labelled `IGNORED` contribute nothing.
        head: logits `[n, vocab]` of hidden states `[n, width]`; any function of `head_parameters`.
        head_parameters: what `head` uses; those that need no gradient get none.
        chunk: tokens per chunk.
        scale: what the sum is multiplied with.
        collect: takes the gradients of `head_parameters` at once, instead of autograd at the end of backward: a memory
            that adds gradients up itself need not hold them until then. The result must then be a root of backward,
            taken with a gradient of 1.

    Returns:
        0-dim fp32. No host sync happens.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    trained = [parameter for parameter in head_parameters if parameter.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, labels, head, chunk, scale, collect, *trained
        )
        return loss
    total = torch.zeros((), device=hidden.device)
    for states, targets in zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True):
        total += _loss(torch.log_softmax(head(states), -1, dtype=torch.float32), targets)[0]
    return total * scale


def _loss(log_probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of one chunk; and, each `[n, 1]`: rows to leave out, labels safe for indexing, what lies there."""
    ignored = (targets == IGNORED).unsqueeze(-1)
    index = targets.clamp_min(0).unsqueeze(-1)
    picked = log_probabilities.gather(-1, index)
    return -picked.masked_fill(ignored, 0.0).sum(), ignored, index, picked


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        head: Head,
        chunk: int,
        scale: float,
        collect: Collect | None,
        *parameters: Tensor,
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        hidden_grads: list[Tensor] = []
        sums: dict[int, Tensor] = {}
        for states, targets in zip(
            torch.split(hidden.detach(), chunk), torch.split(labels, chunk), strict=True
        ):
            loss, (hidden_grad, *grads) = _chunk_gradients(states, targets, head, parameters)
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
        ctx.grads = [torch.cat(hidden_grads).mul_(scale)]
        for index, parameter in enumerate(parameters):
            grad = sums.pop(index).mul_(scale) if index in sums else None
            if collect is not None and grad is not None:
                collect(parameter, grad)
                grad = None
            ctx.grads.append(None if grad is None else grad.to(parameter.dtype))
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the chunked loss was already taken through backward; its gradients are gone")
        hidden_grad, *parameter_grads = (held if held is None else held.mul_(grad) for held in ctx.grads)
        ctx.grads = None
        return (hidden_grad, None, None, None, None, None, *parameter_grads)


def _chunk_gradients(
    states: Tensor, targets: Tensor, head: Head, parameters: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Loss of one chunk, unscaled, and its gradients for the hidden states and each parameter (None: not used)."""
    with torch.enable_grad():
        states = states.requires_grad_()
        logits = head(states)
    # Softmax minus one at the label, without autograd's detours: few passes, since these tensors are huge. One pass
    # turns log-probabilities into the gradient's dtype; the label's entry is replaced before it can be rounded.
    log_probabilities = torch.log_softmax(logits.detach(), -1, dtype=torch.float32)
    loss, ignored, index, picked = _loss(log_probabilities, targets)
    logits_grad = torch.exp(log_probabilities, out=torch.empty_like(logits))
    del log_probabilities
    logits_grad.scatter_(-1, index, torch.expm1(picked).to(logits_grad.dtype))
    _zero_rows(logits_grad, ignored)
    return loss, torch.autograd.grad(logits, [states, *parameters], logits_grad, allow_unused=True)


def _zero_rows(matrix: Tensor, rows: Tensor) -> None:
    """Zero the rows marked in `rows` (`[n, 1]`), 8 bytes at a time where the width allows: half the time in bf16."""
    fits = matrix.is_contiguous() and matrix.shape[-1] * matrix.element_size() % 8 == 0
    (matrix.view(torch.int64) if fits else matrix).masked_fill_(rows, 0)
