"""The model plugin `hf`: a language or image-text-to-text model of transformers, or a module of the user's own.

The recipe's `model` section says which one: a folder or hub id (`hf`), a configuration with random weights
(`config`), or a function of the user's (`factory`). This module is cheap to import; transformers is imported when
the model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainforge.errors import UserError
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.stages import ModelSpec

Attention = Literal["auto", "sdpa", "flex", "flash_attention_2", "flash_attention_3", "eager"]
Pattern = Annotated[str, Field(min_length=1)]
Experts = Literal["auto", "eager", "batched_mm", "grouped_mm"]


class LoraSection(Section):
    """Low-rank adapters: small matrices beside frozen ones."""

    rank: int = Field(8, ge=1, description="rows of an adapter")
    alpha: float = Field(16.0, gt=0, description="the adapter counts alpha / rank times")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the adapter")
    targets: Literal["all-linear"] | Annotated[tuple[Pattern, ...], Field(min_length=1)] = Field(
        "all-linear",
        description="layers: `[q_proj, v_proj]`, patterns of names, or all-linear: those of the blocks",
    )
    rslora: bool = Field(False, description="count the adapter alpha / sqrt(rank) times")


class ModelSection(Section):
    """Which model is trained. One of `hf`, `config` and `factory`; `init_from` alone takes the other run's model."""

    hf: str | None = Field(
        None, description="a folder with a transformers model, or an id on the Hugging Face hub"
    )
    config: dict[str, Any] | None = Field(
        None, description="a transformers configuration with its `model_type`; the weights start random"
    )
    factory: str | None = Field(
        None, description="`package.module:function` that returns a torch module or a ModelSpec of yours"
    )
    init_from: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="start from the weights that another run has trained: its folder, `RUN@STEP`, `RUN@best` (lowest "
        "validation loss), or a checkpoint's folder; without a step the newest, and the step is written down. "
        "Optimizer, counters and data start anew. Adapters are taken over by a run with the same `lora`, and added "
        "to the weights otherwise",
    )
    trust_remote_code: bool = Field(
        False,
        description="run the Python files that a model folder brings (`auto_map` in its config.json), and those that "
        "its tokenizer brings: they can do anything that you can",
    )
    freeze: tuple[Pattern, ...] = Field(
        (),
        description="patterns of names of parameters that are not trained: `[model.embed_tokens.*, model.layers.0.*]`. "
        "One that begins with `!` takes back what those before it froze: `['*', '!*norm*']`",
    )
    lora: LoraSection | None = Field(
        None,
        description="train low-rank adapters only, through peft (`pip install 'trainforge-plugins[lora]'`): `{rank: 8, "
        "alpha: 16, dropout: 0, targets: [q_proj, v_proj], rslora: false}`. `targets` are ends or patterns of names of "
        "linear layers; `all-linear`, the default, takes those of the blocks. With `rslora` an adapter counts "
        "alpha / sqrt(rank) times instead of alpha / rank",
    )
    attn: Attention = Field(
        "auto",
        description="how attention is computed. `auto` takes sdpa, or eager where the architecture cannot (the start "
        "report says which, and why). Rows of several documents need a mask, which keeps sdpa from its fastest "
        "kernels: `flex` and `flash_attention_*` leave out what a token must not see",
    )
    experts: Experts = Field(
        "auto", description="how the experts of a Mixture-of-Experts model are multiplied"
    )

    def runs_code(self) -> tuple[str, ...]:
        """A function of the user's, and files that a model folder brings."""
        made = () if self.factory is None else (f"model.factory: {self.factory}",)
        return (*made, "model.trust_remote_code: true") if self.trust_remote_code else made

    @model_validator(mode="before")
    @classmethod
    def _settled(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("init_from"), str):
            return values
        from trainforge_plugins.hf.init_from import settled

        try:
            return settled(values)
        except UserError as error:
            raise ValueError(
                f"init_from: {error}. (A run that has checkpoints of its own goes on without that run when it is "
                "started from the recipe.yaml in its own folder)"
            ) from None

    @field_validator("config")
    @classmethod
    def _has_type(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and not isinstance(value.get("model_type"), str):
            raise ValueError(
                "needs model_type, the name of a transformers architecture such as llama or qwen3"
            )
        return value

    @field_validator("factory")
    @classmethod
    def _names_a_function(cls, value: str | None) -> str | None:
        if value is not None and not all(
            part.strip() for part in (value.partition(":")[0], value.partition(":")[2])
        ):
            raise ValueError(f"must name a function as package.module:function, not {value!r}")
        return value

    @model_validator(mode="after")
    def _adapters_or_freeze(self) -> ModelSection:
        if self.lora is not None and self.freeze:
            raise ValueError(
                "freeze has no effect with lora, which trains its adapters only: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        given = [name for name in ("hf", "config", "factory") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of hf, config and factory, not {' and '.join(given)}")
        if not given:
            raise ValueError(
                "say which model to train: hf (a folder or hub id), config (an architecture with random weights) "
                "or factory (a function of yours); or init_from (a run that you have trained)"
            )
        return self


def build(ctx: Context, config: ModelSection) -> ModelSpec:
    """Build the model on the meta device.

    Raises:
        ConfigError: the model cannot be found or built; the message says why.
    """
    from trainforge_plugins.hf.freeze import freeze

    spec: ModelSpec
    if config.factory is not None:
        from trainforge_plugins.hf.factory import build_from_factory

        spec = build_from_factory(ctx, config.factory, config)
    else:
        from trainforge_plugins.hf.spec import build_transformers

        spec = build_transformers(ctx, config)
    freeze(spec, config.freeze)
    if config.lora is not None:
        from trainforge_plugins.hf.lora import add_adapters

        add_adapters(spec, config.lora, ctx.run.seed)
    if config.init_from is not None:
        from trainforge_plugins.hf.init_from import start_from

        start_from(ctx, spec, config)
    return spec


@hookimpl
def forge_model() -> Provider:
    """Serve the model stage."""
    return Provider(build=build, config=ModelSection, default=True)
