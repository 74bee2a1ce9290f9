"""Ways to compute the update of host slots: our kernel, torch's fused AdamW, DeepSpeed's. All in place."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from trainforge.errors import ConfigError
from trainforge.stages import Slot
from trainforge.toolbox import halves
from trainforge_megatrain.cpu_adam.threads import Pool

_PIECE = 2**22  # elements that are joined into fp32 at a time


@dataclass(frozen=True)
class Hyper:
    """What AdamW is given for the whole run (`train.betas`, `train.eps`)."""

    beta1: float
    beta2: float
    eps: float


@dataclass(frozen=True)
class Work:
    """A slot, with the learning rate and the weight decay of its parameter in this step."""

    slot: Slot
    lr: float
    decay: float


class HostBackend(Protocol):
    """Updates slots in host memory. The step is known to be finite, and `scale` is a number."""

    name: str
    takes_halves: bool
    threads: int

    def update(self, works: Sequence[Work], scale: float) -> None:
        """Update masters, moments and counts in place; gradients are multiplied with `scale`."""

    def close(self) -> None:
        """Give back threads."""


class _Chunk(ctypes.Structure):
    """`Chunk` of kernel.cpp."""

    _fields_: ClassVar = [
        ("grad", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("master", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("length", ctypes.c_int64),
        ("shrink", ctypes.c_float),
        ("rate", ctypes.c_float),
        ("inverse", ctypes.c_float),
        ("kind", ctypes.c_int32),
        ("first", ctypes.c_int64),
    ]


class _Factors(ctypes.Structure):
    """`Factors` of kernel.cpp."""

    _fields_: ClassVar = [
        (name, ctypes.c_float) for name in ("scale", "beta1", "rest1", "beta2", "rest2", "eps")
    ]


class Native:
    """Our kernel: each byte of a slot is read and written once.

    With g the gradient times the clip scale, t the count, all in fp32 and in this order:
    m = m*beta1 + g*(1-beta1); v = v*beta2 + (g*(1-beta2))*g;
    p = p*(1 - lr*decay) - (m*(lr/(1-beta1^t))) / (sqrt(v)*(1/sqrt(1-beta2^t)) + eps).
    The numbers in parentheses are computed in float64 and rounded once.
    """

    name = "native"
    takes_halves = True

    def __init__(self, pool: Pool, hyper: Hyper) -> None:
        self._pool, self._hyper = pool, hyper
        self.threads = pool.threads

    def update(self, works: Sequence[Work], scale: float) -> None:
        """Update all slots in one call of the kernel."""
        hyper = self._hyper
        chunks = (_Chunk * len(works))()
        for chunk, work in zip(chunks, works, strict=True):
            self._describe(chunk, work)
        factors = _Factors(scale, hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, hyper.eps)
        self._pool.update(chunks, factors)
        for work in works:
            work.slot.state["step"].add_(1)

    def _describe(self, chunk: _Chunk, work: Work) -> None:
        slot, hyper = work.slot, self._hyper
        step = float(slot.state["step"]) + 1
        chunk.grad = slot.grad.data_ptr()
        chunk.exp_avg = slot.state["exp_avg"].data_ptr()
        chunk.exp_avg_sq = slot.state["exp_avg_sq"].data_ptr()
        chunk.master = slot.master.data_ptr()
        chunk.low = None if slot.low is None else slot.low.data_ptr()
        chunk.length = slot.master.numel()
        chunk.shrink = 1 - work.lr * work.decay
        chunk.rate = work.lr / (1 - hyper.beta1**step)
        chunk.inverse = 1 / math.sqrt(1 - hyper.beta2**step)
        chunk.kind = (
            (slot.grad.dtype == torch.bfloat16)
            + 2 * (slot.low is not None)
            + 4 * (slot.state["exp_avg"].dtype == torch.bfloat16)
        )

    def close(self) -> None:
        """End the pool."""
        self._pool.close()


class Fused:
    """torch's fused AdamW, on any device. What is not fp32 goes through fp32 scratch, piece by piece.

    It asks the device nothing: scale and found_inf stay tensors, as in the plugin that is the default.
    """

    name = "torch"
    takes_halves = True

    def __init__(self, hyper: Hyper) -> None:
        self._hyper = hyper
        self.threads = torch.get_num_threads()
        self._scratch = threading.local()

    def update(self, works: Sequence[Work], scale: float) -> None:
        """Update slots in host memory."""
        self.update_on(torch.device("cpu"), works, torch.tensor(scale), torch.zeros(()))

    def update_on(
        self, device: torch.device, works: Sequence[Work], scale: Tensor, found_inf: Tensor
    ) -> None:
        """Update slots that all lie on `device`."""
        scale = scale.to(device, torch.float32, non_blocking=True)
        found_inf = found_inf.to(device, torch.float32, non_blocking=True)
        counts = [work.slot.state["step"] for work in works]
        torch._foreach_add_(counts, [1.0 - found_inf] * len(counts))
        groups: dict[tuple[float, float], list[Slot]] = {}
        for work in works:
            groups.setdefault((work.lr, work.decay), []).append(work.slot)
        for (lr, decay), slots in groups.items():
            whole = [slot for slot in slots if _is_fp32(slot)]
            if whole:
                self._fused(whole, lr, decay, scale, found_inf)
            for slot in slots:
                if slot.low is not None and device.type == "cuda" and _has_triton():
                    self._in_one_kernel(slot, lr, decay, scale, found_inf)
                elif not _is_fp32(slot):
                    self._through_fp32(slot, lr, decay, scale, found_inf)

    def _in_one_kernel(self, slot: Slot, lr: float, decay: float, scale: Tensor, found_inf: Tensor) -> None:
        from trainforge_megatrain.cpu_adam import device_kernel

        hyper = self._hyper
        device_kernel.update(slot, lr, decay, (hyper.beta1, hyper.beta2), hyper.eps, scale, found_inf)

    def _through_fp32(self, slot: Slot, lr: float, decay: float, scale: Tensor, found_inf: Tensor) -> None:
        for start in range(0, slot.master.numel(), _PIECE):
            piece = _span(slot, start, min(start + _PIECE, slot.master.numel()))
            master, grad, exp_avg, exp_avg_sq = self._buffers(piece)
            if piece.low is None:
                master = piece.master
            else:
                halves.join(piece.master, piece.low, master)
            grad.copy_(piece.grad)
            moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            for key, moment in moments.items():
                moment.copy_(piece.state[key])
            state = {**moments, "step": piece.state["step"]}
            whole = replace(piece, master=master, low=None, grad=grad, state=state)
            self._fused([whole], lr, decay, scale, found_inf)
            for key, moment in moments.items():
                piece.state[key].copy_(moment)
            if piece.low is not None:
                halves.split(master, piece.master, piece.low)

    def _buffers(self, piece: Slot) -> list[Tensor]:
        """Four fp32 tensors as long as the piece. On a device its allocator reuses them, in stream order."""
        length, device = piece.master.numel(), piece.master.device
        if device.type != "cpu":
            return list(torch.empty(4, length, device=device).unbind())
        if not hasattr(self._scratch, "kept"):
            self._scratch.kept = torch.empty(4, _PIECE)
        return [row[:length] for row in self._scratch.kept]

    def _fused(self, slots: list[Slot], lr: float, decay: float, scale: Tensor, found_inf: Tensor) -> None:
        torch._fused_adamw_(
            [slot.master for slot in slots],
            [slot.grad for slot in slots],
            [slot.state["exp_avg"] for slot in slots],
            [slot.state["exp_avg_sq"] for slot in slots],
            [],
            [slot.state["step"] for slot in slots],
            lr=lr,
            beta1=self._hyper.beta1,
            beta2=self._hyper.beta2,
            weight_decay=decay,
            eps=self._hyper.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale.reciprocal(),  # the kernel divides by it
            found_inf=found_inf,
        )

    def close(self) -> None:
        """Nothing to give back."""


@functools.cache
def _has_triton() -> bool:
    """Whether PyTorch's compiler for GPU kernels is there; its CUDA builds bring it."""
    return importlib.util.find_spec("triton") is not None


def _is_fp32(slot: Slot) -> bool:
    tensors = (slot.master, slot.grad, slot.state["exp_avg"], slot.state["exp_avg_sq"])
    return all(tensor.dtype == torch.float32 for tensor in tensors)


def _span(slot: Slot, start: int, end: int) -> Slot:
    cut = slice(start, end)
    state = {key: tensor[cut] if tensor.dim() else tensor for key, tensor in slot.state.items()}
    low = None if slot.low is None else slot.low[cut]
    return replace(slot, master=slot.master[cut], grad=slot.grad[cut], low=low, state=state)


class DeepSpeed:
    """The operator behind DeepSpeedCPUAdam, on fp32 slots. It holds Python's lock while it computes.

    It reads whatever it is given as the dtype of the masters, so dtypes must have been checked.
    """

    name = "deepspeed"
    takes_halves = False
    _NUMBER = 0x7F03  # DeepSpeed counts its own optimizers from 0

    def __init__(self, hyper: Hyper) -> None:
        try:
            from deepspeed.ops.op_builder import CPUAdamBuilder
        except ImportError as error:
            raise ConfigError(
                "cpu_adam.backend: deepspeed needs DeepSpeed: pip install 'trainforge-megatrain[deepspeed]', or "
                f"leave the backend at auto ({error})"
            ) from error
        self._hyper = hyper
        self.threads = torch.get_num_threads()
        self._operator: Any = CPUAdamBuilder().load()
        self._operator.create_adam(self._NUMBER, 1e-3, hyper.beta1, hyper.beta2, hyper.eps, 0.0, True, False)

    def update(self, works: Sequence[Work], scale: float) -> None:
        """Update slot by slot."""
        hyper = self._hyper
        for work in works:
            slot = work.slot
            slot.state["step"].add_(1)
            if scale != 1.0:
                slot.grad.mul_(scale)
            self._operator.adam_update(
                self._NUMBER,
                int(slot.state["step"]),
                work.lr,
                hyper.beta1,
                hyper.beta2,
                hyper.eps,
                work.decay,
                True,
                slot.master,
                slot.grad,
                slot.state["exp_avg"],
                slot.state["exp_avg_sq"],
            )

    def close(self) -> None:
        """Forget the operator's object."""
        self._operator.destroy_adam(self._NUMBER)
