"""`weights_digest`: one number for all trainable weights, the same for every layout, rank count and plugin set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from trainforge.stages import ParameterSpec


def weights_digest(parameters: Iterable[ParameterSpec], weights: Callable[[str], Tensor]) -> str:
    """xxh3-128 over sorted (name, shape, xxh3-128 of the row-major fp32 bytes) of the trainable parameters.

    Args:
        parameters: all of them; frozen ones are left out.
        weights: gives a parameter's whole fp32 master on the CPU (`Memory.weights`); called one at a time, in the
            same order on every rank.
    """
    return combined_digest(parameters, lambda name: content_digest(weights(name)))


def content_digest(weight: Tensor) -> str:
    """xxh3-128 of the row-major bytes of a tensor on the CPU."""
    return xxhash.xxh3_128(weight.contiguous().numpy().tobytes()).hexdigest()


def combined_digest(parameters: Iterable[ParameterSpec], content: Callable[[str], str]) -> str:
    """`weights_digest`, given the `content_digest` of each trainable parameter by name."""
    total = xxhash.xxh3_128()
    for spec in sorted(parameters, key=lambda spec: spec.name):
        if spec.trainable:
            total.update(f"{spec.name} {list(spec.shape)} {content(spec.name)}\n".encode())
    return total.hexdigest()
