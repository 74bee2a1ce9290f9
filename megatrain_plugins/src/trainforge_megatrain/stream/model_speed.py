"""How fast a block and the output head of this model really run on this device, at the real shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from trainforge.seeding import preserved
from trainforge.stages import IGNORED, Batch, ModelSpec, ParameterSpec
from trainforge.toolbox.chunked_loss import chunked_cross_entropy
from trainforge.toolbox.parameters import bind, move_buffers
from trainforge_megatrain.stream.forecast import step_flops
from trainforge_megatrain.stream.sizes import Sizes
from trainforge_megatrain.stream.timing import fastest_s
from trainforge_megatrain.stream.units import divide

_CHUNKS = 4  # of the loss: what is done once, such as rounding the head's gradient, weighs little


class _Reached(Exception):
    """The block was called with these arguments."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.args_of_block, self.kwargs_of_block = args, kwargs
        super().__init__()


@dataclass(frozen=True)
class ModelSpeed:
    """Each is None where that part cannot be run by itself, or there is no room for it.

    Attributes:
        block: FLOP/s of the last block at the shape of a micro-batch, with its recomputation.
        head: tokens/s through the output head and the loss, forward and backward.
    """

    block: float | None = None
    head: float | None = None


def model_speed(device: torch.device, dtype: torch.dtype, model: ModelSpec, sizes: Sizes) -> ModelSpeed:
    """Run the last block, and the head, on random weights.

    The model's own forward brings their arguments (masks, rotary tables): it runs with all other blocks left out.
    Afterwards the model lies on the meta device as before.
    """
    if not model.blocks:
        return ModelSpeed()
    with preserved(device), _filled(model, device, dtype):
        block = _attempt(device, lambda: _block_seconds(device, model, _batch(device, sizes)))
        head = _attempt(device, lambda: _head_tokens_per_s(device, model, sizes))
    if block is None:
        return ModelSpeed(head=head)
    units = divide(model)
    flops = step_flops(units, model, sizes)
    last = next(unit for unit in reversed(units) if unit.block is not None)
    return ModelSpeed(flops[last] / sizes.micro_batches * 4 / 3 / block, head)


def _attempt(device: torch.device, measure: Callable[[], float]) -> float | None:
    try:
        return measure()
    except Exception:  # it needs what only a whole forward gives; or there is no room for it
        return None
    finally:
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()


def _block_seconds(device: torch.device, model: ModelSpec, batch: Batch) -> float:
    block = model.module.train().get_submodule(model.blocks[-1])
    with _passed_by(model) as blocks:
        args, kwargs = _arguments(model, blocks[-1], batch)

    def once() -> None:
        out = checkpoint(block, *args, use_reentrant=False, **kwargs)
        out = out if isinstance(out, Tensor) else out[0]
        out.backward(torch.ones_like(out))
        for parameter in block.parameters():
            parameter.grad = None

    return fastest_s(device, once)


def _head_tokens_per_s(device: torch.device, model: ModelSpec, sizes: Sizes) -> float:
    batch = _batch(device, sizes)
    with _passed_by(model), torch.no_grad():
        hidden, _ = model.hidden(batch)
    hidden = hidden.flatten(0, -2)[: _CHUNKS * sizes.chunk].detach().requires_grad_()
    labels = torch.zeros(len(hidden), dtype=torch.long, device=device)
    head = [model.module.get_parameter(name) for name in model.head_parameters]

    def once() -> None:
        chunked_cross_entropy(hidden, labels, model.head, head, sizes.chunk, 1.0).backward()
        for tensor in (hidden, *head):
            tensor.grad = None

    return len(hidden) / fastest_s(device, once)


@contextmanager
def _passed_by(model: ModelSpec) -> Iterator[list[nn.Module]]:
    """The blocks, left out of the model's forward."""
    blocks = [model.module.get_submodule(name) for name in model.blocks]
    try:
        for block in blocks:
            block.forward = lambda hidden, *args, **kwargs: hidden
        yield blocks
    finally:
        for block in blocks:
            del block.forward


def _arguments(model: ModelSpec, block: nn.Module, batch: Batch) -> tuple[Any, Any]:
    """What the model calls a block with."""
    try:
        block.forward = _caught
        model.hidden(batch)
    except _Reached as reached:
        leaf = lambda value: value.detach().requires_grad_() if _is_real(value) else value  # noqa: E731
        return tree_map(leaf, reached.args_of_block), reached.kwargs_of_block
    raise RuntimeError("the model did not call its last block")


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


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
