"""Parameters as views of larger buffers: binding, layout, rounding, norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainforge.stages import Extent, NamedTensor, ParameterSpec

ALIGNMENT = 64
"""Elements to which spans of a flat buffer are aligned: 256 bytes of fp32, 128 of bf16, so kernels vectorise."""

_ROUND_CHUNK = 2**26  # bounds the temporary to 256 MiB


def bind(
    module: nn.Module, name: str, tensor: Tensor, aliases: Iterable[str] = (), *, trainable: bool = True
) -> nn.Parameter:
    """Put a parameter that aliases `tensor` under its dotted name, and the same object under its aliases.

    Args:
        module: the whole model; what was there before (a meta tensor, or a real one) is dropped.
        name: dotted name of the parameter.
        tensor: storage, of the parameter's shape. Later writes to it are seen by the module.
        aliases: the other dotted names of tied weights.
        trainable: whether autograd is to give it a gradient.
    """
    parameter = nn.Parameter(tensor, requires_grad=trainable)
    for dotted in (name, *aliases):
        owner, _, leaf = dotted.rpartition(".")
        setattr(module.get_submodule(owner), leaf, parameter)
    return parameter


@dataclass(frozen=True)
class Layout:
    """Where parameters lie in a flat buffer, in elements.

    Attributes:
        specs: the parameters in the order in which they lie.
        starts: where each begins, by name; aligned to `ALIGNMENT`.
        length: elements of the whole buffer, padding included.
    """

    specs: tuple[ParameterSpec, ...]
    starts: Mapping[str, int]
    length: int

    def span(self, buffer: Tensor, spec: ParameterSpec, offset: int = 0, length: int | None = None) -> Tensor:
        """A 1-D view of a parameter, or of `length` of its elements from `offset`."""
        start = self.starts[spec.name] + offset
        return buffer[start : start + (spec.elements - offset if length is None else length)]


def flat_layout(specs: Sequence[ParameterSpec]) -> Layout:
    """Lay parameters out one after the other, each start aligned."""
    starts, end = {}, 0
    for spec in specs:
        starts[spec.name] = end
        end = aligned(end + spec.elements)
    return Layout(tuple(specs), starts, end)


def aligned(elements: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move every buffer of the module to `device`, each in its own dtype; parameters stay where they are."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def persistent_buffers(module: nn.Module) -> Iterator[NamedTensor]:
    """The buffers of a module that belong in its state, as checkpoints know them."""
    for prefix, owner in module.named_modules(remove_duplicate=True):
        for leaf, buffer in owner.named_buffers(recurse=False):
            if leaf not in owner._non_persistent_buffers_set:
                name = f"{prefix}.{leaf}" if prefix else leaf
                extent = Extent(name, tuple(buffer.shape), 0, buffer.numel())
                yield NamedTensor("buffer", extent, buffer.view(-1))


def round_to_bf16(master: Tensor, out: Tensor) -> None:
    """Write the bf16 working copy of fp32 masters: `hi = (bits + 0x8000) >> 16`, nearest with ties away from zero.

    The streamed half of split masters is rounded so too, because this rounding is invertible with the 16 low bits
    (round-to-nearest-even is not). A master that is infinite or NaN gives NaN.

    Args:
        master: fp32, 1-D, contiguous.
        out: bf16, as long, contiguous, on the same device.
    """
    # With the lowest bit set there are no ties, and the device's own conversion (to nearest, ties to even) rounds as
    # the formula does. That takes 14 bytes of traffic per element; the formula in tensor operations takes 18.
    bits = master.view(torch.int32)
    for piece, target in zip(torch.split(bits, _ROUND_CHUNK), torch.split(out, _ROUND_CHUNK), strict=True):
        target.copy_((piece | 1).view(torch.float32))


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of each tensor, accumulated in float64: `[len(tensors)]`, without a host sync."""
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    return torch.stack(list(norms)).square_()


def global_norm(squares: Tensor) -> Tensor:
    """L2 norm, 0-dim fp32, of sums of squares: float64, one per parameter, in the order of their names.

    Memories that use it give the same bits for the same gradients, whatever order they hold them in.
    """
    return squares.sum().sqrt().float()
