"""What core's loop adds to a step: the same stages walked by a bare loop and by `trainforge.loop.train`, in turn.

The stages are the default memory and optimizer on a model of a few thousand parameters, so that the step itself is
short. The bare loop does what any loop must: take batches, seed, forward and backward, norm, clip, update. Core adds
the control reduction, the time ledger, logging every 10 steps with the default observers, and the checks for stopping.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from pathlib import Path

from benchmarks.common import median, show

STEPS, ROUNDS = 200, 15
LIMIT_MS = 0.3


def main() -> None:
    """Walk the same stages both ways and print the difference."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        run = assembled(Path(folder), closing)
        bare(run)  # warm-up
        bare_ms, core_ms = [], []
        for _ in range(ROUNDS):
            bare_ms.append(bare(run))
            core_ms.append(core(run))
    added = [ours - theirs for ours, theirs in zip(core_ms, bare_ms, strict=True)]
    rows = [
        ("bare loop", median(bare_ms), min(bare_ms), max(bare_ms)),
        ("trainforge.loop.train", median(core_ms), min(core_ms), max(core_ms)),
        ("added by core", median(added), min(added), max(added)),
    ]
    show(
        "core_overhead",
        f"Milliseconds per step over {STEPS} steps, {ROUNDS} rounds of both in turn in one process; the limit for what "
        f"core adds is {LIMIT_MS} ms.",
        ("loop", "median ms", "min ms", "max ms"),
        rows,
    )


def assembled(folder: Path, closing: contextlib.ExitStack):
    """A run of the standard memory, optimizer and observers on the tiny model, ready to take steps."""
    import torch
    import yaml

    from trainforge.assembly import build_stages, start
    from trainforge.batching import resolve_batching
    from trainforge.context import Context, SilentConsole
    from trainforge.options import RunOptions
    from trainforge.planning import make_plan
    from trainforge.runfolder import RunFolder

    torch.set_num_threads(1)
    recipe = {
        "run": {"name": "overhead", "device": "cpu"},
        "train": {
            "steps": 10**6,
            "global_batch": 4,
            "micro_batch": 4,
            "dtype": "fp32",
            "schedule": "constant",
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    reference = "trainforge.testing.reference"
    plan = make_plan(
        folder / "recipe.yaml",
        plugins=[reference_file(folder, reference), "benchmarks/no_checkpoint.py"],
    )
    run_folder = RunFolder(folder / "run")
    run_folder.open(fresh=False)
    closing.callback(run_folder.close)
    ctx = Context(
        run=plan.recipe.run,
        train=plan.recipe.train,
        model_config=plan.recipe.model,
        device=torch.device("cpu"),
        rank=0,
        world=1,
        local_rank=0,
        local_world=1,
        batching=resolve_batching(plan.recipe.train, 1),
        run_dir=run_folder.path,
        cache_dir=folder,
        console=SilentConsole(),
    )
    build_stages(plan, ctx, ("comm",), closing)
    return start(plan, RunOptions(), ctx, run_folder, closing)


def reference_file(folder: Path, module: str) -> str:
    """A plugin file that gives the tiny model and the synthetic data of the test kit."""
    path = folder / "tiny.py"
    path.write_text(f"from {module} import forge_data, forge_model\n")
    return str(path)


def bare(run) -> float:
    """Milliseconds per step of the shortest loop over these stages."""
    import torch

    from trainforge.seeding import micro_batch_seed
    from trainforge.stages import Update

    stages, accumulate, lr = run.stages, run.ctx.batching.accumulate, run.train.lr
    began = time.perf_counter()
    for step in range(1, STEPS + 1):
        batches = stages.data.take(accumulate)
        for batch in batches:
            batch.seed = micro_batch_seed(0, step, batch.index)
        tokens = sum(batch.supervised for batch in batches)
        stages.memory.forward_backward(batches, 1 / tokens, run.sink)
        used = stages.comm.finish()
        norm = stages.memory.grad_norm()
        finite = norm.isfinite()
        scale = (1.0 / (norm + 1e-6)).clamp(max=1.0).where(finite, torch.ones(())).float()
        update = Update(step, lr, scale, finite.logical_not().float())
        stages.memory.apply(lambda slots, update=update: stages.optimizer.update(slots, update), used)
    return (time.perf_counter() - began) * 1000 / STEPS


def core(run) -> float:
    """Milliseconds per step of core's loop over the same stages."""
    from trainforge.loop import train

    run.last_step = run.state.step + STEPS
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        train(run, lambda: False)
    taken = (time.perf_counter() - began) * 1000 / STEPS
    run.ledger.read()  # the lap after the last step, so that the next round starts afresh
    return taken
