"""What the spec says about a model, against the model as transformers makes it."""

from __future__ import annotations

import pytest
import torch
from tests.hf import tiny

FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "deepseek_v3",
    "opt",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_on_meta_and_buffers_are_what_transformers_computes(tmp_path, family):
    spec = tiny.model(tmp_path, family)
    reference = tiny.transformers_model(family)
    assert all(parameter.is_meta for parameter in spec.module.parameters())
    ours = dict(spec.module.named_buffers())
    theirs = dict(reference.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in theirs.items():
        assert ours[name].device.type == "cpu"
        assert torch.equal(ours[name], buffer), name
    assert {(p.name, p.shape) for p in spec.parameters} == {
        (name, tuple(p.shape)) for name, p in reference.named_parameters()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_come_in_execution_order(tmp_path, family):
    """First seen in a forward of the reference = the order of stem, blocks, final norm and head."""
    spec = tiny.model(tmp_path, family)
    reference = tiny.transformers_model(family)
    order = []
    owners = {name.rpartition(".")[0] for name, _ in reference.named_parameters()}
    for owner in owners:
        module = reference.get_submodule(owner)
        module.register_forward_pre_hook(
            lambda *_, owner=owner: order.append(owner) if owner not in order else None
        )
    reference(torch.ones(1, 4, dtype=torch.long))

    def stage(name):
        block = next((i for i, b in enumerate(spec.blocks) if name.startswith(b + ".")), None)
        return block

    ran = [(owner, stage(owner)) for owner in order]
    outside = [owner for owner, block in ran if block is None]
    ours_outside = list(dict.fromkeys(p.name.rpartition(".")[0] for p in spec.parameters if p.block is None))
    assert ours_outside == [owner for owner in outside if owner in ours_outside]
    blocks = [p.block for p in spec.parameters if p.block is not None]
    assert blocks == sorted(blocks)
    assert len(spec.blocks) == 2


def test_final_norm_and_head_come_last(tmp_path):
    spec = tiny.model(tmp_path, "opt", tie_word_embeddings=False)
    assert [p.name for p in spec.parameters][-3:] == [
        "model.decoder.final_layer_norm.weight",
        "model.decoder.final_layer_norm.bias",
        "lm_head.weight",
    ]


def test_kinds(tmp_path):
    kinds = {p.name: p.kind for p in tiny.model(tmp_path, "qwen2").parameters}
    assert kinds["model.embed_tokens.weight"] == "embedding"
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == "matrix"
    assert kinds["model.layers.0.self_attn.q_proj.bias"] == "bias"
    assert kinds["model.layers.0.input_layernorm.weight"] == "norm"
    assert kinds["lm_head.weight"] == "matrix"
    gpt2 = {p.name: p.kind for p in tiny.model(tmp_path, "gpt2").parameters}
    assert gpt2["transformer.wpe.weight"] == "embedding"
    assert gpt2["transformer.ln_f.bias"] == "bias"
    assert gpt2["transformer.h.0.attn.c_attn.weight"] == "matrix"
    sinks = {p.name: p.kind for p in tiny.model(tmp_path, "gpt_oss").parameters}
    assert sinks["model.layers.0.self_attn.sinks"] == "norm"


def test_tied_weights_appear_once(tmp_path):
    spec = tiny.model(tmp_path, "llama", tie_word_embeddings=True)
    tied = next(p for p in spec.parameters if p.name == "model.embed_tokens.weight")
    assert tied.aliases == ("lm_head.weight",)
    assert spec.head_parameters == ("model.embed_tokens.weight",)
    assert "lm_head.weight" not in {p.name for p in spec.parameters}
    assert tiny.model(tmp_path, "llama").head_parameters == ("lm_head.weight",)


def test_experts_are_the_stacked_tensors_and_not_the_router(tmp_path):
    experts = {p.name: p.experts for p in tiny.model(tmp_path, "qwen3_moe").parameters if p.block == 0}
    assert experts["model.layers.0.mlp.experts.gate_up_proj"] == 4
    assert experts["model.layers.0.mlp.experts.down_proj"] == 4
    assert experts["model.layers.0.mlp.gate.weight"] == 0
    oss = {p.name: p.experts for p in tiny.model(tmp_path, "gpt_oss").parameters if p.block == 0}
    assert oss["model.layers.0.mlp.experts.gate_up_proj_bias"] == 4
    deepseek = {p.name: p.experts for p in tiny.model(tmp_path, "deepseek_v3").parameters}
    assert deepseek["model.layers.1.mlp.experts.down_proj"] == 4
    assert deepseek["model.layers.0.mlp.down_proj.weight"] == 0


def test_limits(tmp_path):
    spec = tiny.model(tmp_path, "gpt2")
    assert (spec.vocab_size, spec.max_positions) == (64, 64)
    assert spec.blocks == ("transformer.h.0", "transformer.h.1")


def test_flops_by_hand(tmp_path):
    spec = tiny.model(tmp_path, "llama")
    attention = 32 * 32 * 2 + 32 * 16 * 2
    block = attention + 3 * 32 * 48 + 2 * 32
    multiplied = 2 * block + 32 + 64 * 32
    assert spec.flops_per_token(16) == 6 * multiplied + 12 * 2 * 4 * 8 * 16 * 0.5


def test_flops_count_active_experts_and_windows(tmp_path):
    spec = tiny.model(tmp_path, "qwen3_moe")
    dense = tiny.model(tmp_path, "qwen3_moe", num_experts_per_tok=4)
    experts = 2 * 4 * 3 * 32 * 16
    assert dense.flops_per_token(8) - spec.flops_per_token(8) == 6 * experts / 2
    windowed = tiny.model(tmp_path, "mistral")
    plain = tiny.model(tmp_path, "mistral", sliding_window=None)
    assert windowed.flops_per_token(4) == plain.flops_per_token(4)
    per_key = 12 * 2 * 4 * 8
    assert plain.flops_per_token(32) - windowed.flops_per_token(32) == pytest.approx(
        per_key * (16 - 4 * (1 - 4 / 64))
    )


def test_start_report_names_the_kernel_and_why(tmp_path):
    report = "\n".join(tiny.model(tmp_path, "qwen3_moe").start_report())
    assert "qwen3_moe, 2 blocks" in report
    assert "used by each token" in report
    assert "attention: sdpa" in report
    assert "attention: eager (sdpa cannot soft-cap" in "\n".join(
        tiny.model(tmp_path, "gemma2").start_report()
    )
