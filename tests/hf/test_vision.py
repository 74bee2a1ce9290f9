"""Image-text-to-text models, against transformers' own forward on a plain padded batch."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from tests.hf import seeing, tiny
from tests.hf.test_forward import _NoReadBack
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from trainforge.errors import ConfigError, IncompatibleError
from trainforge.testing import ModelConformance
from trainforge_plugins.hf import LoraSection, ModelSection, build, vision

FAMILIES = [*seeing.FAMILIES]
AXES = [*seeing.AXES]


def theirs(model, family, ids, real, inputs):
    """Logits of transformers' model, called as its processor's outputs are meant to be."""
    types = seeing.token_types(family, ids) if inputs else {}
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=real, **inputs, **types).logits


def ours(spec, batch):
    with torch.no_grad():
        hidden, auxiliary = spec.hidden(batch)
        assert auxiliary is None
        return spec.head(hidden.flatten(0, 1)).view(*batch.input_ids.shape, -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path, family):
    spec = seeing.filled(seeing.model(tmp_path, family))
    reference = seeing.same_weights(spec, family, spec.module.state_dict())
    ids, real, inputs = seeing.rows(family)
    images = theirs(reference, family, ids, real, inputs)
    assert torch.allclose(
        ours(spec, seeing.batch(ids, real, inputs))[real == 1], images[real == 1], atol=1e-5
    )
    darker = {**inputs, "pixel_values": inputs["pixel_values"] / 2}
    changed = theirs(reference, family, ids, real, darker) - images
    assert changed[0, 3:].abs().max() > 1e-3, "the images change nothing"
    assert changed[1].abs().max() == 0
    text = ids.where(ids != seeing.IMAGE, 1)
    plain = theirs(reference, family, text, torch.ones_like(real), {})
    assert torch.allclose(ours(spec, seeing.batch(text)), plain, atol=1e-5)


@pytest.mark.parametrize("family", AXES)
def test_positions_by_hand(tmp_path, family):
    """An image has rows and columns from where it starts; text goes on after the longer side (arXiv:2409.12191)."""
    spec = seeing.model(tmp_path, family)
    ids, real, inputs = seeing.rows(family)
    batch = seeing.batch(ids, real, inputs)
    batch.document_ids[1, 8:15] = 1  # a packed row of text
    batch.position_ids = batch.position_ids.clone()
    batch.position_ids[1, 8:15] = torch.arange(7)
    time, rows, columns = spec._further.positions(batch)
    assert time[0].tolist() == [0, 1, 2, 3, 3, 3, 3, *range(5, 22)]
    assert rows[0].tolist() == [0, 1, 2, 3, 3, 4, 4, *range(5, 22)]
    assert columns[0].tolist() == [0, 1, 2, 3, 4, 3, 4, *range(5, 22)]
    assert time[2, :20].tolist() == [0] * 8 + [*range(4, 16)]
    assert rows[2, :20].tolist() == [0] * 4 + [1] * 4 + [*range(4, 16)]
    assert columns[2, :20].tolist() == [0, 1, 2, 3] * 2 + [*range(4, 16)]
    for axis in (time, rows, columns):
        assert axis[1, :15].tolist() == [*range(8), *range(7)]


@pytest.mark.parametrize("family", AXES)
def test_positions_on_several_axes_matter(tmp_path, family):
    """Else the comparison of logits would show nothing about them."""
    spec = tiny.filled(seeing.model(tmp_path, family))
    batch = seeing.batch(*seeing.rows(family))
    right = ours(spec, batch)
    spec._further._rope_index = None
    wrong = ours(spec, batch)
    assert (right - wrong)[0, 6:].abs().max() > 1e-3
    assert torch.equal(right[1, :15], wrong[1, :15])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_text_is_as_if_alone_and_not_looked_at(tmp_path, family):
    spec = tiny.filled(seeing.model(tmp_path, family))
    ids = torch.randint(1, 58, (1, 12), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 5 + [1] * 5 + [-1] * 2])
    positions = torch.tensor([[*range(5), *range(5), 0, 1]])
    batch = tiny.batch(ids, positions, documents, count=3)
    with _NoReadBack():
        spec.hidden(batch)
    packed = ours(spec, batch)
    for first, last in ((0, 5), (5, 10)):
        alone = ours(spec, tiny.batch(ids[:, first:last]))
        assert torch.allclose(packed[:, first:last], alone, atol=1e-5)


def test_inputs_that_do_not_fit_are_named(tmp_path):
    ids, real, inputs = seeing.rows("qwen2_5_vl")
    spec = tiny.filled(seeing.model(tmp_path, "qwen2_5_vl"))
    with pytest.raises(IncompatibleError, match="image_sizes, which qwen2_5_vl does not take"):
        spec.hidden(seeing.batch(ids, real, inputs | {"image_sizes": torch.ones(2, 2)}))
    with pytest.raises(IncompatibleError, match="attention_mask, which qwen2_5_vl does not take"):
        spec.hidden(seeing.batch(ids, real, inputs | {"attention_mask": real}))
    with pytest.raises(IncompatibleError, match="one number for each token"):
        spec.hidden(seeing.batch(ids, real, inputs | {"mm_token_type_ids": torch.ones(3, 9)}))
    with pytest.raises(IncompatibleError, match="pixel_values, which llama does not take"):
        tiny.filled(tiny.model(tmp_path, "llama")).hidden(seeing.batch(ids.clamp(max=9), None, inputs))
    packed = seeing.batch(ids, real, inputs)
    packed.document_ids[2, 12:20] = 1
    with pytest.raises(IncompatibleError, match="switch packing off"):
        spec.hidden(packed)


def test_types_of_tokens_that_do_not_follow_from_ids_are_asked_for(tmp_path):
    """In PaliGemma they tell the prompt, whose tokens see each other, from the answer."""
    parts = {key: seeing.FAMILIES["gemma3"][key] for key in ("text_config", "vision_config")}
    parts["text_config"] = {"model_type": "gemma", **parts["text_config"]}
    del parts["text_config"]["sliding_window"], parts["text_config"]["layer_types"]
    parts["vision_config"] = {"model_type": "siglip_vision_model", **parts["vision_config"]}
    config = {"model_type": "paligemma", "image_token_index": seeing.IMAGE, "projection_dim": 32, **parts}
    spec = tiny.filled(build(tiny.context(tmp_path), ModelSection(config=config)))
    ids, real, inputs = seeing.rows("llava")
    with pytest.raises(IncompatibleError, match="paligemma wants token_type_ids for rows with images"):
        spec.hidden(seeing.batch(ids, real, inputs))
    spec.hidden(seeing.batch(ids, real))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_and_parameters_come_in_execution_order(tmp_path, family):
    """First seen in a forward with images: embeddings, tower, what joins them, decoder, head."""
    spec, reference = seeing.model(tmp_path, family), seeing.transformers_model(family)
    order = []
    for name in dict.fromkeys(name.rpartition(".")[0] for name, _ in reference.named_parameters()):
        module = reference.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: order.append(name))
    ids, real, inputs = seeing.rows(family)
    theirs(reference, family, ids, real, inputs)
    ran = [name for name in dict.fromkeys(order) if not name.startswith(tuple(f"{b}." for b in spec.blocks))]
    told = dict.fromkeys(p.name.rpartition(".")[0] for p in spec.parameters if p.block is None)
    hooked = [name for name in told if name in ran]
    if family == "qwen3_vl_moe":  # its mergers of earlier blocks run between the blocks
        ran = [name for name in ran if "merger" not in name]
        hooked = [name for name in hooked if "merger" not in name]
    assert hooked == ran
    tower = "blocks" if family in AXES else "encoder.layers"
    assert [name.rpartition(".")[0] for name in spec.blocks] == [
        f"{spec.parts.tower}.{tower}",
        f"{spec.parts.tower}.{tower}",
        "model.language_model.layers",
        "model.language_model.layers",
    ]
    indices = [p.block for p in spec.parameters if p.block is not None]
    assert indices == sorted(indices)
    assert set(indices) == {0, 1, 2, 3}
    tied = family == "gemma3"
    assert spec.head_parameters == ("model.language_model.embed_tokens.weight" if tied else "lm_head.weight",)
    assert (spec.vocab_size, spec.max_positions) == (64, 64)
    assert "2 vision and 2 decoder blocks" in spec.start_report()[0]


def test_flops_count_the_language_model(tmp_path):
    """By hand: attention with two shared heads, a gated MLP, norms, biases of q, k and v, and the head."""
    block = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32 + (32 + 16 + 16)
    language = 2 * block + 32 + 64 * 32
    spec = seeing.model(tmp_path, "qwen2_5_vl")
    assert spec.flops_per_token(16) == 6 * language + 12 * 2 * 4 * 8 * 16 * 0.5
    section = ModelSection(config=seeing.values("qwen2_5_vl"), freeze=["model.visual.*"])
    assert build(tiny.context(tmp_path), section).flops_per_token(16) == spec.flops_per_token(16)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_gets_no_gradient(tmp_path, family):
    tower = "model.visual.*" if family in AXES else "model.vision_tower.*"
    section = ModelSection(config=seeing.values(family), freeze=[tower])
    spec = tiny.filled(build(tiny.context(tmp_path), section))
    for parameter in spec.parameters:
        spec.module.get_parameter(parameter.name).requires_grad_(parameter.trainable)
        assert parameter.trainable is not parameter.name.startswith(tower[:-1])
    hidden, _ = spec.hidden(seeing.batch(*seeing.rows(family)))
    spec.head(hidden.flatten(0, 1)).logsumexp(-1).sum().backward()
    for name, parameter in spec.module.named_parameters():
        assert (parameter.grad is None) is name.startswith(tower[:-1]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_all_linear_layers_of_the_blocks(tmp_path, family):
    section = ModelSection(config=seeing.values(family), lora=LoraSection(rank=2))
    spec = build(tiny.context(tmp_path), section)
    plain = seeing.transformers_model(family)
    prefixes = tuple(f"{block}." for block in spec.blocks)
    linear = {
        f"{name}.lora_A.default.weight"
        for name, module in plain.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(prefixes)
    }
    assert {p.name for p in spec.parameters if "lora_A" in p.name} == linear
    assert any(name.startswith(spec.parts.tower) for name in linear)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_have_transformers_distribution(tmp_path, family):
    ours, theirs = tiny.initial(seeing.model(tmp_path, family)), seeing.transformers_model(family)
    for name, value in theirs.named_parameters():
        if value.numel() < 300:
            assert (value.std() == 0) == (ours[name].std() == 0), name
        else:
            assert ours[name].std().item() == pytest.approx(value.std().item(), rel=0.2), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_its_own_weights(tmp_path, family):
    reference = seeing.transformers_model(family)
    reference.save_pretrained(tmp_path / "folder")
    spec = tiny.folder_model(tmp_path, tmp_path / "folder")
    state = tiny.initial(spec)
    for name, value in reference.named_parameters():
        assert torch.equal(state[name], value), name
    tiny.filled(spec)
    spec.load_buffers()
    ids, real, inputs = seeing.rows(family)
    expected = theirs(reference, family, ids, real, inputs)
    assert torch.allclose(
        ours(spec, seeing.batch(ids, real, inputs))[real == 1], expected[real == 1], atol=1e-5
    )


def test_which_class_a_configuration_gets(tmp_path):
    from transformers import AutoConfig

    assert vision.auto_class(AutoConfig.for_model("qwen2_5_vl")) is AutoModelForImageTextToText
    assert vision.auto_class(AutoConfig.for_model("qwen3")) is AutoModelForCausalLM
    assert vision.auto_class(AutoConfig.for_model("qwen3_5_text")) is AutoModelForCausalLM
    both = AutoConfig.for_model("qwen3_5")
    assert vision.auto_class(both) is AutoModelForImageTextToText
    both.architectures = ["Qwen3_5ForCausalLM"]
    assert vision.auto_class(both) is AutoModelForCausalLM
    with pytest.raises(ConfigError, match="t5 has no causal language model and no image-text-to-text"):
        build(tiny.context(tmp_path), ModelSection(config={"model_type": "t5"}))


def test_keys_of_the_parts_are_checked_and_kept(tmp_path):
    values = seeing.values("llava")
    section = ModelSection(config=values)
    build(tiny.context(tmp_path), section)
    assert section.config == seeing.values("llava")
    wrong = {**values, "vision_config": {**values["vision_config"], "image_sise": 8}}
    with pytest.raises(ConfigError, match="vision_config has no key 'image_sise'; did you mean image_size"):
        build(tiny.context(tmp_path), ModelSection(config=wrong))
    wrong = {**values, "text_config": {**values["text_config"], "hiden_size": 8}}
    with pytest.raises(ConfigError, match="text_config has no key 'hiden_size'; did you mean hidden_size"):
        build(tiny.context(tmp_path), ModelSection(config=wrong))


class TestConformance(ModelConformance):
    """The kit's rules for the model stage hold for a model with a vision tower too."""

    plugin = "hf"
    model: ClassVar = {"config": seeing.values("qwen3_vl_moe")}
