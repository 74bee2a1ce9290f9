"""Tiny image-text-to-text models, and batches with images made by hand."""

from __future__ import annotations

import torch
from tests.hf import tiny

from trainforge.stages import Batch
from trainforge_plugins.hf import ModelSection, build

IMAGE, VIDEO = 60, 61
_TEXT = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,  # so that what a token sees shows in the logits
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": 58,
    "vision_end_token_id": 59,
}
_QWEN_VISION = {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 2, "out_hidden_size": 32}
_QWEN3_VISION = {**_QWEN_VISION, "intermediate_size": 24, "num_position_embeddings": 16}
FAMILIES = {
    "qwen2_5_vl": {
        **_TOKENS,
        "text_config": _TEXT,
        "vision_config": {
            **_QWEN_VISION,
            "intermediate_size": 24,
            "window_size": 8,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl_moe": {
        **_TOKENS,
        "text_config": {
            **_TEXT,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0]},
    },
    "llava": {
        "image_token_index": IMAGE,
        "text_config": {
            "model_type": "llama",
            **{key: value for key, value in _TEXT.items() if key != "rope_parameters"},
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 2,
            "projection_dim": 16,
        },
        "image_seq_length": 16,
    },
    "gemma3": {
        "image_token_index": IMAGE,
        "mm_tokens_per_image": 4,
        "text_config": {
            **{key: value for key, value in _TEXT.items() if key != "rope_parameters"},
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 2,
        },
    },
}
"""Configurations as a recipe gives them, without `model_type`."""

AXES = ("qwen2_5_vl", "qwen3_vl_moe")
"""Families in which images have axes of positions."""

GRIDS = ((1, 4, 4), (1, 4, 8))
"""Patches of the two images in time, height and width; two by two of them make a token."""


def values(family, vocab_size=tiny.VOCAB, **more):
    """The configuration of a family as a recipe gives it."""
    own = FAMILIES[family]
    return {
        "model_type": family,
        **own,
        "text_config": {**own["text_config"], "vocab_size": vocab_size},
        **more,
    }


def model(tmp_path, family, seed=0, **more):
    """The spec of a tiny model with random weights, without storage."""
    return build(tiny.context(tmp_path, seed), ModelSection(config=values(family, **more)))


def images(family, count=2, seed=3):
    """What a processor hands out beside the token ids for `count` images, and how many tokens each is."""
    generator = torch.Generator().manual_seed(seed)
    if family not in AXES:
        size = 16 if family == "llava" else 4
        return {"pixel_values": torch.randn(count, 3, 8, 8, generator=generator)}, [size] * count
    grids = torch.tensor([GRIDS[i % 2] for i in range(count)])
    patches = grids.prod(1)
    pixels = torch.randn(int(patches.sum()), 3 * 2 * 2 * 2, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": grids}, (patches // 4).tolist()


def rows(family, vocab=58, seed=1):
    """Three rows: an image between text, padding and no image, an image at the start and padding.

    Returns token ids `[3, 24]`, which tokens are real, and the further inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs, sizes = images(family, seed=seed)
    ids = torch.randint(1, vocab, (3, 24), generator=generator)
    real = torch.ones(3, 24, dtype=torch.long)
    ids[0, 3 : 3 + sizes[0]] = IMAGE
    ids[2, : sizes[1]] = IMAGE
    real[1, 15:], real[2, 20:] = 0, 0
    ids[real == 0] = 0
    return ids, real, inputs


def batch(ids, real=None, inputs=None, **more):
    """A micro-batch in which each row is one document, padded at the end where `real` is 0."""
    width = torch.arange(ids.shape[1]).expand_as(ids)
    documents = None if real is None else real - 1
    labels = torch.roll(ids, -1, 1)
    labels[:, -1] = -100
    labels[labels == IMAGE] = -100
    if real is not None:
        labels[torch.roll(real, -1, 1) == 0] = -100
    supervised = int((labels != -100).sum())
    count = ids.numel() if real is None else int(real.sum())
    return Batch(ids, labels, width, documents, supervised, count, inputs=inputs or {}, **more)


def transformers_model(family, **more):
    """The family's model as transformers makes it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(**values(family, **more)), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def filled(spec):
    """The spec with initial weights; what starts as zeros and would hide the images (Gemma 3) is random."""
    tiny.filled(spec)
    for name, parameter in spec.module.named_parameters():
        if "projection" in name and not parameter.any():
            with torch.no_grad():
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    return spec


def same_weights(spec, family, state=None, **more):
    """transformers' model with the spec's initial weights, or those of a state."""
    reference = transformers_model(family, **more)
    missing, unexpected = reference.load_state_dict(state or tiny.initial(spec), strict=False)
    assert not unexpected
    assert not set(missing) & {name for name, _ in reference.named_parameters()}
    return reference


def token_types(family, ids):
    """What a processor says of the tokens, under the name by which the model takes it."""
    types = (ids == IMAGE).int()
    return {"llava": {}, "gemma3": {"token_type_ids": types}}.get(family, {"mm_token_type_ids": types})
