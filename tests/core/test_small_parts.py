import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainforge.cadence import CadenceClock
from trainforge.digest import weights_digest
from trainforge.errors import CheckpointError
from trainforge.run_state import RunState
from trainforge.stages import ParameterSpec, checkpoint_name, is_checkpoint_name
from trainforge.units import format_bytes, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GiB", 24 * 2**30), ("512MB", 512_000_000), (7, 7), ("1.5 kib", 1536), ("3", 3)],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("10min", 600), ("1.5h", 5400), ("30s", 30), (5, 5), ("2d", 172800)]
)
def test_durations(text, expected):
    assert parse_seconds(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "3 apples", "-3", True, None, [1]])
def test_what_is_no_size_says_so(text):
    with pytest.raises(ValueError, match="must be a size"):
        parse_bytes(text)


@given(st.integers(0, 2**60))
def test_formatted_bytes_read_back_within_their_precision(count):
    assert math.isclose(parse_bytes(format_bytes(count).replace(" ", "")), count, rel_tol=0.06, abs_tol=1)


def test_formatted_seconds():
    assert [format_seconds(value) for value in (0.0124, 8.44, 125, 3780)] == [
        "12 ms",
        "8.4 s",
        "2 min 05 s",
        "1 h 03 min",
    ]


def test_a_cadence_in_steps_in_time_and_never():
    now = [0.0]
    clock = CadenceClock("10s", lambda: now[0])
    assert not clock.due(1)
    now[0] = 10.0
    assert clock.due(2)
    clock.done()
    assert not clock.due(3)
    assert [step for step in range(1, 9) if CadenceClock(3).due(step)] == [3, 6]
    assert not any(CadenceClock(None).due(step) for step in range(9))


@given(st.integers(0, 10**12))
def test_checkpoint_names(step):
    assert is_checkpoint_name(checkpoint_name(step)) == step
    assert is_checkpoint_name(f".tmp-{checkpoint_name(step)}") is None


def test_run_state_round_trip_and_refusals():
    state = RunState(step=5, tokens=9, loss_first=2.5)
    saved = json.loads(json.dumps(state.state().data))
    other = RunState()
    other.load(1, saved)
    assert other == state
    with pytest.raises(CheckpointError, match="version 2"):
        RunState().load(2, saved)
    del saved["rng"]
    with pytest.raises(CheckpointError):
        RunState().load(1, saved)


def test_the_digest_sees_bits_names_and_shapes_but_not_order_or_frozen_parameters():
    tensors = {"b": torch.tensor([1.0, 2.0]), "a": torch.zeros(2, 2), "frozen": torch.ones(1)}
    specs = [
        ParameterSpec("b", (2,)),
        ParameterSpec("a", (2, 2)),
        ParameterSpec("frozen", (1,), trainable=False),
    ]
    digest = weights_digest(specs, tensors.__getitem__)
    assert digest == weights_digest(specs[::-1], tensors.__getitem__)
    assert digest == weights_digest(specs[:2], tensors.__getitem__)
    assert digest != weights_digest(specs, (tensors | {"a": torch.full((2, 2), -0.0)}).__getitem__)
    assert digest != weights_digest(
        [ParameterSpec("c", (2,)), specs[1]], (tensors | {"c": tensors["b"]}).__getitem__
    )
