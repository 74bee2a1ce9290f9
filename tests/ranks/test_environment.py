"""Ranks, devices and threads from the environment of torchrun, Slurm or nobody."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainforge.errors import ConfigError, UserError
from trainforge.ranks import Ranks, default_threads, device_note, limit_spinning, pick_device
from trainforge.sections import RunSection

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4321",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "24001",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}


def test_alone_without_variables():
    assert Ranks.from_environment({}) == Ranks(0, 1, 0, 1)


def test_torchrun():
    assert Ranks.from_environment(TORCHRUN) == Ranks(3, 4, 1, 2, "10.0.0.1", 4321, "torchrun")


def test_torchrun_inside_slurm_wins():
    assert Ranks.from_environment(SLURM | TORCHRUN).launcher == "torchrun"


def test_slurm():
    found = Ranks.from_environment(SLURM)
    assert (found.rank, found.world, found.local_rank, found.local_world) == (4, 5, 0, 1)
    assert found.master_addr == "node07"
    assert found.master_port == 20000 + 24001 % 12000
    second_node = SLURM | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    assert Ranks.from_environment(second_node).local_world == 2


def test_slurm_takes_the_users_address_and_falls_back_to_srun():
    given_address = SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "77"}
    assert (
        Ranks.from_environment(given_address).master_addr,
        Ranks.from_environment(given_address).master_port,
    ) == (
        "head",
        77,
    )
    without = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert Ranks.from_environment(without).master_addr == "10.9.9.9"


@pytest.mark.parametrize(
    ("nodes", "first"), [("a1", "a1"), ("a1,b2", "a1"), ("gpu[3,5-9]", "gpu3"), ("n[1-2]-ib,x[4]", "n1-ib")]
)
def test_first_host_of_a_slurm_node_list(nodes: str, first: str):
    assert Ranks.from_environment(SLURM | {"SLURM_STEP_NODELIST": nodes}).master_addr == first


def test_a_batch_script_or_a_single_task_is_one_process():
    batch_script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert Ranks.from_environment(batch_script).world == 1
    assert Ranks.from_environment(SLURM | {"SLURM_NTASKS": "1"}).world == 1


@given(st.sets(st.sampled_from(sorted(TORCHRUN)), min_size=1, max_size=5))
def test_missing_torchrun_variables_are_named(missing: set[str]):
    env = {name: value for name, value in TORCHRUN.items() if name not in missing}
    if not set(env) - {"MASTER_ADDR", "MASTER_PORT"}:
        assert Ranks.from_environment(env).world == 1  # an address alone starts no ranks
        return
    with pytest.raises(UserError) as caught:
        Ranks.from_environment(env)
    assert all(name in str(caught.value).split(" missing ")[0] for name in missing)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("RANK", "4", "rank 4 of 4"),
        ("LOCAL_RANK", "2", "2 of 2"),
        ("LOCAL_WORLD_SIZE", "8", "of 8"),
        ("RANK", "two", "RANK is 'two'"),
        ("MASTER_PORT", "http", "MASTER_PORT is 'http'"),
    ],
)
def test_contradictions_are_user_errors(name: str, value: str, says: str):
    with pytest.raises(UserError, match=says):
        Ranks.from_environment(TORCHRUN | {name: value})


def test_slurm_trouble_is_a_user_error():
    for change in ({"SLURM_NODEID": "9"}, {"SLURM_STEP_TASKS_PER_NODE": "many"}, {"SLURM_JOB_ID": ""}):
        with pytest.raises(UserError, match="srun"):
            Ranks.from_environment(SLURM | change)


def test_importing_ranks_and_launcher_does_not_import_torch():
    code = "import sys, trainforge.ranks, trainforge.launcher, trainforge.signals; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------ devices


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch):
    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda: torch.device("cuda") if count else None
        )

    return pretend


TWO = [Ranks(rank, 2, rank, 2, "x", 1, "torchrun") for rank in (0, 1)]


def test_auto_without_cards_is_the_cpu(cards):
    cards(0)
    assert pick_device(RunSection(), Ranks()) == torch.device("cpu")
    assert device_note(RunSection(), Ranks()) is None


def test_one_card_of_several_and_a_line_that_says_so(cards):
    cards(4)
    assert pick_device(RunSection(), Ranks()) == torch.device("cuda:0")
    note = device_note(RunSection(), Ranks())
    assert note is not None
    assert "one of 4 cards" in note
    for quiet in (RunSection(devices=(1,)), RunSection(device="cuda:0"), RunSection(device="cpu")):
        assert device_note(quiet, Ranks()) is None
    assert device_note(RunSection(), TWO[0]) is None


def test_one_rank_each(cards):
    cards(4)
    assert [pick_device(RunSection(), r).index for r in TWO] == [0, 1]
    assert [pick_device(RunSection(devices=(3, 1)), r).index for r in TWO] == [3, 1]
    assert pick_device(RunSection(device="cuda:2"), Ranks()) == torch.device("cuda:2")


def test_a_slurm_task_that_sees_only_its_own_card(cards):
    cards(1)
    assert pick_device(RunSection(), Ranks(1, 2, 1, 2, "x", 1, "slurm")) == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("count", "run", "ranks", "says"),
    [
        (0, RunSection(device="cuda"), Ranks(), "only the CPU"),
        (0, RunSection(devices=(0,)), Ranks(), "only the CPU"),
        (2, RunSection(device="cuda:5"), Ranks(), "cuda:0, cuda:1 and the CPU"),
        (2, RunSection(devices=(7,)), Ranks(), "cuda:7, but this host has cuda:0, cuda:1"),
        (2, RunSection(device="xpu"), Ranks(), "xpu, but this host has cuda:0"),
        (2, RunSection(device="gpu no 1"), Ranks(), "must be auto, cpu"),
        (2, RunSection(device="cpu", devices=(0,)), Ranks(), "remove one"),
        (2, RunSection(device="cuda:1", devices=(0,)), Ranks(), "remove one"),
        (2, RunSection(device="cuda:1"), TWO[1], "use run.devices"),
        (2, RunSection(devices=(1, 1)), TWO[1], "twice"),
        (2, RunSection(devices=(0, 1)), Ranks(), "--nproc 2"),
        (1, RunSection(), TWO[1], "lower --nproc to 1"),
    ],
)
def test_devices_that_cannot_be(cards, count: int, run: RunSection, ranks: Ranks, says: str):
    cards(count)
    with pytest.raises(ConfigError, match=says):
        pick_device(run, ranks)


# ------------------------------------------------------------------------------------------------------ threads


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)

    def pretend(count: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))

    yield pretend
    torch.set_num_threads(before)


@given(cores_here=st.integers(1, 64), world=st.integers(1, 16), wish=st.none() | st.integers(1, 64))
def test_threads_never_add_up_to_more_than_the_cores(cores_here: int, world: int, wish: int | None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores_here)))
        patch.setattr(torch, "set_num_threads", lambda count: None)
        patch.setenv("OMP_NUM_THREADS", "1")  # as torchrun sets it
        given_ranks = [Ranks(r, world, r, world, "x", 1, "torchrun") for r in range(world)]
        threads = [default_threads(RunSection(threads=wish), r) for r in given_ranks]
    assert all(count >= 1 for count in threads)
    assert sum(threads) <= max(cores_here, world)
    if wish is None:
        assert threads[0] == max(1, cores_here // world)


def test_threads_are_set(cores):
    cores(2)
    assert default_threads(RunSection(), TWO[0]) == torch.get_num_threads() == 1
    assert default_threads(RunSection(), Ranks()) == torch.get_num_threads() == 2


def test_the_users_own_omp_num_threads_counts(cores, monkeypatch: pytest.MonkeyPatch):
    cores(8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert default_threads(RunSection(), Ranks()) == 3
    assert default_threads(RunSection(), TWO[0]) == 4


def test_cores_that_srun_has_bound_to_a_task_are_not_shared_again(cores, monkeypatch: pytest.MonkeyPatch):
    cores(4)
    slurm = Ranks(0, 2, 0, 2, "x", 1, "slurm")
    assert default_threads(RunSection(), slurm) == 2
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert default_threads(RunSection(), slurm) == 4


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_waiting_threads_spin_less_unless_the_user_has_said_how(before, after, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    limit_spinning()
    spins = os.environ.pop("GOMP_SPINCOUNT", None)
    assert spins == after
