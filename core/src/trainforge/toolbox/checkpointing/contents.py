"""What a checkpoint holds, as tensors that are loaded when somebody reads them, a chunk of the format at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

Load = Callable[[int, Tensor], None]
_REMEMBERED = (
    2  # a writer with smaller chunks reads in order, but on several threads that cross from one to the next
)


class Chunkwise:
    """Loads ranges of stored tensors in whole chunks, each once as long as they are asked for about in order.

    Args:
        chunk_bytes: of the format's chunks, which lie on a grid over each tensor.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, tensor: str, elements: int, load: Load, start: int, out: Tensor) -> None:
        """Fill `out` with elements from `start` of a tensor that has `elements` of them.

        Args:
            load: `load(start, out)` fills `out` from the disk, verified. It is called on one thread at a time.
        """
        stop, step = start + len(out), self._chunk_bytes // out.element_size()
        if not 0 <= start <= stop <= elements:
            raise IndexError(f"{tensor} has no elements {start} to {stop}")
        with self._lock:
            while start < stop:
                first = start - start % step
                last = stop if stop == elements else stop - stop % step
                if start == first < last:  # whole chunks need no copy
                    end = last
                    load(start, out[: end - start])
                else:
                    chunk = self._chunk(tensor, load, first, min(step, elements - first), out.dtype)
                    end = min(stop, first + len(chunk))
                    out[: end - start].copy_(chunk[start - first : end - first])
                out, start = out[end - start :], end

    def _chunk(self, tensor: str, load: Load, first: int, length: int, dtype: torch.dtype) -> Tensor:
        found = self._chunks.pop((tensor, first), None)
        if found is None:
            while len(self._chunks) >= _REMEMBERED:
                self._chunks.popitem(last=False)
            found = torch.empty(length, dtype=dtype)
            load(first, found)
        self._chunks[tensor, first] = found
        return found
