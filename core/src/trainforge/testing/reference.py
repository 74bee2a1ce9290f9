"""The reference stages as an ordinary plugin: one module that serves all six."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section, Traits

if TYPE_CHECKING:
    from trainforge.context import Context


class ReferenceSection(Section):
    """The `reference` section: only the synthetic data has something to choose."""

    samples: int = Field(40, ge=1, description="samples per epoch")
    tokens: int = Field(12, ge=2, description="longest sample")
    vocab: int = Field(61, ge=2, description="ids lie below this")
    silent_every: int = Field(7, ge=0, description="one sample in so many has no supervised token; 0: none")
    validation: int = Field(5, ge=0, description="validation samples")
    letters: str | None = Field(None, description="a file with the letters of the tokenizer, or null")


class TinyModelSection(Section):
    """The `model` section of the tiny model."""

    layers: int = Field(3, ge=1, description="blocks")
    width: int = Field(16, ge=2, description="width of the hidden states")
    heads: int = Field(2, ge=1, description="attention heads")
    vocab: int = Field(61, ge=2, description="rows of the embedding")
    tied: bool = Field(False, description="whether the output head is the embedding")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout in every block and after the embedding")
    auxiliary: float = Field(
        0.0, ge=0, description="weight of an auxiliary loss: mean square of the hidden states"
    )
    freeze: tuple[str, ...] = Field((), description="names of parameters that are not trained")
    max_positions: int | None = Field(None, description="longest sequence, or null")
    folder: str | None = Field(None, description="an exported model to start from, or null")


@hookimpl
def forge_model() -> Provider:
    """The tiny model."""
    return Provider(build=_model, config=TinyModelSection)


@hookimpl
def forge_data() -> Provider:
    """The synthetic data."""
    return Provider(build=_data, config=ReferenceSection, tokenizer=_tokenizer)


@hookimpl
def forge_memory() -> Provider:
    """The plain loop."""
    return Provider(build=_memory, config=ReferenceSection)


@hookimpl
def forge_comm() -> Provider:
    """A single rank."""
    return Provider(build=_comm, config=ReferenceSection, traits=Traits(max_world=1))


@hookimpl
def forge_optimizer() -> Provider:
    """AdamW written out."""
    return Provider(build=_optimizer, config=ReferenceSection)


@hookimpl
def forge_checkpoint() -> Provider:
    """JSON and raw bytes."""
    return Provider(build=_checkpoint, config=ReferenceSection)


def _model(ctx: Context, config: TinyModelSection) -> Any:
    from trainforge.testing.model import TinyModel

    return TinyModel(config, ctx.run.seed)


def _data(ctx: Context, config: ReferenceSection) -> Any:
    from trainforge.testing.data import SyntheticData

    return SyntheticData(config, ctx)


def _tokenizer(ctx: Context, config: ReferenceSection) -> Any:
    from trainforge.testing.data import LetterTokenizer

    return LetterTokenizer(config)


def _memory(ctx: Context, config: ReferenceSection) -> Any:
    from trainforge.testing.memory import ReferenceMemory

    return ReferenceMemory(ctx)


def _comm(ctx: Context, config: ReferenceSection) -> Any:
    from trainforge.stages import Comm

    return Comm()


def _optimizer(ctx: Context, config: ReferenceSection) -> Any:
    from trainforge.testing.optimizer import ReferenceOptimizer

    return ReferenceOptimizer(ctx.train)


def _checkpoint(ctx: Context, config: ReferenceSection) -> Any:
    from trainforge.testing.checkpoint import ReferenceCheckpoint

    return ReferenceCheckpoint(ctx)
