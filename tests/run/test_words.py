"""What a run says and what it leaves in log.txt, also when it fails."""

from __future__ import annotations

import os
import subprocess

import pytest
from tests.run.runs import run, write_recipe
from tests.support.processes import forge_run

from trainforge.errors import CheckpointError


def test_a_damaged_checkpoint_says_how_to_go_on(tmp_path):
    recipe = write_recipe(tmp_path, train={"steps": 4, "save_every": 2})
    assert run(recipe, tmp_path / "run").code == 0
    damaged = next((tmp_path / "run/checkpoints/step-00000004").glob("*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"--resume 2, or start over with --fresh"):
        run(recipe, tmp_path / "run")
    assert "error: " in (tmp_path / "run/log.txt").read_text().splitlines()[-1]
    assert run(recipe, tmp_path / "run", resume=2).summary["steps"] == 4


def test_the_screen_says_first_what_is_run_and_where(tmp_path, capsys):
    recipe = write_recipe(tmp_path, train={"steps": 1})
    run(recipe, tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"r: {recipe} · folder {tmp_path / 'run'}"
    assert "1 ranks" not in "\n".join(lines)
    logged = [line.split(" ", 2)[2] for line in (tmp_path / "run/log.txt").read_text().splitlines()]
    assert logged == lines


def test_a_terminal_without_utf8_and_a_reader_that_leaves_end_no_run(tmp_path):
    recipe = write_recipe(tmp_path, train={"steps": 3})
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ascii_only = subprocess.run(
        forge_run(recipe, tmp_path / "a"), env=environment, capture_output=True, timeout=120, check=False
    )
    assert ascii_only.returncode == 0, ascii_only.stderr
    assert b"loss" in ascii_only.stdout
    left_alone = subprocess.Popen(forge_run(recipe, tmp_path / "b"), stdout=subprocess.PIPE)
    left_alone.stdout.close()
    assert left_alone.wait(timeout=120) == 0
    assert "finished: step 3 of 3" in (tmp_path / "b/log.txt").read_text()
