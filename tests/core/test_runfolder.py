import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainforge.errors import ConfigError, IncompatibleError, TrainForgeError, UserError
from trainforge.runfolder import RunFolder, flatten

RECIPE = {
    "plugins": ["text"],
    "run": {"name": "x", "seed": 0},
    "model": {"config": {"layers": 2}, "attn": "auto"},
    "train": {"lr": 0.1, "steps": 5, "global_batch": 8, "save_every": 2},
}


def folder(tmp_path):
    opened = RunFolder(tmp_path / "run")
    opened.open(fresh=False)
    opened.write_recipe(RECIPE)
    return opened


def changed(**sections):
    return {
        key: value | sections.get(key, {}) if isinstance(value, dict) else value
        for key, value in RECIPE.items()
    }


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"steps": 9}},
        {"train": {"save_every": "10min"}},
        {"run": {"name": "y"}},
        {"model": {"attn": "sdpa"}},
    ],
)
def test_what_may_change(tmp_path, sections):
    folder(tmp_path).check_resumable(changed(**sections), ())


@pytest.mark.parametrize(
    ("sections", "key", "old", "new"),
    [
        ({"train": {"lr": 0.2}}, "train.lr", "0.1", "0.2"),
        ({"train": {"global_batch": 4}}, "train.global_batch", "8", "4"),
        ({"run": {"seed": 1}}, "run.seed", "0", "1"),
        ({"model": {"config": {"layers": 3}}}, "model.config.layers", "2", "3"),
    ],
)
def test_what_must_not_change_is_shown_with_both_values_and_can_be_allowed(tmp_path, sections, key, old, new):
    opened = folder(tmp_path)
    with pytest.raises(IncompatibleError) as caught:
        opened.check_resumable(changed(**sections), ())
    assert f"{key}: {old} in the folder, {new} now" in str(caught.value)
    opened.check_resumable(changed(**sections), (key,))
    opened.check_resumable(changed(**sections), (key.split(".")[0],))


def test_fresh_moves_the_earlier_run_aside(tmp_path):
    folder(tmp_path).close()
    again = RunFolder(tmp_path / "run")
    moved = again.open(fresh=True)
    assert moved is not None
    assert (moved / "recipe.yaml").exists()
    assert again.saved_recipe() is None


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    held = folder(tmp_path)
    code = (
        "from pathlib import Path; from trainforge.runfolder import RunFolder; import sys\n"
        "try: RunFolder(Path(sys.argv[1])).open(fresh=False)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True
    ).stdout
    assert out.startswith("UserError another run is using")
    held.close()
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True
    ).stdout
    assert out == ""


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run").open(fresh=False)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(TrainForgeError, match=r"summary\.json cannot be written \(Is a directory\)"):
        folder.write_json("summary.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_numbers_that_json_cannot_hold_become_null(tmp_path):
    opened = folder(tmp_path)
    opened.write_json("summary.json", {"loss": float("nan"), "all": [1.5, float("inf")], "path": tmp_path})
    assert json.loads((tmp_path / "run/summary.json").read_text()) == {
        "loss": None,
        "all": [1.5, None],
        "path": str(tmp_path),
    }


def test_a_recipe_that_no_run_wrote_is_never_replaced(tmp_path):
    (tmp_path / "recipe.yaml").write_text("mine")
    with pytest.raises(UserError, match="no run wrote"):
        RunFolder(tmp_path).open(fresh=False)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_fresh_moves_checkpoints_without_a_recipe_aside_too(tmp_path):
    (tmp_path / "run/checkpoints/step-00000004").mkdir(parents=True)
    moved = RunFolder(tmp_path / "run").open(fresh=True)
    assert moved is not None
    assert not any((tmp_path / "run/checkpoints").iterdir())


def test_fresh_does_not_move_the_folder_that_a_person_is_in(tmp_path, monkeypatch):
    folder(tmp_path).close()
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(UserError, match="where you are"):
        RunFolder(Path()).open(fresh=True)


def test_a_key_that_is_not_compared_cannot_be_allowed_to_change(tmp_path):
    opened = folder(tmp_path)
    for key in ("data", "text.path", "train.lrr"):
        with pytest.raises(ConfigError, match=f"--allow-change {key}: no key"):
            opened.check_resumable(RECIPE, (key,))
    opened.check_resumable(changed(train={"lr": 0.2}), ("train.l*",))


def test_only_a_run_with_a_checkpoint_can_be_resumed(tmp_path):
    opened = folder(tmp_path)
    assert opened.resumable_recipe() is None
    (opened.checkpoints / "abandoned-step-00000002").mkdir()
    assert opened.resumable_recipe() is None
    (opened.checkpoints / "step-00000002").mkdir()
    assert opened.resumable_recipe() == RECIPE
