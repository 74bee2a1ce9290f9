"""Modules without weights: parameters on the meta device, buffers real."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within this context every parameter that a module registers moves to the meta device at once.

    Buffers are computed by the module's own constructor, on the CPU, so rotary frequencies and the like are right
    whatever the architecture. Weights are dropped one by one before anything initialises them, so a large model
    needs no memory. (The idea of patching registration is accelerate's `init_empty_weights`.)
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    patched: Any = nn.Module
    patched.register_parameter = register
    try:
        with torch.device("cpu"):
            yield
    finally:
        patched.register_parameter = original
