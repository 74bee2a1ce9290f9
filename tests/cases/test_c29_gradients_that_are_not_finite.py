"""C29: NaN or Inf in one gradient of one rank: no rank moves, the count is right, and all-zero gradients are a step."""

import pytest
import torch
from safetensors.torch import load_file
from tests.cases.reference import assert_weights, plain_loop, toy_run, weights

from trainforge.errors import TrainForgeError

SPOIL = ["", "nan", "", "inf", "zero", "none", ""]


def zeroed(step, module):
    if SPOIL[step - 1] == "zero":  # the hidden states carry no gradient; the head's own stays
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and not name.startswith("head"):
                parameter.grad.zero_()
    elif SPOIL[step - 1] == "none":
        for parameter in module.parameters():
            parameter.grad.zero_()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_a_spoiled_step_changes_nothing_and_the_others_are_as_without_it(tmp_path, ranks):
    run = toy_run(tmp_path / "run", ranks=ranks, model={"spoil": SPOIL}, train={"steps": len(SPOIL)})
    for step in (2, 4):
        before, after = weights(run, step - 1), weights(run, step)
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert run.summary["skipped_steps"] == 2
    reference = plain_loop("plain", steps=len(SPOIL), skip=frozenset({2, 4}), change=zeroed)
    assert_weights(run, reference)
    assert reference.norms[-2] == run.metrics[5]["grad_norm"] == 0.0  # a norm of zero is a step like others
    assert not any(torch.equal(weights(run, 5)[name], tensor) for name, tensor in weights(run, 6).items())


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_too_many_in_a_row_end_the_run_and_what_was_saved_is_finite(tmp_path, ranks):
    """C37's second part: a state that is not finite cannot be saved, since no step makes the weights so."""
    spoil = ["nan", "", "inf", "inf", "inf", "inf"]
    train = {"max_bad_steps": 3, "save_every": 1, "keep": 2}
    error = TrainForgeError if ranks == 1 else AssertionError  # with the rank's traceback
    with pytest.raises(error, match=r"3 steps in a row .*step 5.* were not finite"):
        toy_run(tmp_path / "run", ranks=ranks, model={"spoil": spoil}, train=train)
    kept = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    assert len(kept) == 2
    for path in kept:
        files = sorted(path.glob("rank-*.safetensors"))
        assert len(files) == ranks
        tensors = [tensor for file in files for tensor in load_file(file).values()]
        assert all(tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point())
