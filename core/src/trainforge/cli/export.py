"""`forge export`: a run's model as a folder that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from trainforge.cli.group import debug_option
from trainforge.cli.shared import trust_code_option


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--step", type=click.IntRange(min=0), help="Take the checkpoint of this step [default: newest]."
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Of the weights in the files; the masters are fp32.",
)
@click.option(
    "--lora",
    type=click.Choice(["merged", "adapter"]),
    default="merged",
    show_default=True,
    help="A run with model.lora: its adapters added to the model, or alone.",
)
@click.option("--force", is_flag=True, help="Rename an OUT that is not empty to OUT.old-N.")
@trust_code_option
@debug_option
def export(
    run_dir: Path,
    out: Path,
    step: int | None,
    dtype: Literal["bf16", "fp32"],
    lora: Literal["merged", "adapter"],
    force: bool,
    trust_code: bool,
) -> None:
    """Write the model of the run folder RUN into the folder OUT.

    With the standard model plugin that is a Hugging Face folder: safetensors, configuration, tokenizer and a model
    card to fill in; with --lora adapter, a folder for peft. It needs no accelerator, and memory for a few tensors only.
    """
    from trainforge.console import TerminalConsole
    from trainforge.exporting import export_run

    digest = export_run(
        run_dir,
        out,
        TerminalConsole(),
        step=step,
        dtype=dtype,
        lora=lora,
        force=force,
        trust_code=trust_code,
    )
    click.echo(f"exported to {out} ({dtype}, weights_digest {digest})")
