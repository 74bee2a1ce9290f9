"""`forge plugins`: what is installed, and what one plugin can be told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trainforge.cli.group import debug_option

if TYPE_CHECKING:
    from rich.console import Console

    from trainforge.plugin_info import PluginInfo


@click.command()
@click.argument("name", required=False)
@debug_option
def plugins(name: str | None) -> None:
    """List the installed plugins.

    With NAME (or ./file.py): its stages, configuration, traits and hooks.
    """
    from rich.console import Console

    from trainforge.plugin_info import describe, describe_all

    console = Console(highlight=False)
    if name is None:
        _print_all(console, describe_all())
    else:
        _print_one(console, describe(name))


def _print_all(console: Console, infos: list[PluginInfo]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("plugin", "serves", "distribution", box=None, pad_edge=False)
    table.add_column("", overflow="fold")
    for info in infos:
        state = f"unavailable: {info.problem}" if info.problem else ("default" if info.default else "")
        table.add_row(info.name, ", ".join(info.serves), f"{info.distribution} {info.version}", escape(state))
    console.print(table if infos else "No plugin is installed: pip install trainforge-plugins")


def _print_one(console: Console, info: PluginInfo) -> None:
    from rich.markup import escape
    from rich.table import Table

    console.print(f"{info.name}: {info.distribution} {info.version}", markup=False)
    for line in info.summary.splitlines():
        console.print(f"  {line}", markup=False)
    console.print(f"hooks: {', '.join(info.hooks)}", markup=False)
    for stage, traits in info.traits.items():
        console.print(f"{stage}: {traits}", markup=False)
    for section, keys in info.keys.items():
        console.print(
            f"\nRecipe section {section}:" if keys else f"\nNo configuration ({section}).", markup=False
        )
        table = Table("key", box=None, pad_edge=False)
        for heading in ("type", "default", "what it does"):
            table.add_column(heading, overflow="fold")
        for key in keys:
            table.add_row(*map(escape, (key.name, key.type, key.default, key.description)))
        if keys:
            console.print(table)
