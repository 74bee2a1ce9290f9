"""A checkpoint moves between `stream` and `resident`: the same fp32 bits, however masters are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.hf.tiny import values
from tests.stream.pairs import STREAM, walker
from torch import Tensor

from trainforge.stages import PartState
from trainforge.testing import Walker

MODEL = {"layers": 3, "dropout": 0.2, "freeze": ("blocks.1.up.weight",)}
PLACES = {"resident": ("resident", {}), "split": (STREAM, {}), "fp32": (STREAM, {"master": "fp32"})}


def at(folder: Path, place: str, dtype: str, checkpoint: str | None = "dcp", **facts: object) -> Walker:
    memory, section = PLACES[place]
    others = ("adamw", checkpoint) if checkpoint else ("adamw",)
    given = {"model": MODEL, "accumulate": 1, **facts}
    return walker(folder, memory, others, section=section, train={"dtype": dtype}, **given)  # type: ignore[arg-type]


def held(state: PartState) -> dict[tuple[str, str], Tensor]:
    """The values of masters and moments by key and name."""
    found = {}
    for named in state.tensors:
        found[named.key, named.extent.name] = torch.empty(named.extent.length, dtype=named.dtype)
        named.read(0, found[named.key, named.extent.name])
    return found


def same(one: Walker, other: Walker) -> None:
    """Whether two runs have the same masters and moments; queued updates are waited for."""
    for side in (one, other):
        side.stages.memory.drain()
    left, right = held(one.stages.memory.state()), held(other.stages.memory.state())
    assert left.keys() == right.keys()
    for place, tensor in left.items():
        assert tensor.dtype == right[place].dtype
        assert torch.equal(tensor, right[place]), place


@pytest.mark.parametrize("checkpoint", ["dcp", None])
@pytest.mark.parametrize(
    ("writer", "reader"),
    [("split", "resident"), ("resident", "split"), ("split", "split"), ("fp32", "split"), ("split", "fp32")],
)
def test_bf16_runs_go_on_anywhere(tmp_path: Path, writer: str, reader: str, checkpoint: str | None):
    """With `dcp` and with the checkpoint of the kit (None)."""
    whole = at(tmp_path / "whole", "resident", "bf16", checkpoint)
    first = at(tmp_path / "first", writer, "bf16", checkpoint)
    wanted = [whole.take() for _ in range(8)]
    assert [first.take() for _ in range(5)] == wanted[:5]
    path = first.save()
    second = at(tmp_path / "second", reader, "bf16", checkpoint)
    second.take()  # what is on the device and in the moments must give way
    second.stages.memory.drain()
    second.restore(first.stages.checkpoint, path, 5)
    same(second, first)
    assert [second.take() for _ in range(3)] == wanted[5:]
    same(second, whole)


def test_masters_are_stored_as_fp32(tmp_path: Path):
    ours = at(tmp_path, "split", "bf16")
    ours.take()
    path = ours.save()
    stored = load_file(path / "rank-00000.safetensors")
    masters = {name: tensor for name, tensor in stored.items() if "master/" in name}
    assert len(masters) > 20, sorted(stored)
    assert all(tensor.dtype == torch.float32 for tensor in masters.values())
    exact = torch.cat([tensor.flatten() for tensor in masters.values()])
    assert (exact != exact.bfloat16().float()).float().mean() > 0.5  # not the rounded weights


@pytest.mark.parametrize(("writer", "reader"), [("split", "resident"), ("resident", "split")])
def test_fp32_runs_with_three_micro_batches_of_a_tied_model(tmp_path: Path, writer: str, reader: str):
    facts = {"model": MODEL | {"tied": True}, "accumulate": 3}
    whole = at(tmp_path / "whole", "resident", "fp32", **facts)
    first = at(tmp_path / "first", writer, "fp32", **facts)
    second = at(tmp_path / "second", reader, "fp32", **facts)
    wanted = [whole.take() for _ in range(6)]
    for _ in range(3):
        first.take()
    second.restore(first.stages.checkpoint, first.save(), 3)
    assert [second.take() for _ in range(3)] == wanted[3:]


def test_persistent_buffers_of_a_family_travel(tmp_path: Path):
    facts = {"model": {"config": values("deepseek_v3")}}
    first = walker(tmp_path / "a", STREAM, ("hf", "adamw", "dcp"), **facts)  # type: ignore[arg-type]
    second = walker(tmp_path / "b", "resident", ("hf", "adamw", "dcp"), **facts)  # type: ignore[arg-type]
    first.take()
    second.restore(first.stages.checkpoint, first.save(), 1)
    assert second.take() == first.take()
    same(second, first)
