"""C17: whatever ends a run, no process, no shared memory and no logs stay; the last line says what is saved."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from tests.run.test_ranks import two_rank_recipe
from tests.support.processes import (
    below,
    command_line,
    ended,
    gone,
    shared_memory,
    start_forge_run,
    steps_logged,
    wait_until,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# Wraps each stage: FAIL names the stage and the moment ("build" or a method) in which rank 1 fails, and how.
FAILING = """
import os
from dataclasses import replace

from trainforge.hookspecs import hookimpl


def fail(how):
    if how == "raise":
        raise ValueError("torn on purpose")
    if how == "die":
        os._exit(9)


@hookimpl(wrapper=True)
def forge_STAGE():
    provider = yield

    def build(ctx, config):
        if "METHOD" == "build" and ctx.rank == 1:
            fail("HOW")
        stage = provider.build(ctx, config)
        real, calls = getattr(stage, "METHOD", None), []

        def failing(*arguments, **named):
            calls.append(1)
            if len(calls) == CALL and ctx.rank == 1:
                fail("HOW")
            return real(*arguments, **named)

        if real is not None:
            setattr(stage, "METHOD", failing)
        return stage

    return replace(provider, build=build)
"""


def ours():
    """Processes that any run of ours may have left."""
    found = {}
    for path in Path("/proc").iterdir():
        text = command_line(path.name) if path.name.isdigit() else ""
        if "trainforge" in text and "pytest" not in text:
            found[int(path.name)] = text
    return found


class Ending:
    """A run of two ranks, and what was there before it."""

    def __init__(self, folder, monkeypatch, *options, **train):
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        monkeypatch.setenv("TMPDIR", str(self.temporary))
        self.segments, self.folder = shared_memory(), folder / "run"
        recipe = two_rank_recipe(folder, **{"steps": 6, "save_every": 2, "log_every": 1, **train})
        recipe.write_text(recipe.read_text() + "ddp: {timeout: 1h}\n")
        self.process = start_forge_run(recipe, self.folder, "--nproc", 2, *options)
        self.family = [self.process.pid]

    def trains(self):
        """Wait until a few steps are done."""
        wait_until(lambda: steps_logged(self.folder) > 4, self.process)
        self.family += below(self.process.pid)

    def left_nothing(self, code):
        """The run ends with `code`; gives what it said on standard error."""
        while self.process.poll() is None and len(self.family) < 3:
            self.family = [self.process.pid, *below(self.process.pid)]
            time.sleep(0.01)
        out, err = ended(self.process)
        assert self.process.returncode == code, out + err
        assert "Traceback" not in out + err
        assert gone(self.family)
        marked = str(self.folder)
        assert not [text for text in ours().values() if marked in text]
        assert shared_memory() <= self.segments
        return err

    def logs(self):
        """Folders in the temporary folder."""
        return [path.name for path in self.temporary.iterdir() if path.name.startswith("trainforge-")]


def test_done(tmp_path, monkeypatch):
    ending = Ending(tmp_path, monkeypatch, "--max-steps", "3")
    assert ending.left_nothing(0) == ""
    assert ending.logs() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal(tmp_path, monkeypatch, number):
    ending = Ending(tmp_path, monkeypatch, steps=100_000)
    ending.trains()
    ending.process.send_signal(number)
    ending.left_nothing(3)
    assert ending.logs() == []
    summary = json.loads((ending.folder / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert (ending.folder / f"checkpoints/step-{summary['steps']:08d}/checkpoint.json").exists()


@pytest.mark.parametrize(
    ("stage", "method", "call", "saved"),
    [  # stages are built in one loop, and a step calls one after the other: one of each kind
        ("data", "build", 1, None),
        ("data", "take", 1, None),
        ("memory", "forward_backward", 4, 2),
        ("comm", "finish", 4, 2),
        ("checkpoint", "save", 2, 2),
    ],
)
def test_a_failure_in_a_stage(tmp_path, monkeypatch, stage, method, call, saved):
    err = failed(tmp_path, monkeypatch, stage, method, call, "raise").left_nothing(1)
    assert "torn on purpose" in err
    says_what_is_saved(err, saved)


@pytest.mark.parametrize(("stage", "method"), [("data", "build"), ("memory", "forward_backward")])
def test_a_rank_that_dies(tmp_path, monkeypatch, stage, method):
    ending = failed(tmp_path, monkeypatch, stage, method, 4, "die")
    err = ending.left_nothing(1)
    assert re.search("[Rr]ank 1", err)
    says_what_is_saved(err, None if method == "build" else 2)
    assert all(name in err for name in ending.logs()), "what is kept is named"


def failed(tmp_path, monkeypatch, stage, method, call, how):
    plugin = tmp_path / "failing.py"
    text = FAILING.replace("STAGE", stage).replace("METHOD", method)
    plugin.write_text(text.replace("CALL", str(call)).replace("HOW", how))
    return Ending(tmp_path, monkeypatch, "--plugins", str(plugin))


def says_what_is_saved(err, step):
    last = err.splitlines()[-1]
    if step is None:
        assert last == "Nothing was saved: the next start begins at step 1."
    else:
        assert last.startswith(f"Run again to resume from step {step}, the newest checkpoint in ")


def test_a_killed_launcher(tmp_path, monkeypatch):
    ending = Ending(tmp_path, monkeypatch, steps=100_000)
    ending.trains()
    os.kill(ending.process.pid, signal.SIGKILL)
    ending.left_nothing(-signal.SIGKILL)
