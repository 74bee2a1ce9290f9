"""`HuggingFaceModel`: a causal language or image-text-to-text model of transformers as a `ModelSpec`."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging as transformers_logging

from trainforge.context import Context
from trainforge.errors import ConfigError, IncompatibleError
from trainforge.stages import Batch, Extent, ModelSpec, ParameterSpec
from trainforge_plugins.hf import ModelSection, attention, flops, own_code, structure, vision
from trainforge_plugins.hf.head import OutputHead
from trainforge_plugins.hf.initial import (
    InitialWeights,
    Merged,
    RandomWeights,
    Weights,
    WriteAdapters,
    transformers_initialiser,
)
from trainforge_plugins.hf.own_code import OwnClass
from trainforge_plugins.hf.skeleton import parameters_on_meta
from trainforge_plugins.hf.source import check_sizes, config_of_folder, config_of_values, folder_of
from trainforge_plugins.hf.weights import FolderWeights

_STATEFUL = ("mamba", "linear_attention", "conv", "recurrent", "ssm", "kda", "gated_deltanet")


def build_transformers(ctx: Context, section: ModelSection) -> HuggingFaceModel:
    """Build the model that `model.hf` or `model.config` names.

    Raises:
        ConfigError: it cannot be found, built or read.
    """
    with _quiet():
        folder = None if section.hf is None else folder_of(ctx, section.hf, section.trust_remote_code)
        own = None
        if folder is None:
            config = config_of_values(section.config or {})
        elif own_code.runs_code(ctx, folder, section.trust_remote_code):
            with own_code.code_turn(ctx):
                config = config_of_folder(folder, code=True)
            own = own_code.class_of(ctx, config, folder)
        else:
            config = config_of_folder(folder)
        check_sizes(config.get_text_config())
        return HuggingFaceModel(config, folder, section, ctx.run.seed, ctx.device, own)


class HuggingFaceModel(ModelSpec):
    """A causal language model or image-text-to-text model of transformers, without weights.

    `blocks` of a model with a vision tower are the tower's, then the decoder's. A batch without images runs the
    decoder's alone, and the tower gets no gradient from it.

    Args:
        config: its transformers configuration.
        folder: where its weights lie, or None for random ones.
        section: the recipe's `model` section.
        seed: of the random weights.
        device: what the model will run on.
        own: the class that the folder's own code defines, when that is to run.
    """

    def __init__(
        self,
        config: Any,
        folder: Path | None,
        section: ModelSection,
        seed: int,
        device: torch.device,
        own: OwnClass | None = None,
    ) -> None:
        self.config, self.folder = config, folder
        self.source = _source(section.hf)
        self.text = config.get_text_config()
        auto = vision.auto_class(config) if own is None else own.auto
        model_class = vision.model_class(config, auto) if own is None else own.model
        self.attention = attention.choose(section.attn, model_class, self.text, device)
        names = vision.attention_names(config, self.attention.registered, self.attention.kernel)
        self.module = model = _empty_model(auto, config, names, section.experts, own is not None)
        self.base_name, base = _base_model(model)
        self.parts = vision.parts_of(model, self.base_name, auto is AutoModelForImageTextToText)
        self.blocks = vision.find_blocks(model, self.parts)
        heads = [name for name, _ in model.named_children() if name != self.base_name]
        self.parameters = structure.describe_parameters(
            model, self.blocks, heads, structure.expert_count(self.text), self.parts
        )
        if section.experts != "auto" and not any(spec.experts for spec in self.parameters):
            raise ConfigError(
                f"model.experts is {section.experts}, but {config.model_type} has no stacked experts for it: leave it "
                "out"
            )
        self.head_parameters = self._head_parameters()
        self.vocab_size = int(self.text.vocab_size)
        self.max_positions = structure.number(
            self.text, ("max_position_embeddings", "n_positions", "max_seq_len")
        )
        self.adapters = self.origin = ""
        self.write_adapters: WriteAdapters | None = None
        self.merged: Callable[[Weights], Merged] = lambda weights: (self.module, self.parameters, weights)
        self.weights_source: InitialWeights = (
            RandomWeights(model, seed, transformers_initialiser)
            if folder is None
            else FolderWeights(model, folder, self.parameters)
        )
        self.index_parameters()
        self._further = vision.FurtherInputs(base, config)
        self._balance = self._balancing()
        self._stateful = _carries_state(model, self.text)
        self._check_head()

    def index_parameters(self) -> None:
        """Take note of `parameters` and of the head, after layers were put around others."""
        self._specs = {spec.name: spec for spec in self.parameters}
        self._head = OutputHead(self.module, self.base_name)

    def flops_per_token(self, tokens: int) -> float:
        """Model FLOPs per token: 6 per active parameter (4 when it is frozen), and causal attention.

        Of a model that reads images the language model alone is counted: how often the vision tower is gone
        through depends on the images and not on the number of tokens.
        """
        language = self._language()
        active = flops.active_parameters(language, self.head_parameters, self.text)
        frozen = [spec for spec in language if not spec.trainable]
        spared = flops.active_parameters(frozen, self.head_parameters, self.text)
        return 6.0 * active - 2.0 * spared + flops.attention_flops(self.text, tokens)

    def load(self, name: str, out: Tensor, extent: Extent) -> None:
        """Fill `out` with a span of the parameter's initial weights."""
        self.weights_source.fill(self._specs[name], out, extent)

    def load_buffers(self) -> None:
        """Fill persistent buffers from the model folder."""
        self.weights_source.fill_buffers(self.module)

    def close(self) -> None:
        """Give back what the weights hold open."""
        self.weights_source.close()

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Run the base model.

        `batch.inputs` go to the keywords of the base model's forward that they are called by (pixel values, grids).

        Raises:
            IncompatibleError: rows hold several documents and the model cannot keep them apart, or it does not take
                an input.
        """
        base = self.module.get_submodule(self.base_name)
        options: dict[str, Any] = {"use_cache": False, **self._further.options(batch)}
        if self.attention.own_masks:
            # Without a mask transformers would look for packed rows in the position ids, which asks the device.
            options["attention_mask"] = torch.ones_like(batch.input_ids)
        elif batch.document_ids is not None and "position_ids" not in self._further.accepted:
            self._refuse_documents(batch.document_ids)
        if batch.document_ids is not None and self._stateful:
            self._refuse_documents(batch.document_ids)
        if self._balance is not None:
            options["output_router_logits"] = True
        with attention.masks_of(batch):
            output = base(input_ids=batch.input_ids, **options)
        hidden: Tensor = output.last_hidden_state
        if self._balance is None:
            return hidden, None
        return hidden, self._balance_loss(output.router_logits, hidden, batch)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[n, vocab]` of hidden states `[n, width]`."""
        return self._head(hidden)

    def export(self, out: Path, weights: Callable[[str], Tensor], dtype: Literal["bf16", "fp32"]) -> None:
        """Write a folder that `from_pretrained` reads: configuration, generation configuration, safetensors."""
        from trainforge_plugins.hf.export import export_folder

        module, parameters, weights = self.merged(weights)
        with _quiet():
            export_folder(module, self.folder, parameters, self.blocks, out, weights, dtype)

    def export_adapters(
        self, out: Path, weights: Callable[[str], Tensor], dtype: Literal["bf16", "fp32"]
    ) -> str:
        """Write the adapters of `model.lora` as a folder for `peft.PeftModel.from_pretrained`.

        Raises:
            UserError: there are none, or what they belong to is in no folder.
        """
        if self.write_adapters is None:
            return super().export_adapters(out, weights, dtype)
        return self.write_adapters(out, weights, dtype)

    def start_report(self) -> list[str]:
        """How many parameters there are and how attention and experts are computed."""
        total = sum(spec.elements for spec in self.parameters)
        trainable = sum(spec.elements for spec in self.parameters if spec.trainable)
        active = flops.active_parameters(self._language(), self.head_parameters, self.text)
        counts = f"{_count(total)} parameters"
        if trainable != total:
            counts += f", {_count(trainable)} trainable"
        if any(spec.experts for spec in self.parameters):
            counts += f", {_count(active)} used by each token"
        kind = self.config.model_type
        seeing = sum(name.startswith(f"{self.parts.tower}.") for name in self.blocks)
        blocks = (
            f"{seeing} vision and {len(self.blocks) - seeing} decoder" if seeing else str(len(self.blocks))
        )
        lines = [f"model: {kind}, {blocks} blocks, {counts}"]
        lines += [text for text in (self.adapters, self.origin) if text]
        lines.append(f"attention: {self.attention.kernel} ({self.attention.reason})")
        if self._stateful:
            lines.append(f"model: {kind} carries state along a row, so rows must hold one document each")
        return lines

    def _language(self) -> list[ParameterSpec]:
        """Parameters of the language model and its head."""
        inside = (f"{self.parts.language}.", *self.head_parameters)
        return [spec for spec in self.parameters if spec.name.startswith(inside)]

    def _head_parameters(self) -> tuple[str, ...]:
        inside = f"{self.base_name}."
        return tuple(
            spec.name
            for spec in self.parameters
            if any(not name.startswith(inside) for name in (spec.name, *spec.aliases))
        )

    def _balancing(self) -> Any:
        if not getattr(self.text, "output_router_logits", False):
            return None
        function = getattr(sys.modules[type(self.module).__module__], "load_balancing_loss_func", None)
        if function is None:
            raise ConfigError(
                f"model.config: {self.config.model_type} has no auxiliary loss for its router; "
                "leave out output_router_logits"
            )
        return function

    def _balance_loss(self, logits: Any, hidden: Tensor, batch: Batch) -> Tensor:
        logits = tuple(logits)
        if (
            hidden.requires_grad
            and not any(layer.requires_grad for layer in logits)
            and self._trains_before_the_last_block()
        ):
            raise IncompatibleError(
                "the router's auxiliary loss gets no gradient from blocks that are recomputed without a graph; "
                "set output_router_logits to false in the model's configuration, or choose another memory plugin"
            )
        # Without a mask older releases of transformers count tokens with bincount, which asks the device.
        documents = batch.document_ids
        real = torch.ones_like(batch.input_ids, dtype=torch.bool) if documents is None else documents >= 0
        loss: Tensor = self._balance(
            logits, structure.expert_count(self.text), structure.active_experts(self.text), real
        )
        return loss * float(getattr(self.text, "router_aux_loss_coef", 0.001))

    def _trains_before_the_last_block(self) -> bool:
        """Whether something that is trained lies before the last router for certain."""
        last = len(self.blocks) - 1
        return any(
            spec.trainable and spec.block is not None and spec.block < last for spec in self.parameters
        )

    def _refuse_documents(self, documents: Tensor) -> None:
        if bool(((documents != documents[:, :1]) & (documents >= 0)).any()):
            raise IncompatibleError(
                f"{self.config.model_type} cannot keep several documents in one row apart; switch packing off"
            )

    def _check_head(self) -> None:
        width = int(self.text.hidden_size)
        try:
            logits = self._head(torch.empty(2, width, device="meta"))
        except Exception as error:
            raise ConfigError(
                f"model: the output head of {type(self.module).__name__} cannot be run apart from the rest: {error}"
            ) from None
        if self._head.stand_in.calls != 1 or logits.ndim != 2 or logits.shape[0] != 2:
            raise ConfigError(
                f"model: the output head of {type(self.module).__name__} cannot be told from the rest"
            )


def _source(name: str | None) -> str:
    """What `model.hf` names, so that it can be found from any folder: an id on the hub, or a whole path; else empty."""
    path = Path(name or "").expanduser()
    return str(path.resolve()) if name and path.is_dir() else name or ""


def _base_model(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """The name of the part below the output head, and that part."""
    children = dict(model.named_children())
    inner = [name for name, child in children.items() if isinstance(child, PreTrainedModel)]
    for name in (model.base_model_prefix, *inner):
        if name in children:
            return name, children[name]
    raise ConfigError(f"model: {type(model).__name__} has no base model apart from its output head")


def _empty_model(
    auto: Any, config: Any, attn: str | dict[str, str], experts: str, code: bool
) -> PreTrainedModel:
    options: dict[str, Any] = {"attn_implementation": attn, "dtype": torch.float32, "trust_remote_code": code}
    if experts != "auto":
        options["experts_implementation"] = experts
    try:
        with parameters_on_meta():
            model: PreTrainedModel = auto.from_config(config, **options)
            return model
    except Exception as error:
        raise ConfigError(
            f"model: {config.model_type} cannot be built: {str(error) or type(error).__name__}"
        ) from error


def _carries_state(model: nn.Module, config: Any) -> bool:
    kinds = " ".join(getattr(config, "layer_types", None) or ())
    return bool(getattr(model, "_is_stateful", False)) or any(word in kinds for word in _STATEFUL)


def _count(parameters: float) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return f"{parameters:,.0f}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own bars and remarks from the terminal while a model is built."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()
