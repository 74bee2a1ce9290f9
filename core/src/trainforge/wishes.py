"""Refuses keys of `train` that are valid and yet could change nothing with this model and this data.

What only limits something (a timeout, a largest number) may be met by itself; what asks for something must come true.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, get_args, get_type_hints

from trainforge.errors import ConfigError
from trainforge.wording import did_you_mean

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.stages import ParameterSpec


def check_wishes(ctx: Context) -> None:
    """Check them once model and data are built, before any weight is loaded.

    Raises:
        ConfigError: each wish that cannot come true, with what to change.
    """
    problems = [*_of_blocks(ctx), *_of_decay(ctx), *_of_evaluation(ctx)]
    if problems:
        raise ConfigError("\n".join(problems))


def _of_blocks(ctx: Context) -> Iterator[str]:
    for key in ("recompute", "compile"):
        if getattr(ctx.train, key) is True and not ctx.model.blocks:
            yield f"train.{key} works block by block, and this model names no repeated blocks: set it to false"


def _of_decay(ctx: Context) -> Iterator[str]:
    """A pattern is a kind of parameter, or matches a name; kinds need no member."""
    from trainforge.stages import ParameterSpec

    kinds: Sequence[str] = get_args(get_type_hints(ParameterSpec)["kind"])
    for pattern in ctx.train.decay_exclude:
        if pattern not in kinds and not any(_matches(pattern, spec) for spec in ctx.model.parameters):
            meant = did_you_mean(pattern, [*kinds, *(spec.name for spec in ctx.model.parameters)])
            yield (
                f"train.decay_exclude: {pattern} is no kind of parameter ({', '.join(kinds)}) and matches no "
                f"name{meant}"
            )


def _matches(pattern: str, spec: ParameterSpec) -> bool:
    return any(fnmatchcase(name, pattern) for name in (spec.name, *spec.aliases))


def _of_evaluation(ctx: Context) -> Iterator[str]:
    if ctx.train.eval_every and next(iter(ctx.data.validation()), None) is None:
        yield (
            f"train.eval_every is {ctx.train.eval_every}, and the data holds no sample for validation: leave "
            "train.eval_every out, or have the data plugin hold some out"
        )
