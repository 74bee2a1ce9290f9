"""Listing and removing committed checkpoints, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainforge.checkpoints import (
    checkpoints_folder,
    list_checkpoints,
    remove_checkpoints,
    remove_folder,
    verify_checkpoint,
)
from trainforge.describing import Description, compare, describe_checkpoints
from trainforge.errors import CheckpointError, SelectionError, UserError
from trainforge.outlook import outlook
from trainforge.stages import CheckpointInfo


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
        '{"step": 1, "writer": "a", "saved_at": 1, "bytes": -1}',
        '{"step": 1, "writer": "a", "saved_at": 1, "bytes": true}',
        '{"step": 1, "writer": "a", "saved_at": 1, "bytes": 1e999}',
        '{"step": 1, "writer": "a", "saved_at": 1, "bytes": "many"}',
    ],
    ids=range(18),
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


def test_data_that_lies_elsewhere_counts_as_its_writer_says(tmp_path: Path):
    write(tmp_path, 1, bytes=5_000_000_000)
    assert list_checkpoints(tmp_path)[0].bytes == 5_000_000_000


def test_removing_leaves_the_others_and_gives_the_bytes(tmp_path: Path):
    for step in (1, 2):
        write(tmp_path, step)
    (tmp_path / ".removing-step-00000001" / "left").mkdir(parents=True)  # an earlier removal was cut short
    (first, _) = list_checkpoints(tmp_path)
    about = (first.path / "checkpoint.json").stat().st_size
    assert remove_folder(first.path) == 100 + about
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


PLUGIN = """
from trainforge.errors import CheckpointError
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider
from trainforge.stages import Checkpoint

class Sharing(Checkpoint):
    def save(self, step, parts): ...
    def wait(self): ...
    def restore(self, parts, path): ...
    def verify(self, path): return []
    def remove(self, paths):
        (paths[0].parent / "asked").write_text(" ".join(path.name for path in paths))
        return super().remove(paths) + 1_000_000
    def describe(self, path):
        if path.name.endswith("3"):
            raise CheckpointError("step 3 has no manifest")
        return {"bytes": 4096, "new_bytes": 1024, "tensors": {"memory/master/w": path.name}}
    def close(self):
        print("closed")

@hookimpl
def forge_checkpoint():
    return Provider(build=lambda ctx, config: Sharing())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints 1 to 3 of a local plugin `sharing`."""
    for step in (1, 2, 3):
        write(tmp_path / "run/checkpoints", step, writer="sharing")
    file = tmp_path / "sharing.py"
    file.write_text(PLUGIN)
    record = {"plugin": "sharing", "reference": str(file)}
    (tmp_path / "run/plan.json").write_text(json.dumps({"stages": {"checkpoint": record}}))
    return tmp_path / "run/checkpoints"


def test_the_plugin_that_wrote_them_removes_them_all_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    infos = list_checkpoints(folder)
    sizes = sum(info.bytes for info in infos[:2])
    assert remove_checkpoints(infos[:2]) == sizes + 1_000_000
    assert (folder / "asked").read_text() == "step-00000001 step-00000002"
    assert [info.step for info in list_checkpoints(folder)] == [3]
    assert capsys.readouterr().out == "closed\n"


def test_nothing_is_removed_when_one_of_the_plugins_is_not_there(folder: Path):
    write(folder, 4, writer="nobody_installed")
    with pytest.raises(SelectionError, match="no plugin is called nobody_installed"):
        remove_checkpoints(list_checkpoints(folder))
    assert [info.step for info in list_checkpoints(folder)] == [1, 2, 3, 4]


def test_what_plugins_say_of_checkpoints_and_what_they_cannot(folder: Path):
    write(folder, 0, writer="nobody_installed", bytes=77)
    zero, one, two, three = describe_checkpoints(list_checkpoints(folder))
    assert (zero.bytes, zero.new_bytes, zero.tensors) == (77, None, None)
    assert "no plugin is called nobody_installed" in zero.problem
    assert (one.bytes, one.new_bytes, one.problem) == (4096, 1024, "")
    assert two.tensors == {"memory/master/w": "step-00000002"}
    assert three.problem == "step 3 has no manifest"
    assert three.bytes == three.info.bytes


def described(step: int, tensors: dict[str, str]) -> Description:
    return Description(CheckpointInfo(step, Path("nowhere"), "a", 0, 0.0), 0, tensors=tensors)


def test_tensors_are_compared_by_their_digests():
    found = compare(
        described(1, {"x": "1", "y": "2", "z": "3"}), described(2, {"y": "2", "x": "9", "w": "3"})
    )
    assert (found.changed, found.gone, found.added, found.same) == (["x"], ["z"], ["w"], 1)


def test_an_unknown_writer_is_named(tmp_path: Path):
    write(tmp_path, 1, writer="nobody_installed")
    with pytest.raises(SelectionError, match="no plugin is called nobody_installed"):
        verify_checkpoint(list_checkpoints(tmp_path)[0])


def test_what_is_said_after_a_failure_is_what_the_next_start_does(tmp_path: Path):
    """It passes over a checkpoint that does not say what it is."""
    for step, text in ((2, None), (4, "{")):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        about = {"step": step, "writer": "dcp", "format": 1, "saved_at": 1.0}
        (folder / "checkpoint.json").write_text(text or json.dumps(about))
    assert outlook(tmp_path).startswith("Run again to resume from step 2")
