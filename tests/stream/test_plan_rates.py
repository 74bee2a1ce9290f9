"""Rates are measured, kept, and told; a block runs by itself and leaves the model as it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tests.stream.plans import QWEN, RATES, described, sizes_of
from torch.utils.flop_counter import FlopCounterMode

from trainforge.context import Context
from trainforge_megatrain.stream import StreamSection, rates
from trainforge_megatrain.stream import model_speed as model_speed_module
from trainforge_megatrain.stream.forecast import Rates, step_flops
from trainforge_megatrain.stream.model_speed import ModelSpeed, model_speed
from trainforge_megatrain.stream.timing import ROUNDS
from trainforge_megatrain.stream.units import divide


def asked(ctx: Context, **section) -> Rates:
    sizes = sizes_of(ctx, **section)
    return rates.rates_of_this_machine(
        ctx, ctx.model, ctx.optimizer, StreamSection.model_validate(section), sizes
    )


def test_every_rate_of_this_machine_is_measured(tmp_path):
    got = asked(described(tmp_path, train={"dtype": "bf16"}))
    for name in ("compute", "upload", "download", "host_update", "device_update"):
        assert 1e5 < getattr(got, name) < 1e16
    assert not got.overlaps
    assert not got.of_a_block
    assert len(list(rates.told(got))) == 2


def test_they_are_measured_once_for_what_they_depend_on(tmp_path, monkeypatch):
    measured = []

    def measure(*_args) -> Rates:
        measured.append(1)
        return replace(RATES, host_update=float(len(measured)))

    monkeypatch.setattr(rates, "measure", measure)
    ctx = described(tmp_path)
    assert asked(ctx) == asked(ctx) == replace(RATES, host_update=1.0)
    assert asked(described(tmp_path, train={"dtype": "bf16"})).host_update == 2
    assert asked(ctx, master="fp32").host_update == 3
    for file in (ctx.cache_dir / "stream").iterdir():
        assert json.loads(file.read_text())["facts"]["torch"] == torch.__version__
        file.write_text("{}")  # of another version, or cut off
    assert asked(ctx).host_update == 4


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    ctx = described(tmp_path)
    monkeypatch.setattr(rates, "measure", lambda *_args: RATES)
    ctx.cache_dir.mkdir(parents=True, exist_ok=True)
    (ctx.cache_dir / "stream").write_text("a file where the folder should be")
    assert asked(ctx) == RATES


def test_copies_and_updates_are_timed_as_they_are(monkeypatch):
    """One second per round, whatever it does."""
    monkeypatch.setattr(rates, "fastest_s", lambda device, work: (work(), 1.0)[1])
    device = torch.device("cpu")
    assert rates._copies(device, pinned=False) == (2 * 2**26,) * 2
    assert rates._product(device, torch.float32) == 2 * 512**3


FAMILIES = {
    "qwen2": QWEN,
    "gpt_oss": {
        **QWEN,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_runs_by_itself_and_the_model_is_as_it_was(tmp_path, family):
    ctx = described(tmp_path, FAMILIES[family], micro_batch=2)
    ctx.row_tokens = 32
    before = torch.get_rng_state()
    speed = model_speed(torch.device("cpu"), torch.float32, ctx.model, sizes_of(ctx))
    assert speed.block is not None
    assert 1e5 < speed.block < 1e13
    assert speed.head is not None
    assert 10 < speed.head < 1e9
    assert torch.equal(torch.get_rng_state(), before)
    module = ctx.model.module
    assert all(parameter.is_meta for parameter in module.parameters())
    assert all("forward" not in vars(module.get_submodule(name)) for name in ctx.model.blocks)
    wanted = {name for spec in ctx.model.parameters for name in spec.names}
    assert {name for name, _ in module.named_parameters(remove_duplicate=False)} == wanted


def test_the_speed_is_the_blocks_flops_over_its_time(tmp_path, monkeypatch):
    """FLOPs as PyTorch counts them on a CPU: of all products but those of attention. The last one is not repeated."""
    ctx = described(tmp_path, micro_batch=2, accumulate=3)
    ctx.row_tokens = 32
    counted = []
    real = model_speed_module.fastest_s

    def fastest(*args) -> float:
        with FlopCounterMode(display=False) as counter:
            real(*args)
        counted.append(counter.get_total_flops() / (ROUNDS + 1))
        return 1.0

    monkeypatch.setattr(model_speed_module, "fastest_s", fastest)
    speed = model_speed(torch.device("cpu"), torch.float32, ctx.model, sizes_of(ctx))
    matrices = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160
    assert counted == [(8 * matrices - 2 * 64 * 160) * 2 * 32, 6 * 64 * 264 * 2 * 32]
    assert speed.block == pytest.approx(8 * matrices * 2 * 32, rel=0.06)
    assert speed.head == 2 * 32
    flops = step_flops(divide(ctx.model), ctx.model, sizes_of(ctx))
    assert speed.block == pytest.approx(next(f for u, f in flops.items() if u.block == 5) / 3 * 4 / 3)


def test_a_block_that_cannot_run_by_itself_gives_nothing(tmp_path, monkeypatch):
    ctx = described(tmp_path)
    monkeypatch.setattr(type(ctx.model), "hidden", lambda self, batch: 1 / 0)
    assert model_speed(torch.device("cpu"), torch.float32, ctx.model, sizes_of(ctx)) == ModelSpeed()
    assert all(parameter.is_meta for parameter in ctx.model.module.parameters())
