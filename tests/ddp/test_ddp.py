"""`ddp` on two gloo ranks: buckets, unused parameters, accumulation, host numbers, and ranks in trouble."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.context import make_context
from tests.support.processes import PATIENCE_S

from trainforge.stages import Comm
from trainforge_plugins.ddp import DdpSection, build

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]
RANKS = (0, 1)


def run_ranks(folder: Path, *arguments: str, device: str = "cpu") -> list[dict[str, Any] | None]:
    """Runs a scenario of worker.py on two ranks; gives what each wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "tests.ddp.worker", arguments[0], str(folder), *arguments[1:]]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    address["TEST_DEVICE"] = device
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=os.environ | address | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in RANKS
    ]
    try:
        for process in processes:
            process.wait(timeout=PATIENCE_S)
    finally:
        for process in processes:
            process.kill()
    paths = [folder / f"{rank}.json" for rank in RANKS]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


TWO_CARDS = pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two cards")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_CARDS])])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = run_ranks(tmp_path_factory.mktemp("ddp"), "everything", device=request.param)
    assert all(result is not None for result in found), "a rank failed; its traceback is above"
    return found


def test_one_rank_communicates_with_nobody():
    comm = build(make_context(), DdpSection())
    assert type(comm) is Comm


def test_buckets_are_launched_by_index_on_every_rank(seen):
    # 25 floats fit: a | b c | d (larger than a bucket) | e none
    for rank in RANKS:
        for step in ("step1", "step2"):
            assert seen[rank]["buckets"][step]["launched"] == [10, 25, 40, 1]


def test_a_bucket_is_launched_as_soon_as_it_is_complete(seen):
    assert seen[0]["buckets"]["step1"]["after"] == [
        [10],
        [10],
        [10, 25],
        [10, 25, 40],
        [10, 25, 40],
        [10, 25, 40, 1],
    ]
    assert seen[1]["buckets"]["step1"]["after"][:5] == [[]] * 5  # the first bucket came last
    assert seen[1]["buckets"]["step1"]["after"][5] == [10, 25, 40, 1]


def test_gradients_are_summed_in_place_in_every_step(seen):
    for rank in RANKS:
        for step in (1, 2):
            found = seen[rank]["buckets"][f"step{step}"]
            assert found["sum"] == [3.0 * step * i for i in range(76)]
            assert found["used"] == ["a", "b", "c", "d", "e", "none"]
        assert seen[rank]["buckets"]["metrics"]["buckets"] == 4
        assert seen[rank]["buckets"]["metrics"]["reduced_mb"] == pytest.approx(76 * 4 / 1e6)


def test_an_incomplete_bucket_holds_back_later_ones_until_finish(seen):
    for rank in RANKS:
        found = seen[rank]["incomplete"]
        assert (found["before"], found["after"]) == ([], [2, 2])
        assert (found["used"], found["sum"]) == (["b"], [0.0, 0.0, 2.0, 2.0])


def test_a_reduction_waits_until_its_gradients_have_landed(seen):
    for rank in RANKS:
        found = seen[rank]["landing"]
        assert found["full"] == [4.0] * 3  # 1.5 + 2.5
        assert found["half"] == [5.0] * 3  # 2 + 3
        assert found["used"] == ["a", "h"]
        assert "final twice" in found["twice"]


def test_host_numbers(seen):
    for rank in RANKS:
        found = seen[rank]["numbers"]
        assert found["control"] == [2.0**41 + 0.5, 3.0, 0.0]
        assert found["gather"] == [{"rank": r, "text": "ä" * n, "none": None} for r, n in ((0, 1), (1, 41))]
        assert found["sum_ranks"] == [2.0, 1.0]
        assert found["partition"] == [rank, 2]


def test_unused_parameters(seen):
    """Case C19: unused everywhere, on one rank only, alternating; nothing stale, nothing hangs."""
    for rank in RANKS:
        for worst, used, expected in seen[rank]["branches"]["steps"]:
            assert worst < 1e-6
            assert used == expected
        assert [used for _, used, _ in seen[rank]["branches"]["steps"]] == [
            ["always", "first", "odd", "turn"],
            ["always", "first", "turn"],
        ] * 2


def test_a_parameter_unused_everywhere_is_named_once(seen):
    for rank in RANKS:
        lines = seen[rank]["branches"]["warnings"]
        assert [
            sum(name in line for line in lines) for name in ("never.weight", "never.bias", "odd.weight")
        ] == [1] * 3
        assert not any("first" in line or "turn" in line or "always" in line for line in lines)


def test_one_reduction_per_bucket_under_accumulation(seen):
    """Case C23: micro-batches of 3, 97, 10 and 0 supervised tokens equal one batch of 110."""
    for rank in RANKS:
        found = seen[rank]["accumulation"]
        assert found["collectives"] == found["buckets"] > 1
        assert found["tokens"] == 110
        assert abs(found["loss"]) < 1e-12
        assert found["gradient"] < 1e-12


# ------------------------------------------------------------------------------------------------ ranks in trouble


@pytest.mark.parametrize(("how", "doing"), [("late", "gradients"), ("late_control", "agreeing")])
def test_a_late_rank_is_named(tmp_path: Path, how: str, doing: str):
    first, _ = run_ranks(tmp_path, "trouble", how)
    assert first is not None
    assert first["error"].startswith("RanksError: rank 1 did not reach step 3")
    assert doing in first["error"]
    assert first["seconds"] > 3


@pytest.mark.parametrize("how", ["dead", "raises", "raises_in_backward"])
def test_a_rank_that_is_gone_ends_the_others_before_the_timeout(tmp_path: Path, how: str):
    first, second = run_ranks(tmp_path, "trouble", how)
    assert first is not None
    assert first["error"].startswith("RanksError: rank 1 ")
    assert "step 3" in first["error"]
    if how != "dead":
        assert "left the run" in first["error"]
        assert second is not None
        assert second["error"] == "ValueError: rank 1 has a problem of its own"


def test_a_rank_that_never_comes_is_named(tmp_path: Path):
    first, _ = run_ranks(tmp_path, "absent")
    assert first == {"error": "RanksError: rank 1 did not start within 1.0 s"}
