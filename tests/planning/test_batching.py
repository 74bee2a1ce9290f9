"""The global batch is what is kept; micro-batch and accumulation follow, or the message holds numbers that divide."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainforge.batching import resolve_batching
from trainforge.errors import ConfigError
from trainforge.sections import TrainSection


def resolve(world: int, saved: int | None = None, **train: Any) -> tuple[int, int, int]:
    found = resolve_batching(TrainSection(steps=1, **train), world, saved)
    return found.global_batch, found.micro_batch, found.accumulate


@pytest.mark.parametrize(
    ("world", "saved", "train", "expected"),
    [
        (1, None, {}, (8, 8, 1)),
        (2, None, {}, (8, 4, 1)),
        (3, None, {}, (9, 3, 1)),
        (1, None, {"global_batch": 32}, (32, 8, 4)),
        (1, None, {"global_batch": 7}, (7, 7, 1)),
        (1, None, {"global_batch": 11}, (11, 1, 11)),
        (2, None, {"global_batch": 24}, (24, 6, 2)),
        (1, None, {"global_batch": 12, "micro_batch": 3}, (12, 3, 4)),
        (2, None, {"global_batch": 12, "accumulate": 3}, (12, 2, 3)),
        (2, None, {"micro_batch": 4}, (8, 4, 1)),
        (2, None, {"micro_batch": 4, "accumulate": 3}, (24, 4, 3)),
        (1, None, {"accumulate": 3}, (9, 3, 3)),
        (2, None, {"global_batch": 12, "micro_batch": 2, "accumulate": 3}, (12, 2, 3)),
        # resumed on another number of ranks: the global batch stays and accumulate follows
        (2, 8, {"micro_batch": 2, "accumulate": 4}, (8, 2, 2)),
        (1, 24, {"micro_batch": 4, "accumulate": 3}, (24, 4, 6)),
        (2, 9, {"global_batch": 8}, (8, 4, 1)),
        (4, 8, {}, (8, 2, 1)),
    ],
)
def test_what_follows(world: int, saved: int | None, train: dict[str, Any], expected: tuple[int, int, int]):
    assert resolve(world, saved, **train) == expected


@pytest.mark.parametrize(
    ("world", "saved", "train", "says"),
    [
        (
            4,
            None,
            {"global_batch": 10},
            "10 cannot be shared out to 4 ranks: the nearest that can are 8 and 12",
        ),
        (4, None, {"global_batch": 3}, "nearest that can are 4"),
        (1, None, {"global_batch": 12, "micro_batch": 5}, "nearest that do are 4 and 6"),
        (1, None, {"global_batch": 4, "micro_batch": 9}, "nearest that do are 4"),
        (
            1,
            None,
            {"global_batch": 12, "accumulate": 5},
            "nearest that do are 4 and 6; or set global_batch to 10 and 15",
        ),
        (
            1,
            None,
            {"global_batch": 12, "micro_batch": 2, "accumulate": 5},
            "leave accumulate out (it is 6 then)",
        ),
        (3, 8, {}, "8 cannot be shared out to 3 ranks: the nearest that can are 6 and 9"),
    ],
)
def test_what_does_not_divide(world: int, saved: int | None, train: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=re.escape(says)):
        resolve(world, saved, **train)


@given(
    world=st.integers(1, 9),
    saved=st.none() | st.integers(1, 64),
    total=st.none() | st.integers(1, 64),
    micro=st.just("auto") | st.integers(1, 12),
    accumulate=st.none() | st.integers(1, 12),
)
def test_the_cut_always_adds_up(
    world: int, saved: int | None, total: int | None, micro: Any, accumulate: int | None
):
    try:
        cut = resolve(world, saved, global_batch=total, micro_batch=micro, accumulate=accumulate)
    except ConfigError:
        return
    assert cut[0] == cut[1] * cut[2] * world
    assert cut[0] == (total or saved or cut[0])
    assert micro in ("auto", cut[1])
