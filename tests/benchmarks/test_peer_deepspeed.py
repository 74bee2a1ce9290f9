"""DeepSpeed's side of the benchmark trains what the others train. Needs DeepSpeed, which nothing here installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bench(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "peer_deepspeed"],
        cwd=ROOT,
        env=os.environ | {"TRAINFORGE_BENCH_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_deepspeed_it_says_what_to_install(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['deepspeed'] = None\n")
    result = bench(tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.strip().endswith("pip install deepspeed")


@pytest.mark.slow
def test_both_stages_take_the_steps_of_plain_pytorch(tmp_path: Path):
    pytest.importorskip("deepspeed")
    result = bench(tmp_path, CASES="tiny", STEPS="2", WARMUP="1")
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((tmp_path / "peer_deepspeed.json").read_text())
    assert [row[0] for row in content["rows"]] == ["tiny", "tiny"]
    assert set(content["runs"]) == {"tiny ZeRO-3", "tiny ZeRO-2"}, result.stdout
    loss, norm = first_step()
    for name, run in content["runs"].items():
        assert run, f"{name} failed: {result.stdout}"
        assert run["optimizer"] == "DeepSpeedCPUAdam"
        assert run["tokens_per_s"] > 0
        assert len(run["loss"]) == 2
        assert run["loss"][0] == pytest.approx(loss, rel=1e-3)
        assert run["grad_norm"][0] == pytest.approx(norm, rel=1e-2)  # bf16 gradients, summed in another order


def first_step() -> tuple[float, float]:
    """Loss and norm of the gradients of the tiny case's first step, by autograd alone."""
    import torch
    from benchmarks import peer_deepspeed

    model, rows, accumulate, chunk = peer_deepspeed.CASES["tiny"]
    module = peer_deepspeed.build_module(model, chunk)
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        peer_deepspeed.draw(name, parameter)
    module.float()
    total = sum(module(ids) / accumulate for ids in peer_deepspeed.batches(rows, accumulate)[0])
    total.backward()
    return float(total.detach()), float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]))
