"""The output head of a transformers model, apart from the rest of it."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.utils import ModelOutput


@dataclass
class _OnlyHidden(ModelOutput):
    """What a base model returns, with nothing in it but the hidden states."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


class _GivenHidden(nn.Module):
    """Stands in for the base model and for the modules in it: returns hidden states that it was given.

    Numbers that the head reads from the base model (multipliers) are the base model's.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_base", base)
        object.__setattr__(self, "calls", 0)

    def __getattr__(self, name: str) -> Any:
        value = getattr(object.__getattribute__(self, "_base"), name)
        return self if isinstance(value, nn.Module) else value

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _OnlyHidden:
        object.__setattr__(self, "calls", self.calls + 1)
        return _OnlyHidden(last_hidden_state=inputs_embeds)


class OutputHead:
    """Computes logits from hidden states exactly as the model's own forward does.

    It runs that forward with the base model replaced by one that returns the given hidden states, so every scale,
    soft cap, bias or cast that an architecture applies around its output layer is applied, without a list of
    architectures. Parameters are shared with the model, however they are bound.
    """

    def __init__(self, model: nn.Module, base_name: str) -> None:
        self.model = copy.copy(model)
        self.model._modules = dict(model._modules)
        self.stand_in = _GivenHidden(model.get_submodule(base_name))
        self.model._modules[base_name] = self.stand_in
        accepted = inspect.signature(type(model).forward).parameters
        wanted = {"use_cache": False, "output_router_logits": False, "return_dict": True}
        self.options = {name: value for name, value in wanted.items() if name in accepted}

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[n, vocab]` of hidden states `[n, width]`."""
        logits: Tensor = self.model(inputs_embeds=hidden[None], **self.options).logits
        return logits[0]
