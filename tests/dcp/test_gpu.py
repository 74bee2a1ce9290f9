"""Device tensors: the snapshot is taken on the device's stream order, before `save` returns."""

from __future__ import annotations

import pytest
import torch
from tests.dcp.toys import checkpoint, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def test_a_device_snapshot_holds_what_was_queued_before_and_nothing_queued_after(tmp_path):
    device = torch.accelerator.current_accelerator()
    work = torch.randn(4096, 4096, device=device)
    weights, count = torch.zeros(3, 1_000_001, device=device), torch.tensor(1.0, device=device)
    host = torch.arange(7.0)
    stage = checkpoint(tmp_path, device=str(device))
    for step in range(1, 4):
        for _ in range(20):
            work = (work @ work).clamp(-1, 1)  # keeps the device busy, so that the fill is still queued
        weights.fill_(step)
        stage.save(step, {"p": whole(weights=weights, count=count, host=host)})
        weights.fill_(-1)
    stage.wait()
    got = [torch.zeros_like(weights), torch.zeros_like(count), torch.zeros(7)]
    stage.restore(
        {"p": whole(weights=got[0], count=got[1], host=got[2])}, tmp_path / "checkpoints" / "step-00000003"
    )
    assert bool((got[0] == 3).all())
    assert got[1].item() == 1.0
    assert torch.equal(got[2], host)
    assert stage.metrics()["bytes"] > weights.numel() * 4
    stage.close()
