"""C29: NaN or Inf in one gradient of one rank: no rank moves, the count is right, and all-zero gradients are a step."""

import pytest
import torch
from safetensors.torch import load_file
from tests.cases.reference import assert_weights, plain_loop, toy_run, weights

from trainforge.errors import TrainForgeError

SPOIL = ["", "nan", "", "inf", "zero", ""]


def zeroed(step, module):
    if SPOIL[step - 1] == "zero":  # the hidden states carry no gradient; the head's own stays
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and not name.startswith("head"):
                parameter.grad.zero_()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_a_spoiled_step_changes_nothing_and_the_others_are_as_without_it(tmp_path, ranks):
    run = toy_run(tmp_path / "run", ranks=ranks, model={"spoil": SPOIL})
    for step in (2, 4):
        before, after = weights(run, step - 1), weights(run, step)
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert run.summary["skipped_steps"] == 2
    assert_weights(run, plain_loop("plain", skip=frozenset({2, 4}), change=zeroed))


def test_too_many_in_a_row_end_the_run_and_what_was_saved_is_finite(tmp_path):
    """C37's second part: a state that is not finite cannot be saved, since no step makes the weights so."""
    spoil = ["nan", "", "inf", "inf", "inf", "inf"]
    with pytest.raises(TrainForgeError, match=r"3 steps in a row .*step 5.* were not finite"):
        toy_run(
            tmp_path / "run", model={"spoil": spoil}, train={"max_bad_steps": 3, "save_every": 1, "keep": 2}
        )
    kept = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    assert len(kept) == 2
    for path in kept:
        tensors = load_file(path / "rank-00000.safetensors")
        assert all(tensor.isfinite().all() for tensor in tensors.values() if tensor.is_floating_point())
