"""`model.init_from`: weights of another run, against those that its checkpoint's files hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.export.test_export import TiedToy
from tests.hf import tiny
from tests.run.runs import MODEL, run, write_recipe
from tests.run.test_equivalence import weights_of
from tests.run.test_ranks import two_ranks

import trainforge
from trainforge.checkpoints import list_checkpoints
from trainforge.context import SilentConsole
from trainforge.errors import CheckpointError, ConfigError, IncompatibleError
from trainforge.exporting import export_run
from trainforge.plan_sizes import describe_model
from trainforge.planning import make_plan
from trainforge.testing.model import TinyModel
from trainforge.testing.reference import TinyModelSection
from trainforge_plugins.dcp.checkpoint import DcpCheckpoint
from trainforge_plugins.hf.init_from import StoredInitial

PLAIN = MODEL | {"attention_dropout": 0.0}
LORA = {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "down_proj"]}
FROZEN = "model.layers.0.*"


def recipe_in(folder: Path, source: object, steps: int = 3, **model: object) -> Path:
    """A run of other data than the source's that names no model of its own, unless `model` does."""
    model = {"config": None, "init_from": str(source)} | model
    return write_recipe(folder, 20, model=model, train={"steps": steps, "warmup": 0}, run={"seed": 5})


def source_in(folder: Path, steps: int = 2, **model: object) -> Path:
    recipe = write_recipe(
        folder,
        model={"config": PLAIN} | model,
        train={"steps": steps, "save_every": 1},
        text={"tokenizer": "bytes"},
    )
    assert trainforge.run(recipe, run_dir=folder / "run") == 0
    return folder / "run"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint of each. Do not change it."""
    return source_in(tmp_path_factory.mktemp("source"))


@pytest.fixture
def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copied"))


def initial(recipe: Path) -> dict[str, torch.Tensor]:
    """The initial weights of the run that the recipe describes."""
    return tiny.initial(describe_model(make_plan(recipe))[0])


def stored(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Masters of a checkpoint, read by safetensors alone."""
    alone = folder.parent / f"{folder.name}-{step}" / "checkpoints"
    shutil.copytree(folder / f"checkpoints/step-{step:08d}", alone / "step-00000001")
    return weights_of(alone.parent)


# ---------------------------------------------------------------------------------------------------- which weights


def test_only_weights_are_taken_over_and_the_step_is_written_down(source: Path, tmp_path: Path):
    """The same training as from an exported folder: no moments, no counters, no position in the data."""
    recipe = recipe_in(tmp_path, source)
    ours = run(recipe, tmp_path / "run")
    export_run(source, tmp_path / "folder", SilentConsole(), dtype="fp32")
    recipe = recipe_in(tmp_path, source, hf=str(tmp_path / "folder"), init_from=None)
    folder = tmp_path / "bytes.yaml"
    folder.write_text(recipe.read_text().replace("text:\n", "text:\n  tokenizer: bytes\n"))
    theirs = run(folder, tmp_path / "theirs")
    assert ours.series("loss") == theirs.series("loss")
    assert ours.series("step") == [1, 2, 3]
    assert ours.summary["weights_digest"] == theirs.summary["weights_digest"]
    saved = make_plan(tmp_path / "run/recipe.yaml").recipe.model
    assert (saved.init_from, saved.config) == (f"{source}@2", PLAIN)
    assert f"weights: of step 2 of {source}; optimizer, counters" in (tmp_path / "run/log.txt").read_text()


@pytest.mark.parametrize(
    ("reference", "step"),
    [("@1", 1), ("@2", 2), ("", 2), ("/checkpoints/step-00000001", 1), ("/checkpoints@1", 1)],
)
def test_every_way_to_name_a_step(source: Path, tmp_path: Path, reference: str, step: int):
    weights, expected = initial(recipe_in(tmp_path, f"{source}{reference}")), stored(source, step)
    shutil.rmtree(source.parent / f"run-{step}")
    for name, value in expected.items():
        assert torch.equal(weights[name].view(-1), value.view(-1)), name


def test_the_best_is_the_one_with_the_lowest_validation_loss(source: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="holds a validation loss: name a step"):
        make_plan(recipe_in(tmp_path, f"{source}@best"))
    recipe = write_recipe(
        tmp_path,
        model={"config": PLAIN},
        train={"steps": 4, "eval_every": 1, "save_every": 1, "keep": 9, "lr": 3.0, "best": "eval_loss"},
        text={"validation": 2},
    )
    outcome = run(recipe, tmp_path / "run")
    losses = {entry["step"]: entry["eval_loss"] for entry in outcome.metrics if "eval_loss" in entry}
    best = min(losses, key=lambda step: losses[step])
    assert best != 4, "the last step must not be the best one for this to show anything"
    plan = make_plan(recipe_in(tmp_path / "new", f"{outcome.folder}@best"))
    assert plan.recipe.model.init_from == f"{outcome.folder}@{best}"


WRITER = """
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider
from trainforge.testing.reference import ReferenceSection, _checkpoint

@hookimpl
def forge_checkpoint():
    return Provider(build=_checkpoint, config=ReferenceSection)
"""


def test_a_source_of_another_checkpoint_plugin_is_read_with_the_plugin_that_wrote_it(tmp_path: Path):
    (tmp_path / "writer.py").write_text(WRITER)
    recipe = write_recipe(tmp_path, model={"config": PLAIN}, train={"steps": 1})
    trainforge.run(recipe, run_dir=tmp_path / "run", plugins=[str(tmp_path / "writer.py")])
    assert list_checkpoints(tmp_path / "run/checkpoints")[0].writer == "writer"
    weights = initial(recipe_in(tmp_path / "new", tmp_path / "run"))
    for name, value in weights_of(run(recipe, tmp_path / "dcp").folder).items():
        assert torch.equal(weights[name].view(-1), value.view(-1)), name


def test_one_tensor_at_a_time_and_none_is_kept(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    restore, asked = DcpCheckpoint.restore, []

    def watching(self, parts, path):
        asked.append([named.extent.name for part in parts.values() for named in part.state().tensors])
        restore(self, parts, path)

    monkeypatch.setattr(DcpCheckpoint, "restore", watching)
    spec, _ = describe_model(make_plan(recipe_in(tmp_path, source)))
    assert asked == []  # a plan reads no weight
    tiny.initial(spec)
    assert sorted(name for (name,) in asked) == sorted(parameter.name for parameter in spec.parameters)
    assert isinstance(spec.weights_source, StoredInitial)
    assert spec.weights_source._last is None


class CountingToy(TiedToy):
    """Its persistent buffer changes while it is trained."""

    def hidden(self, batch):
        with torch.no_grad():
            self.scale.mul_(1.5)
        return super().hidden(batch)


def counting_toy(ctx):
    return CountingToy()


def test_a_module_of_the_users_own_with_a_buffer(tmp_path: Path):
    source = source_in(tmp_path / "source", config=None, factory=f"{__name__}:counting_toy")
    spec, _ = describe_model(make_plan(recipe_in(tmp_path, source, factory=f"{__name__}:counting_toy")))
    weights = tiny.initial(spec)
    assert torch.equal(weights["head.weight"], weights_of(source)["embedding.weight"])
    assert spec.module.scale == 2.0
    spec.load_buffers()
    assert spec.module.scale == 2.0 * 1.5**2  # two steps of one micro-batch


# --------------------------------------------------------------------------------------------- adapters and freezing


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trains adapters on the random weights of seed 0."""
    return source_in(tmp_path_factory.mktemp("adapted"), lora=LORA)


def merged(adapted: Path) -> dict[str, torch.Tensor]:
    """The weights that the adapted run was started from, with its adapters added by hand."""
    base = initial(write_recipe(adapted.parent / "base", model={"config": PLAIN}))
    adapters = weights_of(adapted)
    for name in list(base):
        owner = name.removesuffix(".weight")
        if f"{owner}.lora_A.default.weight" in adapters:
            a, b = (adapters[f"{owner}.{part}.default.weight"] for part in ("lora_A", "lora_B"))
            assert b.any()
            base[name] = base[name] + (LORA["alpha"] / LORA["rank"]) * (b @ a)
    return base


def test_adapters_go_into_the_weights_of_a_run_without_them(adapted: Path, tmp_path: Path):
    weights, expected = initial(recipe_in(tmp_path, adapted)), merged(adapted)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(weights[name], value, rtol=0, atol=1e-7), name


def test_a_run_with_the_same_adapters_goes_on_with_them(adapted: Path, tmp_path: Path):
    weights = initial(recipe_in(tmp_path, adapted, lora=LORA | {"dropout": 0.5}))
    expected = initial(write_recipe(tmp_path / "base", model={"config": PLAIN, "lora": LORA}))
    expected |= weights_of(adapted)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_adapters_alone_are_exported_only_beside_what_they_belong_to(tmp_path: Path):
    folder = tmp_path / "folder"
    tiny.transformers_model("llama", vocab_size=264).save_pretrained(folder)
    from_folder = {"hf": str(folder), "config": None}
    full = source_in(tmp_path / "full", **from_folder)
    adapted = source_in(tmp_path / "adapted", lora=LORA, **from_folder)
    for source, base in ((full, ""), (adapted, str(folder))):
        spec, _ = describe_model(make_plan(recipe_in(tmp_path, source, lora=LORA)))
        assert spec.source == base


@pytest.mark.parametrize("other", [{"alpha": 2.0}, {"rank": 4}, {"targets": ["q_proj"]}, {"rslora": True}])
def test_other_adapters_start_beside_the_merged_weights(adapted: Path, tmp_path: Path, other: dict):
    weights, expected = initial(recipe_in(tmp_path, adapted, lora=LORA | other)), merged(adapted)
    for name, value in weights.items():
        if "lora_B" in name:
            assert not value.any()
        elif "lora_A" not in name:
            plain = expected[name.replace(".base_layer", "")]
            assert torch.allclose(value, plain, rtol=0, atol=1e-7), name


def test_new_adapters_and_frozen_parameters_stand_on_the_other_runs_weights(source: Path, tmp_path: Path):
    trained = weights_of(source)
    for more in ({"lora": LORA}, {"freeze": [FROZEN]}):
        for name, value in initial(recipe_in(tmp_path, source, **more)).items():
            if "lora_" not in name and name != "lm_head.weight":
                assert torch.equal(value, trained[name.replace(".base_layer", "")]), name


def test_what_was_frozen_there_comes_from_where_that_run_started(tmp_path: Path):
    frozen = source_in(tmp_path / "frozen", freeze=[FROZEN])
    started = initial(tmp_path / "frozen/recipe.yaml")
    second = run(recipe_in(tmp_path / "second", frozen, freeze=[FROZEN]), tmp_path / "second/run")
    weights, trained = initial(recipe_in(tmp_path / "third", second.folder)), weights_of(second.folder)
    for name, value in weights.items():
        there = name.startswith(FROZEN[:-1])
        assert (name in trained) is not there or name == "lm_head.weight"
        assert torch.equal(value, started[name] if there else trained.get(name, value)), name


# ------------------------------------------------------------------------------------------------------------ resume


def test_a_resume_needs_the_other_run_no_more(copied: Path, tmp_path: Path):
    recipe = recipe_in(tmp_path, copied)
    whole = run(recipe, tmp_path / "whole")
    run(recipe, tmp_path / "run", max_steps=1)
    (copied / "checkpoints/step-00000002").rename(copied / "checkpoints/gone")
    with pytest.raises(IncompatibleError, match=r"model.init_from: '.*@2' in the folder, '.*@1' now"):
        run(recipe, tmp_path / "run")
    shutil.rmtree(copied)
    with pytest.raises(ConfigError, match=r"copied is no run folder.*recipe.yaml in its own folder"):
        run(recipe, tmp_path / "run")
    again = run(tmp_path / "run/recipe.yaml", tmp_path / "run")
    assert again.summary["weights_digest"] == whole.summary["weights_digest"]
    export_run(tmp_path / "run", tmp_path / "out", SilentConsole())
    with pytest.raises(
        ConfigError, match=r"the weights of step 2 of .*copied cannot be read: .* no run folder"
    ):
        run(tmp_path / "run/recipe.yaml", tmp_path / "fresh")


@pytest.mark.parametrize("more", [{"freeze": [FROZEN]}, {"lora": LORA}])
def test_frozen_parameters_are_read_from_the_other_run_again(copied: Path, tmp_path: Path, more: dict):
    recipe = recipe_in(tmp_path, copied, **more)
    whole = run(recipe, tmp_path / "whole")
    run(recipe, tmp_path / "run", max_steps=1)
    again = run(recipe, tmp_path / "run", max_steps=1)
    assert again.series("loss") == whole.series("loss")[:2]
    shutil.rmtree(copied)
    with pytest.raises(
        ConfigError, match="frozen parameters of this run are in none of its own checkpoints: "
    ):
        run(tmp_path / "run/recipe.yaml", tmp_path / "run")


# ------------------------------------------------------------------------------------------------------ what is refused


def test_names_and_shapes_that_differ_are_listed(source: Path, tmp_path: Path):
    other = PLAIN | {"num_hidden_layers": 1, "intermediate_size": 48, "tie_word_embeddings": False}
    with pytest.raises(ConfigError) as caught:
        initial(recipe_in(tmp_path, source, config=other | {"model_type": "qwen3"}))
    text = str(caught.value)
    assert f"the weights of step 2 of {source} are not those of this model" in text
    only_here, only_there, shapes = text.splitlines()[1:4]
    assert "only in this model: model.layers.0.self_attn.q_norm.weight" in only_here
    assert "only there: model.layers.0.self_attn.q_proj.bias" in only_there
    assert "and " in only_there
    assert "model.layers.0.mlp.down_proj.weight ([32, 64] there, [32, 48] here)" in shapes


def test_an_untied_head_starts_as_the_embedding_and_is_never_dropped(source: Path, tmp_path: Path):
    weights = initial(recipe_in(tmp_path, source, config=PLAIN | {"tie_word_embeddings": False}))
    assert torch.equal(weights["lm_head.weight"], weights_of(source)["model.embed_tokens.weight"])
    untied = source_in(tmp_path / "untied", config=PLAIN | {"tie_word_embeddings": False})
    with pytest.raises(ConfigError, match=r"only there: lm_head\.weight"):
        initial(recipe_in(tmp_path, untied, config=PLAIN))


def test_a_damaged_source_is_named(copied: Path, tmp_path: Path):
    files = (copied / "checkpoints/step-00000002").glob("*.safetensors")
    data = max(files, key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"model.init_from: .*{data.name}.*RUN@STEP"):
        initial(recipe_in(tmp_path, copied))


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("nowhere", "nowhere is no run folder"),
        ("{}@7", "step 7: there is no such"),
        ("{}@last", "stands a step"),
    ],
)
def test_a_wrong_name_is_a_sentence(source: Path, tmp_path: Path, reference: str, says: str):
    with pytest.raises(ConfigError, match=says):
        initial(recipe_in(tmp_path, reference.format(source)))


def own_spec(ctx):
    return TinyModel(TinyModelSection(), 0)


def test_a_model_spec_of_the_users_own_is_refused(source: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="works on torch modules"):
        initial(recipe_in(tmp_path, source, factory=f"{__name__}:own_spec"))


# ------------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_start_from_the_same_weights(source: Path, tmp_path: Path):
    recipe = recipe_in(tmp_path, source)
    one, both = run(recipe, tmp_path / "one"), two_ranks(recipe, tmp_path / "two")
    assert both.summary["world"] == 2
    assert both.series("loss") == pytest.approx(one.series("loss"), rel=1e-6)
