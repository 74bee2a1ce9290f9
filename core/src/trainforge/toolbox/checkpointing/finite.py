"""Whether masters are finite, for `finite` in checkpoint.json."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trainforge.toolbox.checkpointing.layout import Chunk, split_name


def is_finite(values: Tensor, chunk: Chunk) -> bool:
    """Whether a chunk of a master is; all other chunks pass.

    The smallest and the largest value tell: both are NaN when any is. That takes 0.08 ns per byte, `isfinite` 0.5, and
    does not take every float of 8 bits. NumPy stays on this thread, which leaves the others to training.

    Args:
        values: of the chunk, 1-D, in host RAM, in its dtype or as bytes.
        chunk: what it is.
    """
    if split_name(chunk.tensor)[1] != "master" or not values.numel():
        return True
    numbers = values.view(getattr(torch, chunk.dtype))
    if numbers.dtype not in (torch.float32, torch.float64):
        numbers = numbers.float()
    array = numbers.numpy()
    return bool(np.isfinite(array.min()) and np.isfinite(array.max()))
