"""Recomputation of repeated blocks in backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_blocks(module: nn.Module, block_names: Iterable[str]) -> None:
    """Make each named block keep only its inputs, and run again in backward, with the same random numbers.

    This is `torch.utils.checkpoint` in its non-reentrant form: the reentrant one fires post-accumulate hooks twice
    for weights shared between blocks. Without gradients a block runs as before.
    """
    for name in block_names:
        block = module.get_submodule(name)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
