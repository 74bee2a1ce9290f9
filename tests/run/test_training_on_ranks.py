"""Freezing, adapters, rates by name and early stopping over two ranks: the weights and losses of one rank.

With two micro-batches in a step either way, each gradient is the sum of the same two numbers, so the weights are equal
to the bit. The losses are added up in another order.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.run.runs import MODEL, Outcome, run, write_recipe
from tests.run.test_equivalence import weights_of
from tests.support.many_runs import Start, on_ranks

from trainforge.checkpoints import list_checkpoints
from trainforge.context import SilentConsole
from trainforge.exporting import export_run
from trainforge_plugins.dcp import manifest

pytestmark = pytest.mark.ranks

LLAMA = MODEL | {"model_type": "llama", "tie_word_embeddings": False}
TRAIN = {"steps": 8, "global_batch": 2, "micro_batch": 1, "lr": 1e-2}
FROZEN = ["*layers.0.*", "*layers.1.*norm*"]
LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"], "dropout": 0.2}
RATES = [{"match": "*embed*", "lr": 1e-3}, {"match": "*layers.1.*", "scale": 0.25}]
WAYS = {
    "freeze": {"model": {"config": LLAMA, "freeze": FROZEN}},
    "lora": {"model": {"config": LLAMA, "lora": LORA}},
    "lr_groups": {"model": {"config": LLAMA}, "train": {"lr_groups": RATES, "weight_decay": 0.5}},
    # no fall is large enough: the second and third evaluation are in vain
    "early_stop": {
        "model": {"config": LLAMA},
        "train": {"eval_every": 2, "early_stop": {"patience": 2, "min_delta": 100}, "best": "eval_loss"},
        "text": {"validation": 5},
    },
    "tied": {"model": {"config": MODEL}, "train": {"micro_batch": 1}},
}


def poisoned(patch: pytest.MonkeyPatch, rank: int) -> None:
    """From step 2 on what rank 1 saves of the masters, its share of them, is not finite; training goes on as it was."""
    from trainforge_plugins.dcp.saving import DcpSave as Save

    write = Save.write

    def spoiling(self, chunks):
        if rank == 1 and self.facts.step >= 2:
            for chunk, copy in zip(chunks, self._copies, strict=True):
                if "/master/" in chunk.tensor:
                    copy.fill_(math.nan)
        return write(self, chunks)

    patch.setattr(Save, "write", spoiling)


def recipe_of(folder: Path, way: str) -> Path:
    sections = {"train": {}, **WAYS[way]}
    return write_recipe(folder / way, 20, **{**sections, "train": TRAIN | sections["train"]})


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The folder in which every way was carried out, by one rank and by two."""
    folder = tmp_path_factory.mktemp("ranks")
    starts = []
    for way in WAYS:
        recipe = recipe_of(folder, way)
        run(recipe, folder / way / "one")
        starts.append(Start(recipe, folder / way / "two"))
    for way in ("freeze", "lora"):  # two ranks begin, one goes on
        starts.append(Start(folder / way / "recipe.yaml", folder / way / "moved", max_steps=3))
    train = TRAIN | {"steps": 4, "save_every": 1, "keep": 2, "max_bad_steps": 100}
    spoilt = write_recipe(folder / "spoilt", 20, model={"config": LLAMA}, train=train)
    starts.append(Start(spoilt, folder / "spoilt/run", 3, poisoned))
    starts.append(Start(spoilt, folder / "spoilt/again", 3, poisoned))
    starts.append(Start(spoilt, folder / "spoilt/again"))
    for start, ends in zip(starts, on_ranks(2, starts), strict=True):
        assert [end.code for end in ends] == [0, 0], (start.run_dir, ends)
    return folder


def outcome(folder: Path, way: str, who: str) -> Outcome:
    return Outcome(0, folder / way / who)


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_give_what_one_gives(both, way):
    one, two = outcome(both, way, "one"), outcome(both, way, "two")
    assert two.summary["world"] == 2
    assert two.summary["status"] == one.summary["status"]
    assert two.series("loss") == pytest.approx(one.series("loss"), rel=1e-6)
    assert two.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-5)
    assert two.series("lr") == one.series("lr")
    weights, wanted = weights_of(two.folder), weights_of(one.folder)
    assert weights.keys() == wanted.keys()
    if way == "tied":  # both uses of the matrix add to one gradient, in an order of their own
        for name, tensor in wanted.items():
            assert (weights[name] - tensor).abs().max() <= 1e-2 * TRAIN["lr"], name
    else:
        assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())
        assert two.summary["weights_digest"] == one.summary["weights_digest"]


def test_what_is_frozen_is_not_in_the_checkpoint_of_two_ranks(both):
    names = weights_of(both / "freeze/two")
    assert "model.layers.1.mlp.up_proj.weight" in names
    assert not [name for name in names if ".layers.0." in name or "norm" in name.partition("layers.1.")[2]]
    adapters = weights_of(both / "lora/two")
    assert len(adapters) == 2 * 2 * len(LORA["targets"])
    assert all("lora_" in name for name in adapters)
    assert all(tensor.any() for tensor in adapters.values())


@pytest.mark.parametrize("way", ["freeze", "lora"])
def test_begun_on_two_ranks_and_finished_on_one(both, way):
    moved = run(both / way / "recipe.yaml", both / way / "moved")
    assert moved.summary["resumed_from"] == 3
    assert moved.summary["weights_digest"] == outcome(both, way, "one").summary["weights_digest"]


def test_early_stop_ends_both_ranks_after_the_same_evaluation(both):
    one, two = outcome(both, "early_stop", "one"), outcome(both, "early_stop", "two")
    for each in (one, two):
        assert (each.summary["status"], each.summary["steps"]) == ("early_stopped", 6)
    assert two.summary["eval_loss"] == pytest.approx(one.summary["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("way", ["tied", "lr_groups"])
def test_an_export_of_two_ranks_has_every_key_once(both, way):
    """C44: the file of each rank holds a share of the weights; transformers reads the whole, tied as it was."""
    from transformers import AutoModelForCausalLM

    out = both / way / "exported"
    export_run(both / way / "two", out, SilentConsole(), dtype="fp32")
    model, info = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not any(info.values()), info
    weights = weights_of(both / way / "two")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert (head.data_ptr() == embedding.data_ptr()) is (way == "tied")
    assert ("lm_head.weight" in weights) is (way != "tied")


def test_what_one_rank_of_two_saves_not_finite_takes_no_good_checkpoints_place(both):
    """C37: rank 0's share is finite, so rank 0 learns it from rank 1."""
    kept = {info.step: info.finite for info in list_checkpoints(both / "spoilt/run/checkpoints")}
    assert kept == {1: True, 3: False}
    assert "the weights of step 2 are not finite" in (both / "spoilt/run/log.txt").read_text()
    resumed = outcome(both, "spoilt", "again")
    assert (resumed.summary["resumed_from"], resumed.summary["status"]) == (1, "finished")
    assert resumed.series("step") == [1, 2, 3, 4]
    after = list_checkpoints(both / "spoilt/again/checkpoints")
    assert [(info.step, info.finite) for info in after] == [(3, True), (4, True)]
    assert not any(manifest.verify(info.path) for info in after)
