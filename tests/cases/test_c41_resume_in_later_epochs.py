"""C41: stopped within epoch 1, at its end, and at the end of all: the same samples and bits as never stopped."""

import json

import pytest
from tests.cases.texts import text_run

RANKS = [1, pytest.param(2, marks=[pytest.mark.ranks, pytest.mark.slow])]


@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.parametrize("ranks", RANKS)
def test_stops_at_7_10_and_15_of_15(tmp_path, ranks, accumulate):
    """5 steps an epoch, 3 epochs; every step takes `accumulate` micro-batches of one row on every rank."""
    rows = 5 * accumulate * ranks
    train = {"global_batch": accumulate * ranks, "micro_batch": 1, "warmup": 3}
    start = {"rows": rows, "ranks": ranks, "train": train, "dropout": 0.1}
    whole = text_run(tmp_path / "whole", **start)
    assert [len(step) for step in whole.sample_ids] == [accumulate * ranks] * 15
    epochs = [[i for step in whole.sample_ids[e : e + 5] for i in step] for e in (0, 5, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(rows))] * 3
    assert epochs[0] != epochs[1] != epochs[2]

    for done, more in ((0, 7), (7, 3), (10, 5)):
        part = text_run(tmp_path / "parts", **start, max_steps=more)
        assert part.code == 0
        assert part.summary["steps"] == done + more
        assert part.sample_ids == whole.sample_ids[: done + more]
        assert consumed(part) == divmod(done + more, 5)
    assert part.summary["status"] == "finished"
    assert part.losses == whole.losses
    assert part.learning_rates == whole.learning_rates
    assert part.digest == whole.digest

    before = (tmp_path / "parts/summary.json").read_bytes()
    again = text_run(tmp_path / "parts", **start)
    assert again.code == 0
    assert again.sample_ids == whole.sample_ids
    assert (tmp_path / "parts/summary.json").read_bytes() == before
    assert "this run is finished: 15 steps are done" in (tmp_path / "parts/log.txt").read_text()


def consumed(run):
    """(epoch, steps within it) of the newest checkpoint."""
    newest = sorted((run.path / "checkpoints").glob("step-*"))[-1]
    data = json.loads((newest / "checkpoint.json").read_text())["parts"]["data"]["data"]
    return data["epoch"], data["consumed"] * 5 // len({i for step in run.sample_ids for i in step})
