"""The command line. Its modules import click and nothing slower; work is imported when a command runs."""

from __future__ import annotations

import click

from trainforge import __version__
from trainforge.cli.checkpoints import checkpoints
from trainforge.cli.data import data
from trainforge.cli.doctor import doctor
from trainforge.cli.export import export
from trainforge.cli.group import ForgeGroup, debug_option
from trainforge.cli.plan import plan
from trainforge.cli.plugins import plugins
from trainforge.cli.run import run
from trainforge.cli.sample import sample

__all__ = ["main"]


@click.group(
    cls=ForgeGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, "--version", message="TrainForge %(version)s")
@debug_option
def main() -> None:
    """Train a model from one recipe, and choose per run how each stage of training is done."""


for _command in (run, plan, data, plugins, checkpoints, export, sample, doctor):
    main.add_command(_command)
