"""Finding the model that a recipe names: a folder, a hub id, or a configuration."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainforge.context import Context
from trainforge.errors import ConfigError
from trainforge_plugins.hf import structure
from trainforge_plugins.hf.turns import turn

_CODE = "*.py"
_WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "*.model", "*.txt")
_PROBE_SECONDS = 10.0
_DOWNLOAD_S = 4 * 3600.0  # a large model takes hours


def folder_of(ctx: Context, name: str, code: bool = False) -> Path:
    """The local folder of a model: as given, or downloaded from the hub (once per host; safetensors only).

    Args:
        code: download Python files too.

    Raises:
        ConfigError: there is no such folder and the id cannot be fetched.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model.hf: {path} has no config.json; use a folder written by save_pretrained")
        return path
    if path.exists():
        raise ConfigError(f"model.hf: {path} is a file; give the folder it lies in")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or " " in name:
        raise ConfigError(f"model.hf: there is no folder {path}")
    with turn(ctx.cache_dir / "hub.lock", "downloading a model", ctx.console, _DOWNLOAD_S):
        return _downloaded(ctx, name, code)


def _downloaded(ctx: Context, name: str, code: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import HfApi, snapshot_download

    patterns = [*_WANTED, _CODE] if code else list(_WANTED)
    try:
        if not huggingface_hub.is_offline_mode():
            HfApi().model_info(name, timeout=_PROBE_SECONDS)
            ctx.console.note(f"model: fetching {name} from the hub, unless it is in the cache")
            return Path(snapshot_download(name, allow_patterns=patterns))
        cause = "HF_HUB_OFFLINE is set"
    except Exception as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except Exception:
        raise ConfigError(
            f"model.hf: {name} is no folder here and cannot be fetched from the hub ({cause}); check the name and "
            "the network, or copy the model to this machine and give its folder"
        ) from None


def config_of_folder(path: Path, code: bool = False) -> Any:
    """The configuration in a model folder. Nothing is fetched; code in the folder runs only with `code`.

    Raises:
        ConfigError: transformers does not know the architecture, or the configuration is broken.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(os.fspath(path), local_files_only=True, trust_remote_code=code)
    except Exception as error:
        raise ConfigError(f"model.hf: {path / 'config.json'} cannot be used: {_first_line(error)}") from None
    method = getattr(config, "quantization_config", None)
    if method is not None:
        kind = (
            method.get("quant_method", "")
            if isinstance(method, dict)
            else getattr(method, "quant_method", "")
        )
        raise ConfigError(
            f"model.hf: {path} holds quantised weights ({kind}), which cannot be trained; use full ones"
        )
    return config


def config_of_values(values: dict[str, Any]) -> Any:
    """A configuration from a recipe's `model.config`.

    Raises:
        ConfigError: an unknown architecture or key, with the nearest valid one, or values that do not fit.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = copy.deepcopy(values)  # configurations take parts of it apart
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.config: unknown model_type {model_type!r}{_nearest(model_type, CONFIG_MAPPING)}"
        )
    config_class = CONFIG_MAPPING[model_type]
    _check_keys(config_class, model_type, values)
    try:
        config = config_class(**values)
    except Exception as error:
        raise ConfigError(f"model.config: {_first_line(error)}") from None
    for part in config_class.sub_configs:
        given = values.get(part)
        if isinstance(given, dict):
            _check_keys(type(getattr(config, part)), part, given)
    return config


def _check_keys(config_class: Any, name: str, values: dict[str, Any]) -> None:
    """Refuse keys that the configuration class, or a part of a configuration called `name`, does not have."""
    try:
        fields = {
            field for parent in config_class.__mro__ for field in getattr(parent, "__annotations__", {})
        }
        known = set(config_class().to_dict()) | set(config_class.attribute_map) | fields | _OTHER_KEYS
    except Exception:
        return
    for key in values:
        if key not in known:
            raise ConfigError(f"model.config: {name} has no key {key!r}{_nearest(key, known)}")


def check_sizes(config: Any) -> None:
    """Refuse sizes that do not fit each other and that transformers only stumbles over in the first forward.

    Args:
        config: the configuration of the language model; sizes that its architecture does not have are left out.

    Raises:
        ConfigError: names both keys, as the architecture calls them, and their values.
    """
    for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"):
        value = _size(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"model: {_key(config, name)} is {value}: it must be at least 1")
    names = [_key(config, name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")]
    width, heads, shared = (
        _size(config, name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    default = f"what is not given is the default of {config.model_type}"
    if heads and shared and heads % shared:
        raise ConfigError(
            f"model: {names[1]} {heads} is not a multiple of {names[2]} {shared}: change one of them ({default})"
        )
    rotary = getattr(config, "rope_parameters", None)
    if rotary and width and heads and width // heads % 2 and _attribute(config, "head_dim") is None:
        raise ConfigError(
            f"model: {names[0]} {width} and {names[1]} {heads} give heads of {width // heads} channels, and rotary "
            f"positions need an even number: change one of them ({default})"
        )
    chosen, experts = structure.active_experts(config), structure.expert_count(config)
    if chosen and experts and chosen > experts:
        raise ConfigError(f"model: each token is sent to {chosen} experts, but there are only {experts}")


def _attribute(config: Any, name: str) -> Any:
    """A value of the configuration; `...` when it differs from layer to layer, where transformers raises."""
    try:
        return getattr(config, name, None)
    except Exception:
        return ...


def _size(config: Any, name: str) -> int | None:
    value = _attribute(config, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _key(config: Any, name: str) -> str:
    """What the architecture calls a size: GPT-2 says n_head for num_attention_heads."""
    return str(config.attribute_map.get(name, name))


_OTHER_KEYS = {
    *("rope_theta", "rope_scaling", "rope_parameters", "layer_types", "head_dim", "pad_token_id", "dtype"),
    *("torch_dtype", "transformers_version", "_name_or_path", "pretraining_tp"),
}
"""Keys that a configuration takes, or that stand in many a config.json, although defaults do not list them."""


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__
