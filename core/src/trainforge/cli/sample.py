"""`forge sample`: let a run's model continue a text."""

from __future__ import annotations

from pathlib import Path

import click

from trainforge.cli.group import debug_option
from trainforge.cli.shared import trust_code_option


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens to draw.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.8,
    show_default=True,
    help="0 takes the likeliest token each time.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is drawn.")
@click.option(
    "--step", type=click.IntRange(min=0), help="Take the checkpoint of this step [default: newest]."
)
@trust_code_option
@debug_option
def sample(
    run_dir: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    step: int | None,
    trust_code: bool,
) -> None:
    """Let the model of the run folder RUN continue PROMPT.

    Prints the prompt and its continuation, and how fast it was drawn to standard error. The training data is not read.
    """
    from trainforge.console import TerminalConsole
    from trainforge.sampling import sample_run

    drawn = sample_run(
        run_dir,
        prompt,
        TerminalConsole(silent=True),
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        step=step,
        trust_code=trust_code,
    )
    click.echo(f"{prompt}{drawn.text}")
    rate = drawn.tokens / max(drawn.seconds, 1e-9)
    click.echo(f"step {drawn.step}: {drawn.tokens} tokens at {rate:,.1f} tokens/s", err=True)
