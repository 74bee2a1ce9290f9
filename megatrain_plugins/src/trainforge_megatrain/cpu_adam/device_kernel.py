"""AdamW on split masters that live on a GPU: one Triton kernel per parameter, every byte read and written once.

Through PyTorch's operations the same update joins, widens, updates and splits in some fifteen kernels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainforge.stages import Slot

_BLOCK = 1024


def update(
    slot: Slot,
    lr: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    scale: Tensor,
    found_inf: Tensor,
) -> None:
    """Update a slot with split masters in place; nothing changes when `found_inf` is set. No host sync.

    Args:
        slot: all tensors on one CUDA device; its count of steps was already advanced.
        lr: learning rate of this step for this parameter.
        decay: decoupled weight decay.
        betas: Adam's averaging factors.
        eps: Adam's epsilon.
        scale: 0-dim fp32 on the device, what the gradient is multiplied with.
        found_inf: 0-dim fp32 on the device.
    """
    assert slot.low is not None
    elements = slot.master.numel()
    if not elements:
        return
    kernel: Any = _adamw
    with torch.cuda.device(slot.master.device):
        kernel[(triton.cdiv(elements, _BLOCK),)](
            slot.master.view(torch.int16),
            slot.low,
            slot.grad,
            slot.state["exp_avg"],
            slot.state["exp_avg_sq"],
            slot.state["step"],
            scale,
            found_inf,
            elements,
            lr,
            1 - lr * decay,
            betas[0],
            betas[1],
            1 - betas[0],
            1 - betas[1],
            math.log2(betas[0]) if betas[0] else -math.inf,
            math.log2(betas[1]) if betas[1] else -math.inf,
            eps,
            BLOCK=_BLOCK,
        )


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    high_ptr, low_ptr, grad_ptr, avg_ptr, sq_ptr, step_ptr, scale_ptr, found_ptr,
    elements, lr, shrink, beta1, beta2, rest1, rest2, log_beta1, log_beta2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(found_ptr) > 0:
        return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    high = tl.load(high_ptr + offsets, mask=inside, other=0).to(tl.int32)
    low = tl.load(low_ptr + offsets, mask=inside, other=0).to(tl.int32)
    master = ((high << 16) + low).to(tl.float32, bitcast=True)
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0).to(tl.float32) * tl.load(scale_ptr)
    avg = tl.load(avg_ptr + offsets, mask=inside, other=0).to(tl.float32) * beta1 + grad * rest1
    sq = tl.load(sq_ptr + offsets, mask=inside, other=0).to(tl.float32) * beta2 + (grad * rest2) * grad
    # In float64: 1 - beta^t loses four digits in fp32 when t is small.
    step = tl.load(step_ptr).to(tl.float64)
    rate = lr / (1.0 - tl.exp2(step * log_beta1)).to(tl.float32)
    root = tl.sqrt((1.0 - tl.exp2(step * log_beta2)).to(tl.float32))
    master = master * shrink - rate * avg / (tl.sqrt(sq) / root + eps)
    tl.store(avg_ptr + offsets, avg.to(avg_ptr.dtype.element_ty), mask=inside)
    tl.store(sq_ptr + offsets, sq.to(sq_ptr.dtype.element_ty), mask=inside)
    bits = master.to(tl.int32, bitcast=True)
    tl.store(high_ptr + offsets, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
    tl.store(low_ptr + offsets, (bits & 0xFFFF).to(tl.int16), mask=inside)
