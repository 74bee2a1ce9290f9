"""What reaches the terminal and log.txt."""

from __future__ import annotations

import io

from rich.console import Console

from trainforge.console import TerminalConsole, printable


def console_on(width: int, *, terminal: bool) -> tuple[TerminalConsole, io.StringIO]:
    console, screen = TerminalConsole(), io.StringIO()
    console.terminal = Console(
        file=screen, width=width, force_terminal=terminal, color_system=None, soft_wrap=not terminal
    )
    return console, screen


def test_sampled_text_cannot_steer_the_terminal(tmp_path):
    console, screen = console_on(80, terminal=True)
    console.log_to(tmp_path / "log.txt")
    console.note("sample \x1b[2J\x07\x00\x9b1m whale\tand\nsea")
    console.warn("odd \x1b]0;title\x07")
    for text in (screen.getvalue(), (tmp_path / "log.txt").read_text("utf-8")):
        assert not set(text) & {"\x1b", "\x07", "\x00", "\x9b"}
        assert "sea" in text


def test_a_file_name_that_is_not_utf8_can_be_shown_and_kept(tmp_path):
    console, screen = console_on(80, terminal=False)
    console.log_to(tmp_path / "log.txt")
    console.note("folder caf\udce9")
    assert "folder caf" in screen.getvalue()
    assert "folder caf" in (tmp_path / "log.txt").read_text("utf-8")


def test_ordinary_text_stays_as_it_is():
    assert printable("loss 4.1 → 1.9 · Ünïcode\n\tover") == "loss 4.1 → 1.9 · Ünïcode\n\tover"


def test_a_terminal_gets_lines_broken_between_words_and_a_pipe_gets_them_whole():
    text = "validation " * 10
    for terminal in (True, False):
        console, screen = console_on(40, terminal=terminal)
        console.note(text.strip())
        lines = screen.getvalue().splitlines()
        assert all(word == "validation" for line in lines for word in line.split())
        assert (len(lines) > 1) == terminal
