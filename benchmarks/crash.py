"""`KILLS=100 PLUGIN=vault python -m benchmarks crash`: a run that saves every step, killed with SIGKILL at any moment.

PLUGIN is `dcp` or `vault`, which writes the checkpoints; without it, each in turn.

After each kill every checkpoint that is found must be whole, and none may be gone that was there before. At the end the
losses and weights must be those of a run that nobody killed. (A kill says nothing about what a disk had not written
yet; for that see tests/crash/test_power_cut.py.)

One process imports everything once; each start of the run is a fork of it.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.run.runs import write_recipe

from benchmarks.common import show

LOADED = (
    "torch",
    "transformers.models.qwen2.modeling_qwen2",
    "trainforge.runner",
    "trainforge_plugins.adamw.optimizer",
    "trainforge_plugins.dcp.checkpoint",
    "trainforge_plugins.ddp.comm",
    "trainforge_plugins.hf.spec",
    "trainforge_plugins.resident.memory",
    "trainforge_plugins.text.data",
    "trainforge_loongforge.vault.checkpoint",
    "trainforge_loongforge.vault.gds",
)
PLUGINS = ("dcp", "vault")
LONGEST_S = 0.5


def main() -> None:
    """Kill, look, resume; exits with 1 when anything was lost."""
    kills, seed = int(os.environ.get("KILLS", "100")), int(os.environ.get("SEED", "0"))
    asked = os.environ.get("PLUGIN")
    plugins = PLUGINS if asked is None else (asked,)
    _import_all()
    outcomes = {}
    for plugin in plugins:
        with tempfile.TemporaryDirectory() as folder:
            outcomes[plugin] = crash(Path(folder), kills, random.Random(seed), plugin)
    counts = list(outcomes[plugins[0]])
    rows = [[name, *(outcomes[plugin][name] for plugin in plugins)] for name in counts]
    title = f"{kills} times SIGKILL at a random moment (seed {seed})"
    show("crash", title, ["what", *(f"count, {plugin}" for plugin in plugins)], rows)
    if any(outcome["losses"] or outcome["differences"] for outcome in outcomes.values()):
        sys.exit(1)


def crash(folder: Path, kills: int, chance: random.Random, plugin: str = "dcp") -> dict[str, int]:
    """Kill a run that often, then let it end, and compare it with one that was not killed.

    `plugin` writes its checkpoints.

    Returns:
        kills; losses (kills after which a checkpoint was damaged or gone); resumes (starts that went on from a
        checkpoint); unfinished (kills that left a save half written); steps taken; differences (in losses and weights).
    """
    train = {"steps": 100_000, "schedule": "constant", "keep": 2}
    recipe, run_dir = write_recipe(folder, rows=200, train=train), folder / "killed"
    counts = {"kills": kills, "losses": 0, "resumes": 0, "unfinished": 0}
    for number in range(kills):
        counts["resumes"] += _newest(run_dir) is not None
        saves_first = number % 4 != 3  # one in four is killed while it starts, on a slow machine
        before = _kill_once(recipe, run_dir, chance.uniform(0.0, LONGEST_S), saves_first, plugin)
        counts["unfinished"] += any(run_dir.glob("checkpoints/.*"))  # before verifying, which cleans up
        counts["losses"] += bool(_damaged(run_dir)) or (_newest(run_dir) or 0) < before
    steps = (_newest(run_dir) or 0) + 3
    _in_child(lambda: _train(recipe, run_dir, 3, plugin), folder / "log.txt")
    _in_child(lambda: _train(recipe, folder / "whole", steps, plugin, save_every=steps), folder / "log.txt")
    differences = _differences(_result(run_dir), _result(folder / "whole"), missing=kills)
    return counts | {"steps": steps, "differences": differences}


def _kill_once(recipe: Path, run_dir: Path, seconds: float, saves_first: bool, plugin: str) -> int:
    """Start the run, kill it some seconds later; gives the newest step that was committed just before.

    Args:
        recipe, run_dir: the run.
        seconds: the time since its start, or since its first save.
        saves_first: whether it is left alone until it has saved.
        plugin: what writes its checkpoints.
    """
    log, old = run_dir.parent / "log.txt", _newest(run_dir)
    child = _fork(lambda: _train(recipe, run_dir, None, plugin), log)
    while saves_first and _newest(run_dir) == old and not _has_ended(child):
        time.sleep(0.005)
    time.sleep(seconds)
    before = _newest(run_dir) or 0
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        sys.exit(f"the run ended by itself:\n{log.read_text()}")
    return before


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _in_child(work: Callable[[], int], log: Path) -> None:
    _, status = os.waitpid(_fork(work, log), 0)
    if status:
        sys.exit(f"the run failed:\n{log.read_text()}")


def _fork(work: Callable[[], int], log: Path) -> int:
    """Do some work in a child with its output in `log`."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 1
    try:
        code = work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    sys.stdout.flush()
    os._exit(code)


def _train(recipe: Path, run_dir: Path, max_steps: int | None, plugin: str, save_every: int = 1) -> int:
    import trainforge

    return trainforge.run(
        recipe,
        run_dir=run_dir,
        max_steps=max_steps,
        plugins=[plugin],
        overrides=[f"train.save_every={save_every}"],
    )


def _newest(run_dir: Path) -> int | None:
    from trainforge.stages import is_checkpoint_name

    steps = [is_checkpoint_name(path.name) for path in run_dir.glob("checkpoints/step-*")]
    return max((step for step in steps if step is not None), default=None)


def _damaged(run_dir: Path) -> list[str]:
    from trainforge.checkpoints import list_checkpoints, verify_checkpoint

    found = list_checkpoints(run_dir / "checkpoints")
    return [problem for info in found for problem in verify_checkpoint(info)]


def _result(run_dir: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    digest = json.loads((run_dir / "summary.json").read_text())["weights_digest"]
    return {"digest": digest, **{str(line["step"]): (line["loss"], line["lr"]) for line in lines}}


def _differences(killed: dict[str, Any], whole: dict[str, Any], missing: int) -> int:
    """Steps that differ. A kill between saving a step and logging it costs at most its line."""
    absent = whole.keys() - killed.keys()
    unequal = sum(killed[name] != whole.get(name) for name in killed)
    return unequal + max(0, len(absent) - missing)


def _import_all() -> None:
    """Load what a run loads, so that a start costs no import."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LOADED:
        importlib.import_module(name)
