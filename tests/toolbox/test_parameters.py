"""Binding, layout, rounding and norms."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainforge.stages import ParameterSpec
from trainforge.toolbox.parameters import (
    bind,
    flat_layout,
    global_norm,
    move_buffers,
    round_to_bf16,
    squared_norms,
)
from trainforge.toolbox.recompute import recompute_blocks


def rounded(values: list[float]) -> list[int]:
    out = torch.zeros(len(values), dtype=torch.bfloat16)
    round_to_bf16(torch.tensor(values, dtype=torch.float32), out)
    return [bits & 0xFFFF for bits in out.view(torch.int16).tolist()]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_rounding_is_the_formula_of_split_masters(values):
    bits = [struct.unpack("<I", struct.pack("<f", value))[0] for value in values]
    assert rounded(values) == [((b + 0x8000) & 0xFFFFFFFF) >> 16 for b in bits]


@given(st.integers(0, 2**16 - 1), st.sampled_from([0x7FFF, 0x8000, 0x8001, 0xFFFF, 0]))
def test_ties_go_away_from_zero(high, low):
    value = struct.unpack("<f", struct.pack("<I", high << 16 | low))[0]
    if not math.isfinite(value):
        return
    assert rounded([value]) == [(high + (low >= 0x8000)) & 0xFFFF]


def test_rounding_keeps_zero_and_sign_overflows_to_infinity_and_hides_nothing():
    assert rounded([0.0, -0.0, 1e-45, -1e-45]) == [0, 0x8000, 0, 0x8000]
    assert rounded([3.4028235e38, -3.4028235e38]) == [0x7F80, 0xFF80]
    out = torch.zeros(4, dtype=torch.bfloat16)
    all_ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32).item()
    round_to_bf16(torch.tensor([math.inf, -math.inf, math.nan, all_ones]), out)
    assert bool(out.isnan().all())


def test_bound_parameters_alias_the_buffer_and_each_other():
    module = nn.Sequential(nn.Embedding(3, 2, device="meta"), nn.Linear(2, 3, bias=False, device="meta"))
    flat = torch.arange(6.0)
    parameter = bind(module, "0.weight", flat.view(3, 2), ("1.weight",))
    assert module[0].weight is module[1].weight is parameter
    flat[5] = 9
    assert module[1].weight[2, 1] == 9
    assert not bind(module, "1.weight", flat.view(3, 2), trainable=False).requires_grad
    assert len(dict(module.named_parameters())) == 2


@given(st.lists(st.integers(0, 200), max_size=8))
def test_layout_spans_are_aligned_and_do_not_overlap(sizes):
    specs = [ParameterSpec(f"p{i}", (size,)) for i, size in enumerate(sizes)]
    layout = flat_layout(specs)
    buffer = torch.zeros(layout.length)
    for number, spec in enumerate(specs, start=1):
        assert layout.starts[spec.name] % 64 == 0
        span = layout.span(buffer, spec)
        assert span.shape == (spec.elements,)
        assert not span.any()
        span.fill_(number)
    assert buffer.count_nonzero() == sum(sizes)
    if sizes and sizes[-1] > 3:
        assert layout.span(buffer, specs[-1], 1, 2).shape == (2,)


def test_norms_are_summed_in_float64():
    tensors = [torch.full((1000,), 1e-3), torch.tensor(3.0), torch.zeros(0), torch.tensor([1e30, 1e30])]
    squares = squared_norms(tensors)
    assert squares.dtype == torch.float64
    assert squares.tolist() == pytest.approx([1e-3, 9.0, 0.0, 2e60], rel=1e-6)
    assert global_norm(squares[:3]).item() == pytest.approx(math.sqrt(9.001), rel=1e-7)
    assert global_norm(squares).item() == pytest.approx(math.sqrt(2) * 1e30, rel=1e-6)
    assert global_norm(squares).dtype == torch.float32
    assert not global_norm(squared_norms([torch.tensor([1.0, float("nan")])])).isfinite()


def test_buffers_move_and_keep_their_dtype():
    module = nn.BatchNorm1d(3, device="cpu")
    move_buffers(module, torch.device("meta"))
    assert module.running_mean.device.type == "meta"
    assert module.num_batches_tracked.dtype == torch.int64
    assert module.weight.device.type == "cpu"


def test_recomputed_blocks_run_again_with_the_same_random_numbers():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()), nn.Linear(8, 1))
    calls = []
    module[0][0].register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(4, 8)
    results = []
    for wrap in (False, True):
        if wrap:
            recompute_blocks(module, ["0"])
        torch.manual_seed(1)
        module.zero_grad()
        module(x).sum().backward()
        results.append([p.grad.clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(calls) == 1 + 2
    with torch.no_grad():
        module(x)
    assert len(calls) == 4
