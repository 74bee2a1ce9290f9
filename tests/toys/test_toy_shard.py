"""Optimizer state sharded over 2 ranks is the same training as on 1 rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainforge.testing import CommConformance, Walker, build_stages, run_ranks, tiny_context, tiny_run

pytestmark = pytest.mark.ranks
FILE = Path(__file__).with_name("toy_shard.py")
GENTLE = {"clip": 0.1, "eps": 1e-4, "weight_decay": 0.1}


class TestRules(CommConformance):
    plugin = FILE


def walker(folder: Path, memory: str, rank: int = 0, world: int = 1) -> Walker:
    """3 or 6 micro-batches a step on each rank: the same 6 in total."""
    model = {"dropout": 0.2, "freeze": ("blocks.1.up.weight",)}
    ctx = tiny_context(folder, model=model, train=GENTLE, rank=rank, world=world, accumulate=6 // world)
    return Walker(build_stages(ctx, (FILE, memory, "adamw", "dcp")))


def train(
    rank: int, world: int, folder: Path, memory: str, steps: int, resume: tuple[Path, int] | None = None
) -> dict[str, Any]:
    """Take steps from the start or from a checkpoint, then save."""
    ours = walker(folder, memory, rank, world)
    try:
        if resume is not None:
            ours.restore(ours.stages.checkpoint, *resume)
        results = [ours.take() for _ in range(steps)]
        held = [(t.key, t.extent, t.tensor.clone()) for t in ours.stages.memory.state().tensors]
        path = ours.save()
        weights = ours.weights()
        ours.stages.comm.gather(None)
        return {"results": results, "held": held, "path": path, "step": ours.step, "weights": weights}
    finally:
        ours.stages.close()


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("memory", ["resident", "trainforge.testing.reference"])
def test_two_ranks_equal_one(tmp_path: Path, memory: str):
    ranks = run_ranks(train, 2, tmp_path / "two", memory, 8)
    alone = train(0, 1, tmp_path / "one", memory, 8)
    for seen in ranks:
        for got, wanted in zip(seen["results"], alone["results"], strict=True):
            assert got.loss == pytest.approx(wanted.loss, rel=1e-6)
            assert got.norm == pytest.approx(wanted.norm, rel=1e-6)
            assert wanted.norm > 0.1  # clipping takes part
            assert got.used == wanted.used
        assert_close(seen["weights"], alone["weights"])
    assert all(torch.equal(ranks[1]["weights"][n], w) for n, w in ranks[0]["weights"].items())


def test_each_rank_holds_its_share_only(tmp_path: Path):
    ranks = run_ranks(train, 2, tmp_path, "resident", 1)
    counts: dict[tuple[str, str], Tensor] = {}
    split = set()
    for seen in ranks:
        for key, extent, tensor in seen["held"]:
            if key == "step":
                assert tensor.numel() == 1
                continue
            assert tensor.numel() == extent.length
            whole = counts.setdefault(
                (key, extent.name), torch.zeros(torch.Size(extent.global_shape).numel())
            )
            whole[extent.offset : extent.offset + extent.length] += 1
            if not extent.whole:
                split.add(extent.name)
    assert split, "no parameter is cut in the middle"
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_checkpoints_fit_another_number_of_ranks(tmp_path: Path, first: int, second: int):
    whole = train(0, 1, tmp_path / "whole", "resident", 8)
    saved = run_ranks(train, first, tmp_path / "cut", "resident", 5)[0]
    resumed = run_ranks(train, second, tmp_path / "cut", "resident", 3, (saved["path"], 5))
    for seen in resumed:
        assert_close(seen["weights"], whole["weights"])


def test_it_runs_under_the_loop_of_core(tmp_path: Path):
    plugins = (FILE, "resident", "adamw", "dcp")
    two = tiny_run(tmp_path / "two", plugins, train=GENTLE, ranks=2)
    one = tiny_run(tmp_path / "one", plugins, train=GENTLE)
    assert two.code == one.code == 0
    assert two.sample_ids == one.sample_ids
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
