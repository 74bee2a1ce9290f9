"""The command group: exit codes, and errors as one message instead of a traceback."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import click

from trainforge.errors import TrainForgeError, UserError

_DEBUG = "trainforge.debug"
_ARGUMENTS = "trainforge.arguments"
Command = TypeVar("Command", bound=Callable[..., Any])


class ForgeGroup(click.Group):
    """Ends with 2 when the user must change something, 1 when the run failed; a traceback needs `--debug`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remember the arguments, which ranks are started with again."""
        ctx.meta[_ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn what it raises into a message and an exit code."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(
                stream, io.TextIOWrapper
            ):  # a terminal without UTF-8 gets ? for what it cannot show
                stream.reconfigure(errors="replace")
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            _show(error, debugging(ctx))
            ctx.exit(exit_code(error))


def debug_option(command: Command) -> Command:
    """The option `--debug`, understood before and after the command's name."""

    def remember(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[_DEBUG] = True

    option = click.option(
        "--debug", is_flag=True, expose_value=False, callback=remember, help="Show tracebacks of errors."
    )
    return option(command)


def debugging(ctx: click.Context) -> bool:
    """Whether `--debug` was given."""
    return bool(ctx.meta.get(_DEBUG))


def arguments(ctx: click.Context) -> tuple[str, ...]:
    """The command line without the program's name."""
    return tuple(ctx.meta.get(_ARGUMENTS, ()))


def exit_code(error: BaseException) -> int:
    """What the command line ends with after an error."""
    return error.exit_code if isinstance(error, TrainForgeError) else 1


def _show(error: BaseException, debug: bool) -> None:
    """Show an error, or leave it to the launcher when this is one of its ranks."""
    from trainforge.rank_process import report_error

    text = _text(error, debug)
    if not report_error(error, text, exit_code(error)):
        click.echo(text, err=True)


def _text(error: BaseException, debug: bool) -> str:
    if isinstance(error, KeyboardInterrupt):
        text = "error: stopped at once by Ctrl-C"
    elif isinstance(error, TrainForgeError):
        text = f"error: {error}"
    else:
        text = f"error: {type(error).__name__}: {error}"
    if debug:
        return f"{''.join(traceback.format_exception(error))}{text}"
    worded = isinstance(error, UserError | KeyboardInterrupt)
    lines = [text, *([] if worded else ["Run with --debug for the traceback."])]
    return "\n".join([*lines, *getattr(error, "__notes__", [])])
