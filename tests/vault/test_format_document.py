"""docs/plugins/vault.md is enough to write a reader: this one is from that page alone, and imports nothing of vault."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
import zstandard
from blake3 import blake3
from tests.dcp.toys import Toy
from tests.run.runs import run, write_recipe
from tests.vault.toys import bits, random_bits, stage_in

PAGE = (Path(__file__).resolve().parents[2] / "docs/plugins/vault.md").read_text("utf-8")
FORMAT = PAGE.split("\n## The format, version 1\n")[1].split("\n## ")[0]

# ------------------------------------------------------------------------------- the reader, from the page alone

SIZES = dict.fromkeys(["float64", "int64", "uint64"], 8) | dict.fromkeys(["float32", "int32", "uint32"], 4)
SIZES |= dict.fromkeys(["float16", "bfloat16", "int16", "uint16"], 2)
SIZES |= dict.fromkeys(["float8_e4m3fn", "float8_e5m2", "bool", "int8", "uint8"], 1)
LONGEST = 4_194_304
MAGIC = b"TFPACK\r\n"


def pack_places(path: Path) -> dict[bytes, tuple[Path, int, int, int, int, bytes]]:
    """Of each chunk by its address: pack, offset, stored, length, codec, checksum. Checks all that the page says."""
    data = path.read_bytes()
    assert data[:16] == MAGIC + struct.pack("<II", 1, 0)
    index_at, index_size, checksum, magic = struct.unpack("<QQ16s8s", data[-40:])
    assert magic == MAGIC
    assert index_at + index_size == len(data) - 40
    index = data[index_at : index_at + index_size]
    assert xxhash.xxh3_128(index).digest() == checksum
    assert index_size % 73 == 0
    assert index_size // 73 <= 1_048_576
    found: dict[bytes, tuple[Path, int, int, int, int, bytes]] = {}
    end = 16
    for address, check, offset, stored, length, codec in struct.iter_unpack("<32s16sQQQB", index):
        alignment = 4096 if stored >= 4096 else 64
        assert offset == math.ceil(end / alignment) * alignment
        assert not any(data[end:offset])
        assert max(stored, length) <= LONGEST
        assert stored == length if codec == 0 else stored < length
        assert codec in (0, 1)
        assert address not in found
        found[address] = (path, offset, stored, length, codec, check)
        end = offset + stored
    assert end == index_at
    return found


class Reader:
    """Reads the steps of a folder of checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[bytes, tuple[Path, int, int, int, int, bytes]] = {}
        for path in (folder / "packs").iterdir():
            if path.name.endswith(".pack") and not path.name.startswith("."):
                self.places |= pack_places(path)

    def manifest(self, step: int) -> dict[str, Any]:
        content = (self.folder / f"step-{step:08d}" / "checkpoint.json").read_bytes()
        match = re.search(rb',\n "checksum": "([0-9a-f]{32})"\n\}\n\Z', content)
        assert match
        assert xxhash.xxh3_128(content[: match.start()] + b"\n}\n").hexdigest() == match[1].decode()
        document = json.loads(content)
        assert document["format"] == 1
        assert document["writer"] == "vault"
        return document

    def chunk(self, address: str, checksum: str) -> bytes:
        path, offset, stored, length, codec, check = self.places[bytes.fromhex(address)]
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(stored)
        if codec == 1:
            data = zstandard.ZstdDecompressor(max_window_size=8 * 2**20).decompress(
                data, max_output_size=length
            )
        assert len(data) == length
        assert xxhash.xxh3_128(data).hexdigest() == checksum == check.hex()
        assert blake3(data).hexdigest() == address
        return data

    def tensors(self, step: int) -> dict[tuple[str, str, str], tuple[list[int], str, bytes]]:
        """Shape, dtype and bytes of each tensor by part, key and name."""
        found: dict[tuple[str, str, str], tuple[list[int], str, bytes]] = {}
        for part, stored in self.manifest(step)["parts"].items():
            for tensor in stored["tensors"]:
                data = b""
                for elements, address, checksum in tensor["chunks"]:
                    chunk = self.chunk(address, checksum)
                    assert len(chunk) == elements * SIZES[tensor["dtype"]]
                    data += chunk
                assert len(data) == math.prod(tensor["shape"]) * SIZES[tensor["dtype"]]
                place = (part, tensor["key"], tensor["name"])
                assert place not in found
                found[place] = (tensor["shape"], tensor["dtype"], data)
        return found


# ----------------------------------------------------------------------------------------------------- its tests


def state(seed: int) -> dict[str, torch.Tensor]:
    """Every dtype of the page; no elements, one, and more than fit into a chunk; zeros, which zstd makes small."""
    found = {dtype: random_bits(dtype, (seed, 37), seed) for dtype in SIZES}
    found |= {"empty": torch.zeros(0, 4), "one": torch.tensor(float(seed)), "zeros": torch.zeros(5000)}
    found["large"] = random_bits("float32", (1100, 1000), seed)
    found["wide"] = random_bits("bfloat16", (3, 2**20), 1)  # the same in every step
    found["turned"] = random_bits("int32", (65, 33), seed).T
    return found


def part_of(tensors: dict[str, torch.Tensor], cut: int, data: dict[str, Any]) -> Toy:
    """A part that holds each tensor in two spans, as a rank may that has several shares."""
    spans = {}
    for name, tensor in tensors.items():
        shape, flat = tuple(tensor.shape), tensor.reshape(-1)
        at = min(cut, flat.numel())
        pieces = [(shape, 0, flat[:at]), (shape, at, flat[at:])] if at else [(shape, 0, tensor)]
        spans["master" if tensor.dtype is torch.float32 else "buffer", name] = pieces
    return Toy(spans, data)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("cut", [0, 101])
def test_a_reader_written_from_the_page_restores_bit_for_bit(tmp_path: Path, compress: bool, cut: int):
    data = {"text": '“ü” \u2028 " \\', "numbers": [1, 0.1, 1e300, -0.0, float("inf")], "nothing": None}
    stage = stage_in(tmp_path, keep=3, compress=compress)
    for step in (3, 12, 40):
        stage.save(step, {"memory": part_of(state(step), cut, data | {"step": step})})
        stage.wait()
    stage.close()
    reader = Reader(tmp_path / "checkpoints")
    for step in (3, 12, 40):
        found = reader.tensors(step)
        assert len(found) == len(state(step))
        for name, tensor in state(step).items():
            key = "master" if tensor.dtype is torch.float32 else "buffer"
            dtype = str(tensor.dtype).removeprefix("torch.")
            assert found["memory", key, name] == (list(tensor.shape), dtype, bits(tensor)), name
        manifest = reader.manifest(step)
        assert manifest["parts"]["memory"]["data"] == data | {"step": step}
        assert manifest["parts"]["memory"]["version"] == 3
        assert manifest["step"] == step
        assert manifest["bytes"] == sum(len(bits(tensor)) for tensor in state(step).values())
        masters = [t for t in state(step).values() if t.dtype is torch.float32]
        assert manifest["finite"] == all(bool(t.isfinite().all()) for t in masters)
    assert {place[4] for place in reader.places.values()} == ({0, 1} if compress else {0})
    new = sum(reader.manifest(step)["new_bytes"] for step in (3, 12, 40))
    assert new == sum(place[2] for place in reader.places.values())  # no chunk was written twice


def test_packs_that_were_rewritten_read_the_same(tmp_path: Path):
    """Step 1 has much that later steps have not, so what they share with it is moved."""
    stage = stage_in(tmp_path, keep=1)
    shared, folder = {"wide": random_bits("uint8", (2 * LONGEST + 5,), 1)}, tmp_path / "checkpoints"
    stage.save(1, {"memory": part_of(shared | {"x": random_bits("uint8", (5 * LONGEST,), 2)}, 0, {})})
    stage.wait()
    first = set((folder / "packs").iterdir())
    stage.save(2, {"memory": part_of(shared, 0, {})})
    stage.wait()
    stage.close()
    assert not first & set((folder / "packs").iterdir())
    (found,) = Reader(folder).tensors(2).values()
    assert found == ([2 * LONGEST + 5], "uint8", bits(shared["wide"]))


def test_a_change_anywhere_in_a_manifest_breaks_its_checksum(tmp_path: Path):
    stage = stage_in(tmp_path)
    stage.save(1, {"memory": part_of({"w": torch.ones(3)}, 0, {})})
    stage.close()
    path = tmp_path / "checkpoints/step-00000001/checkpoint.json"
    content = path.read_bytes()
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises((AssertionError, ValueError)):
            Reader(tmp_path / "checkpoints").manifest(1)


def fields(number: int) -> list[str]:
    """The first column of a table of fields of the page."""
    table = FORMAT.split("| field | what |\n|---|---|\n")[number].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)


def test_the_page_names_every_field_in_its_order(tmp_path: Path):
    stage = stage_in(tmp_path)
    stage.save(1, {"memory": part_of({"w": torch.ones(3)}, 0, {})})
    stage.close()
    document = json.loads((tmp_path / "checkpoints/step-00000001/checkpoint.json").read_bytes())
    assert list(document) == fields(1)
    assert list(document["parts"]["memory"]) == ["version", "data", "tensors"]
    assert list(document["parts"]["memory"]["tensors"][0]) == fields(2)
    dtypes = re.search(r"^\| `dtype` \| `([\w ]+)` \|$", FORMAT, re.MULTILINE)
    assert dtypes
    assert set(dtypes[1].split()) == set(SIZES)


def test_the_pages_short_reader_prints_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    outcome = run(write_recipe(tmp_path, train={"steps": 2}), tmp_path / "runs/demo", plugins=["vault"])
    assert outcome.code == 0
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.+?)```", FORMAT, re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out
    masters = {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
        for (part, key, name), (shape, _, data) in Reader(tmp_path / "runs/demo/checkpoints")
        .tensors(2)
        .items()
        if (part, key) == ("memory", "master")
    }
    assert len(masters) > 10
    assert printed == "".join(f"{name} {tensor}\n" for name, tensor in masters.items())
