"""Listing and removing committed checkpoints, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainforge.checkpoints import (
    checkpoints_folder,
    list_checkpoints,
    remove_checkpoint,
    verify_checkpoint,
)
from trainforge.errors import CheckpointError, SelectionError, UserError


def write(folder: Path, step: int, **changes: object) -> Path:
    path = folder / f"step-{step:08d}"
    (path / "deep").mkdir(parents=True)
    about = {"step": step, "writer": "saver", "format": 1, "saved_at": 1000.0 + step, **changes}
    (path / "checkpoint.json").write_text(json.dumps(about))
    (path / "deep" / "data").write_bytes(b"x" * 100)
    return path


def test_committed_checkpoints_come_in_order(tmp_path: Path):
    for step in (12, 3, 100):
        write(tmp_path, step)
    (tmp_path / "step-00000200.tmp").mkdir()
    (tmp_path / ".step-00000201").mkdir()
    (tmp_path / "step-00000300").write_text("a file is none")
    found = list_checkpoints(tmp_path)
    assert [info.step for info in found] == [3, 12, 100]
    assert found[0].writer == "saver"
    assert found[0].saved_at == 1003.0
    assert found[0].bytes == 100 + (found[0].path / "checkpoint.json").stat().st_size
    assert found[0].writer == "saver"


def test_nothing_there_is_an_empty_list(tmp_path: Path):
    assert list_checkpoints(tmp_path / "none") == []
    with pytest.raises(UserError, match="no run folder"):
        checkpoints_folder(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    assert (
        checkpoints_folder(tmp_path)
        == checkpoints_folder(tmp_path / "checkpoints")
        == tmp_path / "checkpoints"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"step": 1}',
        '{"step": "x", "writer": "a", "saved_at": 1}',
        "\xff",
        "[" * 100_000,
        '{"step": 1e999, "writer": "a", "saved_at": 1}',
        '{"step": 1, "writer": "a", "saved_at": 1' + "0" * 400 + "}",
        '{"step": 1, "writer": "a", "saved_at": NaN}',
        '{"step": 1, "writer": "./evil.py", "saved_at": 1}',
        '{"step": 1, "writer": "evil.py", "saved_at": 1}',
        '{"step": 1, "writer": "../a", "saved_at": 1}',
        '{"step": 1, "writer": "a", "saved_at": 1, "metrics": [1]}',
    ],
    ids=range(14),
)
def test_an_unusable_checkpoint_json_is_named(tmp_path: Path, text: str):
    path = write(tmp_path, 1)
    (path / "checkpoint.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"step-00000001 has no usable checkpoint\.json"):
        list_checkpoints(tmp_path)


def test_a_program_that_comes_with_a_checkpoint_is_not_run(tmp_path: Path):
    folder = tmp_path / "run"
    info_path = write(folder / "checkpoints", 1, writer="evil")
    (folder / "evil.py").write_text("raise SystemExit('it was run')")
    plan = {"stages": {"checkpoint": {"plugin": "evil", "reference": str(folder / "evil.py")}}}
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(SelectionError, match="no plugin is called evil"):
        verify_checkpoint(list_checkpoints(info_path.parent)[0])


def test_what_a_checkpoint_was_measured_at_and_whether_it_is_finite_is_listed(tmp_path: Path):
    write(tmp_path, 1, metrics={"eval_loss": 2.5})
    write(tmp_path, 2, finite=False)
    found = list_checkpoints(tmp_path)
    assert [(dict(info.metrics), info.finite) for info in found] == [({"eval_loss": 2.5}, True), ({}, False)]


def test_a_folder_that_says_another_step_is_refused(tmp_path: Path):
    path = write(tmp_path, 2)
    path.rename(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="of step 2"):
        list_checkpoints(tmp_path)


def test_removing_leaves_the_others(tmp_path: Path):
    for step in (1, 2):
        write(tmp_path, step)
    (tmp_path / ".removing-step-00000001" / "left").mkdir(parents=True)  # an earlier removal was cut short
    remove_checkpoint(list_checkpoints(tmp_path)[0])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_an_unknown_writer_is_named(tmp_path: Path):
    write(tmp_path, 1, writer="nobody_installed")
    with pytest.raises(SelectionError, match="no plugin is called nobody_installed"):
        verify_checkpoint(list_checkpoints(tmp_path)[0])
