"""The progress line: what it says, and that it never wraps or loses the step number."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from trainforge_plugins.progress.display import ProgressDisplay, figures, fitting

METRICS = {
    "loss": 1.95059,
    "eval_loss": 1.96582,
    "tokens_per_s": 19759.4,
    "step_ms": 104.0,
    "ledger/compute_ms": 99.0,
    "ledger/optimizer_ms": 5.0,
    "host_peak_bytes": 1024.0**3,
    "skipped_steps": 0.0,
}


def shown_at(width: int) -> str:
    terminal = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    state, logged = SimpleNamespace(step=0), []
    console = SimpleNamespace(terminal=terminal, log=logged.append)
    run = SimpleNamespace(console=console, state=state, last_step=600)
    display = ProgressDisplay()
    display.forge_run_started(run, None)
    display.forge_metrics_logged(run, 220, METRICS)
    assert logged[0].startswith("step 220/600 · loss 1.9506 · ")
    assert logged[0].endswith("1.0 GiB")  # the log holds everything, however narrow the screen
    bar = display._progress.get_renderable()
    display.forge_run_ended(run, None)
    paper = Console(file=io.StringIO(), width=width)
    paper.print(bar)
    return paper.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_bar_is_one_line_with_step_and_loss(width):
    lines = shown_at(width).splitlines()
    assert len(lines) == 1
    assert len(lines[0]) <= width
    assert lines[0].startswith("step 220/600 ")
    assert "loss 1.9506" in lines[0]
    assert "…" not in lines[0]


def test_a_wide_terminal_shows_more():
    assert "to go" in shown_at(80)
    assert "1.0 GiB" not in shown_at(80)
    assert "validation 1.9658" in shown_at(120)
    assert "compute 95% optimizer 5% · 1.0 GiB" in shown_at(200)


def test_the_last_entry_has_nothing_to_go():
    assert not any("to go" in part for part in figures(METRICS))


def test_the_first_figure_stays_however_narrow():
    assert fitting(["loss 1.0", "2 tokens/s"], 3) == "loss 1.0"


def test_the_first_step_says_nothing_about_the_time_to_go():
    lines = []
    console = SimpleNamespace(terminal=None, note=lines.append)
    run = SimpleNamespace(console=console, state=SimpleNamespace(step=4), last_step=10)
    display = ProgressDisplay()
    display.forge_run_started(run, None)
    for step in (5, 6):
        display.forge_step_ended(run, step)
        display.forge_metrics_logged(run, step, METRICS)
    assert ["to go" in line for line in lines] == [False, True]
