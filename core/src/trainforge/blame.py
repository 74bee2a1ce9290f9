"""Whose failure it was: a plugin's unexpected exception becomes one error that names it and says what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainforge.errors import OutOfMemory, ProviderError, TrainForgeError

if TYPE_CHECKING:
    from trainforge.context import Context

STARTING = "starting"
"""What a plugin does while its stage is built."""


@contextlib.contextmanager
def blaming(ctx: Context, plugin: str, stage: str, doing: str) -> Iterator[None]:
    """Say whose turn it is, and name the plugin in whatever it raises that is not worded for a person yet.

    Raises:
        ProviderError: the plugin failed; `OutOfMemory` when that was for lack of memory.
    """
    ctx.plugin, ctx.doing = plugin, (stage, doing)
    try:
        yield
    except TrainForgeError:
        raise
    except Exception as error:
        raise explained(error, ctx, plugin, stage, doing) from error


def explained(error: Exception, ctx: Context, plugin: str, stage: str, doing: str) -> ProviderError:
    """What a person reads instead of a plugin's exception: who failed while doing what, and what to lower."""
    if _is_out_of_memory(error):
        return OutOfMemory(plugin, stage, doing, error, _what_to_lower(ctx, doing))
    return ProviderError(plugin, stage, doing, error)


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    on_host = isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)
    return on_host or isinstance(error, torch.OutOfMemoryError)


def _what_to_lower(ctx: Context, doing: str) -> str:
    if doing == STARTING:
        return (
            "forge plan shows what each stage needs: choose a memory plugin that keeps less of it there, more ranks "
            "with a comm plugin that shares it out, or a smaller model"
        )
    ways = []
    if ctx.batching.micro_batch > 1:
        ways.append(f"lower train.micro_batch (now {ctx.batching.micro_batch}; global_batch stays as it is)")
    if ctx.train.recompute is not True:
        ways.append("set train.recompute to true")
    return ", or ".join([*ways, f"lower train.loss_chunk (now {ctx.train.loss_chunk})"])
