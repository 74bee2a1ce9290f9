"""How fast AdamW updates parameters in host RAM: `cpu_adam` beside torch's fused AdamW, and DeepSpeed's if installed.

Every core of the affinity mask works. Each way updates the same number of parameters in turn, round after round, in
buffers that were written before. Bytes are those that must be read and written per parameter when nothing is cached.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import median, show

PARAMETERS, ROUNDS, LR = 200_000_000, 9, 1e-4
HELD = 30  # bytes of buffers per parameter: one split slot and one fp32 slot


def main() -> None:
    """Update in turn and print the table."""
    import torch

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    count = min(PARAMETERS, _available() // (3 * HELD))
    with tempfile.TemporaryDirectory() as folder:
        ways = _ways(Path(folder), count, cores)
        seconds: dict[str, list[float]] = {name: [] for name, _, _ in ways}
        for name, _, update in ways * (ROUNDS + 1):
            began = time.perf_counter()
            update()
            seconds[name].append(time.perf_counter() - began)
    rows = []
    for name, size, _ in ways:
        taken = median(seconds[name][1:])  # the first is warm-up
        rows.append((name, size, count / taken / 1e9, count * size / taken / 1e9, min(seconds[name]) * 1000))
    show(
        "host_update",
        f"Updates of {count:,} parameters on {cores} cores, median of {ROUNDS} rounds of all in turn in one process.",
        ("update", "bytes/parameter", "Gparam/s", "GB/s", "fastest ms"),
        rows,
        seconds=seconds,
    )


def _ways(folder: Path, count: int, cores: int) -> list[tuple[str, int, Callable[[], None]]]:
    """(name, bytes per parameter, the update) of each way that this machine has."""
    import torch

    from trainforge.stages import ParameterSpec, Slot, Update
    from trainforge.testing import tiny_context
    from trainforge.toolbox import halves
    from trainforge_megatrain.cpu_adam import CpuAdamSection, build

    spec = ParameterSpec("w", (count,))

    def state() -> dict[str, torch.Tensor]:
        moments = {"exp_avg": 1e-3, "exp_avg_sq": 1e-6}
        return {key: torch.full((count,), value) for key, value in moments.items()} | {
            "step": torch.zeros(())
        }

    whole = Slot(spec, spec.extent, torch.rand(count), torch.full((count,), 1e-3), state())
    high, low = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
    halves.split(whole.master, high, low)
    split = Slot(spec, spec.extent, high, whole.grad.bfloat16(), state(), low)
    update = Update(1, LR, torch.tensor(0.5), torch.tensor(0.0))
    ctx = tiny_context(folder)
    native = build(ctx, CpuAdamSection(backend="native", threads=cores))

    def fused() -> None:
        moments = [[whole.state[key]] for key in ("exp_avg", "exp_avg_sq")]
        numbers = {"lr": LR, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
        torch._fused_adamw_(
            [whole.master],
            [whole.grad],
            *moments,
            [],
            [torch.ones(())],
            amsgrad=False,
            maximize=False,
            **numbers,
        )

    ways = [
        ("cpu_adam, split masters, bf16 gradients", 26, lambda: native.update([split], update)),
        ("cpu_adam, fp32", 28, lambda: native.update([whole], update)),
        ("torch fused AdamW, fp32, without clip scale", 28, fused),
    ]
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        return ways
    peer = build(ctx, CpuAdamSection(backend="deepspeed"))
    plain = Update(1, LR, torch.tensor(1.0), torch.tensor(0.0))
    return [*ways, ("DeepSpeedCPUAdam, fp32, without clip scale", 28, lambda: peer.update([whole], plain))]


def _available() -> int:
    """Bytes of RAM that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 * 2**30
