"""What several commands share: choosing plugins and overriding the recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trainforge.errors import SelectionError

if TYPE_CHECKING:
    from trainforge.planning import Plan

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Choices:
    """The recipe and what the command line lays over it."""

    recipe: Path | None
    plugins: tuple[str, ...]
    only: bool
    without: tuple[str, ...]
    stage: tuple[str, ...]
    overrides: tuple[str, ...]

    def plan(self, *, more: Sequence[str] = (), world: int = 1) -> Plan:
        """Make the plan; `more` are further overrides."""
        from trainforge.planning import make_plan

        return make_plan(
            self.recipe,
            plugins=self.plugins,
            only=self.only,
            without=self.without,
            stages=_settled(self.stage),
            overrides=[*self.overrides, *more],
            world=world,
        )


def with_choices(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function the argument RECIPE and the options of `Choices`; it is called with them as one `choices`."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, choices=taken_out(options), **options)

    return choice_options(call)


def taken_out(options: dict[str, Any]) -> Choices:
    """Take what `choice_options` has added out of a command's options."""
    return Choices(**{field.name: options.pop(field.name) for field in fields(Choices)})


def choice_options(command: Command) -> Command:
    """The argument RECIPE and the options of `Choices`."""
    for decorate in reversed(
        (
            click.argument("recipe", required=False, type=click.Path(path_type=Path)),
            click.option(
                "--plugins",
                multiple=True,
                metavar="A,B,...",
                help="Plugins, by name or file (./mine.py). They win over the recipe's, stage by stage.",
            ),
            click.option("--only", is_flag=True, help="Leave out the plugins that the recipe names."),
            click.option("--without", multiple=True, metavar="OBSERVER", help="Leave out an observer."),
            click.option(
                "--stage",
                multiple=True,
                metavar="STAGE=PLUGIN",
                help="Settle who serves a stage when two could.",
            ),
            click.option(
                "--set",
                "overrides",
                multiple=True,
                metavar="KEY=VALUE",
                help="Override a key: train.lr=1e-3.",
            ),
        )
    ):
        command = decorate(command)
    return command


trust_code_option = click.option(
    "--trust-code",
    is_flag=True,
    help="Run code that RUN's recipe names and that is not installed: files in RUN, model.factory, "
    "model.trust_remote_code.",
)
"""For commands that look into a run folder, which may have come from somebody else."""


def _settled(values: Sequence[str]) -> Mapping[str, str]:
    settled: dict[str, str] = {}
    for value in values:
        stage, equals, plugin = (part.strip() for part in value.partition("="))
        if not equals or not stage or not plugin:
            raise SelectionError(
                f"--stage {value}: must look like STAGE=PLUGIN, for example --stage comm=NAME"
            )
        if settled.setdefault(stage, plugin) != plugin:
            raise SelectionError(f"--stage {stage} is given twice: {settled[stage]} and {plugin}")
    return settled
