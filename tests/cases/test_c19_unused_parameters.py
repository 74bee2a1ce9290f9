"""C19: a parameter that is not used, or on one rank only, and another one in each step: as in plain PyTorch."""

import pytest
import torch
from tests.cases.reference import assert_weights, plain_loop, toy_run, weights
from tests.cases.toys import takes_branch

BRANCH = "blocks.0.branch.weight"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_the_branch_of_one_rank_trains_as_in_plain_pytorch(tmp_path, ranks):
    # small buckets: the branch shares one with parameters that every rank uses, others are alone
    run = toy_run(
        tmp_path / "run",
        ranks=ranks,
        rows="branch",
        model={"branch": True},
        sections={"ddp": {"bucket_mb": 2e-3}},
    )
    reference = plain_loop("branch", branch=True)
    assert run.losses == pytest.approx(reference.losses, rel=1e-6)
    assert [entry["grad_norm"] for entry in run.metrics] == pytest.approx(reference.norms, rel=1e-5)
    assert_weights(run, reference)


@pytest.mark.ranks
def test_what_no_rank_uses_keeps_every_bit_and_is_named_once(tmp_path):
    run = toy_run(tmp_path / "run", ranks=2, rows="branch", model={"branch": True})
    for step in range(2, 7):
        before, after = weights(run, step - 1), weights(run, step)
        assert torch.equal(before["unused.weight"], after["unused.weight"])  # no decay either
        used = any(takes_branch(step, index) for index in range(4))
        assert torch.equal(before[BRANCH], after[BRANCH]) == (not used)  # nothing stale from the step before
    log = (run.path / "log.txt").read_text()
    assert log.count("unused.weight") == 1
    assert log.count(BRANCH) == 1  # in step 3, where nobody takes the branch
