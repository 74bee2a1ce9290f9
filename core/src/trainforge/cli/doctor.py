"""`forge doctor`: what this machine and installation mean for a run."""

from __future__ import annotations

import click

from trainforge.cli.group import debug_option


@click.command()
@debug_option
def doctor() -> None:
    """Check this machine and installation.

    Versions, devices, compiler, memory limits, threads: each line says what it means for a run.
    """
    from trainforge.doctor import examine

    findings = examine()
    for finding in findings:
        line = f"{'ok' if finding.fine else '! '}  {finding.what}: {finding.found} ({finding.meaning})"
        click.secho(line, fg=None if finding.fine else "yellow")
    concerns = sum(not finding.fine for finding in findings)
    click.echo(f"\n{concerns} to look at (marked !)" if concerns else "\nNothing to worry about.")
