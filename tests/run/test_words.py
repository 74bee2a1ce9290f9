"""What a run says and what it leaves in log.txt, also when it fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from tests.run.runs import run, write_recipe
from tests.support.processes import forge_run

from trainforge.errors import CheckpointError


def damaged(folder):
    """A run of 4 steps whose newest checkpoint of two has lost a bit."""
    recipe = write_recipe(folder, train={"steps": 4, "save_every": 2})
    assert run(recipe, folder / "run").code == 0
    file = next((folder / "run/checkpoints/step-00000004").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return recipe


def test_a_damaged_newest_checkpoint_is_passed_over_loudly(tmp_path, capsys):
    recipe = damaged(tmp_path)
    whole = (tmp_path / "run/summary.json").read_text()
    capsys.readouterr()
    again = run(recipe, tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "is damaged" in said
    assert "Going back to step 2" in said
    assert "the damaged checkpoint was set aside as" in said
    assert "resumed from step 2 of 4" in said
    assert again.summary["weights_digest"] == json.loads(whole)["weights_digest"]
    assert len(list((tmp_path / "run/checkpoints").glob("abandoned-step-00000004-*"))) == 1
    assert run(recipe, tmp_path / "run").code == 0  # and from then on it is as if nothing had been


def test_two_ranks_pass_over_a_damaged_checkpoint_together(tmp_path):
    recipe = damaged(tmp_path)
    done = subprocess.run(
        [*forge_run(recipe, tmp_path / "run"), "--nproc", "2"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "resumed from step 2 of 4" in done.stdout


def test_a_damaged_checkpoint_that_was_asked_for_says_how_to_go_on(tmp_path):
    recipe = damaged(tmp_path)
    with pytest.raises(CheckpointError, match=r"--resume 2, or start over with --fresh"):
        run(recipe, tmp_path / "run", resume=4)
    assert "error: " in (tmp_path / "run/log.txt").read_text().splitlines()[-1]
    assert run(recipe, tmp_path / "run", resume=2).summary["steps"] == 4


def test_without_an_older_checkpoint_a_damaged_one_ends_the_run(tmp_path):
    recipe = damaged(tmp_path)
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000002")
    with pytest.raises(CheckpointError, match=r"is damaged .* start over with --fresh"):
        run(recipe, tmp_path / "run")


def test_a_checkpoint_that_does_not_say_what_it_is_is_passed_over_too(tmp_path, capsys):
    recipe = damaged(tmp_path)
    (tmp_path / "run/checkpoints/step-00000004/checkpoint.json").write_text("{")
    capsys.readouterr()
    assert run(recipe, tmp_path / "run").code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "has no usable checkpoint.json" in said
    assert "It is passed over, and set aside as" in said
    assert "resumed from step 2 of 4" in said


def test_a_checkpoint_that_cannot_be_read_for_now_is_not_given_up(tmp_path):
    """The system refuses, as with too many open files; that is no damage, and nothing may be passed over for it."""
    recipe = damaged(tmp_path)
    file = tmp_path / "run/checkpoints/step-00000004/checkpoint.json"
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(CheckpointError, match="and try again"):
        run(recipe, tmp_path / "run")
    assert file.is_symlink()


def test_the_screen_says_first_what_is_run_and_where(tmp_path, capsys):
    recipe = write_recipe(tmp_path, train={"steps": 1, "save_every": 1})
    run(recipe, tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    assert "· saved after every step" in "\n".join(lines)
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
