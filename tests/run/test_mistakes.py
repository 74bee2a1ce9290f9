"""Every mistake of a person ends with exit 2 and one message that says what to change; no traceback."""

import os
import subprocess

import pytest
import yaml
from click.testing import CliRunner
from tests.run.runs import MODEL, run, write_recipe
from tests.support.processes import PATIENCE_S, forge_run

from trainforge.cli import main


def forge(*arguments):
    return CliRunner().invoke(main, ["run", *map(str, arguments)], prog_name="forge")


def longer(model=None, **text):
    return {"model": {"config": MODEL | (model or {})}, "text": text}


MISTAKES = {
    "unknown plugin": (["--plugins", "streem"], {}, "streem"),
    "unknown key": ([], {"train": {"stepz": 3}}, "did you mean train.steps"),
    "unknown section": ([], {"txet": {"path": "x"}}, "did you mean text"),
    "wrong type": ([], {"train": {"steps": "many"}}, "train.steps"),
    "missing file": ([], {"text": {"path": "nowhere.txt"}}, "nowhere.txt"),
    "empty file": ([], {"text": {"path": "empty.txt"}}, "empty.txt"),
    "glob without a file": ([], {"text": {"path": "data/*.jsonl"}}, "data/*.jsonl"),
    "tokenizer larger than the embedding": ([], longer({"vocab_size": 200}), "200"),
    "sequence longer than the positions": ([], longer(max_len=128), "64"),
    "a batch that ranks cannot share": ([], {"train": {"global_batch": 3, "micro_batch": 2}}, "global_batch"),
    "a model size that is no number": ([], longer({"hidden_size": "big"}), "hidden_size"),
    "more key than query heads": ([], longer({"num_key_value_heads": 4}), "num_key_value_heads"),
    "no layers": ([], longer({"num_hidden_layers": 0}), "num_hidden_layers"),
    "an architecture that does not exist": ([], longer({"model_type": "qwen22"}), "qwen22"),
    "a model id that cannot be fetched": (
        [],
        {"model": {"hf": "nobody/nothing", "config": None}},
        "nobody/nothing",
    ),
    "a card that does not exist": ([], {"run": {"device": "cuda:7"}}, "cuda:7"),
    "an attention kernel that is not there": (
        [],
        {"model": {"attn": "flash_attention_2"}},
        "flash_attention_2",
    ),
    "a run folder below a file": (["--run-dir", "empty.txt/run"], {}, "cannot be written"),
    "a checkpoint that does not exist": (["--resume", "7"], {}, "--resume 7"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_with_exit_2(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty.txt").write_text("")
    options, sections, says = MISTAKES[mistake]
    recipe = write_recipe(tmp_path, **sections)
    if sections.get("model", {}).get("hf"):
        loaded = yaml.safe_load(recipe.read_text())
        del loaded["model"]["config"]
        recipe.write_text(yaml.safe_dump(loaded))
    result = forge(recipe, *options)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output


def test_a_recipe_that_is_not_yaml(tmp_path):
    (tmp_path / "recipe.yaml").write_text("train: {steps: 3\nmodel: [")
    result = forge(tmp_path / "recipe.yaml")
    assert result.exit_code == 2
    assert "not YAML" in result.stderr


def test_a_changed_recipe_in_a_folder_that_holds_another_run(tmp_path):
    run(write_recipe(tmp_path), tmp_path / "run", max_steps=1)
    result = forge(write_recipe(tmp_path, run={"seed": 5}), "--run-dir", tmp_path / "run")
    assert result.exit_code == 2
    assert "run.seed: 0 in the folder, 5 now" in result.stderr


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"text": {"path": "nowhere.txt"}}, "nowhere.txt"),
        ({"model": {"config": MODEL | {"vocab_size": 200}}}, "200"),
    ],
)
def test_under_two_ranks_too(tmp_path, sections, says):
    recipe = write_recipe(tmp_path, **sections)
    command = forge_run(recipe, tmp_path / "run", "--nproc", 2)
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr.count("error: ") == 1
    assert says in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
