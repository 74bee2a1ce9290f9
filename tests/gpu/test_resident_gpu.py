"""`resident`, `adamw` and the toolbox on a GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tests.support.context import make_context
from tests.support.toy_model import ToyConfig, ToyModel, toy_batches

from trainforge.stages import Comm, Update
from trainforge.toolbox.parameters import round_to_bf16, squared_norms
from trainforge.toolbox.streams import Streams
from trainforge_plugins.adamw import forge_optimizer
from trainforge_plugins.resident import forge_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU"),
]
CONFIG = ToyConfig(layers=3, tied=True, odd=True, unused=True, bias=True, experts=2)


class Loop:
    def __init__(self, device: str, **train) -> None:
        self.comm = Comm()
        self.ctx = make_context(
            device=device, built={"model": ToyModel(CONFIG), "comm": self.comm}, eps=1e-4, lr=1e-2, **train
        )
        self.ctx.built["optimizer"] = self.optimizer = forge_optimizer().build(self.ctx, None)
        self.memory = forge_memory().build(self.ctx, None)
        self.sink = self.comm.watch(self.memory.gradients)

    def step(self, number: int, batches, poison: bool = False) -> torch.Tensor:
        scale = 1 / sum(batch.supervised for batch in batches)
        loss = self.memory.forward_backward(batches, scale, self.sink)
        used = self.comm.finish()
        if poison:
            self.memory.gradients[0].span(3)[0] = float("inf")
        norm = self.memory.grad_norm()
        finite = norm.isfinite()
        update = Update(
            number, 1e-2, (1 / (norm + 1e-6)).clamp(max=1.0).where(finite, 1.0), (~finite).float()
        )
        self.memory.apply(lambda slots: self.optimizer.update(slots, update), used)
        return loss

    def weights(self):
        return {spec.name: self.memory.weights(spec.name) for spec in self.memory.model.parameters}


@contextlib.contextmanager
def no_host_sync():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def pinned(batches):
    for batch in batches:
        for name in ("input_ids", "labels", "position_ids"):
            setattr(batch, name, getattr(batch, name).pin_memory())
    return batches


@pytest.mark.parametrize("recompute", [False, True])
def test_gpu_equals_cpu_in_fp32(recompute):
    cpu, gpu = Loop("cpu", dtype="fp32"), Loop("cuda", dtype="fp32", recompute=recompute)
    for step in range(1, 6):
        batches = toy_batches(CONFIG, 2, step=step)
        assert gpu.step(step, batches).item() == pytest.approx(cpu.step(step, batches).item(), rel=1e-5)
    expected = cpu.weights()
    for name, tensor in gpu.weights().items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_steady_step_never_waits_for_the_device(dtype):
    loop = Loop("cuda", dtype=dtype)
    batches = [pinned(toy_batches(CONFIG, 2, step=step)) for step in range(1, 5)]
    loop.step(1, batches[0])
    with no_host_sync():
        for step in (2, 3, 4):
            loop.step(step, batches[step - 1])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_found_inf_changes_no_bit(dtype):
    loop = Loop("cuda", dtype=dtype)
    loop.step(1, toy_batches(CONFIG, 2))
    before = [named.tensor.clone() for named in loop.memory.state().tensors]
    loop.step(2, toy_batches(CONFIG, 2, step=2), poison=True)
    assert all(torch.equal(a, b.tensor) for a, b in zip(before, loop.memory.state().tensors, strict=True))
    loop.step(3, toy_batches(CONFIG, 2, step=2))
    assert not all(torch.equal(a, b.tensor) for a, b in zip(before, loop.memory.state().tensors, strict=True))


def test_rounding_and_norms_equal_the_cpu():
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), dtype=torch.int64).to(torch.int32)
    bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000
    master = bits.view(torch.float32)
    master[~master.isfinite()] = 1.0
    here, there = (
        torch.zeros(len(master), dtype=torch.bfloat16),
        torch.zeros(len(master), dtype=torch.bfloat16).cuda(),
    )
    round_to_bf16(master, here)
    round_to_bf16(master.cuda(), there)
    assert torch.equal(here.view(torch.int16), there.cpu().view(torch.int16))
    tensors = [torch.randn(size) * 1e25 for size in (0, 1, 1000, 300_000)]
    assert torch.allclose(
        squared_norms(tensors), squared_norms([t.cuda() for t in tensors]).cpu(), rtol=1e-12
    )


def test_copies_on_streams_are_ordered_by_events():
    streams = Streams(torch.device("cuda"))
    upload, download = streams.stream("upload"), streams.stream("download", priority=-1)
    assert streams.stream("upload") is upload
    host, back = streams.host(1 << 22, torch.float32), streams.host(1 << 22, torch.float32)
    assert host.is_pinned()
    host.fill_(3.0)
    slot = torch.zeros(1 << 22, device="cuda")
    free, landed, ready, left = (streams.event() for _ in range(4))
    left.wait()  # never recorded
    free.record()
    upload.wait(free)
    streams.copy(slot, host, upload)
    landed.record(upload)
    landed.wait()
    torch.cuda._sleep(10_000_000)
    slot.mul_(2)
    ready.record()
    download.wait(ready)
    streams.copy(back, slot, download)
    left.record(download)
    left.synchronize()
    assert bool((back == 6).all())
