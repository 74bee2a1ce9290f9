"""`model.trust_remote_code`: Python files of a model folder run only when they may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.hf import tiny
from tests.run.runs import run, write_recipe

from trainforge.context import SilentConsole
from trainforge.errors import ConfigError, DataError
from trainforge.exporting import export_run
from trainforge.plan_sizes import describe_model
from trainforge.planning import make_plan
from trainforge_plugins.hf import ModelSection, build

MARK = "import os, pathlib\npathlib.Path(os.environ['MARKS'], __name__.rpartition('.')[2]).touch()\n"
CONFIGURATION = f"""{MARK}
from transformers import LlamaConfig
class MineConfig(LlamaConfig):
    model_type = "mine"
"""
MODELING = f"""{MARK}
from transformers import LlamaForCausalLM
from .configuration_mine import MineConfig
class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""
TOKENIZATION = f"""{MARK}
from transformers import PreTrainedTokenizerFast
class MineTokenizerFast(PreTrainedTokenizerFast):
    pass
"""
FILES = {"configuration_mine.py": CONFIGURATION, "modeling_mine.py": MODELING}
AUTO_MAP = {
    "AutoConfig": "configuration_mine.MineConfig",
    "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
}


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where each file of a folder leaves its name when it runs. The cache of transformers is a new one."""
    folder = tmp_path / "marks"
    folder.mkdir()
    monkeypatch.setenv("MARKS", str(folder))
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    return folder


def ran(marks: Path) -> list[str]:
    return sorted(path.name for path in marks.iterdir())


def changed(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama under another name, with code of its own."""
    folder = tmp_path / "mine"
    tiny.transformers_model("llama", vocab_size=264).save_pretrained(folder)
    changed(folder / "config.json", model_type="mine", auto_map=AUTO_MAP, architectures=["MineForCausalLM"])
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def recipe_in(path: Path, folder: Path, trust: bool = True, **text: object) -> Path:
    model = {"hf": str(folder), "config": None, "trust_remote_code": trust}
    return write_recipe(path, model=model, train={"steps": 2}, text={"tokenizer": "bytes"} | text)


def test_nothing_of_the_folder_runs_unless_it_may(tmp_path: Path, folder: Path, marks: Path):
    with pytest.raises(ConfigError) as caught:
        run(recipe_in(tmp_path, folder, trust=False), tmp_path / "run")
    assert ": configuration_mine.py, modeling_mine.py. That code" in str(caught.value)
    assert "model.trust_remote_code: true" in str(caught.value)
    assert ran(marks) == []


def test_it_trains_and_its_export_has_the_code(tmp_path: Path, folder: Path, marks: Path):
    from transformers import AutoModelForCausalLM

    outcome = run(recipe_in(tmp_path, folder), tmp_path / "run")
    assert ran(marks) == ["configuration_mine", "modeling_mine"]
    warning = f"model.trust_remote_code: running configuration_mine.py, modeling_mine.py of {folder}"
    assert warning in (outcome.folder / "log.txt").read_text()

    plain = tmp_path / "plain"
    tiny.transformers_model("llama", vocab_size=264).save_pretrained(plain)
    (plain / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    native = run(recipe_in(tmp_path / "native", plain, trust=False), tmp_path / "native/run")
    assert outcome.series("loss") == native.series("loss")

    export_run(outcome.folder, tmp_path / "out", SilentConsole(), dtype="fp32", trust_code=True)
    for name, text in FILES.items():
        assert (tmp_path / "out" / name).read_text() == text
    assert json.loads((tmp_path / "out/config.json").read_text())["auto_map"] == AUTO_MAP
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(model).__name__ == "MineForCausalLM"
    export_run(native.folder, tmp_path / "native/out", SilentConsole(), dtype="fp32")
    expected = load_file(tmp_path / "native/out/model.safetensors")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())


def test_a_folder_that_transformers_knows_is_read_without_its_code(tmp_path: Path, folder: Path, marks: Path):
    changed(folder / "config.json", model_type="llama")
    ctx = tiny.context(tmp_path)
    spec = build(ctx, ModelSection(hf=str(folder)))
    assert type(spec.module).__module__.startswith("transformers.models.llama")
    assert "which is not run: transformers' own llama is taken" in ctx.console.lines[0]
    spec.export(tmp_path / "out", tiny.initial(spec).__getitem__, "fp32")
    assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text())
    assert not list((tmp_path / "out").glob("*.py"))
    assert ran(marks) == []


def test_a_folder_without_a_model_class_or_with_broken_code(tmp_path: Path, folder: Path, marks: Path):
    changed(folder / "config.json", auto_map={"AutoConfig": AUTO_MAP["AutoConfig"]})
    with pytest.raises(ConfigError, match="names no class for AutoModelForCausalLM"):
        build(tiny.context(tmp_path), ModelSection(hf=str(folder), trust_remote_code=True))
    changed(folder / "config.json", auto_map=AUTO_MAP)
    (folder / "modeling_mine.py").write_text("raise RuntimeError('broken')\n")
    with pytest.raises(ConfigError, match="cannot be used: RuntimeError: broken"):
        build(tiny.context(tmp_path), ModelSection(hf=str(folder), trust_remote_code=True))


def test_another_runs_word_does_not_allow_code_to_run(tmp_path: Path, folder: Path, marks: Path):
    run(recipe_in(tmp_path, folder), tmp_path / "run")
    for path in marks.iterdir():
        path.unlink()
    plain = tmp_path / "plain"
    tiny.transformers_model("llama", vocab_size=264).save_pretrained(plain)
    for named in ({}, {"hf": str(plain)}):
        model = {"config": None, "init_from": str(tmp_path / "run"), **named}
        plan = make_plan(write_recipe(tmp_path / "new", model=model))
        with pytest.raises(ConfigError, match="trust_remote_code: true"):
            describe_model(plan)
    assert ran(marks) == []


def test_the_key_holds_for_tokenizers_too(tmp_path: Path, marks: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "</s>": 1, "the": 2, "whale": 3, "number": 4, "swam": 5, "by": 6}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    words_folder = tmp_path / "words"
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(words_folder)
    changed(
        words_folder / "tokenizer_config.json",
        tokenizer_class="MineTokenizer",
        auto_map={"AutoTokenizer": [None, "tokenization_mine.MineTokenizerFast"]},
    )
    (words_folder / "tokenization_mine.py").write_text(TOKENIZATION)
    model = tmp_path / "model"
    tiny.transformers_model("llama", vocab_size=264).save_pretrained(model)
    with pytest.raises(DataError, match=r"needs Python code of its own.*model.trust_remote_code: true"):
        run(recipe_in(tmp_path, model, trust=False, tokenizer=str(words_folder)), tmp_path / "run")
    assert ran(marks) == []
    outcome = run(recipe_in(tmp_path, model, tokenizer=str(words_folder), max_len=16), tmp_path / "run")
    assert ran(marks) == ["tokenization_mine"]
    export_run(outcome.folder, tmp_path / "out", SilentConsole(), trust_code=True)
    assert (tmp_path / "out/tokenization_mine.py").read_text() == TOKENIZATION
