"""Two ranks whose disk fills up, and whose checkpoint lacks a part: both end, nothing is lost, and it goes on."""

from __future__ import annotations

import re
import subprocess

import pytest
from tests.cases.test_c37_c42_checkpoints import without
from tests.run.runs import MODEL, Outcome, write_recipe
from tests.support.many_runs import Start, on_ranks

from trainforge.checkpoints import list_checkpoints
from trainforge_plugins.dcp import manifest

pytestmark = pytest.mark.ranks

TRAIN = {"steps": 12, "global_batch": 2, "micro_batch": 1, "save_every": 1, "keep": 100}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1.5 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk(tmp_path, small_disk):
    recipe = write_recipe(tmp_path, 20, model={"config": MODEL}, train=TRAIN)
    run_dir = small_disk / "run"
    (full,) = on_ranks(2, [Start(recipe, run_dir)])
    for end in full:
        assert (end.code, end.error) == (1, "CheckpointError"), full
        assert re.search(r"no room for a checkpoint in .*: it needs [\d.]+ KiB and .* are free", end.text), (
            end
        )
    kept = list_checkpoints(run_dir / "checkpoints")
    newest = kept[-1].step
    assert [info.step for info in kept] == list(range(1, newest + 1))
    assert 1 < newest < 12
    assert not any(manifest.verify(info.path) for info in kept)
    left = [path.name for path in (run_dir / "checkpoints").glob("[!s]*/*")]
    assert set(left) <= {"failed.json"}, "the reason, for the other rank; the bytes are given back"

    subprocess.run(["mount", "-o", "remount,size=32m", small_disk], check=True)
    before = Outcome(1, run_dir).metrics
    parts = kept[0].path / "checkpoint.json"
    saved = parts.read_bytes()
    without(parts, "parts", "loop", "data", "rng")
    (run_dir / "lacking/checkpoints").mkdir(parents=True)
    subprocess.run(["cp", "-r", kept[0].path, run_dir / "lacking/checkpoints"], check=True)
    parts.write_bytes(saved)
    resumed, whole, lacking = on_ranks(
        2,
        [
            Start(recipe, run_dir),
            Start(recipe, tmp_path / "whole"),
            Start(recipe, run_dir / "lacking"),
        ],
    )
    assert [end.code for end in resumed + whole] == [0] * 4
    after, wanted = Outcome(0, run_dir), Outcome(0, tmp_path / "whole")
    assert after.summary["resumed_from"] == newest
    assert not list((run_dir / "checkpoints").glob("[!s]*")), "the next start has cleaned up"
    assert after.summary["weights_digest"] == wanted.summary["weights_digest"]
    assert after.series("loss") == wanted.series("loss")
    assert after.metrics[:newest] == before[:newest]
    for end in lacking:  # C42: named on every rank, and no step is taken without it
        assert end.code in (1, 2)
        assert "lacks rng" in end.text
    assert not (run_dir / "lacking/metrics.jsonl").exists()
