"""One rule per trait: what it accepts, what it refuses, and in which words."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainforge.checks import RULES, check
from trainforge.discovery import Source
from trainforge.errors import IncompatibleError
from trainforge.provider import STAGES, Provider, Traits
from trainforge.selection import Chosen


def chosen(**traits: Traits) -> dict[Any, Chosen]:
    return {
        stage: Chosen(
            stage,
            Source(f"p_{stage}", "x", "dist", "1", Path()),
            Provider(build=lambda ctx, config: None, traits=traits.get(stage, Traits())),
            "default",
        )
        for stage in STAGES
    }


@pytest.mark.parametrize(
    ("traits", "device", "world", "says"),
    [
        (
            {"data": Traits(devices=frozenset({"cuda"}))},
            "cpu",
            1,
            "p_data (data) runs on cuda, and this run is on cpu",
        ),
        ({"comm": Traits(max_world=1)}, "cpu", 2, "p_comm (comm) supports 1 rank, and this run has 2"),
        ({"memory": Traits(max_world=4)}, "cpu", 8, "p_memory (memory) supports 4 ranks, and this run has 8"),
        (
            {"memory": Traits(gradients_on="host"), "comm": Traits(takes_gradients_on=frozenset({"device"}))},
            "cuda",
            2,
            "p_memory (memory) leaves gradients on the host; p_comm (comm) takes device gradients",
        ),
        (
            {"optimizer": Traits(takes_gradients_on=frozenset({"host"}))},
            "cuda",
            1,
            "p_memory (memory) leaves gradients on the device; p_optimizer (optimizer) takes host gradients",
        ),
        (
            {"comm": Traits(shards_state=True), "memory": Traits(holds_shards=False)},
            "cpu",
            2,
            "p_comm (comm) gives each rank a part of the optimizer state; p_memory (memory) can only hold all of it",
        ),
    ],
)
def test_what_does_not_fit_is_said(traits: dict[str, Traits], device: str, world: int, says: str):
    with pytest.raises(IncompatibleError) as caught:
        check(chosen(**traits), device, world)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("traits", "device", "world"),
    [
        ({}, "cpu", 64),
        ({"data": Traits(devices=frozenset({"cuda"}))}, "cuda", 1),
        ({"data": Traits(devices=frozenset({"cuda"}))}, None, 1),  # not known yet: asked again by the runner
        ({"comm": Traits(max_world=2)}, "cpu", 2),
        ({"memory": Traits(gradients_on="host")}, "cpu", 1),
        ({"comm": Traits(shards_state=True)}, "cpu", 2),
        ({"memory": Traits(holds_shards=False)}, "cpu", 2),
        ({"comm": Traits(shards_state=True), "memory": Traits(holds_shards=False)}, "cpu", 1),
    ],
)
def test_what_fits_passes(traits: dict[str, Traits], device: str | None, world: int):
    check(chosen(**traits), device, world)


def test_everything_is_told_at_once():
    traits = {"data": Traits(max_world=1), "comm": Traits(max_world=2)}
    with pytest.raises(IncompatibleError) as caught:
        check(chosen(**traits), "cpu", 3)
    assert len(str(caught.value).splitlines()) == 2


def test_every_trait_has_a_rule():
    source = "".join(Path(rule.__code__.co_filename).read_text() for rule in RULES[:1])
    for trait in fields(Traits):
        assert f"traits.{trait.name}" in source


@given(st.sampled_from(["device", "host"]), st.sets(st.sampled_from(["device", "host"]), min_size=1))
def test_gradients_fit_exactly_when_their_place_is_taken(place: Any, takes: set[str]):
    stages = chosen(memory=Traits(gradients_on=place), comm=Traits(takes_gradients_on=frozenset(takes)))
    if place in takes:
        check(stages, "cuda", 1)
    else:
        with pytest.raises(IncompatibleError):
            check(stages, "cuda", 1)
