"""`forge doctor` sees what is wrong, on made-up machines."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainforge import doctor
from trainforge.cli import main


def test_each_line_says_what_it_means():
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    for word in (
        "Python",
        "torch",
        "devices",
        "C++ compiler",
        "/dev/shm",
        "locked memory",
        "host memory",
        "CPU threads",
    ):
        assert word in result.stdout
    assert all(finding.meaning for finding in doctor.examine())


@pytest.mark.parametrize(
    ("environ", "cores", "fine"),
    [
        ({"OMP_NUM_THREADS": "1"}, 8, False),
        ({"OMP_NUM_THREADS": "8"}, 8, True),
        ({}, 8, True),
        ({"OMP_NUM_THREADS": ""}, 1, True),
    ],
)
def test_a_thread_limit_from_the_environment_is_a_concern(environ: dict[str, str], cores: int, fine: bool):
    (finding,) = doctor.threads(environ, cores)
    assert finding.fine == fine
    assert ("unset OMP_NUM_THREADS" in finding.meaning) == (not fine)


def test_another_command_first_on_path_is_seen(tmp_path: Path):
    for name in doctor.COMMANDS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    own = Path(sys.executable).parent
    shadowed = list(doctor.commands(f"{tmp_path}:{own}"))
    assert [finding.fine for finding in shadowed] == [False, False]
    assert "another one comes first on PATH" in shadowed[0].meaning
    assert all(finding.fine for finding in doctor.commands(f"{own}:{tmp_path}"))


def test_another_distribution_with_our_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    info = tmp_path / "smithy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: smithy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nforge = smithy:main\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    forge, other = doctor.commands()
    assert not forge.fine
    assert "smithy" in forge.found
    assert "smithy" not in other.found


def test_small_shared_memory_is_a_concern(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def usage(free: int) -> object:
        return type("Usage", (), {"free": free, "total": free})()

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage(64 * 1024**2))
    (finding,) = doctor.shared_memory(tmp_path)
    assert not finding.fine
    assert "--shm-size" in finding.meaning
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage(8 * 1024**3))
    assert next(doctor.shared_memory(tmp_path)).fine
    assert not next(doctor.shared_memory(tmp_path / "none")).fine


def test_locked_memory_in_words():
    assert next(doctor.locked_memory(resource.RLIM_INFINITY)).found == "unlimited"
    assert next(doctor.locked_memory(8 * 1024**2)).found == "8.0 MiB"


def test_the_smallest_limit_of_a_control_group_and_its_parents_counts(tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "memory.max").write_text("4096\n")
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    assert doctor.cgroup_limit(tmp_path, membership) == 4096
    (tmp_path / "a" / "b" / "memory.max").write_text("1024\n")
    assert doctor.cgroup_limit(tmp_path, membership) == 1024

    (tmp_path / "memory" / "c").mkdir(parents=True)  # version 1, where no limit is a huge number
    (tmp_path / "memory" / "c" / "memory.limit_in_bytes").write_text("2048\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    membership.write_text("4:cpu:/c\n3:memory:/c\n")
    assert doctor.cgroup_limit(tmp_path, membership) == 2048
    assert doctor.cgroup_limit(tmp_path, tmp_path / "none") is None


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    def broken() -> object:
        raise OSError("no /proc here")

    monkeypatch.setattr(doctor, "host_memory", broken)
    finding = next(f for f in doctor.examine() if f.found.startswith("OSError"))
    assert "no /proc here" in finding.found
    assert not finding.fine
