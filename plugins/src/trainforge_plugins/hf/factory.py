"""A user's own model: `model.factory: package.module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from trainforge.context import Context
from trainforge.errors import ConfigError
from trainforge.stages import Batch, Extent, ModelSpec
from trainforge_plugins.hf import ModelSection, structure
from trainforge_plugins.hf.initial import (
    InitialWeights,
    Merged,
    RandomWeights,
    Weights,
    WriteAdapters,
    module_initialiser,
)
from trainforge_plugins.hf.skeleton import parameters_on_meta


def build_from_factory(ctx: Context, name: str, section: ModelSection) -> ModelSpec:
    """Call the user's function with `ctx`; it returns a `ModelSpec` or a torch module.

    While it runs, parameters go to the meta device as they are registered (buffers stay real), so it builds the
    module as usual and needs no memory for weights. A torch module needs

    - `hidden(batch) -> Tensor [rows, tokens, width]`, or `(hidden, auxiliary loss)`: everything up to the head.
      A row may hold several documents: tokens attend only within their own `batch.document_ids`.
    - `head(hidden [n, width]) -> logits [n, vocab]`.
    - `vocab_size`, and `max_positions` when sequences have a longest length.
    - `blocks`, the name of the `ModuleList` with the repeated blocks (else the longest one is taken), and
      `head_modules`, names of modules that `head` uses (default: those called `head` or `lm_head`).
    - `init_weights(module)` when the modules' own `reset_parameters` are not wanted: it is called for the module that
      owns a parameter and for every module around it, under a generator seeded for that parameter.

    Raises:
        ConfigError: the function cannot be imported or returns something else.
    """
    function = _imported(name)
    try:
        with parameters_on_meta():
            made = function(ctx)
    except Exception as error:
        raise ConfigError(f"model.factory: {name} failed: {type(error).__name__}: {error}") from error
    if isinstance(made, ModelSpec):
        return made
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"model.factory: {name} returned {type(made).__name__}, not a torch module or a ModelSpec"
        )
    lacks = [part for part in ("hidden", "head", "vocab_size") if not hasattr(made, part)]
    if lacks:
        raise ConfigError(f"model.factory: the module that {name} returns needs {' and '.join(lacks)}")
    if section.attn != "auto" or section.experts != "auto":
        raise ConfigError(
            "model: attn and experts are for transformers models; a factory's module decides itself"
        )
    return FactoryModel(made, ctx.run.seed)


class FactoryModel(ModelSpec):
    """A user's module as a `ModelSpec`; `build_from_factory` says what the module must have."""

    def __init__(self, module: Any, seed: int) -> None:
        self.module: Any = module
        self.vocab_size = int(module.vocab_size)
        limit = getattr(module, "max_positions", None)
        self.max_positions = None if limit is None else int(limit)
        self.blocks = _blocks(module)
        heads = tuple(getattr(module, "head_modules", ("head", "lm_head")))
        self.parameters = structure.describe_parameters(
            module, self.blocks, heads, structure.expert_count(module)
        )
        self.head_parameters = tuple(
            spec.name
            for spec in self.parameters
            if any(
                name.startswith(tuple(f"{head}." for head in heads)) for name in (spec.name, *spec.aliases)
            )
        )
        self.adapters = self.source = self.origin = ""
        self.write_adapters: WriteAdapters | None = None
        self.merged: Callable[[Weights], Merged] = lambda weights: (self.module, self.parameters, weights)
        self.weights_source: InitialWeights = RandomWeights(module, seed, module_initialiser)
        self.index_parameters()

    def index_parameters(self) -> None:
        """Take note of `parameters`, after they have changed."""
        self._specs = {spec.name: spec for spec in self.parameters}

    def flops_per_token(self, tokens: int) -> float:
        """6 per parameter (4 when it is frozen) that is not looked up; the module says nothing of attention."""
        counted = (s for s in self.parameters if s.kind != "embedding" or s.name in self.head_parameters)
        return sum((6.0 if spec.trainable else 4.0) * spec.elements for spec in counted)

    def load(self, name: str, out: Tensor, extent: Extent) -> None:
        """Fill `out` with a span of the parameter's initial weights."""
        self.weights_source.fill(self._specs[name], out, extent)

    def load_buffers(self) -> None:
        """Fill persistent buffers when the weights come from another run."""
        self.weights_source.fill_buffers(self.module)

    def close(self) -> None:
        """Give back what the weights hold open."""
        self.weights_source.close()

    def export(self, out: Path, weights: Callable[[str], Tensor], dtype: Literal["bf16", "fp32"]) -> None:
        """Write `model.safetensors`: the module's state, tied parameters once, for `safetensors.torch.load_model`.

        The header's metadata names the others (`aliases`: JSON, other name to stored name).
        """
        from trainforge_plugins.hf.export import export_module

        module, parameters, weights = self.merged(weights)
        export_module(module, parameters, out, weights, dtype)

    def export_adapters(
        self, out: Path, weights: Callable[[str], Tensor], dtype: Literal["bf16", "fp32"]
    ) -> str:
        """Write the adapters of `model.lora` as a folder for `peft.PeftModel.from_pretrained`.

        Raises:
            UserError: there are none, or what they belong to is in no folder.
        """
        if self.write_adapters is None:
            return super().export_adapters(out, weights, dtype)
        return self.write_adapters(out, weights, dtype)

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Run the module's `hidden`."""
        result = self.module.hidden(batch)
        return result if isinstance(result, tuple) else (result, None)

    def head(self, hidden: Tensor) -> Tensor:
        """Run the module's `head`."""
        logits: Tensor = self.module.head(hidden)
        return logits

    def start_report(self) -> list[str]:
        """How many parameters there are, and how many of them are trained."""
        total = sum(spec.elements for spec in self.parameters)
        trained = sum(spec.elements for spec in self.parameters if spec.trainable)
        share = f", {trained:,} trainable" if trained != total else ""
        line = f"model: {type(self.module).__name__}, {total:,} parameters{share}"
        return [text for text in (line, self.adapters, self.origin) if text]


def _imported(name: str) -> Any:
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"model.factory: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"model.factory: {module_name} has no function {function_name}")
    return function


def _blocks(module: nn.Module) -> tuple[str, ...]:
    named = getattr(module, "blocks", None)
    if isinstance(named, str):
        try:
            blocks = module.get_submodule(named)
        except AttributeError:
            raise ConfigError(
                f"model.factory: `blocks` of {type(module).__name__} names {named!r}, and there is no such module in it"
            ) from None
        return tuple(f"{named}.{name}" for name, _ in blocks.named_children())
    lists = [part for _, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    return structure.find_blocks(module, max((len(part) for part in lists), default=0))
