"""The path to flash attention, with kernels of the same signature written in plain PyTorch."""

from __future__ import annotations

import importlib.machinery
import itertools
import sys
import types

import pytest
import torch
from tests.hf import tiny

from trainforge_plugins.hf import ModelSection, build
from trainforge_plugins.hf.attention import document_starts


def _attend(q, k, v, softmax_scale, window_size):
    """`[tokens, heads, width]`, causal, within a window, key heads repeated."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    tokens = torch.arange(len(q))
    distance = tokens[:, None] - tokens[None, :]
    allowed = (distance >= 0) & ((distance <= window_size[0]) if window_size[0] >= 0 else True)
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)


@pytest.fixture
def kernels(monkeypatch):
    """A stand-in for the package flash_attn; counts its calls."""
    calls = []

    def flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size):
        calls.append("plain")
        assert causal
        rows = zip(q, k, v, strict=True)
        return torch.stack([_attend(*row, softmax_scale, window_size) for row in rows])

    def flash_attn_varlen_func(
        q, k, v, starts, ends, longest, longest_k, dropout_p, softmax_scale, causal, window_size
    ):
        calls.append("varlen")
        assert starts.dtype == torch.int32
        bounds = starts.tolist()
        parts = [
            _attend(q[a:b], k[a:b], v[a:b], softmax_scale, window_size) for a, b in itertools.pairwise(bounds)
        ]
        return torch.cat(parts)

    module = types.ModuleType("flash_attn")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v3"])
def test_flash_agrees_with_sdpa(tmp_path, kernels, family):
    section = ModelSection(config=tiny.values(family), attn="flash_attention_2")
    flash = tiny.filled(build(tiny.context(tmp_path, device="cuda"), section))
    plain = tiny.filled(tiny.model(tmp_path, family))
    ids = torch.randint(1, tiny.VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 6 + [1] * 6])
    positions = torch.tensor([[*range(5), *range(7)], [*range(6), *range(6)]])
    for batch in (tiny.batch(ids), tiny.batch(ids, positions, documents, count=4)):
        assert torch.allclose(flash.hidden(batch)[0], plain.hidden(batch)[0], atol=1e-5)
    assert kernels == ["plain"] * 2 + ["varlen"] * 2


def test_flash_has_no_cpu_kernel(tmp_path, kernels):
    from trainforge.errors import ConfigError

    with pytest.raises(ConfigError, match="no CPU kernel"):
        tiny.model(tmp_path, "llama", attn="flash_attention_2")


@pytest.mark.parametrize("count", [None, 4])
def test_document_starts(count):
    documents = torch.tensor([[0, 0, 1, 1], [1, 1, 1, -1]])
    assert document_starts(documents, count).tolist() == [0, 2, 4, 7, 8]
