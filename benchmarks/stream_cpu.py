"""`stream` on a CPU: what streaming adds to a step, and what of the traffic hides behind computing.

1. A model of 100M parameters, fp32, recomputation on both sides: whole steps of `stream,cpu_adam` beside those of
   `resident,adamw`. There is no link to hide, so what is added is copies and Python.
2. Blocks, copies and updates that take known times (they sleep): the step beside the sum of all of them, and beside the
   bound max(forward, updates) + max(backward, uploads, downloads) that overlap can reach.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import median, show
from trainforge.stages import Optimizer, ParameterSpec, StateSpec, Update
from trainforge.testing import Stages, Walker, build_stages, load_plugin, tiny_context
from trainforge.testing.bench import REFERENCE, build_stage

STEPS, WARMUP = 6, 2
MODEL = {
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 2048,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
BLOCKS, FORWARD_MS, LINK_MS, UPDATE_MS = 12, 30.0, 15.0, 20.0


def main() -> None:
    """Measure both."""
    _added()
    _hidden()


def _added() -> None:
    walkers = {
        "resident,adamw": _walker("resident", "adamw"),
        "stream,cpu_adam": _walker("stream", "cpu_adam"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in walkers}
    for _ in range(STEPS + WARMUP):
        for name, walker in walkers.items():
            began = time.perf_counter()
            walker.take()
            walker.stages.memory.drain()
            seconds[name].append(time.perf_counter() - began)
    steps = {name: 1000 * median(times[WARMUP:]) for name, times in seconds.items()}
    base = steps["resident,adamw"]
    model = next(iter(walkers.values())).stages.model
    show(
        "stream_cpu_added",
        f"Median of {STEPS} steps after {WARMUP}, both sides in turn in one process, each drained; a Llama shape of "
        f"{sum(spec.elements for spec in model.parameters) / 1e6:.0f}M parameters, 4 rows of 256 tokens, fp32, every "
        "block recomputed on both sides.",
        ("side", "step ms", "step / resident"),
        [(name, step, step / base) for name, step in steps.items()],
    )
    for walker in walkers.values():
        walker.stages.close()


def _walker(memory: str, optimizer: str) -> Walker:
    ctx = tiny_context(
        Path(tempfile.mkdtemp()),
        model={"config": MODEL},
        train={"recompute": True, "clip": 1.0},
        accumulate=1,
        micro_batch=4,
    )
    stages = build_stages(ctx, ("hf", memory, optimizer), {"reference": {"tokens": 256}})
    return Walker(stages)


def _hidden() -> None:
    walker = _timed_walker()
    seconds = []
    for _ in range(STEPS + WARMUP):
        began = time.perf_counter()
        walker.take()
        seconds.append(time.perf_counter() - began)
    walker.stages.memory.drain()
    step = 1000 * median(seconds[WARMUP:])
    forward, link, update = BLOCKS * FORWARD_MS, BLOCKS * LINK_MS, BLOCKS * UPDATE_MS
    everything = (
        4 * forward + 3 * link + update
    )  # forward, recomputation, backward twice as long; up, up, down
    bound = max(forward, update) + max(3 * forward, link)
    show(
        "stream_cpu_hidden",
        f"Median of {STEPS} steps after {WARMUP}. {BLOCKS} blocks; {FORWARD_MS:g} ms of forward, {LINK_MS:g} ms for "
        f"its weights or gradients on the link, {UPDATE_MS:g} ms for its update. All sleep instead of working.",
        ("what", "ms", "step / it"),
        [
            ("step", step, 1.0),
            ("one after the other", everything, step / everything),
            ("bound", bound, step / bound),
        ],
    )
    walker.stages.close()


class SleepingBlock(nn.Module):
    """A linear layer that takes `FORWARD_MS`, and twice that in backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, then multiply."""
        time.sleep(FORWARD_MS / 1000)
        y: Tensor = _SleepInBackward.apply(x + self.linear(x))
        return y


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2 * FORWARD_MS / 1000)
        return grad


class SleepingModel(nn.Module):
    """Blocks that sleep between an embedding and a head; a module for `model.factory`."""

    vocab_size = 64

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocab_size, width)
        self.layers = nn.ModuleList(SleepingBlock(width) for _ in range(BLOCKS))
        self.lm_head = nn.Linear(width, self.vocab_size, bias=False)

    def hidden(self, batch: Any) -> Tensor:
        """Everything but the head."""
        x: Tensor = self.embedding(batch.input_ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.lm_head(hidden)
        return logits


def sleeping_model(ctx: Any) -> SleepingModel:
    """The factory."""
    return SleepingModel()


class SleepingOptimizer(Optimizer):
    """Updates nothing, and takes `UPDATE_MS` for a block."""

    def state(self, spec: ParameterSpec) -> dict[str, StateSpec]:
        """None."""
        return {}

    def update(self, slots: Any, update: Update) -> None:
        """Sleep."""
        if any("layers" in slot.spec.name for slot in slots):
            time.sleep(UPDATE_MS / 1000)


class ThreadStreams:
    """Streams that are threads: a copy takes `LINK_MS` on its own, while the main thread computes."""

    def __init__(self) -> None:
        self._streams: dict[str, ThreadPoolExecutor] = {}

    def stream(self, name: str, priority: int = 0) -> Any:
        """A thread of that name."""
        return _ThreadStream(self._streams.setdefault(name, ThreadPoolExecutor(1, name)))

    def event(self) -> Any:
        """An event."""
        return _ThreadEvent()

    def current(self) -> Any:
        """The main thread."""
        return _ThreadStream(None)

    def host(self, elements: int, dtype: torch.dtype, *, pinned: bool = True) -> Tensor:
        """Ordinary memory."""
        return torch.zeros(elements, dtype=dtype)

    def on(self, stream: Any) -> Any:
        """Nothing to do."""
        return nullcontext()

    def copy(self, dst: Tensor, src: Tensor, stream: Any) -> None:
        """Copy after a while, on the stream's thread."""

        def work() -> None:
            time.sleep(LINK_MS / 1000 if dst.numel() > 1000 else 0)
            dst.copy_(src)

        stream.submit(work)

    def close(self) -> None:
        """End the threads."""
        for executor in self._streams.values():
            executor.shutdown()


class _ThreadStream:
    def __init__(self, executor: ThreadPoolExecutor | None) -> None:
        self.executor = executor

    def submit(self, work: Callable[[], object]) -> Future[object] | None:
        return None if self.executor is None else self.executor.submit(work)

    def wait(self, event: _ThreadEvent) -> None:
        mark = event.mark
        if mark is not None:
            self.submit(mark.result)


class _ThreadEvent:
    mark: Future[object] | None = None

    def record(self, stream: _ThreadStream | None = None) -> None:
        self.mark = None if stream is None else stream.submit(lambda: None)

    def wait(self) -> None:
        if self.mark is not None:
            self.mark.result()

    synchronize = wait


def _timed_walker() -> Walker:
    from trainforge_megatrain.stream import StreamSection
    from trainforge_megatrain.stream.memory import Stream

    ctx = tiny_context(
        Path(tempfile.mkdtemp()), model={"factory": "benchmarks.stream_cpu:sleeping_model"}, accumulate=1
    )
    for plugin, stage in ((REFERENCE, "comm"), ("hf", "model"), (REFERENCE, "data")):
        build_stage(ctx, load_plugin(plugin), stage, {})
    ctx.built["optimizer"] = SleepingOptimizer()
    streams: Any = ThreadStreams()
    ctx.built["memory"] = Stream(ctx, StreamSection(), streams, ThreadPoolExecutor(1), lambda units: False)
    build_stage(ctx, load_plugin(REFERENCE), "checkpoint", {})
    return Walker(Stages(ctx, **ctx.built))


if __name__ == "__main__":
    main()
