"""How fast a block of this model really runs on this device: forward, recomputation and backward at the real shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from trainforge.seeding import preserved
from trainforge.stages import IGNORED, Batch, ModelSpec, ParameterSpec
from trainforge.toolbox.parameters import bind, move_buffers
from trainforge_megatrain.stream.forecast import step_flops
from trainforge_megatrain.stream.sizes import Sizes
from trainforge_megatrain.stream.units import divide

_ROUNDS = 3


class _Reached(Exception):
    """The block was called with these arguments."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.args_of_block, self.kwargs_of_block = args, kwargs
        super().__init__()


def block_flops_per_s(
    device: torch.device, dtype: torch.dtype, model: ModelSpec, sizes: Sizes
) -> float | None:
    """FLOP/s of the last block at the shape of a micro-batch; None where it cannot be run by itself.

    The model's own forward brings the arguments (masks, rotary tables): it runs on random weights with every other
    block left out. Afterwards the model lies on the meta device as before.
    """
    if not model.blocks:
        return None
    with preserved(device), _filled(model, device, dtype):
        try:
            seconds = _seconds(device, model, _batch(device, sizes))
        except Exception:  # a block that needs what only a whole forward gives; or there is no room for it
            return None
        finally:
            if device.type != "cpu":
                torch.get_device_module(device).empty_cache()
    units = divide(model)
    flops = step_flops(units, model, sizes)
    last = next(unit for unit in reversed(units) if unit.block is not None)
    return flops[last] / sizes.micro_batches * 4 / 3 / seconds


def _seconds(device: torch.device, model: ModelSpec, batch: Batch) -> float:
    block = model.module.train().get_submodule(model.blocks[-1])
    args, kwargs = _arguments(model, batch)
    taken = []
    for _ in range(_ROUNDS + 1):
        _synchronize(device)
        began = time.perf_counter()
        out = checkpoint(block, *args, use_reentrant=False, **kwargs)
        out = out if isinstance(out, Tensor) else out[0]
        out.backward(torch.ones_like(out))
        for parameter in block.parameters():
            parameter.grad = None
        _synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _arguments(model: ModelSpec, batch: Batch) -> tuple[Any, Any]:
    """What the model calls its last block with."""
    replaced = [model.module.get_submodule(name) for name in model.blocks]
    try:
        for block in replaced:
            block.forward = _passed_by
        replaced[-1].forward = _caught
        model.hidden(batch)
    except _Reached as reached:
        leaf = lambda value: value.detach().requires_grad_() if _is_real(value) else value  # noqa: E731
        return tree_map(leaf, reached.args_of_block), reached.kwargs_of_block
    finally:
        for block in replaced:
            del block.forward
    raise RuntimeError("the model did not call its last block")


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _passed_by(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden


def _caught(*args: Any, **kwargs: Any) -> Any:
    raise _Reached(args, kwargs)


@contextmanager
def _filled(model: ModelSpec, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Random weights for the last block and for what is no block; on meta again afterwards."""
    last = len(model.blocks) - 1
    wanted = [spec for spec in model.parameters if spec.block in (None, last)]
    _bind_all(
        model.module, wanted, lambda s: torch.empty(s.shape, dtype=dtype, device=device).normal_(std=0.02)
    )
    move_buffers(model.module, device)
    try:
        yield
    finally:
        _bind_all(model.module, wanted, lambda spec: torch.empty(spec.shape, device="meta"))
        move_buffers(model.module, torch.device("cpu"))


def _bind_all(module: nn.Module, specs: list[ParameterSpec], make: Callable[[ParameterSpec], Tensor]) -> None:
    for spec in specs:
        bind(module, spec.name, make(spec), spec.aliases, trainable=spec.trainable)


def _batch(device: torch.device, sizes: Sizes) -> Batch:
    rows = max(1, sizes.tokens // sizes.row)
    ids = torch.zeros(rows, sizes.row, dtype=torch.long, device=device)
    positions = torch.arange(sizes.row, device=device).expand(rows, -1)
    return Batch(ids, torch.full_like(ids, IGNORED), positions, None, supervised=1, real=ids.numel())


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
