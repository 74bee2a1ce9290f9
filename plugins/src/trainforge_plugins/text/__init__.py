"""Text and conversations as training data: tokenised once into a memory-mapped cache, packed, resumable exactly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from trainforge.hookspecs import hookimpl
from trainforge.provider import Estimate, Provider, Section
from trainforge.units import Seconds

if TYPE_CHECKING:
    import click

    from trainforge.context import Context
    from trainforge.stages import Data, ModelSpec
    from trainforge_plugins.text.exported import RunTokenizer


InputFormat = Literal["auto", "text", "jsonl", "alpaca", "sharegpt", "openai", "prompt_completion"]


def _check_names(columns: dict[str, str], tags: dict[str, str]) -> None:
    from trainforge_plugins.text.formats import RowFormat

    RowFormat("auto", columns, tags)


class SourceSection(Section):
    """One entry of `text.sources`. What it leaves out is as in the section itself."""

    path: str | tuple[str, ...]
    weight: float = Field(1.0, gt=0, le=1000)
    format: InputFormat | None = None
    columns: dict[str, str] = Field({})
    tags: dict[str, str] = Field({})

    @model_validator(mode="after")
    def _names(self) -> SourceSection:
        _check_names(self.columns, self.tags)
        return self


class TextSection(Section):
    """Where the text lies and how it is cut into samples. A sample is one row of `max_len` tokens."""

    path: str | tuple[str, ...] | None = Field(
        None,
        description="a file, a folder, a glob (`data/**/*.txt`), `package:NAME/FILE` for text shipped in a Python "
        "package, an address (`s3://...`, `https://...`), or a list of these; relative to the folder in which the run "
        "is started; either this, `sources` or `dataset`",
    )
    sources: tuple[SourceSection, ...] | None = Field(
        None,
        min_length=1,
        description="several paths with weights: `[{path:, weight: 1, format:, columns:, tags:}]`; the weight is how "
        "often the rows come in an epoch",
    )
    dataset: str | tuple[str, ...] | None = Field(
        None,
        description="names in the registry `dataset_info.json` of `dataset_dir`, as LLaMA-Factory keeps it",
    )
    dataset_dir: Path = Field(Path("data"), description="the folder of `dataset_info.json`, for `dataset`")
    format: InputFormat = Field(
        "auto",
        description="text: a file is one document; jsonl: a row is one, whatever the file's kind; alpaca, sharegpt, "
        "openai, prompt_completion: a row is a conversation; auto: by the file's extension and the rows' columns",
    )
    columns: dict[str, str] = Field(
        {},
        description="conversations: what the columns are called: `prompt`, `query`, `response`, `system`, `history`, "
        "`messages`, `tools`, `images`",
    )
    tags: dict[str, str] = Field(
        {},
        description="conversations: what the keys and roles of turns are called: `role_tag`, `content_tag`, "
        "`user_tag`, `assistant_tag`, `observation_tag`, `function_tag`, `system_tag`",
    )
    field: str = Field("text", min_length=1, description="jsonl: the column that holds a row's text")
    tokenizer: str = Field(
        "auto",
        min_length=1,
        description="bytes (built in), a tokenizer's folder, tokenizer.json or hub id, or auto (the tokenizer of "
        "`model.hf`, else bytes)",
    )
    max_len: int = Field(512, ge=2, description="tokens per row")
    image_dir: Path | None = Field(
        None,
        description="conversations: the folder of images whose paths are relative; by default that of the file which "
        "names them, or `dataset_dir`",
    )
    template: str = Field(
        "auto",
        min_length=1,
        description="conversations: the chat template: auto (the tokenizer's own, else plain), plain, chatml, llama3, "
        "mistral, gemma, or a file with Jinja",
    )
    train_on: Literal["assistant", "all", "last"] = Field(
        "assistant",
        description="conversations: what is learnt: every assistant turn with its end token, only the last one, or "
        "every token",
    )
    too_long: Literal["drop", "cut_prompt", "cut_tail"] = Field(
        "drop",
        description="conversations longer than `max_len`: left out; their longest prompts lose the middle; or they end "
        "early",
    )
    packing: bool = Field(
        True,
        description="conversations: several in a row; false: one in each, padded to the longest of the micro-batch",
    )
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

    @model_validator(mode="after")
    def _one_input(self) -> TextSection:
        given = [name for name in ("path", "sources", "dataset") if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "none of them is given"
            raise ValueError(f"give one of path, sources and dataset: {found}")
        fields = type(self).model_fields
        changed = [name for name, field in fields.items() if getattr(self, name) != field.default]
        own = [name for name in ("format", "columns", "tags", "field") if name in changed]
        if self.dataset is not None and own:
            raise ValueError(f"{own[0]} is in dataset_info.json when dataset is given: leave it out here")
        if self.dataset is None and "dataset_dir" in changed:
            raise ValueError("dataset_dir is only used with dataset: leave it out, or name a dataset")
        _check_names(self.columns, self.tags)
        return self

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
    """Disk that the token cache takes, and the length of the rows, for the stages that hold them.

    As if each byte were a token of the byte tokenizer, and 3 bytes one of another; a conversation's token has a label.
    """
    from trainforge_plugins.text.inputs import find_inputs
    from trainforge_plugins.text.tokenizers import chosen_tokenizer

    width = 2 if model.vocab_size <= 2**16 else 4
    per_token = 1 if chosen_tokenizer(ctx, config.tokenizer) == "bytes" else 3
    cache = sum(
        int(source.share * source.text_bytes) // per_token * (width + (source.format == "chat"))
        for source in find_inputs(config)
    )
    return Estimate(disk={"token cache": cache}, row_tokens=config.max_len)


def tokenizer(ctx: Context, config: TextSection) -> RunTokenizer:
    """The configured tokenizer alone."""
    from trainforge_plugins.text.exported import RunTokenizer

    return RunTokenizer(ctx, config)


def inspect_command() -> click.Command:
    """`forge data inspect`."""
    from trainforge_plugins.text.inspection import inspect

    return inspect


@hookimpl
def forge_data() -> Provider:
    """The default data stage."""
    return Provider(
        build=build,
        config=TextSection,
        default=True,
        tools={"inspect": inspect_command},
        quickstart="trainforge_plugins.text:quickstart.yaml",
        estimate=estimate,
        tokenizer=tokenizer,
    )
