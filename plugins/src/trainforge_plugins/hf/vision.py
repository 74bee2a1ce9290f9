"""What an image-text-to-text model has beside its language model: a vision tower, and positions on several axes."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from trainforge.errors import ConfigError, IncompatibleError
from trainforge.stages import Batch
from trainforge_plugins.hf import structure
from trainforge_plugins.hf.structure import Parts

_OURS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "use_cache", "cache"}
"""Keywords of a forward that are made here from the batch, or left alone."""


def auto_class(config: Any) -> Any:
    """The class of transformers that builds this configuration's model.

    A configuration that serves both kinds (Qwen3.5, Llama 4) is an image-text-to-text model when it describes a
    vision tower, unless its `architectures` name the language model alone.

    Raises:
        ConfigError: transformers has neither kind for it.
    """
    language = AutoModelForCausalLM._model_mapping
    images = AutoModelForImageTextToText._model_mapping
    kind = type(config)
    if kind not in language and kind not in images:
        raise ConfigError(
            f"model: {config.model_type} has no causal language model and no image-text-to-text model in transformers"
        )
    if kind not in images:
        return AutoModelForCausalLM
    if kind not in language:
        return AutoModelForImageTextToText
    named = model_class(config, AutoModelForCausalLM).__name__ in (config.architectures or ())
    sees = getattr(config, "vision_config", None) is not None
    return AutoModelForCausalLM if named or not sees else AutoModelForImageTextToText


def model_class(config: Any, auto: Any) -> type[PreTrainedModel]:
    """The model class that `auto` builds from the configuration."""
    found = auto._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple | list) else found


def attention_names(config: Any, registered: str, kernel: str) -> str | dict[str, str]:
    """Attention by part of the model: ours for the language model, transformers' own for what reads images.

    Our masks follow the documents of a batch, of which patches of an image know nothing.
    """
    text = config.get_text_config()
    keys = [key for key in config.sub_configs if getattr(config, key, None) is not None]
    if not any(getattr(config, key) is text for key in keys):
        return registered
    others = "eager" if kernel == "eager" else None
    names = {key: registered if getattr(config, key) is text else others for key in keys}
    return {"": registered, **{key: name for key, name in names.items() if name is not None}}


def parts_of(model: PreTrainedModel, base_name: str, sees: bool) -> Parts:
    """The parts of a model, by the modules that transformers itself calls decoder and encoder of images.

    Args:
        model: with its head.
        base_name: the name of what lies below the head.
        sees: whether it is an image-text-to-text model.
    """
    if not sees:
        return Parts(base_name)
    base: Any = model.get_submodule(base_name)
    names = {id(module): name for name, module in model.named_modules()}
    decoder, encoder = base.get_decoder(), base.get_encoder(modality="image")
    tower = "" if encoder is base or encoder is decoder else names[id(encoder)]
    return Parts(names[id(decoder)], tower)


def find_blocks(model: PreTrainedModel, parts: Parts) -> tuple[str, ...]:
    """Dotted names of the repeated blocks in forward order: those of the vision tower, then the decoder's."""
    found: list[str] = []
    for name in (parts.tower, parts.language):
        if not name:
            continue
        part: Any = model.get_submodule(name)
        layers = structure.number(part.config.get_text_config(), _LAYER_COUNTS)
        own = getattr(part, "_no_split_modules", None)
        classes = (*(own or ()), *(model._no_split_modules or ()))
        found += [f"{name}.{block}" for block in structure.find_blocks(part, layers, classes)]
    return tuple(found)


_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "depth")


class FurtherInputs:
    """Hands a batch's further inputs to the base model, and what follows from them.

    Args:
        base: the model below the head.
        config: its configuration.
    """

    def __init__(self, base: nn.Module, config: Any) -> None:
        self.base, self.config = base, config
        self.accepted = set(inspect.signature(type(base).forward).parameters)
        rope_index = getattr(base, "get_rope_index", None)
        self._rope_index: Any = rope_index
        self._rope_options = set() if rope_index is None else set(inspect.signature(rope_index).parameters)

    def options(self, batch: Batch) -> dict[str, Tensor]:
        """Keywords of the base model's forward: further inputs, what tokens stand for, positions.

        Raises:
            IncompatibleError: inputs do not fit the model or the rows.
        """
        found = self._checked(batch)
        if found:
            found |= {name: self._token_types(batch, name) for name in self._names_of_types()}
        if "position_ids" in self.accepted:
            found["position_ids"] = self.positions(batch)
        return found

    def _checked(self, batch: Batch) -> dict[str, Tensor]:
        for name in batch.inputs:
            if name not in self.accepted - _OURS - {"self", "kwargs"}:
                raise IncompatibleError(
                    f"the data hands out the input {name}, which {self.config.model_type} does not take: use the "
                    "processor that belongs to the model, or another model"
                )
        return dict(batch.inputs)

    def positions(self, batch: Batch) -> Tensor:
        """Positions of the tokens: `[rows, tokens]`, or `[axes, rows, tokens]` when images have axes of their own.

        A row with images gets what the model's own code computes from token ids, padding and grids; that code
        reads numbers one by one, so it runs on the CPU. Rows of text keep their positions in the document on every
        axis, and a batch without images is not looked at.

        Raises:
            IncompatibleError: a row with images holds several documents, or inputs do not fit the rows.
        """
        grids = [name for name in batch.inputs if name.endswith("_grid_thw")]
        if self._rope_index is None or not grids:
            return batch.position_ids
        ids, kinds = batch.input_ids.cpu(), self._token_types(batch, "mm_token_type_ids").cpu()
        documents = None if batch.document_ids is None else batch.document_ids.cpu()
        real = torch.ones_like(ids) if documents is None else (documents >= 0).long()
        sees = ((kinds != 0) & (real != 0)).any(1)
        if documents is not None and bool(((documents != documents[:, :1]) & (documents >= 0))[sees].any()):
            raise IncompatibleError(
                f"a row with images holds several documents, and {self.config.model_type} gives images positions of "
                "their own: switch packing off"
            )
        options = {name: value.cpu() for name, value in batch.inputs.items() if name in self._rope_options}
        options |= {"mm_token_type_ids": kinds[sees], "attention_mask": real[sees]}
        found, _ = self._rope_index(
            ids[sees], **{name: value for name, value in options.items() if name in self._rope_options}
        )
        positions = batch.position_ids.cpu().expand(len(found), -1, -1).clone()
        positions[:, sees] = found
        return positions.to(batch.input_ids.device)

    def _names_of_types(self) -> list[str]:
        return [name for name in sorted(self.accepted) if name.endswith("token_type_ids")]

    def _token_types(self, batch: Batch, name: str) -> Tensor:
        """What each token stands for: 0 text, 1 image, 2 video; as transformers' processors say it."""
        given = batch.inputs.get(name)
        if given is None:
            self._refuse_other_types(name)
            image, video = (getattr(self.config, f"{kind}_token_id", None) for kind in ("image", "video"))
            types = torch.zeros_like(batch.input_ids)
            for number, token in ((1, image), (2, video)):
                if token is not None:
                    types.masked_fill_(batch.input_ids == token, number)
            return types
        if given.shape != batch.input_ids.shape:
            raise IncompatibleError(
                f"the input {name} is {list(given.shape)}, but the rows are {list(batch.input_ids.shape)}: give one "
                "number for each token, or leave it out"
            )
        return given

    def _refuse_other_types(self, name: str) -> None:
        """Numbers of another meaning do not follow from the ids: in PaliGemma they tell prompt from answer.

        Where types mark the blocks of an image, in which tokens see each other (Gemma 3), the architecture has a
        function of that name.
        """
        blocks = hasattr(sys.modules[type(self.base).__module__], "get_block_sequence_ids_for_mask")
        if name != "mm_token_type_ids" and not blocks:
            raise IncompatibleError(
                f"{self.config.model_type} wants {name} for rows with images, which the data does not hand out: train "
                "it on text alone, or choose another model"
            )
