"""`stream` and `cpu_adam` on a GPU: the same training as `resident`, whatever the timing, within the budget."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.hf.tiny import values
from tests.run.runs import run, write_recipe

from trainforge.stages import ParameterSpec, Slot
from trainforge.testing import Stages, Walker, build_stages, load_plugin, tiny_context
from trainforge.testing.bench import REFERENCE, build_stage
from trainforge.toolbox import halves
from trainforge.toolbox.streams import Streams
from trainforge_megatrain.stream import StreamSection
from trainforge_megatrain.stream.units import Place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LLAMA = {"config": values("llama", num_hidden_layers=5, vocab_size=264)}


class SlowCopies(Streams):
    """Every copy starts late, by a time that changes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.random = random.Random(0)

    def copy(self, dst, src, stream):
        with stream.torch_stream:
            torch.cuda._sleep(self.random.randrange(4_000_000))  # cycles: up to about 2 ms
        super().copy(dst, src, stream)


def mixed(units) -> None:
    """The first block on the device, the second's weights kept there, the others streamed."""
    blocks = [unit for unit in units if unit.block is not None]
    blocks[0].place, blocks[1].place = Place.DEVICE, Place.KEPT


def walker(
    folder, memory, *, place=None, inputs_down=False, streams=Streams, accumulate=3, section=None, **train
):
    ctx = tiny_context(
        folder,
        model=LLAMA,
        train={"clip": 0.5, "lr": 1e-3, "eps": 1e-6, "dtype": "fp32", "steps": 200, **train},
        device="cuda:0",
        accumulate=accumulate,
        micro_batch=2,
    )
    if memory == "resident":
        return Walker(build_stages(ctx, ("hf", "resident", "adamw", "dcp")))
    from trainforge_megatrain.stream.memory import Stream

    def decide(units):
        if place is not None:
            place(units)
        return inputs_down

    for plugin, stage in ((REFERENCE, "comm"), ("hf", "model"), (REFERENCE, "data")):
        build_stage(ctx, load_plugin(plugin), stage, {})
    build_stage(ctx, load_plugin("cpu_adam"), "optimizer", {})
    given = StreamSection.model_validate(section or {})
    ctx.built["memory"] = Stream(ctx, given, streams(ctx.device), ThreadPoolExecutor(1), decide)
    build_stage(ctx, load_plugin("dcp"), "checkpoint", {})
    return Walker(Stages(ctx, **ctx.built))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("inputs_down", [False, True])
@pytest.mark.parametrize("place", [None, mixed])
def test_it_trains_like_resident_in_fp32(tmp_path, accumulate, inputs_down, place):
    ours = walker(tmp_path / "a", "stream", place=place, inputs_down=inputs_down, accumulate=accumulate)
    default = walker(tmp_path / "b", "resident", accumulate=accumulate)
    for _ in range(20):
        got, wanted = ours.take(), default.take()
        assert got.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert got.norm == pytest.approx(wanted.norm, rel=1e-4)
        assert got.used == wanted.used
    weights = default.weights()
    for name, weight in ours.weights().items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=2e-4)  # a fifth of one step
    for one in (ours, default):
        one.stages.close()


@pytest.mark.parametrize("inputs_down", [False, True])
@pytest.mark.parametrize("place", [None, mixed])
def test_late_copies_change_nothing(tmp_path, inputs_down, place):
    """Real streams with real delays: a forgotten wait would read old bytes."""
    results = []
    for streams in (Streams, SlowCopies):
        one = walker(tmp_path, "stream", place=place, inputs_down=inputs_down, streams=streams, dtype="bf16")
        results.append([one.take().loss for _ in range(8)])
        one.stages.close()
    assert results[0] == pytest.approx(results[1], rel=2e-3)


def test_the_loss_curve_in_bf16_is_that_of_resident(tmp_path):
    ours = walker(tmp_path / "a", "stream", dtype="bf16", inputs_down=True, place=mixed, accumulate=1)
    default = walker(tmp_path / "b", "resident", dtype="bf16", accumulate=1)
    curves = [[one.take().loss for _ in range(200)] for one in (ours, default)]
    ends = [sum(curve[-20:]) / 20 for curve in curves]
    assert curves[0][0] == pytest.approx(curves[1][0], rel=1e-3)
    assert ends[0] == pytest.approx(ends[1], rel=0.02)
    assert ends[0] < 0.9 * curves[0][0]
    for one in (ours, default):
        one.stages.close()


def test_checkpoints_move_between_the_two(tmp_path):
    ours = walker(tmp_path / "a", "stream", dtype="bf16", place=mixed)
    for _ in range(3):
        ours.take()
    path = ours.save()
    resumed = walker(tmp_path / "b", "resident", dtype="bf16")
    resumed.restore(resumed.stages.checkpoint, path, 3)
    weights = resumed.weights()
    assert all(torch.equal(weight, weights[name]) for name, weight in ours.weights().items())


def test_compiled_blocks_train(tmp_path):
    plain = walker(tmp_path / "a", "stream", place=mixed)
    compiled = walker(tmp_path / "b", "stream", place=mixed, compile=True)
    for _ in range(4):
        assert compiled.take().loss == pytest.approx(plain.take().loss, rel=1e-4)


def test_the_budget_is_a_hard_limit(tmp_path):
    """About 0.4 billion parameters, 6.5 GB of weights, gradients and state, in 4 GiB."""
    config = values(
        "llama",
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=7,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=4096,
    )
    recipe = write_recipe(
        tmp_path,
        20,
        run={"device": "cuda"},
        model={"config": config},
        train={"steps": 4, "global_batch": 4, "micro_batch": 4, "dtype": "bf16", "log_every": 1},
        stream={"gpu_budget": "4GiB"},
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        outcome = run(recipe, tmp_path / "run", plugins=("stream", "cpu_adam"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert outcome.summary["status"] == "finished"
    assert torch.cuda.max_memory_reserved() <= 4 * 2**30
    assert torch.cuda.max_memory_reserved() > 2 * 2**30  # and it was used


@pytest.mark.parametrize("length", [1, 1000, 100_003])
def test_the_kernel_for_split_masters_is_adamw(length):
    from trainforge_megatrain.cpu_adam.backends import Fused, Hyper, Work

    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    spec = ParameterSpec("w", (length,))
    start = torch.randn(length, device=device)
    high = torch.empty(length, dtype=torch.bfloat16, device=device)
    low = torch.empty(length, dtype=torch.int16, device=device)
    halves.split(start, high, low)
    state = {"exp_avg": torch.zeros_like(start), "exp_avg_sq": torch.zeros_like(start)}
    state["step"] = torch.zeros((), device=device)
    wanted, average, square, count = start.double(), torch.zeros_like(start).double(), 0.0, 0
    backend = Fused(Hyper(0.9, 0.95, 1e-8))
    for step in range(1, 13):
        grad = torch.randn(length, device=device).bfloat16()
        scale, skip = 0.5 if step % 2 else 1.0, step == 7
        slot = Slot(spec, spec.extent, high, grad.clone(), state, low)
        before = [tensor.clone() for tensor in (high, low, *state.values())]
        found_inf = torch.tensor(float(skip), device=device)
        backend.update_on(device, [Work(slot, 1e-2, 0.1)], torch.tensor(scale, device=device), found_inf)
        if skip:
            assert all(torch.equal(a, b) for a, b in zip(before, (high, low, *state.values()), strict=True))
            continue
        count += 1
        exact = grad.double() * scale
        average, square = 0.9 * average + 0.1 * exact, 0.95 * square + 0.05 * exact * exact
        root = (square / (1 - 0.95**count)).sqrt() + 1e-8
        wanted = wanted * (1 - 1e-2 * 0.1) - 1e-2 * (average / (1 - 0.9**count)) / root
    got = torch.empty_like(start)
    halves.join(high, low, got)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)
    assert float(state["step"]) == count
