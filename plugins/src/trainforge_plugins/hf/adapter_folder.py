"""Writing adapters apart from the model they were trained on, as peft stores them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from trainforge_plugins.hf.export import rounded
from trainforge_plugins.hf.safetensors_files import Layout, SafetensorsFiles

if TYPE_CHECKING:
    from trainforge.stages import ParameterSpec
    from trainforge_plugins.hf.initial import Weights

ADAPTER = "default"
"""What peft calls an adapter that nobody named."""


def write_adapters(
    config: Any,
    base: str,
    plain: nn.Module,
    parameters: Sequence[ParameterSpec],
    out: Path,
    weights: Weights,
    dtype: Literal["bf16", "fp32"],
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, for `peft.PeftModel.from_pretrained`.

    Args:
        config: the `peft.LoraConfig` of the run.
        base: what is written as the model that the adapters belong to.
        plain: that model's module, without adapters.
        parameters: those of the module with adapters; what is trained of them is written.
        weights: gives a parameter by name.
    """
    names = [spec.name for spec in parameters if spec.trainable]
    layers = list(dict.fromkeys(name.rpartition(".lora_")[0] for name in names))
    stored = copy.copy(config)
    stored.base_model_name_or_path, stored.task_type, stored.inference_mode = base, "CAUSAL_LM", True
    stored.target_modules = _as_written(layers, plain)
    # GPT-2's layers hold their weight the other way round, and peft wants to be told.
    stored.fan_in_fan_out = any(not isinstance(plain.get_submodule(name), nn.Linear) for name in layers)
    stored.save_pretrained(str(out))
    target = torch.bfloat16 if dtype == "bf16" else torch.float32
    keys = {name: f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}" for name in names}
    shapes = {spec.name: spec.shape for spec in parameters}
    layouts = {keys[name]: Layout(shapes[name], target) for name in names}
    files = SafetensorsFiles(out, layouts, {"format": "pt"}, single="adapter_model")
    for name in names:
        files.write(keys[name], rounded(weights(name), target))
    files.close()


def _as_written(layers: Sequence[str], plain: nn.Module) -> list[str]:
    """The layers by how their names end (`q_proj`), as is usual, where that means no other; else by whole names."""
    endings = sorted({name.rpartition(".")[2] for name in layers})
    meant = {name for name, _ in plain.named_modules() if name.rpartition(".")[2] in endings}
    return endings if meant == set(layers) else list(layers)
