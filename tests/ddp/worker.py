"""One of two ranks in the tests of `ddp`: runs a scenario and writes what it saw as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.support.context import make_context
from torch import Tensor, nn

from trainforge.stages import IGNORED, Comm, Extent, FlatBuffer
from trainforge_plugins.ddp import DdpSection, build

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device(f"cuda:{RANK}" if os.environ.get("TEST_DEVICE") == "cuda" else "cpu")


def make_comm(**section: Any) -> tuple[Comm, Any]:
    ctx = make_context(rank=RANK, world=WORLD, device=str(DEVICE))
    return build(ctx, DdpSection(**section)), ctx.console


def make_buffer(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> FlatBuffer:
    extents, starts, total = [], [], 0
    for name, shape in shapes.items():
        length = torch.Size(shape).numel()
        extents.append(Extent(name, shape, 0, length))
        starts.append(total)
        total += length
    return FlatBuffer(torch.zeros(total, dtype=dtype, device=DEVICE), tuple(extents), tuple(starts))


@contextmanager
def counted_reductions() -> Iterator[list[int]]:
    """Collects the sizes of gradient reductions (asynchronous ones), in the order of their launch."""
    sizes: list[int] = []
    plain = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if async_op:
            sizes.append(tensor.numel())
        return plain(tensor, *args, async_op=async_op, **kwargs)

    dist.all_reduce = counting
    try:
        yield sizes
    finally:
        dist.all_reduce = plain


@contextmanager
def no_host_sync() -> Iterator[None]:
    """On a GPU: whatever makes the host wait for the device is an error."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    yield
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")


class Landing:
    """A copy that lands only when it is waited for."""

    def __init__(self, copy: Callable[[], Any]) -> None:
        self.wait = copy


# -------------------------------------------------------------------------------------------- in one process group


def buckets() -> dict[str, Any]:
    """Five parameters in four buckets of at most 100 bytes; the two ranks finish them in opposite orders."""
    comm, _ = make_comm(bucket_mb=1e-4)
    sizes = {"a": 10, "b": 20, "c": 5, "d": 40, "e": 1, "none": 0}
    buffer = make_buffer({name: (size,) for name, size in sizes.items()})
    sink = comm.watch([buffer])
    seen: dict[str, Any] = {}
    with counted_reductions() as launched:
        for step in (1, 2):
            buffer.tensor.copy_(torch.arange(76.0) * (1 + RANK) * step)
            order = buffer.extents if RANK == 0 else buffer.extents[::-1]
            after = []
            with no_host_sync():
                for extent in order:
                    sink(extent, None)
                    after.append(list(launched))
                used = comm.finish()
            seen[f"step{step}"] = {
                "after": after,
                "launched": list(launched),
                "used": sorted(used),
                "sum": buffer.tensor.tolist(),
            }
            launched.clear()
    seen["metrics"] = comm.metrics()
    comm.close()
    return seen


def incomplete() -> dict[str, Any]:
    """The first bucket never completes on rank 1: it holds back the others until the end of the step."""
    comm, _ = make_comm(bucket_mb=1e-6)
    buffer = make_buffer({"a": (2,), "b": (2,)})
    sink = comm.watch([buffer])
    with counted_reductions() as launched:
        buffer.span(1).fill_(1.0)
        sink(buffer.extents[1], None)
        before = list(launched)
        used = comm.finish()
        after = list(launched)
    comm.close()
    return {"before": before, "after": after, "used": sorted(used), "sum": buffer.tensor.tolist()}


def landing() -> dict[str, Any]:
    """Gradients that land late, and buffers of two dtypes."""
    comm, _ = make_comm()
    full, half = make_buffer({"a": (3,)}), make_buffer({"h": (3,)}, torch.bfloat16)
    sink = comm.watch([full, half])
    sink(full.extents[0], Landing(lambda: full.tensor.fill_(1.5 + RANK)))
    sink(half.extents[0], Landing(lambda: half.tensor.fill_(2.0 + RANK)))
    used = comm.finish()
    seen = {
        "full": full.tensor.tolist(),
        "half": half.tensor.tolist(),
        "used": sorted(used),
        "twice": "accepted",
    }
    try:
        sink(full.extents[0], None)
        sink(full.extents[0], None)
    except AssertionError as error:
        seen["twice"] = str(error)
    comm.finish()
    comm.close()
    return seen


def numbers() -> dict[str, Any]:
    comm, _ = make_comm()
    big = 2.0**40 + 0.25  # float32 would lose the quarter
    seen = {
        "control": comm.control([big, RANK + 1.0, 0.0]),
        "gather": comm.gather({"rank": RANK, "text": "ä" * (1 + 40 * RANK), "none": None}),
        "sum_ranks": comm.sum_ranks(torch.tensor([1.0, RANK], device=DEVICE)).tolist(),
        "partition": (comm.rank, comm.world),
    }
    comm.close()
    return seen


class Branches(nn.Module):
    """`never` is not used at all, `first` by rank 0 only, `turn` by one rank after the other, `odd` in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("always", "never", "first", "turn", "odd"):
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        x = self.always(x)
        x = x + self.first(x) if rank == 0 else x
        x = x + self.turn(x) if (rank + step) % 2 == 0 else x
        x = x + self.odd(x) if step % 2 else x
        return x.pow(2).sum()


def branch_gradients(model: Branches, rank: int, step: int) -> dict[str, Tensor]:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(model(x, rank, step) / WORLD, parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


def branches() -> dict[str, Any]:
    """Case C19, over four steps and with buckets of a few parameters."""
    comm, console = make_comm(bucket_mb=1e-4)
    model = Branches()
    shapes = {name: tuple(parameter.shape) for name, parameter in reversed(list(model.named_parameters()))}
    buffer = make_buffer(shapes)
    sink = comm.watch([buffer])
    steps = []
    for step in range(1, 5):
        buffer.tensor.zero_()
        mine = branch_gradients(model, RANK, step)
        for index, extent in enumerate(buffer.extents):
            if extent.name in mine:
                buffer.span(index).copy_(mine[extent.name].flatten())
                sink(extent, None)
        used = comm.finish()
        everyone = [branch_gradients(model, rank, step) for rank in range(WORLD)]
        worst = 0.0
        for index, extent in enumerate(buffer.extents):
            parts = [grads[extent.name].flatten() for grads in everyone if extent.name in grads]
            expected = torch.stack(parts).sum(0) if parts else torch.zeros(extent.length)
            worst = max(worst, (buffer.span(index).cpu() - expected).abs().max().item())
        expected_names = {name.partition(".")[0] for grads in everyone for name in grads}
        steps.append([worst, sorted({name.partition(".")[0] for name in used}), sorted(expected_names)])
    comm.close()
    return {"steps": steps, "warnings": console.lines}


def accumulation() -> dict[str, Any]:
    """Case C23: micro-batches of 3, 97, 10 and 0 supervised tokens over two ranks against one batch of 110."""
    comm, _ = make_comm(bucket_mb=1e-3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 11)).double()
    counts = [3, 97, 10, 0]
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(11, (100,), generator=generator) for _ in counts]
    labels = [torch.randint(11, (100,), generator=generator) for _ in counts]
    for label, count in zip(labels, counts, strict=True):
        label[count:] = IGNORED

    def loss_of(batch: int) -> Tensor:
        return F.cross_entropy(model(ids[batch]), labels[batch], ignore_index=IGNORED, reduction="sum")

    names, parameters = zip(*reversed(list(model.named_parameters())), strict=True)
    shapes = {name: tuple(parameter.shape) for name, parameter in zip(names, parameters, strict=True)}
    buffer = make_buffer(shapes, torch.float64)
    sink = comm.watch([buffer])
    with counted_reductions() as launched:
        mine = [index for index in range(4) if index % WORLD == RANK]
        (tokens,) = comm.control([sum(counts[index] for index in mine)])
        loss = torch.zeros(1, dtype=torch.float64)
        for index in mine:
            if counts[index]:
                part = loss_of(index) / tokens
                loss += part.detach()
                for place, grad in enumerate(torch.autograd.grad(part, parameters)):
                    buffer.span(place).add_(grad.flatten().to(DEVICE))
        for extent in buffer.extents:
            sink(extent, None)
        comm.finish()
    whole = F.cross_entropy(model(torch.cat(ids)), torch.cat(labels), ignore_index=IGNORED)
    expected = torch.cat([grad.flatten() for grad in torch.autograd.grad(whole, parameters)])
    seen = {
        "collectives": len(launched),
        "buckets": comm.metrics()["buckets"],
        "tokens": tokens,
        "loss": comm.sum_ranks(loss.to(DEVICE)).item() - whole.item(),
        "gradient": ((buffer.tensor.cpu() - expected).norm() / expected.norm()).item(),
    }
    comm.close()
    return seen


def everything() -> dict[str, Any]:
    """All scenarios after one another, each with a process group of its own."""
    scenarios = (buckets, incomplete, landing, numbers, branches, accumulation)
    return {scenario.__name__: scenario() for scenario in scenarios}


# ------------------------------------------------------------------------------------------------ ranks in trouble


def trouble(how: str) -> dict[str, Any]:
    """Rank 1 misbehaves in step 3; what does rank 0 say, and how soon?"""
    comm, _ = make_comm(timeout=4 if how.startswith("late") else 3600)
    buffer = make_buffer({"a": (4,)})
    sink = comm.watch([buffer])
    begun = time.monotonic()
    try:
        for step in (1, 2, 3):
            if RANK == 1 and step == 3:
                misbehave(how)
            begun = time.monotonic()
            if how != "late":
                comm.control([1.0])
            sink(buffer.extents[0], None)
            if RANK == 1 and step == 3 and how == "raises_in_backward":
                raise ValueError("rank 1 has a problem of its own")
            comm.finish()
    except Exception as error:
        comm.close()
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - begun}
    comm.close()
    return {"error": "none"}


def misbehave(how: str) -> None:
    if how.startswith("late"):
        given_up = Path(sys.argv[2], "0.json")
        end = time.monotonic() + 60
        while not given_up.exists() and time.monotonic() < end:
            time.sleep(0.05)
    elif how == "dead":
        os._exit(9)
    elif how == "raises":
        raise ValueError("rank 1 has a problem of its own")


def absent() -> dict[str, Any]:
    """Rank 1 never comes."""
    if RANK == 1:
        return {}
    try:
        make_comm(timeout=1)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "none"}


if __name__ == "__main__":
    name, out, *arguments = sys.argv[1:]
    Path(out, f"{RANK}.json").write_text(json.dumps(globals()[name](*arguments)))
