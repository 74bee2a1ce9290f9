"""`model.lora`: adapters through peft, against peft's own module trained by hand."""

from __future__ import annotations

import json
import sys

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests.hf import tiny
from tests.run.runs import MODEL, run, write_recipe
from tests.run.test_equivalence import weights_of
from tests.support.plain_loop import initial_weights
from transformers import AutoConfig, AutoModelForCausalLM

from trainforge.context import SilentConsole
from trainforge.errors import ConfigError, UserError
from trainforge.exporting import export_run
from trainforge_plugins.hf import ModelSection, build
from trainforge_plugins.hf.lora import base_name, is_adapter
from trainforge_plugins.text.data import TextData

LLAMA = MODEL | {"attention_dropout": 0.0, "model_type": "llama"}
LORA = {"rank": 4, "alpha": 12, "targets": ["q_proj", "v_proj", "down_proj"]}
TRAIN = {"steps": 8, "global_batch": 4, "micro_batch": 2, "lr": 1e-2, "eps": 1e-6}
TRAIN |= {"schedule": "constant", "warmup": 0}


def recipe_in(folder, lora=LORA, config=LLAMA, **train):
    return write_recipe(folder, 20, train=TRAIN | train, model={"config": config, "lora": lora})


def spec_of(tmp_path, config=LLAMA, seed=0, **lora):
    return build(tiny.context(tmp_path, seed), ModelSection(config=config, lora=LORA | lora))


@pytest.fixture
def batches(monkeypatch):
    taken, take = [], TextData.take

    def recording(self, count):
        taken.append(take(self, count))
        return taken[-1]

    monkeypatch.setattr(TextData, "take", recording)
    return taken


def peft_model(initial, **lora):
    """peft's own model of the same base, adapters started alike."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA), attn_implementation="sdpa")
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=LORA["targets"], **lora)
    wrapped = peft.get_peft_model(model, config)
    wrapped.base_model.model.load_state_dict(initial, strict=False)
    model.tie_weights()
    return wrapped


def test_equals_pefts_module_in_a_plain_loop(tmp_path, batches):
    recipe = recipe_in(tmp_path)
    initial = initial_weights(recipe)
    model = peft_model(initial)
    outcome = run(recipe, tmp_path / "run")
    trained = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    losses = []
    for step in batches:
        tokens = sum(int((batch.labels != -100).sum()) for batch in step)
        total = 0.0
        for batch in step:
            logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert outcome.series("loss") == pytest.approx(losses, rel=1e-6)
    final = weights_of(outcome.folder)
    assert final.keys() == trained.keys()
    for name, parameter in trained.items():
        assert not parameter.equal(initial[name]), name
        assert (final[name] - parameter).abs().max() < 1e-6, name


def test_a_checkpoint_holds_the_adapters_and_nothing_else(tmp_path):
    outcome = run(recipe_in(tmp_path), tmp_path / "run", max_steps=1)
    newest = next((outcome.folder / "checkpoints").glob("step-*"))
    about = json.loads((newest / "checkpoint.json").read_text())
    tensors = about["parts"]["memory"]["tensors"]
    assert all(is_adapter(tensor["name"]) for tensor in tensors)
    elements = sum(v.numel() for file in newest.glob("*.safetensors") for v in load_file(file).values())
    rows = 2 * 2 * (32 + 32) * 4 // 2 + 2 * (32 + 16) * 4 + 2 * (64 + 32) * 4
    assert elements == 3 * rows + 2 * 3 * 2  # a master and two moments each, and a count of steps
    log = (outcome.folder / "log.txt").read_text()
    assert "lora: rank 4 on 6 layers (down_proj, q_proj, v_proj); all else is frozen" in log
    assert f"{rows:,} trainable" in log


def test_resumed_and_uninterrupted_are_the_same_with_dropout(tmp_path):
    lora = LORA | {"dropout": 0.3}
    whole = run(recipe_in(tmp_path, lora), tmp_path / "whole")
    run(recipe_in(tmp_path, lora), tmp_path / "parts", max_steps=3)
    parts = run(recipe_in(tmp_path, lora), tmp_path / "parts")
    assert parts.summary["weights_digest"] == whole.summary["weights_digest"]
    without = run(recipe_in(tmp_path), tmp_path / "without")
    assert without.series("loss") != whole.series("loss")


def test_adapters_start_by_seed_and_name_and_the_base_is_the_models(tmp_path):
    one, same = tiny.initial(spec_of(tmp_path)), tiny.initial(spec_of(tmp_path))
    other = tiny.initial(spec_of(tmp_path, seed=1))
    plain = tiny.initial(build(tiny.context(tmp_path), ModelSection(config=LLAMA)))
    assert {base_name(name) for name in one if not is_adapter(name)} == plain.keys()
    firsts = []
    for name, value in one.items():
        assert value.equal(same[name])
        if not is_adapter(name):
            assert value.equal(plain[base_name(name)])
        elif "lora_B" in name:
            assert not value.any()
        else:
            bound = (6 / ((1 + 5) * value.shape[1])) ** 0.5  # kaiming_uniform_ with a = sqrt(5)
            assert 0.7 * bound < value.abs().max() <= bound
            assert not value.equal(other[name])
            firsts.append(value.flatten()[:4].tolist())
    assert len({tuple(first) for first in firsts}) == len(firsts)


def test_a_folder_is_read_under_the_adapters(tmp_path):
    reference = tiny.transformers_model("qwen3_moe")
    reference.save_pretrained(tmp_path / "model")
    section = ModelSection(hf=str(tmp_path / "model"), lora={"targets": ["*.layers.1.*proj"]})
    spec = tiny.filled(build(tiny.context(tmp_path), section))
    ids = torch.randint(0, tiny.VOCAB, (2, 7))
    hidden, _ = spec.hidden(tiny.batch(ids))
    torch.testing.assert_close(spec.head(hidden.flatten(0, 1)), reference(ids).logits.flatten(0, 1))
    adapted = {spec.name for spec in spec.parameters if spec.trainable}
    assert len(adapted) == 8
    assert all(".layers.1.self_attn." in name for name in adapted)


def test_an_adapted_head_belongs_to_the_head(tmp_path):
    config = LLAMA | {"tie_word_embeddings": False}
    spec = tiny.filled(spec_of(tmp_path, config, targets=["lm_head"]))
    names = ["lm_head.base_layer.weight", "lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight"]
    assert list(spec.head_parameters) == names
    recipe = recipe_in(tmp_path, LORA | {"targets": ["lm_head"]}, config)
    final = weights_of(run(recipe, tmp_path / "run").folder)
    assert final.keys() == set(names[1:])
    assert all(value.any() for value in final.values())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_export_has_the_adapters_added(tmp_path, family):
    targets = ["q_proj", "down_proj"] if family == "llama" else ["c_attn", "c_proj"]
    lora = LORA | {"targets": targets}
    spec = build(tiny.context(tmp_path), ModelSection(config=tiny.values(family), lora=lora))
    weights = tiny.initial(spec)
    for name in weights:
        if is_adapter(name):
            weights[name] = torch.randn_like(weights[name]) / 8
    (tmp_path / "out").mkdir()
    spec.export(tmp_path / "out", weights.__getitem__, "fp32")
    spec.module.load_state_dict(weights, assign=True, strict=False)
    spec.module.eval()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.randint(0, tiny.VOCAB, (2, 7))
    hidden, _ = spec.hidden(tiny.batch(ids))
    torch.testing.assert_close(
        exported(ids).logits.flatten(0, 1), spec.head(hidden.flatten(0, 1)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("train", [{"recompute": True}, {"micro_batch": 4}, {"loss_chunk": 7}], ids=str)
def test_how_a_step_is_cut_changes_nothing(tmp_path, train):
    whole = run(recipe_in(tmp_path), tmp_path / "whole").series("loss")
    assert run(recipe_in(tmp_path, **train), tmp_path / "cut").series("loss") == pytest.approx(
        whole, rel=1e-6
    )


def test_flops_count_adapters_and_a_frozen_base(tmp_path):
    plain = build(tiny.context(tmp_path), ModelSection(config=LLAMA))
    spec = spec_of(tmp_path)
    base = sum(p.elements for p in plain.parameters)  # the tied embedding is the head too
    adapters = sum(p.elements for p in spec.parameters if p.trainable)
    assert plain.flops_per_token(8) - spec.flops_per_token(8) == 2 * base - 6 * adapters


def test_a_scale_by_the_root_of_the_rank(tmp_path):
    scaling = [
        spec_of(tmp_path, rslora=rslora).module.get_submodule("model.layers.0.self_attn.q_proj").scaling
        for rslora in (False, True)
    ]
    assert scaling == [{"default": 3.0}, {"default": 6.0}]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"lora": {"targets": ["q_prj"]}}, "q_prj is no linear layer of this model: did you mean q_proj?"),
        ({"lora": {"targets": ["embed_tokens"]}}, "embed_tokens is no linear layer"),
        ({"lora": {"targets": ["lm_head"]}}, "the weight of lm_head is tied"),
    ],
    ids=str,
)
def test_targets_that_cannot_be(tmp_path, model, says):
    with pytest.raises(ConfigError) as error:
        build(tiny.context(tmp_path), ModelSection(config=LLAMA, **model))
    assert says in str(error.value)


def test_freezing_beside_adapters_is_refused():
    with pytest.raises(ValueError, match="freeze has no effect with lora"):
        ModelSection(config=LLAMA, lora={}, freeze=["*norm*"])


def test_without_peft_the_way_to_get_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'trainforge-plugins\[lora\]'"):
        spec_of(tmp_path)


def test_a_module_of_ones_own_takes_adapters(tmp_path, monkeypatch):
    from tests.hf.test_freeze import FACTORY

    (tmp_path / "adapted_net.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    section = ModelSection(factory="adapted_net:make", lora={"targets": ["up"]})
    spec = build(tiny.context(tmp_path), section)
    trained = [parameter for parameter in spec.parameters if parameter.trainable]
    assert [parameter.block for parameter in trained] == [0, 0, 1, 1, 2, 2]
    assert spec.start_report()[1].startswith("lora: rank 8 on 3 layers (up)")


# ------------------------------------------------------------------------------------------- adapters exported alone


def trained_on_a_folder(folder, family, targets):
    """A run on a model folder with adapters that say something: the run folder and the model's folder."""
    tiny.transformers_model(family, vocab_size=264).save_pretrained(folder / "base")
    model = {"hf": str(folder / "base"), "config": None, "lora": LORA | {"targets": targets, "rslora": True}}
    recipe = write_recipe(
        folder, model=model, train=TRAIN | {"steps": 2, "lr": 0.1}, text={"tokenizer": "bytes"}
    )
    return run(recipe, folder / "run").folder, folder / "base"


def logits_of(model):
    ids = torch.randint(0, 250, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize(
    ("family", "targets", "written"),
    [
        ("llama", ["q_proj", "down_proj", "lm_head"], ["down_proj", "lm_head", "q_proj"]),
        ("gpt2", ["*.0.*c_proj"], ["transformer.h.0.attn.c_proj", "transformer.h.0.mlp.c_proj"]),
    ],
)
def test_peft_reads_adapters_that_were_exported_alone(tmp_path, family, targets, written):
    run_dir, base = trained_on_a_folder(tmp_path, family, targets)
    for lora in ("merged", "adapter"):
        export_run(run_dir, tmp_path / lora, SilentConsole(), dtype="fp32", lora=lora)
    assert not (tmp_path / "adapter/config.json").exists()
    beside = peft.PeftModel.from_pretrained(loaded(base), tmp_path / "adapter")
    merged = logits_of(loaded(tmp_path / "merged"))
    torch.testing.assert_close(logits_of(beside), merged, rtol=1e-4, atol=1e-5)
    assert (merged - logits_of(loaded(base))).abs().max() > 1e-2
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert config["target_modules"] == written
    # peft itself names and lays out the same tensors
    beside.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours, theirs = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    # and transformers finds the base by what is written
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="eager")
    torch.testing.assert_close(logits_of(found), merged, rtol=1e-4, atol=1e-5)


def test_adapters_alone_are_rounded_named_and_few(tmp_path):
    run_dir, base = trained_on_a_folder(tmp_path, "llama", ["q_proj"])
    notes = []
    console = SilentConsole()
    console.note = notes.append
    digest = export_run(run_dir, tmp_path / "out", console, lora="adapter")
    assert digest == json.loads((run_dir / "summary.json").read_text())["weights_digest"]
    final, stored = weights_of(run_dir), load_file(tmp_path / "out/adapter_model.safetensors")
    for name, value in final.items():
        half = stored[f"base_model.model.{name.replace('.default.', '.')}"]
        assert half.dtype == torch.bfloat16
        assert (half.float() - value).abs().max() <= value.abs().max() / 256
    assert len(stored) == len(final)
    assert notes[-1] == f"these are the adapters alone: they belong to {base}"
    assert f"adapters alone, to be loaded beside {base}" in (tmp_path / "out/README.md").read_text()
    assert (tmp_path / "out/tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("lora", "says"),
    [(None, "no adapters to be exported alone"), (LORA, "belong to weights that no model folder holds")],
    ids=["none", "random"],
)
def test_adapters_that_cannot_be_exported_alone(tmp_path, lora, says):
    run_dir = run(recipe_in(tmp_path, lora, steps=1), tmp_path / "run").folder
    with pytest.raises(UserError, match=says) as error:
        export_run(run_dir, tmp_path / "out", SilentConsole(), lora="adapter")
    assert "leave out --lora adapter" in str(error.value)
    assert not list(tmp_path.glob("*out*"))
