"""What a person sees: lines, warnings and progress bars on rank 0's terminal, and the same lines in log.txt."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from trainforge.context import Task
from trainforge.units import format_bytes, format_seconds

_PLAIN_EVERY_S = 5.0
_CONTROL = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}


class _Terminal(RichConsole):
    """A rich console that goes silent when nobody reads it any more (`forge run | head`): training goes on."""

    def on_broken_pipe(self) -> None:
        """Leave the lines to the log."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class TerminalConsole:
    """The console of a real run.

    Attributes:
        terminal: the rich console that everything goes through, so that lines and live bars do not clash.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self.terminal: RichConsole = _Terminal(highlight=False, quiet=silent)
        # A terminal gets lines broken between words; a file or a pipe gets them whole.
        self.terminal.soft_wrap = not self.terminal.is_terminal
        self._silent = silent
        self._warned: set[str] = set()
        self._log: Path | None = None
        self._early: list[str] = []

    def log_to(self, path: Path) -> None:
        """Append every line to the file at `path` from now on, also those shown before it was known."""
        self._log = path
        for line in self._early:
            self._keep(line)
        self._early.clear()

    def note(self, text: str) -> None:
        """Show a line. Characters that would steer the terminal, as sampled text may hold, are replaced."""
        text = printable(text)
        self.terminal.print(text, markup=False)
        self._keep(text)

    def warn(self, text: str) -> None:
        """Show a warning; the same text is shown once."""
        text = printable(text)
        if text in self._warned:
            return
        self._warned.add(text)
        self.terminal.print(f"warning: {text}", style="yellow", markup=False)
        self._keep(f"warning: {text}")

    def log(self, text: str) -> None:
        """Keep a line in the log without showing it."""
        self._keep(printable(text))

    def task(self, label: str, total: float | None = None, unit: str = "") -> AbstractContextManager[Task]:
        """Progress of long work: a bar on a terminal, a line every few seconds elsewhere."""
        if self.terminal.is_terminal:
            return self._bar(label, total, unit)
        return self._lines(label, total, unit)

    @contextlib.contextmanager
    def _bar(self, label: str, total: float | None, unit: str) -> Iterator[Task]:
        amount: ProgressColumn = DownloadColumn() if unit == "B" else MofNCompleteColumn()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            amount,
            TextColumn(unit if unit != "B" else ""),
        )
        with Progress(*columns, TimeRemainingColumn(), console=self.terminal, transient=True) as progress:
            yield _BarTask(progress, progress.add_task(label, total=total))

    @contextlib.contextmanager
    def _lines(self, label: str, total: float | None, unit: str) -> Iterator[Task]:
        yield _LineTask(self, label, total, unit)

    def _keep(self, line: str) -> None:
        if self._log is None:
            if not self._silent:  # ranks other than 0 have no log
                self._early.append(line)
            return
        with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def printable(text: str) -> str:
    """The text without control characters (escape sequences, ...) and broken surrogates (odd file names)."""
    return text.translate(_CONTROL).encode("utf-8", "replace").decode("utf-8")


class _BarTask:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)


class _LineTask:
    """Says how far it is every few seconds, and nothing when the work is over before the first of them."""

    def __init__(self, console: TerminalConsole, label: str, total: float | None, unit: str) -> None:
        self._console, self._label, self._total, self._unit = console, label, total, unit
        self._done = 0.0
        self._began = self._said = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._said < _PLAIN_EVERY_S:
            return
        self._said = now
        text = f"{self._label}: {self._amount(self._done)}"
        if self._total:
            left = (now - self._began) * (self._total / max(self._done, 1e-9) - 1)
            text += f" of {self._amount(self._total)}, {format_seconds(max(left, 0))} to go"
        self._console.note(text)

    def _amount(self, value: float) -> str:
        return format_bytes(value) if self._unit == "B" else f"{value:g} {self._unit}".rstrip()
