"""The model's processor: what it makes of images, and which tokens stand for each of them.

The text of a row is expanded here and not by the processor, since labels need to know where everything lies. What an
image becomes is taken from the processor: it gets nothing but one placeholder for each image, with a control token in
between. The first row of each process is also given to the processor whole, and must come out the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainforge.errors import DataError
from trainforge_plugins.text.conversation import BadRow
from trainforge_plugins.text.opening import need
from trainforge_plugins.text.tokenizers import BYTES

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

CONFIGS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Files that may name the class of a processor."""

_OF_TOKENS = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "special_tokens_mask",
    "offset_mapping",
}
"""What a processor gives for each token; a model finds it from the ids."""


@dataclass(frozen=True)
class Expansion:
    """What a processor makes of the images of one row.

    Attributes:
        texts: for each image what takes its placeholder's place.
        inputs: the model's further inputs (`pixel_values`, ...), the images along dimension 0.
    """

    texts: tuple[str, ...]
    inputs: dict[str, Tensor]


class VisionProcessor:
    """The processor of an image-text model, for images only.

    Attributes:
        placeholder: what the chat template writes for an image.
    """

    def __init__(self, name: str, loaded: Any) -> None:
        self._name, self._loaded, self._tokenizer = name, loaded, loaded.tokenizer
        self.placeholder: str = loaded.image_token
        self._checked = False
        others = [self._tokenizer.eos_token, *self._tokenizer.all_special_tokens]
        self._between = next((t for t in others if t and t not in self.placeholder), "")
        if not self._between:
            raise DataError(
                f"the tokenizer of {name} has no control token beside that of images: use another"
            )

    def expand(self, images: Sequence[Image]) -> Expansion:
        """What takes the place of each image, and the model's inputs.

        Raises:
            BadRow: the processor refuses an image.
            DataError: it writes something that does not come back as the same tokens.
        """
        found = self._call(self._between.join([self.placeholder] * len(images)), images)
        separator = self._tokenizer.convert_tokens_to_ids(self._between)
        runs: list[list[int]] = [[]]
        for token in found["input_ids"][0].tolist():
            if token == separator:
                runs.append([])
            else:
                runs[-1].append(token)
        if len(runs) != len(images):
            raise self._unsupported("it puts control tokens between images")
        return Expansion(tuple(map(self._text, runs)), _further(found))

    def check(self, text: str, images: Sequence[Image], ids: list[int], inputs: dict[str, Tensor]) -> None:
        """Compare a row with what the processor makes of it; once, further calls do nothing.

        Raises:
            DataError: it makes something else of it.
        """
        if self._checked:
            return
        whole = self._call(text, images)
        further = _further(whole)
        same = further.keys() == inputs.keys() and all(
            further[name].shape == inputs[name].shape and bool((further[name] == inputs[name]).all())
            for name in inputs
        )
        if whole["input_ids"][0].tolist() != ids or not same:
            raise self._unsupported("what it makes of an image depends on the text")
        self._checked = True

    def _call(self, text: str, images: Sequence[Image]) -> Any:
        try:
            return self._loaded(
                text=[text], images=[list(images)], add_special_tokens=False, return_tensors="pt"
            )
        except Exception as error:  # of whatever kind: an image too long for its width, a mode without a rule
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise BadRow("the model's processor refuses its images", lines[0]) from None

    def _text(self, ids: list[int]) -> str:
        added = self._tokenizer.get_added_vocab()
        tokens = self._tokenizer.convert_ids_to_tokens(ids)
        if all(token in added for token in tokens):
            text = "".join(tokens)
        else:
            text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if self._tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise self._unsupported("what it writes for an image is not read as the same tokens")
        return text

    def _unsupported(self, why: str) -> DataError:
        return DataError(
            f"the processor of {self._name} ({type(self._loaded).__name__}) cannot be used for training: {why}: "
            "choose another model, or leave the images out with text.columns: {images: ''}"
        )


def _further(found: Any) -> dict[str, Tensor]:
    import torch

    return {
        name: value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
        for name, value in found.items()
        if name not in _OF_TOKENS
    }


def load_processor(name: str, own_code: bool = False) -> VisionProcessor:
    """Load the processor of a model's folder or hub id; `own_code`: code that the folder brings may run.

    Raises:
        DataError: it has none for images, or it cannot be read.
    """
    need("PIL.Image", "training on images")
    kind = None if name == BYTES or Path(name).is_file() else _processor_class(name)
    if kind is None or "image_processor" not in kind.get_attributes():
        raise DataError(
            f"the rows have images, but {name} brings no processor for them ({' or '.join(CONFIGS[:2])}): set "
            "model.hf, or text.tokenizer, to the folder or hub id of an image-text model, or leave the images out with "
            "text.columns: {images: ''}"
        )
    try:
        loaded = _for_images(kind).from_pretrained(name, trust_remote_code=own_code)
    except Exception as error:  # of several libraries
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"cannot read the processor of {name}: {lines[0]}: fetch its files again") from None
    if getattr(loaded, "image_token", None) is None:
        raise DataError(
            f"the processor of {name} ({kind.__name__}) has no token for images: choose another model, or leave the "
            "images out with text.columns: {images: ''}"
        )
    return VisionProcessor(name, loaded)


def _processor_class(name: str) -> Any:
    """The class that the files name, or that goes with the type of the model; None without any."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    names = [_read(name, file).get("processor_class") for file in CONFIGS]
    names.append(PROCESSOR_MAPPING_NAMES.get(_read(name, "config.json").get("model_type")))
    found = (getattr(transformers, str(wanted), None) for wanted in names if wanted)
    return next((kind for kind in found if kind is not None), None)


def _read(name: str, file: str) -> dict[str, Any]:
    """A JSON file of a model's folder or of the hub; empty when it is not there."""
    from huggingface_hub import hf_hub_download

    folder = Path(name).expanduser()
    try:
        path = folder / file if folder.is_dir() else Path(hf_hub_download(name, file))
        value = json.loads(path.read_text("utf-8"))
    except Exception:  # of several libraries, and no file is no mistake
        return {}
    return value if isinstance(value, dict) else {}


def _for_images(kind: Any) -> Any:
    """The processor's class without its part for videos, which needs torchvision even when there are none."""
    if "video_processor" not in kind.get_attributes():
        return kind

    class ForImages(kind):
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, **options: Any) -> None:
            super().__init__(image_processor=image_processor, tokenizer=tokenizer, **options)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in kind.get_attributes() if name != "video_processor"]

    ForImages.__name__ = kind.__name__
    return ForImages


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The inputs of several rows, one after the other along dimension 0.

    Where rows differ in another dimension (the tiles of an image, say), the smaller ones are padded with zeros, as
    processors do it.
    """
    import torch

    found: dict[str, Tensor] = {}
    for name in parts[0] if parts else ():
        tensors = [part[name] for part in parts]
        shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
        found[name] = torch.cat([_padded(tensor, shape) for tensor in tensors])
    return found


def _padded(tensor: Tensor, shape: list[int]) -> Tensor:
    if list(tensor.shape[1:]) == shape:
        return tensor
    whole = tensor.new_zeros((len(tensor), *shape))
    whole[tuple(slice(size) for size in tensor.shape)] = tensor
    return whole
