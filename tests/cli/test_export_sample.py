"""`forge export` and `forge sample` as a person calls them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tests.run.runs import write_recipe

import trainforge
from trainforge.cli import main
from trainforge_plugins.dcp.checkpoint import DcpCheckpoint


def forge(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="forge")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps; its text, and the cache of it, are gone."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, train={"steps": 3, "save_every": 1, "keep": 2})
    assert trainforge.run(recipe, run_dir=folder / "run") == 0
    (folder / "text.txt").unlink()
    shutil.rmtree(folder / "cache")
    return folder / "run"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return trained


def continuation(result: Result, prompt: str) -> str:
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(prompt)
    return result.stdout[len(prompt) : -1]


def test_a_greedy_sample_is_what_transformers_generates_from_the_export(run_dir: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert forge("export", run_dir, "out", "--dtype", "fp32").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained("out", local_files_only=True)
    ids = tokenizer("the whale ", return_tensors="pt", add_special_tokens=False).input_ids
    expected = model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    result = forge("sample", run_dir, "the whale ", "--tokens", 20, "--temperature", 0)
    assert continuation(result, "the whale ") == tokenizer.decode(expected[0, ids.shape[1] :])
    assert "step 3: 20 tokens at " in result.stderr


def test_seed_and_step_decide_what_is_drawn(run_dir: Path):
    def drawn(*options: object) -> str:
        return continuation(forge("sample", run_dir, "whale", "--tokens", 30, *options), "whale")

    assert drawn() == drawn("--seed", 0) == drawn("--step", 3)
    assert drawn() != drawn("--seed", 1)
    assert drawn() != drawn("--step", 2)


def test_a_sample_reads_no_optimizer_state(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    from trainforge_plugins.dcp.checkpoint import DcpCheckpoint

    restore, keys = DcpCheckpoint.restore, set()

    def watching(self, parts, path):
        keys.update(named.key for part in parts.values() for named in part.state().tensors)
        restore(self, parts, path)

    monkeypatch.setattr(DcpCheckpoint, "restore", watching)
    assert forge("sample", run_dir, "whale", "--tokens", 1).exit_code == 0
    assert keys == {"master"}


def test_export_says_what_it_wrote(run_dir: Path):
    result = forge("export", run_dir, "out")
    digest = json.loads((run_dir / "summary.json").read_text())["weights_digest"]
    assert result.stdout == f"exported to out (bf16, weights_digest {digest})\n"
    assert forge("export", run_dir, "out").exit_code == 2
    assert forge("export", run_dir, "out", "--force").exit_code == 0
    assert sorted(path.name for path in Path().iterdir()) == ["out", "out.old-1"]


def test_adapters_alone_of_a_run_without_any_are_refused(run_dir: Path):
    result = forge("export", run_dir, "out", "--lora", "adapter")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: this run's model has no adapters to be exported alone: leave out --lora adapter\n"
    )
    assert not Path("out").exists()


@pytest.mark.parametrize("command", [("export", "OUT"), ("sample", "whale")])
def test_wrong_runs_and_steps_are_one_sentence(command: tuple[str, str], run_dir: Path, tmp_path: Path):
    name, last = command

    def refused(run: object, *options: object) -> str:
        result = forge(name, run, last, *options)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert not Path("OUT").exists()
        return result.stderr

    assert "nowhere is no run folder" in refused("nowhere")
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    assert "no committed checkpoint yet" in refused("empty")
    assert "kept are 2, 3" in refused(run_dir, "--step", 9)
    shutil.copytree(run_dir / "checkpoints", tmp_path / "bare/checkpoints")
    assert "no recipe.yaml" in refused("bare")


def test_what_cannot_be_continued_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    from trainforge.stages import Memory
    from trainforge_plugins.resident.memory import Resident

    assert "the prompt holds no token" in forge("sample", run_dir, "").stderr
    monkeypatch.setattr(Resident, "generate", Memory.generate)
    result = forge("sample", run_dir, "whale")
    assert (result.exit_code, "its memory plugin resident does not generate" in result.stderr) == (2, True)


def test_merging_a_step_is_exporting_it(run_dir: Path):
    merged = forge("checkpoints", run_dir, "merge", 2, "merged")
    assert merged.exit_code == 0, merged.output
    assert forge("export", run_dir, "exported", "--step", 2).stdout.replace("exported to exported", "") == (
        merged.stdout.replace("exported to merged", "")
    )
    files = sorted(path.name for path in Path("exported").iterdir())
    assert files == sorted(path.name for path in Path("merged").iterdir())
    for name in files:
        assert Path("exported", name).read_bytes() == Path("merged", name).read_bytes()


def test_a_damaged_step_is_not_exported_and_an_older_one_is_named(run_dir: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    for data in copy.glob("checkpoints/step-00000003/*.safetensors"):
        content = bytearray(data.read_bytes())
        content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
        data.write_bytes(content)
    refused = forge("export", copy, "damaged")
    assert refused.exit_code == 1
    assert "is damaged" in refused.stderr
    assert "The newest before it is that of step 2" in refused.stderr
    assert not Path("damaged").exists()
    assert forge("export", copy, "sound", "--step", 2).exit_code == 0


def test_two_steps_are_compared_by_checksums_without_reading_them(run_dir: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    for data in copy.glob("checkpoints/*/*.safetensors"):
        data.write_bytes(b"")
    *names, total = forge("checkpoints", copy, "diff", 2, 3).stdout.splitlines()
    for name in ("master/model.embed_tokens.weight", "exp_avg/model.norm.weight", "step/model.norm.weight"):
        assert f"changed  memory/{name}" in names
    assert total.startswith(f"step 2 to step 3: {len(names)} (")
    assert total.endswith(") tensors changed, 0 are the same")
    same = forge("checkpoints", copy, "diff", 3, 3).stdout.splitlines()
    assert same[0].startswith("step 3 to step 3: 0 of ")
    assert f" {len(names)} are the same" in same[0]


def test_steps_that_are_cut_in_other_ways_are_compared_by_reading_the_weights(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    real = DcpCheckpoint.describe

    def described(self: DcpCheckpoint, path: Path) -> dict[str, Any]:
        return {**real(self, path), "cuts": {"memory/master/model.embed_tokens.weight": path.name}}

    monkeypatch.setattr(DcpCheckpoint, "describe", described)
    *_, why = forge("checkpoints", run_dir, "diff", 2, 3).stdout.splitlines()
    assert why.startswith("only the weights were compared, by reading them: steps 2 and 3 are not cut into")


def test_without_digests_the_weights_of_two_steps_are_read_and_compared(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(DcpCheckpoint, "describe", lambda self, path: {})
    trained = forge("checkpoints", run_dir, "diff", 2, 3)
    assert trained.exit_code == 0, trained.output
    *names, total, why = trained.stdout.splitlines()
    assert "changed  memory/master/model.embed_tokens.weight" in names
    assert all(name.startswith("changed  memory/master/model.") for name in names)
    assert total.startswith(f"step 2 to step 3: {len(names)} (")
    assert total.endswith(") tensors changed, 0 are the same")
    assert why == "only the weights were compared, by reading them: dcp keeps no digests"
    same = forge("checkpoints", run_dir, "diff", 3, 3).stdout.splitlines()
    assert same[0].startswith("step 3 to step 3: 0 of ")
    assert f" {len(names)} are the same" in same[0]
