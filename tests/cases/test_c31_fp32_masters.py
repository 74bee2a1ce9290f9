"""C31: bf16 weights with fp32 masters move like fp32 ones; without masters they would stand still."""

from pathlib import Path

import pytest
import torch
from tests.cases import constant

from trainforge.testing import tiny_run

LR, DECAY, STEPS = 6e-4, 0.01, 100


def closed_form(steps):
    """With a constant gradient Adam's step is the learning rate: w <- w(1 - lr·decay) - lr, from w = 1."""
    return (1 + 1 / DECAY) * (1 - LR * DECAY) ** steps - 1 / DECAY


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_hundred_steps_of_a_constant_gradient(tmp_path, dtype):
    train = {
        "lr": LR,
        "weight_decay": DECAY,
        "decay_exclude": [],
        "steps": STEPS,
        "dtype": dtype,
        "clip": None,
    }
    run = tiny_run(
        tmp_path / "run",
        (Path(constant.__file__), "resident", "adamw", "dcp"),
        train=train | {"schedule": "constant", "warmup": 0, "log_every": 50, "global_batch": 1},
        sections={"reference": {"silent_every": 0}},
    )
    assert run.summary["skipped_steps"] == run.summary["empty_steps"] == 0
    found = torch.load(run.path / "found.pt")
    assert closed_form(STEPS) == pytest.approx(0.93942, abs=1e-5)
    assert found["master"].tolist() == pytest.approx([closed_form(STEPS)] * 8, abs=2e-6)
    assert len(found["seen"]) == STEPS
    for step, copy in enumerate(found["seen"]):
        assert copy.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
        spacing = 2**-9 if dtype == "bf16" else 1e-6  # half of bf16's distance between numbers below 1
        assert copy.float().tolist() == pytest.approx([closed_form(step)] * 8, abs=spacing + 2e-6)


def test_without_a_master_nothing_would_move():
    """What the masters are for: the same hundred steps by torch.optim.AdamW on a bf16 parameter change no bit."""
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], lr=LR, weight_decay=DECAY)
    for _ in range(STEPS):
        weight.grad = torch.full_like(weight, constant.GRADIENT)
        optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(8, dtype=torch.bfloat16))
