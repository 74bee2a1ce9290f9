"""Folders with a tokenizer, a chat template and a processor of images, as image-text models have them, but tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of Qwen2.5-VL without what it says of videos."""

LLAVA_SPECIAL = ("<s>", "</s>", "<unk>", "<pad>", "<image>")
LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% else %}{{ ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""In the manner of Llava 1.5: images come first, whatever their place; contents must be lists of parts."""


def _backend(special: tuple[str, ...]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["What is in this picture? A red square.\n"] * 9, trainer)
    return backend


def qwen_folder(folder: Path, **options: Any) -> Path:
    """A folder like that of Qwen2.5-VL: images keep their shape, one token for 28 x 28 pixels."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_backend(QWEN_SPECIAL), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = QWEN_TEMPLATE
    options = {"min_pixels": 56 * 56, "max_pixels": 112 * 112, **options}
    return _save(folder, tokenizer, Qwen2VLImageProcessorPil(**options), "Qwen2_5_VLProcessor")


def llava_folder(folder: Path) -> Path:
    """A folder like that of Llava 1.5: every image becomes 32 x 32 pixels and 16 tokens; a text begins with `<s>`."""
    backend = _backend(LLAVA_SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = LLAVA_TEMPLATE
    square = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    _save(folder, tokenizer, CLIPImageProcessorPil(**square), "LlavaProcessor")
    facts = {
        "processor_class": "LlavaProcessor",
        "patch_size": 8,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    (folder / "processor_config.json").write_text(json.dumps(facts))
    return folder


def _save(folder: Path, tokenizer: Any, image_processor: Any, processor: str) -> Path:
    tokenizer.save_pretrained(folder)
    image_processor.save_pretrained(folder)
    config = folder / "preprocessor_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "processor_class": processor}))
    return folder


class _Qwen(Qwen2_5_VLProcessor):
    """Takes no part for videos, which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument is not None:
            return super().check_argument_for_proper_class(argument_name, argument)
        return None


def qwen_processor(folder: Path) -> Any:
    """The library's own processor of `qwen_folder`, put together by hand."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return _Qwen(Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer, chat_template=QWEN_TEMPLATE)


def llava_processor(folder: Path) -> Any:
    """The library's own processor of `llava_folder`, put together by hand."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return LlavaProcessor(
        CLIPImageProcessorPil.from_pretrained(folder),
        tokenizer,
        patch_size=8,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=LLAVA_TEMPLATE,
    )


def picture(path: Path, width: int, height: int, seed: int = 0) -> Path:
    """A picture whose pixels all differ from each other and from those of other seeds."""
    image = Image.new("RGB", (width, height))
    for x in range(width):
        for y in range(height):
            image.putpixel((x, y), ((x * 7 + seed * 31) % 256, (y * 5 + seed) % 256, (x * y + seed) % 256))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path
