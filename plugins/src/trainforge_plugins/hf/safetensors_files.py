"""Writing safetensors files one tensor at a time: the layout is fixed before the first byte, so nothing waits in RAM.

The format (https://github.com/huggingface/safetensors): 8 bytes with the header's length, a JSON header, then the
tensors without a gap. As the library does, tensors of wider types come first, so that each is aligned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SHARD_BYTES = 5 * 10**9
"""Most bytes in a file, as long as a single tensor does not have more."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Layout:
    """Shape and dtype of a tensor that will be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsFiles:
    """The weights of a folder: `model.safetensors`, or shards and their index. Call `write` once per tensor.

    Args:
        out: the folder.
        layouts: every tensor by key, in the order in which shards are filled.
        metadata: for the header of each file.
        single: the name of the one file, for what is never cut into shards; None for a model's.
    """

    def __init__(
        self,
        out: Path,
        layouts: Mapping[str, Layout],
        metadata: Mapping[str, str],
        single: str | None = None,
    ) -> None:
        self._layouts = layouts
        self._places: dict[str, tuple[Path, int]] = {}
        shards = _shards(layouts) if single is None else [list(layouts)]
        for number, keys in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else single or "model"
            self._begin(out / f"{name}.safetensors", keys, metadata)
        if len(shards) > 1:
            self._write_index(out / "model.safetensors.index.json")

    def write(self, key: str, tensor: Tensor) -> None:
        """Write a tensor in its place. It must have the shape and dtype that were announced, and lie on the CPU."""
        layout = self._layouts[key]
        assert (tuple(tensor.shape), tensor.dtype) == (layout.shape, layout.dtype), key
        path, offset = self._places.pop(key)
        with path.open("r+b") as file:
            file.seek(offset)
            if tensor.numel():
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Nothing more comes: all that was announced must be there."""
        assert not self._places, f"never written: {sorted(self._places)}"

    def _begin(self, path: Path, keys: list[str], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        offset = 0
        for key in sorted(keys, key=lambda key: -self._layouts[key].dtype.itemsize):
            layout = self._layouts[key]
            header[key] = {
                "dtype": _NAMES[layout.dtype],
                "shape": list(layout.shape),
                "data_offsets": [offset, offset + layout.bytes],
            }
            self._places[key] = (path, offset)
            offset += layout.bytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + offset)
        for key in keys:
            self._places[key] = (path, self._places[key][1] + 8 + len(text))

    def _write_index(self, path: Path) -> None:
        index = {
            "metadata": {
                "total_parameters": sum(
                    torch.Size(layout.shape).numel() for layout in self._layouts.values()
                ),
                "total_size": sum(layout.bytes for layout in self._layouts.values()),
            },
            "weight_map": {key: place.name for key, (place, _) in self._places.items()},
        }
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shards(layouts: Mapping[str, Layout]) -> list[list[str]]:
    """The keys of each file, in order; a file is closed before it would grow beyond `SHARD_BYTES`."""
    shards: list[list[str]] = [[]]
    size = 0
    for key, layout in layouts.items():
        if shards[-1] and size + layout.bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += layout.bytes
    return shards
