"""Learning rates by name: `train.lr_groups`, against torch's parameter groups."""

from __future__ import annotations

import pytest
import torch
from tests.adamw.test_adamw import make, make_slots, update
from tests.run.runs import run, write_recipe
from tests.run.test_equivalence import weights_of
from tests.support.plain_loop import initial_weights

from trainforge.errors import ConfigError
from trainforge.plan_sizes import describe_model
from trainforge.planning import make_plan
from trainforge.schedule import with_rates
from trainforge.sections import TrainSection
from trainforge.stages import ParameterSpec

SPECS = (
    ParameterSpec("embed.weight", (4, 2), "embedding", aliases=("head.weight",)),
    ParameterSpec("blocks.0.weight", (2, 2)),
    ParameterSpec("blocks.0.norm", (2,), "norm"),
    ParameterSpec("blocks.1.weight", (2, 2), trainable=False),
)


def scales(*groups: dict) -> list[float]:
    train = TrainSection.model_validate({"steps": 1, "lr": 0.01, "lr_groups": list(groups)})
    return [spec.lr_scale for spec in with_rates(SPECS, train)]


def test_a_rate_or_a_factor_and_the_last_match_counts():
    assert scales() == [1.0] * 4
    assert scales({"match": "head*", "lr": 0.001}) == [pytest.approx(0.1), 1, 1, 1]
    assert scales({"match": "blocks*", "scale": 3}, {"match": "*norm", "scale": 2}) == [1, 3, 2, 1]


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (
            [{"match": "embd.weight", "scale": 2}],
            "embd.weight matches no parameter: did you mean embed.weight?",
        ),
        ([{"match": "blocks.1.*", "scale": 2}], "blocks.1.* has no effect"),
        ([{"match": "*norm", "scale": 2}, {"match": "*", "scale": 2}], "norm has no effect"),
    ],
)
def test_a_group_that_changes_nothing_is_refused(groups, says):
    with pytest.raises(ConfigError) as error:
        scales(*groups)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "group", [{"match": "*"}, {"match": "*", "lr": 1, "scale": 1}, {"match": "*", "lr": 0}, {"scale": 1}]
)
def test_a_group_says_one_rate(tmp_path, group):
    with pytest.raises(ConfigError, match=r"train\.lr_groups"):
        make_plan(write_recipe(tmp_path, train={"lr_groups": [group]}))


def test_equals_torch_groups():
    """Decay is multiplied with the group's rate, as in torch."""
    optimizer = make(weight_decay=0.3)
    slots = make_slots(optimizer)
    rates = [0.5, 2.0, 1.0, 1.0, 0.1]
    slots = [
        type(slot)(_scaled(slot.spec, rate), slot.extent, slot.master, slot.grad, slot.state)
        for slot, rate in zip(slots, rates, strict=True)
    ]
    leaves = [slot.master.clone().requires_grad_() for slot in slots]
    reference = torch.optim.AdamW(
        [
            {"params": [leaf], "lr": 0.01 * rate, "weight_decay": 0.3 if slot.spec.kind == "matrix" else 0.0}
            for leaf, slot, rate in zip(leaves, slots, rates, strict=True)
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    draw = torch.Generator().manual_seed(1)
    for step in range(1, 5):
        for slot, leaf in zip(slots, leaves, strict=True):
            slot.grad.copy_(torch.randn(slot.grad.shape, generator=draw))
            leaf.grad = slot.grad.clone()
        optimizer.update(slots, update(step))
        reference.step()
    for slot, leaf in zip(slots, leaves, strict=True):
        torch.testing.assert_close(slot.master, leaf.detach(), rtol=1e-6, atol=1e-7)


def _scaled(spec, rate):
    return with_rates([spec], TrainSection(steps=1, lr_groups=({"match": "*", "scale": rate},)))[0]


def test_a_whole_run_moves_a_group_at_its_own_rate(tmp_path):
    """Adam's first step is the learning rate for every element with a gradient: so it can be read from the weights."""
    train = {"steps": 1, "schedule": "constant", "warmup": 0, "weight_decay": 0, "lr": 0.01, "eps": 1e-12}
    groups = [{"match": "*embed*", "lr": 1e-3}, {"match": "*layers.1.*", "scale": 0.5}]
    recipe = write_recipe(tmp_path, train=train | {"lr_groups": groups})
    before = initial_weights(recipe)
    after = weights_of(run(recipe, tmp_path / "run").folder)
    for name in after:
        moved = (after[name] - before[name]).abs().max().item()
        rate = 1e-3 if "embed" in name else 0.005 if "layers.1." in name else 0.01
        assert moved == pytest.approx(rate, rel=1e-2), name


def test_a_group_must_not_change_on_resume(tmp_path):
    recipe = write_recipe(tmp_path, train={"steps": 2})
    run(recipe, tmp_path / "run", max_steps=1)
    changed = write_recipe(tmp_path, train={"steps": 2, "lr_groups": [{"match": "*embed*", "scale": 2}]})
    with pytest.raises(Exception, match=r"train\.lr_groups"):
        run(changed, tmp_path / "run")


def test_a_misspelt_group_ends_before_training(tmp_path):
    recipe = write_recipe(tmp_path, train={"lr_groups": [{"match": "*.embeds*", "scale": 2}]})
    assert describe_model(make_plan(recipe))
    with pytest.raises(ConfigError, match=r"\*\.embeds\* matches no parameter"):
        run(recipe, tmp_path / "run")
