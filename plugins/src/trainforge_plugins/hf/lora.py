"""`model.lora`: low-rank adapters (Hu et al., 2021, arXiv:2106.09685) beside frozen layers, through the library peft.

peft puts its layer around the one it adapts: what was `q_proj.weight` is then `q_proj.base_layer.weight`, and the
adapter is `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. Those are the names that parameters have
here too, because memory puts tensors into the module by them; `base_name` gives the name before.
"""

from __future__ import annotations

import copy
import importlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from trainforge.errors import ConfigError, UserError
from trainforge.seeding import derive_seed
from trainforge.stages import Extent, ParameterSpec
from trainforge.wording import counted, did_you_mean, listed
from trainforge_plugins.hf.adapter_folder import ADAPTER, write_adapters
from trainforge_plugins.hf.freeze import mark
from trainforge_plugins.hf.skeleton import parameters_on_meta

if TYPE_CHECKING:
    from trainforge.stages import ModelSpec
    from trainforge_plugins.hf import LoraSection
    from trainforge_plugins.hf.factory import FactoryModel
    from trainforge_plugins.hf.initial import InitialWeights, Weights
    from trainforge_plugins.hf.spec import HuggingFaceModel


def base_name(name: str) -> str:
    """The name that a parameter of the model has without adapters."""
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Whether a name is that of an adapter's parameter."""
    return name.endswith((f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"))


def add_adapters(spec: ModelSpec, section: LoraSection, seed: int) -> None:
    """Put adapters beside the layers that `section.targets` names and freeze everything else.

    Raises:
        ConfigError: peft is not installed, or a target is no linear layer of the model.
    """
    from trainforge_plugins.hf.factory import FactoryModel
    from trainforge_plugins.hf.spec import HuggingFaceModel

    if not isinstance(spec, HuggingFaceModel | FactoryModel):
        raise ConfigError(
            "model.lora works on torch modules, and model.factory returned a ModelSpec of its own"
        )
    model, peft = spec, _peft()
    layers = _targets(model, section.targets)
    _refuse_tied(model.parameters, layers)
    config = peft.LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        use_rslora=section.rslora,
        target_modules=rf"model\.({'|'.join(map(re.escape, layers))})",
        init_lora_weights=False,
    )
    base = {spec.name: spec for spec in model.parameters}
    plain = copy.deepcopy(model.module)
    with parameters_on_meta():  # in a holder without a configuration, by which peft would choose other layers
        holder = nn.ModuleDict({"model": model.module})
        peft.inject_adapter_in_model(config, holder, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    wrapped = set(layers)
    model.parameters = tuple(_described(model.module, model.parameters, wrapped))
    model.head_parameters = tuple(_heads(model.head_parameters, base, model.parameters, wrapped))
    model.weights_source = AdapterWeights(model.weights_source, base, seed)
    model.index_parameters()
    mark(model.module, model.parameters)
    model.merged = lambda weights: (plain, tuple(base.values()), _merging(model.module, wrapped, weights))
    model.write_adapters = partial(_write_apart, model, config, plain)
    endings = {name.rpartition(".")[2] for name in layers}
    where = f"{counted(len(layers), 'layer')} ({listed(endings)})"
    model.adapters = f"lora: rank {section.rank} on {where}; all else is frozen"


def _write_apart(
    model: HuggingFaceModel | FactoryModel,
    config: Any,
    plain: nn.Module,
    out: Path,
    weights: Weights,
    dtype: Literal["bf16", "fp32"],
) -> str:
    if not model.source:
        raise UserError(
            "the adapters of this run belong to weights that no model folder holds (random ones, or those of another "
            "run): leave out --lora adapter, which exports them added to those weights"
        )
    write_adapters(config, model.source, plain, model.parameters, out, weights, dtype)
    return model.source


class AdapterWeights:
    """The base model's weights, and adapters that start as peft starts them: A random, B zero.

    Args:
        base: gives the base model's weights.
        specs: the base model's parameters by the names they have without adapters.
        seed: of the random weights.
    """

    def __init__(self, base: InitialWeights, specs: dict[str, ParameterSpec], seed: int) -> None:
        self.base, self.specs, self.seed = base, specs, seed

    def fill(self, spec: ParameterSpec, out: Tensor, extent: Extent) -> None:
        """Fill `out` with a span of the parameter's initial value."""
        before = self.specs.get(base_name(spec.name))
        if before is not None:
            self.base.fill(before, out, replace(extent, name=before.name))
        elif f".lora_B.{ADAPTER}." in spec.name:
            out.zero_()
        else:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "weights", spec.name))
            value = nn.init.kaiming_uniform_(torch.empty(spec.shape), a=math.sqrt(5), generator=generator)
            out.copy_(value.view(-1)[extent.offset : extent.offset + extent.length])

    def fill_buffers(self, module: nn.Module) -> None:
        """Fill persistent buffers that the base model's weights hold."""
        self.base.fill_buffers(module)

    def close(self) -> None:
        """Give back what the base model's weights hold open."""
        self.base.close()


def _merging(module: nn.Module, wrapped: set[str], weights: Weights) -> Weights:
    """Gives the base model's parameters with the adapters added, under the names that they have there."""

    def value(name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        if owner not in wrapped:
            return weights(name)
        base = weights(f"{owner}.base_layer.{leaf}")
        if leaf != "weight":
            return base
        a, b = (weights(f"{owner}.{part}.{ADAPTER}.weight") for part in ("lora_A", "lora_B"))
        layer: Any = module.get_submodule(owner)
        change = b @ a * layer.scaling[ADAPTER]
        return base + (change.T if layer.fan_in_fan_out else change)

    return value


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"model.lora needs peft ({error}): pip install 'trainforge-plugins[lora]'"
        ) from None


def _targets(model: ModelSpec, targets: Sequence[str] | str) -> tuple[str, ...]:
    """Names of the layers to adapt, in the model's order."""
    from transformers.pytorch_utils import Conv1D

    linear = [name for name, part in model.module.named_modules() if isinstance(part, nn.Linear | Conv1D)]
    if isinstance(targets, str):
        chosen = {name for name in linear if name.startswith(tuple(f"{block}." for block in model.blocks))}
        if not chosen:
            raise ConfigError(
                "model.lora.targets: no block of this model has a linear layer; name the layers"
            )
        return tuple(name for name in linear if name in chosen)
    chosen = set()
    for target in targets:
        matched = {name for name in linear if _names(target, name)}
        if not matched:
            endings = dict.fromkeys(name.rpartition(".")[2] for name in linear)
            meant = did_you_mean(target, [*endings, *linear])
            raise ConfigError(
                f"model.lora.targets: {target} is no linear layer of this model{meant} (there are {listed(endings)})"
            )
        chosen |= matched
    return tuple(name for name in linear if name in chosen)


def _names(target: str, name: str) -> bool:
    """A layer is named by its whole name, by how it ends (`q_proj`), or by a pattern (`*.layers.0.*`)."""
    return name == target or name.endswith(f".{target}") or fnmatchcase(name, target)


def _refuse_tied(parameters: Iterable[ParameterSpec], layers: Iterable[str]) -> None:
    tied = {name.rpartition(".")[0]: spec for spec in parameters if spec.aliases for name in spec.names}
    for layer in layers:
        if layer in tied:
            raise ConfigError(
                f"model.lora.targets: the weight of {layer} is tied ({', '.join(tied[layer].names)}), so an adapter "
                "would change only one of its uses: leave it out"
            )


def _described(
    module: nn.Module, parameters: Iterable[ParameterSpec], wrapped: set[str]
) -> Iterator[ParameterSpec]:
    """The base model's parameters, frozen and renamed where they are wrapped, each adapter after what it adapts."""
    for spec in parameters:
        owner, _, leaf = spec.name.rpartition(".")
        if owner not in wrapped:
            yield replace(spec, trainable=False)
            continue
        yield replace(spec, name=f"{owner}.base_layer.{leaf}", trainable=False)
        if leaf == "weight":
            for part in ("lora_A", "lora_B"):
                name = f"{owner}.{part}.{ADAPTER}.weight"
                shape = tuple(module.get_parameter(name).shape)
                yield ParameterSpec(name, shape, block=spec.block)


def _heads(
    heads: Sequence[str],
    base: dict[str, ParameterSpec],
    parameters: Iterable[ParameterSpec],
    wrapped: set[str],
) -> Iterator[str]:
    """Names of what the output head uses, adapters of it included."""
    owners = {name.rpartition(".")[0] for name in heads} & wrapped
    for spec in parameters:
        inside = any(spec.name.startswith(f"{owner}.") for owner in owners)
        if base_name(spec.name) in heads or (inside and base_name(spec.name) not in base):
            yield spec.name
