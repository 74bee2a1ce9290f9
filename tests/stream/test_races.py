"""Any legal order of copies and updates gives the same training, and every wait is needed."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.stream.racing import LateWorker, Places, ReadingComm, build, watch_threads
from torch import nn

from trainforge.testing import Walker
from trainforge.toolbox.fake_streams import FakeStreams, RaceError
from trainforge.toolbox.streams import Streams
from trainforge_megatrain.stream.memory import WAITS
from trainforge_megatrain.stream.units import Place

PASSING: Places = {}
"""All blocks pass through the slots, stem and head are kept."""
MIXED: Places = {
    "stem": Place.DEVICE,
    "blocks.0": Place.DEVICE,
    "blocks.2": Place.KEPT,
}
"""Some units live on the device, a block is kept, the others pass through."""
SETTINGS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"places": PASSING, "accumulate": 1},
    "two": {"places": PASSING},
    "mixed places": {"places": MIXED},
    "three slots, sums rounded": {"places": PASSING, "slots": 3, "train": {"dtype": "bf16"}},
    "inputs in host RAM": {"places": PASSING, "offload": True},
}


@pytest.fixture(autouse=True)
def watched_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_threads(monkeypatch)


def run(walker: Walker, streams: Any = None) -> tuple[list[Any], dict[str, torch.Tensor], Any]:
    """Three steps with an evaluation between: results, weights, losses of the evaluation."""
    with streams or nullcontext():
        results = [walker.take(), walker.take()]
        losses = walker.stages.memory.evaluate(walker.stages.data.validation())
        results.append(walker.take())
        return results, walker.weights(), losses


def faked(folder: Path, source: random.Random, name: str, **facts: Any) -> tuple[Walker, FakeStreams]:
    streams = FakeStreams(source)
    return build(folder, streams, LateWorker(source), **SETTINGS[name], **facts), streams


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each setting gives on a plain CPU."""
    found: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in found:
            plain = Streams(torch.device("cpu"))
            folder = tmp_path_factory.mktemp("expected")
            found[name] = run(build(folder, plain, ThreadPoolExecutor(1), **SETTINGS[name]))
        return found[name]

    return of


def same(one: Any, other: Any) -> bool:
    weights = all(torch.equal(one[1][name], other[1][name]) for name in other[1])
    return one[0] == other[0] and weights and torch.equal(one[2], other[2])


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=st.randoms(use_true_random=False))
def test_any_legal_order_gives_the_same(tmp_path: Path, expected: Any, name: str, source: random.Random):
    assert same(run(*faked(tmp_path, source, name)), expected(name))


def noticed(folder: Path, expected: Any, name: str, place: str, seed: int, **facts: Any) -> bool:
    walker, streams = faked(folder, random.Random(seed), name, left_out=place, **facts)
    try:
        result = run(walker, streams)
    except RaceError:
        return True
    return not same(result, expected(name))


class Skipping(nn.ModuleList):
    """Blocks of which some are passed by, as those of a vision tower are in a step without images."""

    skipped: frozenset[int] = frozenset()

    def __iter__(self) -> Any:
        return (block for index, block in enumerate(super().__iter__()) if index not in self.skipped)


ALONE: Places = dict.fromkeys(("stem", "blocks.1", "blocks.2", "blocks.3", "head"), Place.DEVICE)
"""Only the first block is in host RAM, so that nobody waits for its update but who needs it."""


def passing_by(walker: Walker, streams: Any, block: int) -> Any:
    """Four steps; every other one leaves a block out."""
    blocks = walker.stages.model.module.blocks
    with streams:
        results = []
        for step in range(4):
            blocks.skipped = frozenset([block]) if step % 2 else frozenset()
            results.append(walker.take())
        return results, walker.weights(), torch.zeros(0)


def skipping(model: Any) -> None:
    model.module.blocks = Skipping(model.module.blocks)


def passed_by(folder: Path, block: int, source: random.Random, **facts: Any) -> Any:
    streams = FakeStreams(source)
    walker = build(folder, streams, LateWorker(source, 0), change=skipping, **facts)
    return passing_by(walker, streams, block)


def passed_by_in_resident(folder: Path, block: int, **facts: Any) -> Any:
    """The same with everything on the device."""
    return passing_by(build(folder, None, None, {}, change=skipping, **facts), nullcontext(), block)


@pytest.mark.parametrize(("block", "places"), [(0, ALONE), (0, PASSING), (1, MIXED), (3, PASSING)])
def test_blocks_that_are_passed_by(tmp_path: Path, block: int, places: Places):
    """Their last update is brought before their gradients are zeroed; the head has its weights without the last one."""
    for accumulate in (1, 2):
        wanted = passed_by_in_resident(tmp_path / "a", block, accumulate=accumulate)
        facts: dict[str, Any] = {"places": places, "accumulate": accumulate, "offload": True}
        assert same(passed_by(tmp_path / "b", block, random.Random(1), **facts), wanted)
        assert f"blocks.{block}.up.weight" not in wanted[0][1].used


@pytest.mark.parametrize("place", WAITS)
def test_leaving_out_any_wait_is_noticed(tmp_path: Path, expected: Any, place: str):
    if place == "a block's update before its gradients are zeroed":
        wanted = passed_by_in_resident(tmp_path, 0)
        assert not same(passed_by(tmp_path, 0, random.Random(0), places=ALONE, left_out=place), wanted)
        return
    facts = {"comm": ReadingComm()} if place == "gradients before the host reads them" else {}
    names = ["inputs in host RAM"] if "inputs" in place else ["one micro-batch", "two"]
    for seed in range(6):
        if noticed(tmp_path, expected, names[seed % len(names)], place, seed, **facts):
            return
    pytest.fail(f"without waiting for {place} everything went well")
