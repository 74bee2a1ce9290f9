"""Reading a model folder: safetensors files, one tensor at a time, through transformers' own renaming rules."""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from trainforge.errors import ConfigError
from trainforge.stages import Extent, ParameterSpec

_READ_ELEMENTS = 1 << 24
_MAPPED_BYTES = 1 << 30
_INDEX = "model.safetensors.index.json"


@dataclass
class _Source:
    """Where a tensor of the model comes from: one key of the folder, or several that a converter joins or splits."""

    keys: list[tuple[str, str]] = field(default_factory=list)
    converter: WeightConverter | None = None
    first: str = ""


class Folder:
    """The tensors of a folder with safetensors files, by key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = _files_of_keys(path)
        self._open: dict[Path, Any] = {}
        self._read_bytes = 0

    def slice(self, key: str) -> Any:
        """The tensor `key` as safetensors' lazy slice."""
        path = self.files[key]
        if path not in self._open:
            self._open[path] = _opened(path)
        return self._open[path].get_slice(key)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of the tensor `key`."""
        return tuple(self.slice(key).get_shape())

    def read(self, key: str, out: Tensor, offset: int) -> None:
        """Fill `out` (1-D) with the tensor's elements from `offset` on, row-major, in bounded pieces."""
        lazy = self.slice(key)
        shape = tuple(lazy.get_shape())
        if not shape:
            out.copy_(lazy[...].reshape(1))
            return
        row = 1
        for size in shape[1:]:
            row *= size
        rows_at_once = max(1, _READ_ELEMENTS // max(row, 1))
        done, end = 0, offset + out.numel()
        while done < out.numel():
            first = (offset + done) // row
            last = min(first + rows_at_once, -(-end // row))
            piece = lazy[first:last].reshape(-1)
            begin = offset + done - first * row
            count = min(piece.numel() - begin, out.numel() - done)
            out[done : done + count].copy_(piece[begin : begin + count])
            done += count

    def was_read(self, count: int) -> None:
        """Note that `count` bytes were read; every GiB the files are closed, to be opened again when asked for.

        safetensors maps a file into memory, and what was read of it counts as this process's until it is closed: a
        model would seem to take twice its size for the whole run.
        """
        self._read_bytes += count
        if self._read_bytes >= _MAPPED_BYTES:
            self.close()

    def close(self) -> None:
        """Close the files that are open."""
        self._open.clear()
        self._read_bytes = 0


class FolderWeights:
    """The weights of a model folder, named as the model names them.

    transformers 5 renames and joins tensors of older checkpoints (experts are stacked, layers renamed) by rules it
    publishes per architecture; the same rules are applied here, so a folder that `from_pretrained` reads is read the
    same way.

    Raises:
        ConfigError: the folder has no safetensors, or its keys do not match the model's.
    """

    def __init__(self, model: Any, path: Path, parameters: Sequence[ParameterSpec]) -> None:
        self.folder = Folder(path)
        self.model = copy.deepcopy(model)
        self.sources = self._sources()
        self._last: tuple[str, dict[str, Tensor]] | None = None
        self.aliases = {spec.name: (spec.name, *spec.aliases) for spec in parameters}
        self._check(parameters)

    def fill(self, spec: ParameterSpec, out: Tensor, extent: Extent) -> None:
        """Fill `out` with a span of the parameter."""
        name = next(alias for alias in self.aliases[spec.name] if alias in self.sources)
        source = self.sources[name]
        if source.converter is None:
            self.folder.read(source.keys[0][0], out, extent.offset)
            self.folder.was_read(out.nbytes)
            return
        converted = self._converted(source, name)
        out.copy_(converted[name].reshape(-1)[extent.offset : extent.offset + extent.length])
        if extent.offset + extent.length == spec.elements:
            del converted[name]  # read to its end: not kept for the rest of the run
        self.folder.was_read(out.nbytes)

    def fill_buffers(self, module: nn.Module) -> None:
        """Fill the persistent buffers that the folder holds."""
        persistent = set(module.state_dict())
        for name, buffer in module.named_buffers():
            if name in persistent and name in self.sources and self.sources[name].converter is None:
                value = torch.empty(buffer.numel(), dtype=buffer.dtype)
                self.folder.read(self.sources[name].keys[0][0], value, 0)
                buffer.copy_(value.view(buffer.shape))

    def close(self) -> None:
        """Close the folder's files."""
        self.folder.close()

    def _sources(self) -> dict[str, _Source]:
        rules = get_model_conversion_mapping(self.model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        names = self.model.state_dict()
        prefix = self.model.base_model_prefix
        sources: dict[str, _Source] = defaultdict(_Source)
        for key in sorted(self.folder.files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, names)
            if name not in names and key in names:
                name, pattern = rename_source_key(key, [], [], prefix, names)
            source = sources[name]
            source.keys.append((key, pattern or key))
            source.first = name
            if pattern is not None:
                source.converter = by_pattern[pattern]
        for name, source in list(sources.items()):
            if source.converter is not None:
                for other in _targets(name, source.converter):
                    sources[other] = source
        return dict(sources)

    def _converted(self, source: _Source, name: str) -> dict[str, Tensor]:
        """What a converter makes of its keys, `name` among it; the last ones are kept for the next extent."""
        if self._last is None or self._last[0] != source.first or name not in self._last[1]:
            self._last = None
            converter = copy.deepcopy(source.converter)
            assert converter is not None
            for key, pattern in source.keys:
                lazy = self.folder.slice(key)
                converter.add_tensor(source.first, key, pattern, lambda lazy=lazy: lazy[...])
            made = converter.convert(source.first, model=self.model, config=self.model.config)
            made = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
            self._last = (source.first, made)
        return self._last[1]

    def _check(self, parameters: Sequence[ParameterSpec]) -> None:
        known = set(self.model.state_dict())
        ignored = self.model._keys_to_ignore_on_load_unexpected or ()
        missing = [
            spec.name for spec in parameters if not any(a in self.sources for a in self.aliases[spec.name])
        ]
        surplus = [
            source.keys[0][0]
            for name, source in self.sources.items()
            if name not in known and not any(re.search(pattern, name) for pattern in ignored)
        ]
        if missing or surplus:
            parts = [f"misses {_some(missing)}"] if missing else []
            parts += [f"holds {_some(surplus)}, which the model has no place for"] if surplus else []
            raise ConfigError(
                f"model.hf: {self.folder.path} {' and '.join(parts)}: its config.json and its weights do not belong "
                "together"
            )
        for spec in parameters:
            name = next(alias for alias in self.aliases[spec.name] if alias in self.sources)
            source = self.sources[name]
            if source.converter is None and self.folder.shape(source.keys[0][0]) != spec.shape:
                raise ConfigError(
                    f"model.hf: {source.keys[0][0]} in {self.folder.path} has shape "
                    f"{list(self.folder.shape(source.keys[0][0]))}, but config.json describes {list(spec.shape)}"
                )


def _targets(name: str, converter: WeightConverter) -> list[str]:
    """All names a converter makes, given the first of them."""
    first = converter.target_patterns[0]
    return [name.replace(first, pattern) for pattern in converter.target_patterns]


def _files_of_keys(path: Path) -> dict[str, Path]:
    index = path / _INDEX
    if index.is_file():
        try:
            listing = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"model.hf: {index} is not a safetensors index ({error}); fetch it again"
            ) from None
        files = {key: path / name for key, name in listing.items()}
        lost = sorted({file.name for file in files.values() if not file.is_file()})
        if lost:
            raise ConfigError(
                f"model.hf: {path} lacks {_some(lost)}, which its index names; fetch the folder again"
            )
        return files
    found = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
    if found:
        return {key: file for file in found for key in _opened(file).keys()}  # noqa: SIM118 - not a dict
    pickles = sorted(file.name for file in path.glob("*.bin"))
    if pickles:
        raise ConfigError(
            f"model.hf: {path} has only {_some(pickles)}, which are pickles and can run code when they are read; "
            "convert it with transformers: model.save_pretrained(folder) writes safetensors"
        )
    raise ConfigError(f"model.hf: {path} has no *.safetensors files; use a folder written by save_pretrained")


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt").__enter__()
    except SafetensorError as error:
        raise ConfigError(
            f"model.hf: {path} is not a whole safetensors file ({error}); fetch it again"
        ) from None


def _some(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
