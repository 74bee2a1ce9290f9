"""The launcher: ranks start, fail, stop and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.processes import PATIENCE_S

from trainforge.errors import UserError
from trainforge.launcher import launch

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys
from trainforge.errors import UserError
from trainforge.launcher import launch
nproc, grace, meet, nnodes, node, rdzv, *argv = sys.argv[1:]
try:
    sys.exit(launch(argv, int(nproc), grace_s=float(grace), meet_s=float(meet), nnodes=int(nnodes), node_rank=int(node),
                    rdzv=rdzv or None, module="tests.ranks.stand_in"))
except UserError as error:
    sys.stderr.write(f"{error}\\n")
    sys.exit(2)
"""


def start(
    *argv: object,
    nproc: int = 2,
    grace: float = 20,
    meet: float = 60,
    nnodes: int = 1,
    node: int = 0,
    rdzv: str = "",
):
    command = [sys.executable, "-c", CODE, *map(str, (nproc, grace, meet, nnodes, node, rdzv, *argv))]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture(autouse=True)
def logs_of_failed_ranks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("logs")))


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_for(paths: list[Path]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not all(path.exists() and path.stat().st_size for path in paths):
        assert time.monotonic() < end, f"{paths} did not appear"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def all_gone(pids: list[int], within_s: float = 60) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end and not all(gone(pid) for pid in pids):
        time.sleep(0.05)
    return all(gone(pid) for pid in pids)


def test_ranks_know_who_they_are(tmp_path: Path):
    code, out, err = finish(start("environment", tmp_path))
    assert (code, out, err) == (0, "hello from rank 0\n", "")
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [fact["RANK"] for fact in facts] == ["0", "1"]
    assert [fact["LOCAL_RANK"] for fact in facts] == ["0", "1"]
    assert {fact["WORLD_SIZE"] for fact in facts} == {fact["LOCAL_WORLD_SIZE"] for fact in facts} == {"2"}
    assert facts[0]["MASTER_PORT"] == facts[1]["MASTER_PORT"]
    assert facts[1]["argv"] == ["environment", str(tmp_path)]


def test_a_users_mistake_is_said_once_without_a_traceback():
    assert finish(start("mistake")) == (2, "", "train.lr must be above 0\n")


def test_the_rank_that_failed_first_speaks_and_the_others_end_soon():
    code, _, err = finish(start("crash", "raise"))
    assert code == 1
    assert err.startswith("Traceback")
    assert "rank one divides by zero" in err.splitlines()[-1]
    assert "rank 1 is gone" not in err  # what rank 0 says is only a consequence
    assert "runpy" not in err


def test_a_rank_that_crashes_without_a_word_is_named_with_its_log():
    code, _, err = finish(start("crash", "segv"))
    assert code == 1
    lines = err.splitlines()
    assert lines[0] == "last words of rank 1"
    assert "Rank 1 was killed by SIGSEGV" in lines[-1]
    assert "rank 1 is gone" not in err


@pytest.mark.parametrize(
    ("number", "seconds"),
    [
        (signal.SIGTERM, 7),  # longer than ranks get when one has failed
        (signal.SIGINT, 0.3),
        (signal.SIGUSR1, 0.3),
    ],
)
def test_a_signal_is_passed_on_and_every_rank_may_save(
    tmp_path: Path, number: signal.Signals, seconds: float
):
    process = start("save", tmp_path, seconds)
    wait_for([tmp_path / f"ready-{rank}" for rank in (0, 1)])
    process.send_signal(number)
    code, _, err = finish(process)
    assert (code, err) == (3, "")
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == [number.name] * 2


def test_a_save_that_takes_longer_than_the_grace_period_is_cut_off(tmp_path: Path):
    process = start("save", tmp_path, 3600, grace=1)
    wait_for([tmp_path / f"ready-{rank}" for rank in (0, 1)])
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 1
    assert "did not finish saving within 1 s" in err
    assert all_gone([int((tmp_path / f"ready-{rank}").read_text()) for rank in (0, 1)])


def pids_of(tmp_path: Path) -> Iterator[int]:
    paths = [tmp_path / f"pids-{rank}" for rank in (0, 1)]
    wait_for(paths)
    for path in paths:
        yield from map(int, path.read_text().split())


def test_no_orphans_when_a_rank_dies(tmp_path: Path):
    process = start("orphan", tmp_path, "die")
    pids = list(pids_of(tmp_path))
    code, _, err = finish(process)
    assert code == 1
    assert "Rank 1 ended with exit code 7" in err
    assert all_gone(pids)


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path):
    process = start("orphan", tmp_path)
    ranks_and_workers = list(pids_of(tmp_path))
    ranks, workers = ranks_and_workers[0::2], ranks_and_workers[1::2]
    process.send_signal(signal.SIGKILL)
    finish_code = process.wait(timeout=PATIENCE_S)
    try:
        assert finish_code == -signal.SIGKILL
        assert all_gone(ranks)
    finally:
        for pid in workers:  # workers see to themselves (`die_with_parent`); these do not
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_two_hosts_meet(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("", 0))
        rdzv = f"localhost:{probe.getsockname()[1]}"
    hosts = [start("environment", tmp_path, nproc=1, nnodes=2, node=node, rdzv=rdzv) for node in (0, 1)]
    assert [finish(host)[0] for host in hosts] == [0, 0]
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert {(fact["WORLD_SIZE"], fact["LOCAL_WORLD_SIZE"]) for fact in facts} == {("2", "1")}


def test_a_busy_port_is_one_message():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} .* is busy"):
            launch(["x"], 1, nnodes=2, rdzv=f"localhost:{port}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"nproc": 0}, "at least 1"),
        ({"nproc": 1, "nnodes": 2}, "--rdzv HOST:PORT"),
        ({"nproc": 1, "nnodes": 2, "node_rank": 2, "rdzv": "a:1"}, "below --nnodes"),
        ({"nproc": 1, "nnodes": 2, "node_rank": 1, "rdzv": "a:port"}, "must be HOST:PORT"),
    ],
)
def test_wrong_arguments_are_user_errors(arguments: dict[str, object], says: str):
    with pytest.raises(UserError, match=says):
        launch(["x"], **arguments)


def test_plain_torchrun_needs_no_launcher_of_ours(tmp_path: Path):
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.ranks.stand_in",
    ]
    done = subprocess.run(
        [sys.executable, *command, "environment", str(tmp_path)], cwd=ROOT, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0
    assert (tmp_path / "1.json").exists()


def test_a_host_that_cannot_reach_the_first_one_is_told_what_to_check():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
    code, _, err = finish(start("environment", "unused", nproc=1, nnodes=2, node=1, rdzv=nobody, meet=3))
    assert code == 2
    assert "did not meet" in err
    assert "Traceback" not in err
