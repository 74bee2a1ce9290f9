"""Writing a model folder as transformers' own `save_pretrained` lays it out, without the model in memory.

`save_pretrained` takes the renaming and joining rules that apply while a folder is read, the other way round, over the
whole state. Here the same function gets few tensors at a time: first empty ones on the meta device, which tells every
key, shape and size in advance, then the real ones.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from trainforge.errors import ConfigError
from trainforge.stages import ParameterSpec
from trainforge.toolbox.parameters import round_to_bf16
from trainforge_plugins.hf.own_code import comes_from_a_folder, copy_code
from trainforge_plugins.hf.safetensors_files import Layout, SafetensorsFiles

Weights = Callable[[str], Tensor]


def export_folder(
    model: Any,
    folder: Path | None,
    parameters: Sequence[ParameterSpec],
    blocks: Sequence[str],
    out: Path,
    weights: Weights,
    dtype: Literal["bf16", "fp32"],
) -> None:
    """Write configuration, generation configuration and weights into `out`.

    Args:
        model: the transformers model, on the meta device.
        folder: what the run started from, or None. Its generation configuration is kept.
        parameters, blocks: as in the `ModelSpec`.
        weights: gives a parameter or a persistent buffer by name.
        dtype: of the weights. Those that transformers keeps in fp32, and buffers, keep their own.

    Raises:
        ConfigError: transformers cannot lay this model out for a folder.
    """
    target = torch.bfloat16 if dtype == "bf16" else torch.float32
    _write_configuration(model, folder, target, out)
    if folder is not None and comes_from_a_folder(type(model)):
        copy_code(folder, out)
    names = stored_names(model, parameters)
    keeps = _keeps_dtype(model)
    groups = _groups(model, names, blocks)
    layouts: dict[str, Layout] = {}
    for group in groups:
        kept = any(map(keeps, group))
        for key, value in _laid_out(model, {name: names[name] for name in group}).items():
            layouts[key] = Layout(tuple(value.shape), value.dtype if kept else target)
    files = SafetensorsFiles(out, layouts, {"format": "pt"})
    for group in groups:
        for key, value in _laid_out(model, {name: weights(name) for name in group}).items():
            files.write(key, rounded(value, layouts[key].dtype))
    files.close()


def export_module(
    module: nn.Module,
    parameters: Sequence[ParameterSpec],
    out: Path,
    weights: Weights,
    dtype: Literal["bf16", "fp32"],
) -> None:
    """Write the state of a module of the user's own into `out`, under the names it has there."""
    aliases = {alias: spec.name for spec in parameters for alias in spec.aliases}
    buffers = {name for name, _ in module.named_buffers()}
    target = torch.bfloat16 if dtype == "bf16" else torch.float32
    layouts = {
        name: Layout(tuple(value.shape), value.dtype if name in buffers else target)
        for name, value in module.state_dict().items()
        if name not in aliases
    }
    files = SafetensorsFiles(out, layouts, {"format": "pt", "aliases": json.dumps(aliases)})
    for name, layout in layouts.items():
        files.write(name, rounded(weights(name), layout.dtype))
    files.close()


def stored_names(model: Any, parameters: Sequence[ParameterSpec]) -> dict[str, Tensor]:
    """An empty tensor on meta for each entry of the model's state that is stored, by name.

    Tied parameters are stored once, under the name that transformers keeps; what only looks alike is stored.
    """
    state = {name: value.to("meta") for name, value in model.state_dict().items()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    for spec in parameters:
        names = [name for name in (spec.name, *spec.aliases) if name in state]
        chosen = next((name for name in names if name not in tied), names[0])
        for name in names:
            if name != chosen:
                del state[name]
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return state


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in `dtype`; bf16 is rounded as the working copies of training are."""
    if value.dtype != torch.float32 or dtype != torch.bfloat16:
        return value.to(dtype)
    out = torch.empty(value.shape, dtype=dtype)
    round_to_bf16(value.contiguous().view(-1), out.view(-1))
    return out


def _write_configuration(model: Any, folder: Path | None, dtype: torch.dtype, out: Path) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if getattr(config, "auto_map", None) is not None and not comes_from_a_folder(type(model)):
        del config.auto_map  # names files that were not used and do not come along
    config.save_pretrained(out)
    name = "generation_config.json"
    if folder is not None and (folder / name).is_file():
        shutil.copyfile(folder / name, out / name)
    elif model.can_generate():
        model.generation_config.save_pretrained(out)


def _keeps_dtype(model: Any) -> Callable[[str], bool]:
    """Whether an entry of the state is never rounded: buffers, and what transformers loads in fp32 all the same."""
    buffers = {name for name, _ in model.named_buffers()}
    parts = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    pattern = re.compile("|".join(rf"(^|\.){part}($|\.)" for part in parts)) if parts else None
    return lambda name: name in buffers or (pattern is not None and pattern.search(name) is not None)


def _groups(model: Any, names: dict[str, Tensor], blocks: Sequence[str]) -> list[list[str]]:
    """The names cut into groups that can be laid out one after the other: alone where that gives the same.

    What transformers joins with others when it writes a folder is tried by block, then all together.
    """
    whole = {key: value.shape for key, value in _laid_out(model, names).items()}

    def complete(group: Sequence[str]) -> bool:
        try:
            made = _laid_out(model, {name: names[name] for name in group})
        except Exception:  # a rule that needs tensors which are not in the group
            return False
        return bool(made) and all(whole.get(key) == value.shape for key, value in made.items())

    groups, joined = [], defaultdict(list)
    for name in names:
        if complete([name]):
            groups.append([name])
        else:
            joined[next((block for block in blocks if name.startswith(f"{block}.")), "")].append(name)
    if all(map(complete, joined.values())):
        groups += joined.values()
    else:
        groups.append([name for group in joined.values() for name in group])
    made = [key for group in groups for key in _laid_out(model, {name: names[name] for name in group})]
    if sorted(made) != sorted(whole):
        raise ConfigError(
            f"transformers cannot lay out {model.config.model_type} for a folder piece by piece: please report this"
        )
    return groups


def _laid_out(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = revert_weight_conversion(model, state)
    return result
