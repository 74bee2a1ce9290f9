"""Killed at random moments, a run loses nothing and ends as one that was not killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["dcp", "vault"])
def test_twenty_kills_of_a_run_that_saves_every_step(tmp_path: Path, plugin: str):
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "crash"],
        cwd=ROOT,
        env=os.environ | {"KILLS": "20", "PLUGIN": plugin, "TRAINFORGE_BENCH_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    counts = dict(json.loads((tmp_path / "crash.json").read_text())["rows"])
    assert counts["kills"] == 20
    assert counts["losses"] == counts["differences"] == 0
    assert counts["resumes"] == 19, "all but the first start go on from a checkpoint"
    assert counts["unfinished"] > 0
    assert counts["steps"] > 15
