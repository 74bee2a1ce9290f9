"""The global batch is what is kept; micro-batch and accumulation follow, or the message holds numbers that divide."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.context import make_context

from trainforge.batching import choose_micro_batch, cut_as_before, resolve_batching
from trainforge.context import Batching
from trainforge.errors import ConfigError, ProviderError
from trainforge.provider import Estimate, Provider
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


def chosen(ask: Any, *others: int | None, estimate: Any = None, world: int = 1, **train: Any) -> Any:
    """A context with 12 samples a step after the memory plugin was asked; `others` are what other ranks answer."""
    stage = {"plugin": "m", "config": "its section"}
    memory = SimpleNamespace(provider=Provider(build=lambda *_: None, micro_batch=ask), **stage)
    data = SimpleNamespace(provider=Provider(build=lambda *_: None, estimate=estimate), **stage)
    comm = SimpleNamespace(gather=lambda value: [value, *others])
    ctx = make_context(world=world, built={"comm": comm, "model": "the model", "optimizer": "the optimizer"})
    ctx.train, ctx.batching = TrainSection(steps=1, **train), Batching(12, 6 // world, 2)
    choose_micro_batch(SimpleNamespace(chosen={"memory": memory, "data": data}), ctx)  # type: ignore[arg-type]
    return ctx


def test_the_memory_plugin_chooses_with_the_length_of_rows_known():
    asked: list[Any] = []

    def ask(ctx: Any, model: Any, optimizer: Any, config: Any) -> int:
        asked.append((ctx.row_tokens, model, optimizer, config))
        return 3

    ctx = chosen(ask, estimate=lambda *_: Estimate(row_tokens=77))
    assert asked == [(77, "the model", "the optimizer", "its section")]
    assert ctx.batching == Batching(12, 3, 4)
    assert ctx.train.micro_batch == 3


def test_ranks_take_the_smallest_answer_and_one_without_leaves_it_to_the_rule():
    assert chosen(lambda *_: 6, 2, world=2).batching == Batching(12, 2, 3)
    ctx = chosen(lambda *_: 6, None, world=2)
    assert (ctx.batching, ctx.train.micro_batch) == (Batching(12, 3, 2), "auto")


@pytest.mark.parametrize("train", [{"micro_batch": 6}, {"accumulate": 2}])
def test_what_the_recipe_fixes_is_not_asked(train: dict[str, Any]):
    def ask(*_: Any) -> int:
        raise AssertionError("asked")

    assert chosen(ask, **train).batching == Batching(12, 6, 2)


@pytest.mark.parametrize("answer", [0, 5, 12])
def test_an_answer_that_does_not_divide_is_the_plugins_failure(answer: int):
    with pytest.raises(ProviderError, match="6 samples of a rank"):
        chosen(lambda *_: answer, 2, world=2)


@pytest.mark.parametrize(
    ("train", "world", "saved", "micro"),
    [
        ({}, 1, {"global_batch": 12, "micro_batch": 4}, 4),
        ({"global_batch": 12}, 3, {"micro_batch": 4}, 4),
        ({}, 2, {"global_batch": 12, "micro_batch": 4}, "auto"),  # no longer divides
        ({}, 1, {"global_batch": 12, "micro_batch": "auto"}, "auto"),
        ({}, 1, {"global_batch": 12, "micro_batch": 0}, "auto"),
        ({}, 1, {}, "auto"),
        ({"accumulate": 6}, 1, {"global_batch": 12, "micro_batch": 4}, "auto"),
        ({"micro_batch": 2}, 1, {"global_batch": 12, "micro_batch": 4}, 2),
    ],
)
def test_a_resumed_run_keeps_its_micro_batch(
    train: dict[str, Any], world: int, saved: dict[str, Any], micro: Any
):
    assert cut_as_before(TrainSection(steps=1, **train), world, saved).micro_batch == micro
