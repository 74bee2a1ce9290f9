"""C23: micro-batches of 3, 97, 10 and 0 supervised tokens are one batch of 110, with one reduction per step."""

import json

import pytest
import torch
from tests.cases.reference import assert_weights, plain_loop, toy_run, weights

CUTS = {
    "four micro-batches": {"micro_batch": 1},
    "two of two rows": {"micro_batch": 2},
    "one batch of 110": {"micro_batch": 4},
}


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_is_the_single_big_batch(tmp_path, cut):
    run = toy_run(tmp_path / "run", rows="uneven", train=CUTS[cut])
    reference = plain_loop("uneven")
    assert run.losses == pytest.approx(reference.losses, rel=1e-6)
    assert [e["grad_norm"] for e in run.metrics if "loss" in e] == pytest.approx(reference.norms, rel=1e-5)
    assert_weights(run, reference)
    assert run.summary["supervised_tokens"] == 4 * 110


@pytest.mark.ranks
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_two_ranks_are_the_single_big_batch_with_one_reduction_per_bucket(tmp_path, micro_batch):
    run = toy_run(
        tmp_path / "run",
        ranks=2,
        rows="uneven",
        train={"micro_batch": micro_batch},
        sections={"ddp": {"bucket_mb": 2e-3}},
    )
    reference = plain_loop("uneven")
    assert run.losses == pytest.approx(reference.losses, rel=1e-6)
    assert_weights(run, reference)
    empty_steps_change_nothing(run)
    elements = sum(tensor.numel() for tensor in weights(run, 1).values())
    for rank in (0, 1):
        lines = (run.path / f"reductions-{rank}.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        assert len(steps) == 3  # steps 1, 3 and 4, each noted when the next one trained; not the last
        for sizes in steps:
            assert len(sizes) == run.metrics[0]["comm/buckets"] > 1
            assert (
                elements <= sum(sizes) < elements + 64 * len(sizes)
            )  # each gradient once, and what aligns it


def empty_steps_change_nothing(run):
    for step in (2, 5):
        before, after = weights(run, step - 1), weights(run, step)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert "loss" not in run.metrics[step - 1]
    assert run.summary["empty_steps"] == 2


def test_a_step_without_a_supervised_token_changes_no_bit_and_shows_no_loss(tmp_path):
    """C07 at the level of the step: steps 2 and 5 have no supervised token on any rank."""
    run = toy_run(tmp_path / "run", rows="uneven")
    empty_steps_change_nothing(run)
    # moments and counts of steps too: what follows is what it would have been without the empty steps
    assert_weights(run, plain_loop("uneven"))
