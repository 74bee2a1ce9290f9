"""C16: the same count of batches in every epoch, each sample once, and no epoch without a batch."""

import pytest
from tests.cases.texts import text_run

from trainforge.errors import DataError

RANKS = [1, pytest.param(2, marks=pytest.mark.ranks)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("policy", "sizes"), [("partial", [4, 4, 2]), ("drop", [4, 4])])
def test_ten_rows_in_batches_of_four_over_three_epochs(tmp_path, policy, sizes, ranks):
    train = {"global_batch": 4, "micro_batch": 2}
    run = text_run(tmp_path / "run", 10, ranks=ranks, train=train, text={"last_batch": policy})
    assert run.summary["total_steps"] == run.summary["steps"] == 3 * len(sizes)
    assert [len(step) for step in run.sample_ids] == 3 * sizes
    epochs = [
        [i for step in run.sample_ids[e * len(sizes) : (e + 1) * len(sizes)] for i in step] for e in range(3)
    ]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch)  # over all shards
        assert set(epoch) <= set(range(10))
    assert policy == "drop" or all(len(epoch) == 10 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # the tokens of a short step are counted as they are
    assert run.summary["tokens"] == 32 * 3 * sum(sizes)
    if ranks > 1:
        alone = text_run(tmp_path / "alone", 10, train=train, text={"last_batch": policy})
        assert run.sample_ids == alone.sample_ids
        assert run.losses == pytest.approx(alone.losses, rel=1e-6)


def test_a_set_smaller_than_the_batch_is_refused_or_trained_whole(tmp_path):
    train = {"global_batch": 4, "micro_batch": 2}
    with pytest.raises(DataError, match=r"3 training rows .* global batch of 4 rows \(1 ranks?\)"):
        text_run(tmp_path / "drop", 3, train=train, text={"last_batch": "drop"})
    assert not (tmp_path / "drop/summary.json").exists()
    run = text_run(tmp_path / "partial", 3, train=train)
    assert [sorted(step) for step in run.sample_ids] == [[0, 1, 2]] * 3
    assert all(loss > 0 for loss in run.losses)


@pytest.mark.ranks
def test_two_shards_of_too_few_rows_are_refused_with_their_number(tmp_path):
    with pytest.raises(
        AssertionError, match=r"DataError: 3 training rows .* global batch of 4 rows \(2 ranks\)"
    ):
        text_run(tmp_path / "run", 3, ranks=2, train={"global_batch": 4}, text={"last_batch": "drop"})
