"""Initial weights: random ones, and those of a folder, against transformers."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.hf import tiny

from trainforge.errors import ConfigError
from trainforge.stages import Extent

# ---------------------------------------------------------------------------------------------------------- random


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "gemma3_text"])
def test_random_weights_have_transformers_distribution(tmp_path, family):
    size = {"gpt2": {"n_embd": 128}}.get(family, {"hidden_size": 128})
    spec = tiny.model(tmp_path, family, **size)
    torch.manual_seed(0)  # of theirs
    ours, theirs = tiny.initial(spec), dict(tiny.transformers_model(family, **size).named_parameters())
    for name, value in theirs.items():
        if value.std() == 0 or value.numel() == 1:
            assert torch.equal(ours[name], value), name
        else:
            assert ours[name].std().item() == pytest.approx(value.std().item(), rel=0.15), name
            assert abs(ours[name].mean().item()) < 4 * value.std().item() / value.numel() ** 0.5, name


def test_gpt2s_residual_projections_are_scaled_by_depth(tmp_path):
    """GPT-2 sets these from the root model, not from the layer that owns them."""
    state = tiny.initial(tiny.model(tmp_path, "gpt2", n_embd=128, initializer_range=0.02))
    assert state["transformer.h.0.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.05)
    assert state["transformer.h.0.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)


def test_padding_row_is_zero(tmp_path):
    embedding = tiny.initial(tiny.model(tmp_path, "llama", pad_token_id=3))["model.embed_tokens.weight"]
    assert embedding[3].abs().sum() == 0
    assert embedding[2].abs().sum() > 0


def test_bits_depend_on_seed_and_name_only(tmp_path):
    first, again = tiny.model(tmp_path, "qwen3_moe"), tiny.model(tmp_path, "qwen3_moe")
    expected = tiny.initial(first)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    for parameter in reversed(again.parameters):
        half = parameter.elements // 2
        for offset, length in ((half, parameter.elements - half), (0, half)):
            out = torch.empty(length)
            again.load(parameter.name, out, Extent(parameter.name, parameter.shape, offset, length))
            assert torch.equal(out, expected[parameter.name].flatten()[offset : offset + length])
    assert torch.equal(torch.get_rng_state(), before)
    other = tiny.initial(tiny.model(tmp_path, "qwen3_moe", seed=1))
    name = "model.layers.0.mlp.experts.down_proj"
    assert not torch.equal(other[name], expected[name])
    assert not torch.equal(expected[name], expected["model.layers.1.mlp.experts.down_proj"])


def test_drawing_leaves_the_model_on_meta(tmp_path):
    spec = tiny.model(tmp_path, "llama")
    tiny.initial(spec)
    assert all(parameter.is_meta for parameter in spec.module.parameters())


# ---------------------------------------------------------------------------------------------------------- folders


def _saved(tmp_path, family, shard="1GB", **more):
    folder = tmp_path / family
    model = tiny.transformers_model(family, **more)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder, model


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", "mixtral", "gpt2", "deepseek_v3", "gemma3_text", "phi3"]
)
def test_a_saved_folder_reads_as_from_pretrained(tmp_path, family):
    folder, _ = _saved(tmp_path, family)
    _same_as_from_pretrained(tmp_path, folder)


def _same_as_from_pretrained(tmp_path, folder):
    from transformers import AutoModelForCausalLM

    spec = tiny.folder_model(tmp_path, folder)
    state = tiny.initial(spec)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, value in reference.named_parameters(remove_duplicate=False):
        assert torch.equal(state[name], value), name
    spec.load_buffers()
    ours = dict(spec.module.named_buffers())
    for name, value in reference.named_buffers():
        assert torch.equal(ours[name], value), name
    return spec


def test_shards_and_spans(tmp_path, monkeypatch):
    folder, model = _saved(tmp_path, "llama", shard="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    monkeypatch.setattr("trainforge_plugins.hf.weights._READ_ELEMENTS", 70)
    spec = _same_as_from_pretrained(tmp_path, folder)
    expected = model.state_dict()["model.layers.1.mlp.down_proj.weight"].flatten()
    for offset, length in ((0, 1), (47, 2), (13, 700), (1535, 1)):
        out = torch.empty(length)
        spec.load("model.layers.1.mlp.down_proj.weight", out, Extent("", (32, 48), offset, length))
        assert torch.equal(out, expected[offset : offset + length])


def test_checkpoints_with_one_tensor_per_expert(tmp_path):
    """What the hub holds for Qwen MoE models: experts apart. Written by hand here."""
    folder, model = _saved(tmp_path, "qwen3_moe")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate_up, down = state.pop(prefix + "gate_up_proj"), state.pop(prefix + "down_proj")
        for expert in range(4):
            state[f"{prefix}{expert}.gate_proj.weight"] = gate_up[expert, :16].clone()
            state[f"{prefix}{expert}.up_proj.weight"] = gate_up[expert, 16:].clone()
            state[f"{prefix}{expert}.down_proj.weight"] = down[expert].clone()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    spec = tiny.folder_model(tmp_path, folder)
    loaded = tiny.initial(spec)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name
    out = torch.empty(16 * 32)
    spec.load("model.layers.1.mlp.experts.gate_up_proj", out, Extent("", (4, 32, 32), 2 * 1024 + 512, 512))
    assert torch.equal(out.view(16, 32), state["model.layers.1.mlp.experts.2.up_proj.weight"])


def test_joined_experts_do_not_stay_in_memory(tmp_path):
    folder, model = _saved(tmp_path, "mixtral")  # saved with one tensor per expert
    spec = tiny.folder_model(tmp_path, folder)
    before = _tensors_of(4, 32, 48)
    loaded = tiny.initial(spec)  # the down projections of the last block come last of all experts
    del loaded
    assert _tensors_of(4, 32, 48) == before
    again = torch.empty(4 * 96 * 32)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    spec.load(name, again, Extent(name, (4, 96, 32), 0, again.numel()))
    assert torch.equal(again.view(4, 96, 32), model.state_dict()[name])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_files_are_not_mapped_for_longer_than_needed(tmp_path, monkeypatch, family):
    monkeypatch.setattr("trainforge_plugins.hf.weights._MAPPED_BYTES", 1)
    folder, _ = _saved(tmp_path, family)
    spec = _same_as_from_pretrained(tmp_path, folder)
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert spec.parameters, "the model that reads it is still there"


def _tensors_of(*shape):
    gc.collect()
    return sum(type(o) is torch.Tensor and not o.is_meta and o.shape == shape for o in gc.get_objects())


def test_tied_folder(tmp_path):
    folder, model = _saved(tmp_path, "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    spec = _same_as_from_pretrained(tmp_path, folder)
    assert torch.equal(tiny.initial(spec)["lm_head.weight"], model.model.embed_tokens.weight)


def test_base_model_prefix_may_be_absent(tmp_path):
    folder, model = _saved(tmp_path, "gpt2")
    state = {
        name.removeprefix("transformer."): value.clone()
        for name, value in model.transformer.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    _same_as_from_pretrained(tmp_path, folder)


def test_bf16_folder_gives_fp32_of_the_same_values(tmp_path):
    folder = tmp_path / "bf16"
    model = tiny.transformers_model("llama").to(torch.bfloat16)
    model.save_pretrained(folder)
    state = tiny.initial(tiny.folder_model(tmp_path, folder))
    assert torch.equal(state["lm_head.weight"], model.lm_head.weight.float())


# ----------------------------------------------------------------------------------------------- folders that are wrong


def _rewritten(folder, change):
    state = {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_and_surplus_keys_are_named(tmp_path):
    folder, _ = _saved(tmp_path, "llama")
    _rewritten(folder, lambda state: state.pop("model.norm.weight"))
    with pytest.raises(ConfigError, match=r"misses model\.norm\.weight"):
        tiny.folder_model(tmp_path, folder)
    _rewritten(
        folder, lambda state: state.update({"model.norm.weight": torch.ones(32), "extra.gain": torch.ones(1)})
    )
    with pytest.raises(ConfigError, match=r"holds extra\.gain"):
        tiny.folder_model(tmp_path, folder)


def test_other_shape_is_named(tmp_path):
    folder, _ = _saved(tmp_path, "llama")
    _rewritten(folder, lambda state: state.update({"lm_head.weight": torch.ones(60, 32)}))
    with pytest.raises(ConfigError, match=r"lm_head\.weight .* has shape \[60, 32\]"):
        tiny.folder_model(tmp_path, folder)


def test_pickles_are_refused(tmp_path):
    folder, _ = _saved(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickles"):
        tiny.folder_model(tmp_path, folder)


def test_truncated_file_and_lost_shard(tmp_path):
    folder, _ = _saved(tmp_path, "llama")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        tiny.folder_model(tmp_path, folder)
    sharded, _ = _saved(tmp_path / "b", "llama", shard="20KB")
    (sharded / "model-00001-of-00005.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks model-00001"):
        tiny.folder_model(tmp_path, sharded)


def test_quantised_folder_is_refused(tmp_path):
    folder, _ = _saved(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantised"):
        tiny.folder_model(tmp_path, folder)
