"""On a GPU: no step of the model makes the host wait, and kernels agree."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tests.hf import tiny

from trainforge.stages import Batch
from trainforge_plugins.hf import ModelSection, build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
_TOKENS = 256


def _spec(tmp_path, family, attn="auto", **more):
    config = tiny.values(family, hidden_size=64, head_dim=16, max_position_embeddings=_TOKENS, **more)
    spec = tiny.filled(build(tiny.context(tmp_path, device="cuda"), ModelSection(config=config, attn=attn)))
    spec.module.to("cuda", torch.bfloat16)
    return spec


def _batches():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, tiny.VOCAB, (2, _TOKENS), generator=generator)
    documents = torch.tensor([[0] * 100 + [1] * 156, [0] * 200 + [1] * 50 + [-1] * 6])
    positions = torch.tensor([[*range(100), *range(156)], [*range(200), *range(50), *range(6)]])
    plain, packed = tiny.batch(ids), tiny.batch(ids, positions, documents, count=5)
    return plain.to(torch.device("cuda")), packed.to(torch.device("cuda"))


def _step(spec, batch: Batch) -> None:
    hidden, auxiliary = spec.hidden(batch)
    loss = spec.head(hidden.flatten(0, 1)).float().logsumexp(-1).sum()
    (loss if auxiliary is None else loss + auxiliary).backward()


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("gemma3_text", {}),
        ("gemma2", {}),
        ("qwen3_moe", {"output_router_logits": True}),
        ("qwen3_moe", {}),
    ],
)
def test_no_host_sync(tmp_path, family, more):
    spec = _spec(tmp_path, family, **more)
    plain, packed = _batches()
    _step(spec, plain)
    _step(spec, packed)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(spec, plain)
        _step(spec, packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attn", ["flex", "flash_attention_2", "flash_attention_3"])
def test_kernels_agree_with_sdpa(tmp_path, attn):
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}.get(attn)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    reference, other = _spec(tmp_path, "llama"), _spec(tmp_path, "llama", attn=attn)
    for batch in _batches():
        with torch.no_grad():
            difference = reference.hidden(batch)[0] - other.hidden(batch)[0]
        real = slice(None) if batch.document_ids is None else batch.document_ids >= 0
        assert difference[real].abs().max() < 0.1
