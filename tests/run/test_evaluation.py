"""The validation loss is the mean over all supervised tokens, however rows fall on ranks and micro-batches."""

import signal

import pytest
import torch
from tests.run.runs import MODEL, Outcome, run, write_recipe
from tests.run.test_equivalence import weights_of
from tests.support.many_runs import Start, on_ranks
from tests.support.processes import ended, start_forge_run, wait_until
from transformers import AutoConfig, AutoModelForCausalLM

LENGTH = 32
LLAMA = MODEL | {"attention_dropout": 0.0, "model_type": "llama"}


def recipe_with(folder, rows, micro_batch):
    """Two steps of training, then the loss over `rows` rows of a file of its own; the last row is not full."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = folder / "held-out.txt"
    held_out.write_bytes(text_of(rows))
    train = {"steps": 2, "global_batch": 4, "micro_batch": micro_batch, "lr": 1e-3}
    return write_recipe(
        folder,
        20,
        model={"config": LLAMA},
        train=train,
        text={"validation": str(held_out), "validation_rows": rows},
    )


def text_of(rows):
    text = "".join(f"{i * 37 % 101} whales; " for i in range(rows * 8)).encode()
    return text[: rows * LENGTH - 11]


def by_hand(outcome, rows):
    """transformers' model with the weights that were saved, over the bytes of the file and the end token after them."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA), dtype=torch.float32).eval()
    model.load_state_dict(weights_of(outcome.folder), strict=False)
    model.tie_weights()
    ids = [*text_of(rows), 256]
    total, tokens = 0.0, 0
    for first in range(0, len(ids), LENGTH):
        row = torch.tensor(ids[first : first + LENGTH + 1])
        with torch.no_grad():
            logits = model(input_ids=row[:LENGTH][None]).logits[0, : len(row) - 1].double()
        total += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
        tokens += len(row) - 1
    assert tokens == len(ids) - 1, "every token but the first is predicted once"
    return total / tokens


@pytest.mark.parametrize(("rows", "micro_batch"), [(7, 1), (7, 2), (7, 4), (1, 4)])
def test_over_micro_batches(tmp_path, rows, micro_batch):
    outcome = run(recipe_with(tmp_path, rows, micro_batch), tmp_path / "run")
    assert outcome.summary["eval_loss"] == pytest.approx(by_hand(outcome, rows), rel=1e-6)


@pytest.mark.ranks
def test_over_ranks(tmp_path):
    """With 5 rows in micro-batches of 2, rank 0 has four of them and rank 1 one; of 1 row, rank 1 has nothing."""
    recipes = {rows: recipe_with(tmp_path / str(rows), rows, 2) for rows in (1, 5)}
    starts = [Start(recipe, recipe.parent / "two") for recipe in recipes.values()]
    assert {end.code for ends in on_ranks(2, starts) for end in ends} == {0}
    for rows, recipe in recipes.items():
        one, both = run(recipe, recipe.parent / "one"), Outcome(0, recipe.parent / "two")
        assert both.summary["world"] == 2
        assert both.summary["eval_loss"] == pytest.approx(by_hand(both, rows), rel=1e-6)
        assert both.summary["eval_loss"] == pytest.approx(one.summary["eval_loss"], rel=1e-6)


# The validation split has no end; a file says that the evaluation is at work.
ENDLESS = """
from dataclasses import replace
from itertools import cycle

from trainforge.hookspecs import hookimpl


@hookimpl(wrapper=True)
def forge_data():
    provider = yield

    def build(ctx, config):
        data = provider.build(ctx, config)
        batches = data.validation

        def validation():
            for number, batch in enumerate(cycle(list(batches()))):
                if number == 20:
                    (ctx.run_dir / f"evaluates-{ctx.rank}").touch()
                yield batch

        data.validation = validation
        return data

    return replace(provider, build=build)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_is_not_kept_waiting_by_a_long_evaluation(tmp_path, nproc):
    recipe = recipe_with(tmp_path, 7, 1)
    recipe.write_text(recipe.read_text().replace("steps: 2", "steps: 100000\n  eval_every: 3"))
    (tmp_path / "endless.py").write_text(ENDLESS)
    process = start_forge_run(
        recipe, tmp_path / "run", "--nproc", nproc, "--plugins", tmp_path / "endless.py"
    )
    wait_until(lambda: all((tmp_path / f"run/evaluates-{rank}").exists() for rank in range(nproc)), process)
    process.send_signal(signal.SIGTERM)
    out, err = ended(process)
    assert process.returncode == 3, out + err
    outcome = Outcome(3, tmp_path / "run")
    assert (outcome.summary["status"], outcome.summary["eval_loss"]) == ("stopped", None)
    assert outcome.summary["steps"] in (3, 4)
    assert (tmp_path / f"run/checkpoints/step-{outcome.summary['steps']:08d}/checkpoint.json").exists()
