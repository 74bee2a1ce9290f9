"""The validation loss is the mean over all supervised tokens, however rows fall on ranks and micro-batches."""

import signal
import time

import pytest
import torch
from tests.run.runs import MODEL, Outcome, run, write_recipe
from tests.run.test_equivalence import weights_of
from tests.run.test_ranks import two_ranks
from tests.support.processes import start_forge_run, steps_logged, wait_until
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
@pytest.mark.parametrize("rows", [1, 5])
def test_over_ranks(tmp_path, rows):
    """With 5 rows in micro-batches of 2, rank 0 has four of them and rank 1 one; of 1 row, rank 1 has nothing."""
    recipe = recipe_with(tmp_path, rows, 2)
    one = run(recipe, tmp_path / "one")
    both = two_ranks(recipe, tmp_path / "two")
    assert both.summary["world"] == 2
    assert both.summary["eval_loss"] == pytest.approx(by_hand(both, rows), rel=1e-6)
    assert both.summary["eval_loss"] == pytest.approx(one.summary["eval_loss"], rel=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_is_not_kept_waiting_by_a_long_evaluation(tmp_path, nproc):
    recipe = recipe_with(tmp_path, 40_000, 1)
    recipe.write_text(recipe.read_text().replace("steps: 2", "steps: 100000\n  eval_every: 3"))
    process = start_forge_run(recipe, tmp_path / "run", "--nproc", nproc)
    wait_until(lambda: steps_logged(tmp_path / "run") == 2, process)
    time.sleep(1)  # by now it evaluates, for half a minute if nobody stops it
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 12
    assert process.returncode == 3, out + err
    outcome = Outcome(3, tmp_path / "run")
    assert (outcome.summary["status"], outcome.summary["eval_loss"]) == ("stopped", None)
    assert outcome.summary["steps"] in (3, 4)
    assert (tmp_path / f"run/checkpoints/step-{outcome.summary['steps']:08d}/checkpoint.json").exists()
