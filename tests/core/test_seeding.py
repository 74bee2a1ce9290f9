import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainforge.errors import CheckpointError
from trainforge.seeding import (
    derive_seed,
    micro_batch_seed,
    preserved,
    rng_state,
    seed_everything,
    set_rng_state,
)


def draws():
    return random.random(), float(numpy.random.random()), torch.rand(3).tolist()


@given(st.integers(0, 2**40), st.integers(0, 10**6), st.integers(0, 4096))
def test_micro_batch_seeds_are_63_bits_and_differ(seed, step, index):
    here = micro_batch_seed(seed, step, index)
    assert 0 <= here < 2**63
    assert here == micro_batch_seed(seed, step, index)
    assert len({here, micro_batch_seed(seed + 1, step, index), micro_batch_seed(seed, step + 1, index)}) == 3


def test_a_path_is_not_its_concatenation():
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_seed_everything_repeats_python_numpy_and_torch():
    seed_everything(7)
    first = draws()
    seed_everything(7)
    assert draws() == first
    seed_everything(8)
    assert draws() != first


def test_preserved_leaves_no_trace():
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    with preserved(torch.device("cpu")):
        seed_everything(99)
        draws()
    assert draws() == expected


def test_rng_state_is_plain_data_and_restores():
    import json

    seed_everything(3)
    saved = json.loads(json.dumps(rng_state()))
    expected = draws()
    seed_everything(4)
    set_rng_state(saved)
    assert draws() == expected


@pytest.mark.parametrize("name", ["python", "torch"])
def test_a_missing_generator_is_named(name):
    state = rng_state()
    del state[name]
    with pytest.raises(CheckpointError, match=name):
        set_rng_state(state)


def test_an_unreadable_generator_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="cannot be read"):
        set_rng_state(rng_state() | {"torch": "zz"})
