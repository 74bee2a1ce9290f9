"""Whole runs on a GPU: no host sync in a steady step, the figures of the log, and resume."""

from __future__ import annotations

import pytest
import torch
from tests.run.runs import MODEL, run, write_recipe

from trainforge.hookspecs import hookimpl
from trainforge_plugins.jsonl import MetricsFile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
QUIET = {"steps": 20, "log_every": 20, "global_batch": 4, "micro_batch": 2, "lr": 1e-3}


def recipe(folder, **train):
    model = {"config": MODEL | {"attention_dropout": 0.0}}
    return write_recipe(folder, 20, run={"device": "cuda"}, model=model, train=QUIET | train)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_steady_step_never_waits_for_the_device(tmp_path, monkeypatch, dtype):
    """Data, forward, backward, norm, clipping and update of steps 4 to 18, with every host sync an error."""
    watched = []

    class Watching(MetricsFile):
        @hookimpl
        def forge_step_ended(self, run, step):
            if step == 3:
                torch.cuda.set_sync_debug_mode("error")
            elif step == 18:
                torch.cuda.set_sync_debug_mode("default")
            watched.append(step)

    monkeypatch.setattr("trainforge_plugins.jsonl.MetricsFile", Watching)
    try:
        outcome = run(recipe(tmp_path, dtype=dtype), tmp_path / "run", strict=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watched == list(range(1, 21))
    assert outcome.summary["status"] == "finished"
    assert outcome.summary["loss_last"] < 5.6


def test_fp32_on_the_gpu_trains_like_the_cpu(tmp_path):
    losses = {}
    for device in ("cpu", "cuda"):
        path = write_recipe(
            tmp_path / device,
            20,
            run={"device": device},
            model={"config": MODEL | {"attention_dropout": 0.0}},
            train=QUIET | {"log_every": 1, "dtype": "fp32"},
        )
        losses[device] = run(path, tmp_path / device / "run").series("loss")
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-4)


def test_resume_on_the_gpu_and_what_is_logged(tmp_path):
    path = recipe(tmp_path, log_every=1, dtype="bf16")
    whole = run(path, tmp_path / "whole")
    run(path, tmp_path / "parts", max_steps=7)
    parts = run(path, tmp_path / "parts")
    assert parts.sample_ids == whole.sample_ids[7:]
    assert parts.series("loss") == pytest.approx(whole.series("loss"), rel=1e-3)
    last = whole.metrics[-1]
    assert last["device_peak_bytes"] > 0
    assert 0 < last["mfu"] < 1
    assert whole.summary["peak_device_bytes"] > 0
    assert last["ledger/compute_ms"] > 0
