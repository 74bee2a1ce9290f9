"""Large tensors in host RAM: exact sizes, faulted in by all threads, page-locked where a device copies from them.

PyTorch's own page-locked memory comes from a cache that rounds each block up to a power of two and lets one thread
fault its pages; both hurt when most of a machine's RAM is wanted. Here memory is mapped, filled with zeros in parallel
(huge pages where the kernel gives them), and then locked as it is.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch
from torch import Tensor

from trainforge.errors import ConfigError

_SMALL = 2**20  # below it the allocator's rounding does not matter and a mapping of its own does not pay


class HostMemory:
    """Zeroed tensors in host RAM for a device. `close` unlocks what was locked; the tensors must not be used after."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._locked: list[
            Tensor
        ] = []  # kept: memory that is given back while it is locked stays mapped for ever

    def tensor(self, elements: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """A zeroed 1-D tensor; with `pinned` in page-locked memory, unless the device is the CPU.

        Raises:
            ConfigError: the memory cannot be had or locked; the message says how much was asked for.
        """
        pinned = pinned and self.device.type != "cpu"
        size = elements * dtype.itemsize
        if size < _SMALL:
            return torch.zeros(elements, dtype=dtype, pin_memory=pinned)
        tensor = torch.frombuffer(self._mapping(size), dtype=dtype, count=elements)
        tensor.zero_()  # in parallel: this is where the pages come into being
        if pinned:
            return self._lock(tensor, size)
        return tensor

    def _mapping(self, size: int) -> mmap.mmap:
        try:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(
                f"{size / 2**30:.1f} GiB of host RAM cannot be had ({error.strerror})"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(
                OSError
            ):  # a kernel without them: ordinary pages do as well, only more slowly
                mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping

    def _lock(self, tensor: Tensor, size: int) -> Tensor:
        if self.device.type != "cuda":
            return tensor.pin_memory()
        error = int(_cuda_runtime().cudaHostRegister(tensor.data_ptr(), size, 0))
        if error:
            raise ConfigError(
                f"{size / 2**30:.1f} GiB of host RAM cannot be page-locked (CUDA error {error}): raise the limit "
                "(`ulimit -l unlimited`, or --ulimit memlock=-1 for a container), or do without page-locking where the "
                "plugin has a key for it"
            )
        self._locked.append(tensor)
        return tensor

    def close(self) -> None:
        """Unlock everything."""
        while self._locked:
            _cuda_runtime().cudaHostUnregister(self._locked.pop().data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
