"""Split masters: every fp32 bit comes back, and the upper half is the working copy."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainforge.stages import ParameterSpec, Slot
from trainforge.toolbox import halves
from trainforge.toolbox.parameters import round_to_bf16

BITS = st.integers(0, 2**32 - 1)
TIE = st.integers(0, 2**16 - 1).map(lambda upper: (upper << 16) | 0x8000)
SPECIAL = [
    *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF),  # zeros and denormals
    *(0x7F7FFFFF, 0x7F800000, 0xFF800000),  # the largest number and the infinities
    *(0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF),  # NaNs, among them those that overflow when rounded
    *(0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001),  # ties and their neighbours
]


def tensor_of(bits: list[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"<{len(bits)}I", *bits)), dtype=torch.float32)


def bits_of(tensor: torch.Tensor) -> list[int]:
    return [value & 0xFFFFFFFF for value in tensor.view(torch.int32).tolist()]


def halved(bits: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    high = torch.empty(len(bits), dtype=torch.bfloat16)
    low = torch.empty(len(bits), dtype=torch.int16)
    halves.split(tensor_of(bits), high, low)
    return high, low


@given(st.lists(BITS | TIE | st.sampled_from(SPECIAL), min_size=1, max_size=40))
@example(SPECIAL)
def test_every_bit_comes_back(bits):
    high, low = halved(bits)
    upper = [value & 0xFFFF for value in high.view(torch.int16).tolist()]
    assert upper == [((value + 0x8000) >> 16) & 0xFFFF for value in bits]
    joined = torch.empty(len(bits))
    halves.join(high, low, joined)
    assert bits_of(joined) == bits


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_the_upper_half_is_the_nearest_bf16_with_ties_away_from_zero(numbers):
    (bits,) = [list(struct.unpack(f"<{len(numbers)}I", struct.pack(f"<{len(numbers)}f", *numbers)))]
    high, _ = halved(bits)
    for number, rounded in zip(numbers, high.double().tolist(), strict=True):
        size = abs(number)
        below = struct.unpack(
            "<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", size))[0] & 0xFFFF0000)
        )[0]
        above_bits = struct.unpack("<I", struct.pack("<f", below))[0] + 0x10000
        above = struct.unpack("<f", struct.pack("<I", above_bits))[0]
        limit = above if above != float("inf") else 2.0**128  # the next number, had it the exponent
        wanted = above if size - below >= limit - size else below
        assert abs(rounded) == wanted


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_the_upper_half_is_the_working_copy_that_memories_round(numbers):
    master = torch.tensor(numbers, dtype=torch.float32)
    copy = torch.empty(len(numbers), dtype=torch.bfloat16)
    round_to_bf16(master, copy)
    high, _ = halved(bits_of(master))
    assert torch.equal(high.view(torch.int16), copy.view(torch.int16))


@pytest.mark.parametrize("chunk", [3, 8])
def test_long_masters_go_in_pieces(monkeypatch, chunk):
    monkeypatch.setattr(halves, "_CHUNK", chunk)
    bits = [value * 0x01234567 & 0xFFFFFFFF for value in range(1, 18)]
    high, low = halved(bits)
    joined = torch.empty(len(bits))
    halves.join(high, low, joined)
    assert bits_of(joined) == bits


def test_an_optimizer_for_fp32_gets_whole_masters_and_wide_gradients():
    spec = ParameterSpec("w", (4,))
    high, low = halved([0x3F808123] * 4)
    state = {"count": torch.zeros(4)}
    split = Slot(spec, spec.extent, high, torch.full((4,), 0.5, dtype=torch.bfloat16), state, low)
    whole = Slot(spec, spec.extent, torch.ones(4), torch.full((4,), 0.5), {"count": torch.zeros(4)})

    def halve(slots):
        for slot in slots:
            assert slot.low is None
            assert slot.master.dtype == slot.grad.dtype == torch.float32
            slot.master.mul_(0.5).sub_(slot.grad)
            slot.state["count"].add_(1)

    halves.with_whole_masters(halve, [split, whole])
    joined = torch.empty(4)
    halves.join(high, low, joined)
    assert torch.equal(joined, tensor_of([0x3F808123] * 4) * 0.5 - 0.5)
    assert torch.equal(whole.master, torch.zeros(4))
    assert state["count"].tolist() == whole.state["count"].tolist() == [1] * 4
