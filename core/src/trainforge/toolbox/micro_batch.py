"""What every memory does with one micro-batch: its loss and backward, and its loss alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trainforge.seeding import seed_everything
from trainforge.stages import Batch, ModelSpec

Loss = Callable[[Tensor, Tensor, float], Tensor]
"""`loss(hidden, labels, scale)`: summed cross-entropy through the output head, times `scale`; 0-dim fp32."""


def train_micro_batch(
    model: ModelSpec, batch: Batch, scale: float, loss: Loss, device: torch.device
) -> Tensor:
    """Run forward and backward of one micro-batch under its own seed.

    Args:
        scale: 1 / supervised tokens of the step, over all ranks.

    Returns:
        Its share of the step's loss, 0-dim fp32 on `device`, without the auxiliary loss.
    """
    seed_everything(batch.seed)
    batch = batch.to(device)
    hidden, aux = model.hidden(batch)
    own = loss(hidden, batch.labels, scale)
    # An auxiliary loss is a mean over this micro-batch: it weighs as much as the micro-batch's share of tokens.
    (own if aux is None else own + aux * (batch.supervised * scale)).backward()  # type: ignore[no-untyped-call]
    return own.detach()


def losses_of(model: ModelSpec, batches: Iterable[Batch], loss: Loss, device: torch.device) -> Tensor:
    """Summed cross-entropy of each batch, fp32 `[number of batches]` on `device`."""
    losses = [loss_of(model, batch, loss, device) for batch in batches]
    return torch.stack(losses) if losses else torch.zeros(0, device=device)


def loss_of(model: ModelSpec, batch: Batch, loss: Loss, device: torch.device) -> Tensor:
    """Summed cross-entropy of a batch, 0-dim fp32 on `device`; 0 without a supervised token."""
    if batch.supervised == 0:
        return torch.zeros((), device=device)
    batch = batch.to(device)
    return loss(model.hidden(batch)[0], batch.labels, 1.0)
