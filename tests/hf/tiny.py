"""Tiny configurations of the families that the tests look at, and helpers around them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from trainforge.context import SilentConsole
from trainforge.stages import Batch
from trainforge_plugins.hf import ModelSection, build

VOCAB = 64
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_DIFFERENCES = {
    "llama": {},
    "qwen2": {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, **_MOE},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": 4},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, **_LAYERS},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "phi": {},
    "phi3": {},
    "olmo2": {},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 4},
    "falcon_h1": {"lm_head_multiplier": 0.4},
    "llama4_text": {
        "num_local_experts": 4,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 4,
    },
    "qwen3_next": {
        "head_dim": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        **_HYBRID,
        **_MOE,
    },
    "qwen3_5_text": {"head_dim": 8, **_HYBRID},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        **_MOE,
    },
}
_OTHERS = {
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"},
    "opt": {
        **{
            key: value
            for key, value in _LLAMA.items()
            if key not in ("intermediate_size", "num_key_value_heads")
        },
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
    },
}


def values(family, **more):
    """The configuration of a family as a recipe gives it."""
    own = _OTHERS[family] if family in _OTHERS else {**_LLAMA, **_DIFFERENCES[family]}
    return {"model_type": family, **own, **more}


def context(tmp_path, seed=0, device="cpu"):
    """The part of a `Context` that the model stage uses."""
    return SimpleNamespace(
        run=SimpleNamespace(seed=seed),
        device=torch.device(device),
        cache_dir=tmp_path,
        console=SilentConsole(),
    )


def model(tmp_path, family="llama", seed=0, attn="auto", **more):
    """The spec of a tiny model with random weights, without storage."""
    return build(context(tmp_path, seed), ModelSection(config=values(family, **more), attn=attn))


def folder_model(tmp_path, folder, seed=0):
    """The spec of the model in a folder."""
    return build(context(tmp_path, seed), ModelSection(hf=str(folder)))


def initial(spec):
    """All initial weights by name, ties under each name."""
    state = {}
    for parameter in spec.parameters:
        out = torch.empty(parameter.elements)
        spec.load(parameter.name, out, parameter.extent)
        for name in (parameter.name, *parameter.aliases):
            state[name] = out.view(parameter.shape)
    return state


def filled(spec):
    """The spec with its module given its initial weights, in evaluation mode."""
    spec.module.load_state_dict(initial(spec), assign=True, strict=False)
    spec.module.eval()
    return spec


def batch(ids, positions=None, documents=None, count=None):
    """A micro-batch of `ids` `[rows, tokens]`; without documents every row is one."""
    rows, tokens = ids.shape
    if positions is None:
        positions = torch.arange(tokens).expand(rows, tokens)
    real = ids.numel() if documents is None else int((documents >= 0).sum())
    return Batch(ids, ids, positions, documents, real, real, documents=count)


def transformers_model(family, **more):
    """The family's model as transformers makes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**values(family, **more)), dtype=torch.float32, attn_implementation="eager"
    ).eval()
