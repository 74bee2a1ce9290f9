"""The dtypes that a checkpoint can hold."""

from __future__ import annotations

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "bool": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
}  # fmt: skip
"""PyTorch's names, with the bytes of an element."""
