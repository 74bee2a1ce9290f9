"""`model.freeze`: parameters that keep their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trainforge.errors import ConfigError
from trainforge.wording import did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from trainforge.stages import ModelSpec, ParameterSpec


def freeze(spec: ModelSpec, patterns: Sequence[str]) -> None:
    """Mark the parameters of `spec` that the patterns name as frozen, in its module too.

    Patterns are those of the shell (`*`, `?`, `[ab]`) and are gone through in order: one that begins with `!` takes
    back what earlier ones froze. A tied weight is frozen under any of its names.

    Raises:
        ConfigError: a pattern has no effect, or nothing is left to train.
    """
    if not patterns:
        return
    chosen = _chosen(spec.parameters, patterns)
    spec.parameters = tuple(
        replace(parameter, trainable=parameter.trainable and parameter.name not in chosen)
        for parameter in spec.parameters
    )
    if not any(parameter.trainable for parameter in spec.parameters):
        raise ConfigError(
            "model.freeze freezes every parameter, so there is nothing to train: take back some of it with a pattern "
            "that begins with ! (such as !*norm*)"
        )
    mark(spec.module, spec.parameters)


def mark(module: nn.Module, parameters: Sequence[ParameterSpec]) -> None:
    """Tell the module's parameters whether they are trained."""
    for parameter in parameters:
        module.get_parameter(parameter.name).requires_grad_(parameter.trainable)


def _chosen(parameters: Sequence[ParameterSpec], patterns: Sequence[str]) -> set[str]:
    """Names that the patterns freeze."""
    chosen: set[str] = set()
    for text in patterns:
        keep, pattern = text.startswith("!"), text.removeprefix("!")
        matched = {
            parameter.name
            for parameter in parameters
            if any(fnmatchcase(name, pattern) for name in parameter.names)
        }
        if not matched:
            meant = did_you_mean(pattern, (name for parameter in parameters for name in parameter.names))
            raise ConfigError(f"model.freeze: {text} matches no parameter{meant}")
        if keep and not matched & chosen:
            raise ConfigError(
                f"model.freeze: {text} takes back nothing, because no pattern before it freezes what it matches"
            )
        chosen = chosen - matched if keep else chosen | matched
    return chosen
