"""Random initial weights, one parameter at a time, the same bits whoever asks for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from trainforge.errors import ConfigError
from trainforge.seeding import derive_seed
from trainforge.stages import Extent, ParameterSpec

Initialise = Callable[[nn.Module], None]
Weights = Callable[[str], Tensor]
"""A parameter's trained value by name, whole and on the CPU."""
Merged = tuple[nn.Module, Sequence[ParameterSpec], Weights]
"""A model as others know it: its module, its parameters, and what gives their values."""
WriteAdapters = Callable[[Path, Weights, Literal["bf16", "fp32"]], str]
"""Writes adapters alone into a folder, and gives the name of the model that they belong to."""


class InitialWeights(Protocol):
    """Where a model's first weights come from."""

    def fill(self, spec: ParameterSpec, out: Tensor, extent: Extent) -> None:
        """Fill `out` with a span of the parameter's initial value."""

    def fill_buffers(self, module: nn.Module) -> None:
        """Fill those persistent buffers of `module` that it has values for."""

    def close(self) -> None:
        """Give back what is open."""


class RandomWeights:
    """Draws parameters with the model's own initialisation under a generator seeded by (run seed, name).

    A twin of the model without weights is kept; to draw a parameter, it alone is given storage there, the
    initialisation of its module and then of every module around it runs (some architectures scale weights from
    further up), and the storage is taken out again. So no more than one parameter exists at a time.
    """

    def __init__(
        self, module: nn.Module, seed: int, initialiser: Callable[[list[nn.Module]], Iterator[Initialise]]
    ) -> None:
        self.twin = copy.deepcopy(module)
        self.seed = seed
        self.initialiser = initialiser
        self._last: tuple[str, Tensor] | None = None

    def fill(self, spec: ParameterSpec, out: Tensor, extent: Extent) -> None:
        """Fill `out` with a span of the parameter's initial value."""
        if self._last is None or self._last[0] != spec.name:
            self._last = (spec.name, self._draw(spec))
        out.copy_(self._last[1].view(-1)[extent.offset : extent.offset + extent.length])
        if extent.offset + extent.length == spec.elements:
            self._last = None

    def fill_buffers(self, module: nn.Module) -> None:
        """Leave them as the module's constructor made them."""

    def close(self) -> None:
        """Nothing is open."""

    @torch.no_grad()
    def _draw(self, spec: ParameterSpec) -> Tensor:
        owner_name, _, leaf = spec.name.rpartition(".")
        chain = [self.twin]
        for part in owner_name.split(".") if owner_name else ():
            chain.append(chain[-1].get_submodule(part))
        owner, placeholder = chain[-1], chain[-1]._parameters[leaf]
        value = torch.full(spec.shape, torch.nan)
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        generator = torch.default_generator
        before = generator.get_state()
        try:
            generator.manual_seed(derive_seed(self.seed, "weights", spec.name))
            for initialise, module in zip(self.initialiser(chain), reversed(chain), strict=True):
                initialise(module)
        finally:
            generator.set_state(before)
            owner._parameters[leaf] = placeholder
        if bool(value.isnan().any()):
            raise ConfigError(
                f"the model has no initialisation for {spec.name}: its module {type(owner).__name__} needs one "
                "(a reset_parameters method, or init_weights(module) on the model)"
            )
        return value


def transformers_initialiser(chain: list[nn.Module]) -> Iterator[Initialise]:
    """From the innermost module outwards: the `_init_weights` of the transformers model that each belongs to."""
    from transformers import PreTrainedModel

    for index in reversed(range(len(chain))):
        model = next(module for module in reversed(chain[: index + 1]) if isinstance(module, PreTrainedModel))
        yield model._init_weights


def module_initialiser(chain: list[nn.Module]) -> Iterator[Initialise]:
    """For a user's module: the model's `init_weights(module)` if it has one, else each module's `reset_parameters`."""
    own = getattr(chain[0], "init_weights", None)
    for index in reversed(range(len(chain))):
        if callable(own):
            yield own
        elif index == len(chain) - 1:
            yield _reset
        else:
            yield _leave


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _leave(module: nn.Module) -> None:
    return None
