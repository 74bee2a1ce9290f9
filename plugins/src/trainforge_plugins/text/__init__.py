"""Plain text and JSONL as training data: tokenised once into a memory-mapped cache, packed, resumable exactly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from trainforge.hookspecs import hookimpl
from trainforge.provider import Estimate, Provider, Section
from trainforge.units import Seconds

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.stages import Data, ModelSpec
    from trainforge_plugins.text.exported import RunTokenizer


class TextSection(Section):
    """Where the text lies and how it is cut into samples. A sample is one row of `max_len` tokens."""

    path: str | tuple[str, ...] = Field(
        description="a file, a folder, a glob (`data/**/*.txt`), `package:NAME/FILE` for text shipped in a Python "
        "package, or a list of these; relative to the folder in which the run is started"
    )
    format: Literal["auto", "text", "jsonl"] = Field(
        "auto",
        description="text: a file is one document; jsonl: a line is one; auto: by the file's extension",
    )
    field: str = Field("text", min_length=1, description="jsonl: the field that holds a row's text")
    tokenizer: str = Field(
        "auto",
        min_length=1,
        description="bytes (built in), a tokenizer's folder, tokenizer.json or hub id, or auto (the tokenizer of "
        "`model.hf`, else bytes)",
    )
    max_len: int = Field(512, ge=2, description="tokens per row")
    validation: Annotated[float, Field(ge=0)] | str | tuple[str, ...] | None = Field(
        0.02, description="held out for evaluation: a share of the rows (below 1), a count of rows, or a path"
    )
    validation_rows: int = Field(
        256, ge=1, description="rows used by one evaluation, spread over the held-out ones"
    )
    last_batch: Literal["partial", "drop"] = Field(
        "partial",
        description="an epoch's last step when the rows do not fill it: train on fewer rows, or leave it out",
    )
    shuffle: bool = Field(True, description="visit the rows in another order in every epoch")
    strict: bool = Field(
        False, description="stop at the first row that cannot be used instead of skipping it"
    )
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto", description="processes that tokenise; 0: the main process does it; auto: by cores and size"
    )
    worker_timeout: Seconds = Field(
        120.0, gt=0, description="a tokenising process that is silent for this long ends the run"
    )
    cache: Path | None = Field(
        None, description="folder of the token cache; by default the run's cache folder"
    )

    @field_validator("validation")
    @classmethod
    def _share_or_count(
        cls, value: float | str | tuple[str, ...] | None
    ) -> float | str | tuple[str, ...] | None:
        if isinstance(value, float) and value >= 1 and not value.is_integer():
            raise ValueError("must be a share below 1, a whole number of rows, or a path")
        return value


def build(ctx: Context, config: TextSection) -> Data:
    """Tokenise (or find the cache of) the configured text and give the data stage."""
    from trainforge_plugins.text.data import build_data

    return build_data(ctx, config)


def estimate(ctx: Context, model: ModelSpec, config: TextSection) -> Estimate:
    """Disk that the token cache takes: exact for bytes, for other tokenizers as if they gave one token in 3 bytes.

    And the length of the rows, for the stages that hold them.
    """
    from trainforge_plugins.text.sources import find_sources
    from trainforge_plugins.text.tokenizers import chosen_tokenizer

    size = sum(source.size for source in find_sources(config.path, config.format))
    width = 2 if model.vocab_size <= 2**16 else 4
    tokens = size if chosen_tokenizer(ctx, config.tokenizer) == "bytes" else size // 3
    return Estimate(disk={"token cache": tokens * width}, row_tokens=config.max_len)


def tokenizer(ctx: Context, config: TextSection) -> RunTokenizer:
    """The configured tokenizer alone."""
    from trainforge_plugins.text.exported import RunTokenizer

    return RunTokenizer(ctx, config)


@hookimpl
def forge_data() -> Provider:
    """The default data stage."""
    return Provider(
        build=build,
        config=TextSection,
        default=True,
        quickstart="trainforge_plugins.text:quickstart.yaml",
        estimate=estimate,
        tokenizer=tokenizer,
    )
