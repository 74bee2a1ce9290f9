"""`forge data`: the commands that the chosen data plugin brings (`Provider.tools`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainforge.cli.group import debug_option
from trainforge.cli.shared import Choices, choice_options, taken_out

if TYPE_CHECKING:
    from trainforge.selection import Chosen

_PROVIDER = "trainforge.data_provider"


class DataGroup(click.Group):
    """A group whose commands are known once the recipe says which plugin serves data."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Find out whose commands these are."""
        ctx.meta[_PROVIDER] = _chosen(args[1:])
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the plugin's tools."""
        return sorted(ctx.meta[_PROVIDER].provider.tools)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """A tool, as a command that also takes a recipe and chooses plugins."""
        factory = ctx.meta[_PROVIDER].provider.tools.get(name)
        return None if factory is None else _with_choices(factory(), name)


def _chosen(args: Sequence[str]) -> Chosen:
    """The data provider of a command line whose other options are not known yet."""
    lenient = {"ignore_unknown_options": True, "allow_extra_args": True}
    probe = choice_options(click.Command("probe", context_settings=lenient, add_help_option=False))
    ctx = probe.make_context("probe", list(args), resilient_parsing=True)
    values = dict(ctx.params)
    words = [Path(word) for word in (values.pop("recipe"), *ctx.args) if word is not None]
    recipe = next((word for word in words if word.is_file()), None)
    return Choices(recipe, **values).plan().chosen["data"]


def _with_choices(tool: click.Command, name: str) -> click.Command:
    """The tool's command with the recipe and the options of `Choices` in front of its own."""
    callback = tool.callback
    assert callback is not None

    def invoke(**values: Any) -> None:
        from trainforge.assembly import cache_dir
        from trainforge.console import TerminalConsole
        from trainforge.plan_sizes import describe_model

        made = taken_out(values).plan()
        _, context = describe_model(made)
        context.console, context.cache_dir = TerminalConsole(), cache_dir()
        chosen = made.chosen["data"]
        context.plugin = chosen.plugin
        callback(context, chosen.config, **values)

    command = click.Command(name, callback=invoke, params=list(tool.params), help=tool.help)
    return debug_option(choice_options(command))


@click.group(cls=DataGroup)
@debug_option
def data() -> None:
    """Look at the data of a recipe; the commands are those of its data plugin."""
