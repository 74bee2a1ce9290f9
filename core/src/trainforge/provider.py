"""`Provider`: what a plugin hands over for a stage. A plain value, made while planning; it touches no GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

if TYPE_CHECKING:
    import click

    from trainforge.context import Context
    from trainforge.stages import ModelSpec, Optimizer, Tokenizer

StageName = Literal["model", "data", "memory", "comm", "optimizer", "checkpoint"]
STAGES: tuple[StageName, ...] = ("model", "data", "memory", "comm", "optimizer", "checkpoint")


class Section(BaseModel):
    """Base of a plugin's recipe section: frozen; a key it does not know and a number that is not finite are errors.

    `true` is no number, though Python has it equal to 1. A field's `description` becomes its line in docs/recipe.md.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def runs_code(self) -> tuple[str, ...]:
        """Keys that have code run which is not installed, as a person would write them: `model.factory: nets:make`.

        `forge export` and `forge sample` ask before such a key of a stored recipe is followed.
        """
        return ()

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        inside = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(one, bool) for one in inside):
            accepted = _types_in(cls.model_fields[info.field_name or ""].annotation)
            if (int in accepted or float in accepted) and bool not in accepted and Any not in accepted:
                raise ValueError("must be a number and not true or false")
        return value


def _types_in(annotation: Any) -> list[Any]:
    """The types that an annotation is made of."""
    inside = get_args(annotation)
    return [one for part in inside for one in _types_in(part)] if inside else [annotation]


@dataclass(frozen=True)
class Traits:
    """The few facts about a provider that planning checks (`trainforge.checks` holds one rule for each).

    Attributes:
        devices: device types it runs on (`"cpu"`, `"cuda"`, ...), or None for any.
        max_world: the largest number of ranks it supports, or None for any.
        gradients_on: memory only: where it leaves gradients, `"device"` or `"host"`.
        takes_gradients_on: comm and optimizer: the places from which they take gradients.
        shards_state: comm only: `partition` gives each rank only its own extents of the optimizer state.
        holds_shards: memory only: it can hold masters and moments for a part of the extents.
    """

    devices: frozenset[str] | None = None
    max_world: int | None = None
    gradients_on: Literal["device", "host"] = "device"
    takes_gradients_on: frozenset[str] = frozenset({"device", "host"})
    shards_state: bool = False
    holds_shards: bool = True


@dataclass(frozen=True)
class Estimate:
    """What a stage expects to need. Bytes per tier, each with the name under which `forge plan` lists it.

    Attributes:
        device: bytes on each rank's device, by what they hold (`{"masters": 4_000, ...}`).
        host: bytes of host RAM on each rank.
        disk: bytes on disk, whole run folder or cache.
        seconds_per_step: the predicted time this stage adds to one step, or None when it cannot tell.
        row_tokens: data only: the tokens of its longest rows; the stages after it find them as `ctx.row_tokens`.
        notes: lines that `forge plan` shows below its table.
        refusal: why a run would be refused before it loads anything, with the numbers; `forge plan` shows it last and
            exits with 2.
    """

    device: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)
    disk: Mapping[str, int] = field(default_factory=dict)
    seconds_per_step: float | None = None
    row_tokens: int | None = None
    notes: tuple[str, ...] = ()
    refusal: str | None = None


@dataclass(frozen=True)
class Provider:
    """What a plugin gives for one stage (or for an observer).

    Attributes:
        build: `build(ctx, config)` makes the stage object; called once per rank, after planning.
        config: the pydantic model of the plugin's recipe section (a `Section`).
        traits: the facts that planning checks.
        default: this provider serves its stage when nobody else is asked for. Its distribution also names
            the plugin in the entry point group `trainforge.defaults`, so that it is found without importing
            every installed plugin.
        tools: data only: commands of `forge data`, by name: each makes a click command when it is asked for. Core adds
            the recipe and the options that choose plugins, and calls its callback as `callback(ctx, config,
            **options)`, with the model described and nothing else built.
        quickstart: `"package:path"` of a recipe in package data, used when there is no other recipe.
        estimate: `estimate(ctx, model, config)` for `forge plan`; None when the stage needs next to nothing.
        micro_batch: memory only: `micro_batch(ctx, model, optimizer, config)` chooses the samples per forward on one
            rank where the recipe leaves it open (`train.micro_batch: auto`, no `accumulate`). The answer divides
            `ctx.batching.global_batch / ctx.world`, which stays; None leaves it to core's rule. Asked on every rank
            before data and memory are built, and for `forge plan`; `ctx.row_tokens` is what data estimates, or None.
        tokenizer: data only: `tokenizer(ctx, config)` gives the tokenizer alone, for `forge export` and `forge
            sample`: the data is not touched, and nothing is built before it. None when there is none.
    """

    build: Callable[[Context, Any], Any]
    config: type[Section] = Section
    traits: Traits = field(default_factory=Traits)
    default: bool = False
    quickstart: str | None = None
    tools: Mapping[str, Callable[[], click.Command]] = field(default_factory=dict)
    estimate: Callable[[Context, ModelSpec, Any], Estimate] | None = None
    micro_batch: Callable[[Context, ModelSpec, Optimizer, Any], int | None] | None = None
    tokenizer: Callable[[Context, Any], Tokenizer] | None = None
