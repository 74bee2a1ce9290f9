"""What saving costs: plain `torch.save`, torch's DCP, our `dcp` and `vault`, in turn on the same state in one process.

    python -m benchmarks checkpoint
    PARAMETERS=50000000 SIDES=vault CASES=full,restore python -m benchmarks checkpoint

The state is that of AdamW: fp32 masters and two moments, and nothing else of a run. On a GPU it lies there, but with
`vault_host` in host RAM, as `stream` has it; a step is products of matrices that take as long as STEP_S.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.checkpoint_sides import MATRIX, MOMENTS, OurStage, Side, State, side_of, stage_of
from benchmarks.common import median, show
from trainforge.stages import Slot

GPU = torch.cuda.is_available()
PARAMETERS = int(os.environ.get("PARAMETERS", "1600000000" if GPU else "300000000"))
SIDES = os.environ.get(
    "SIDES", "torch,torch_dcp,vault,vault_host" if GPU else "torch,torch_dcp,dcp,vault"
).split(",")
CASES = os.environ.get("CASES", "full" if GPU else "full,frozen,restore,collection").split(",")
LATER = int(os.environ.get("LATER", "1" if GPU else "3"))
STEPS, STEP_S = int(os.environ.get("STEPS", "50")), float(os.environ.get("STEP_S", "0.4"))
ONCE = ("torch", "torch_dcp", "dcp") if GPU else ()  # each takes half a minute there
DD_BYTES = 2**32 if GPU else 2**40  # of a longer file the time is worked out


# ---------------------------------------------------------------------------------------------------------- measuring


def main() -> None:
    """Run the cases."""
    runs: dict[str, Any] = {}
    folder = os.environ.get("FOLDER")
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-checkpoint-") as name:
        root = Path(name)
        state = State(PARAMETERS, "cuda:0" if GPU else "cpu")
        if "full" in CASES:
            runs["full"] = full(root, state)
        if "frozen" in CASES:
            runs["frozen"] = frozen(root, state)
        if "restore" in CASES:
            runs["restore"] = restore(root, state)
        del state
        if "collection" in CASES:
            runs["collection"] = collection(root)
    if runs.keys() <= {"full"}:
        return
    show(
        "checkpoint_more",
        "Restore, verify and dd in turn, each from the disk: medians. Collection: 100 steps of a small state in chunks "
        "of 64 KiB, every tenth kept, by a process that has not read them before.",
        ("what", "value"),
        [
            (f"{case}: {what}", value)
            for case, found in runs.items()
            if case != "full"
            for what, value in found.items()
        ],
        runs=runs,
    )


def full(root: Path, state: State) -> list[dict[str, Any]]:
    """All sides: the first save, later ones, and one with training going on."""
    figures: list[dict[str, Any]] = []
    for name in SIDES:
        if name.endswith("_host"):
            state = State(PARAMETERS, "cpu")
        copy_s = copied_s(state)
        with emptied(root / name) as folder:
            for found in saves(name, folder, state):
                figures.append({"side": name, "copy_ms": copy_s * 1000} | found)
                print(figures[-1], flush=True)
    show(
        "checkpoint",
        f"{state.bytes / 1e9:.1f} GB of state ({PARAMETERS / 1e6:,.0f}M parameters). Blocked: until an update may "
        "follow. Lost: what an update at once (on a GPU: steps of "
        f"{STEP_S} s, {STEPS} of them) took longer than without a save. Copy: one memory copy of the state. dd: as "
        f"many bytes of zeros, bs=8M, just before. CPU: of all threads, per byte of state. Later: medians of {LATER}.",
        ("side", "save", "blocked ms", "lost ms", "blocked + lost / copy", "durable s", "/ dd direct",
         "/ dd fdatasync", "GB written", "CPU ns/B"),
        [
            (
                f["side"],
                f["save"],
                f["blocked_ms"],
                f.get("lost_ms", ""),
                (f["blocked_ms"] + f.get("lost_ms", 0.0)) / f["copy_ms"],
                f["durable_s"],
                f.get("of_direct", ""),
                f.get("of_fdatasync", ""),
                f["written"] / 1e9,
                f.get("cpu_ns", ""),
            )
            for f in figures
        ],
        figures=figures,
    )  # fmt: skip
    return figures


def saves(name: str, folder: Path, state: State) -> Iterator[dict[str, Any]]:
    """The first save of a side, the medians of later ones, and one with training going on."""
    training = None if name in ONCE else Training(state)
    synced_s = dd_s(folder, state.bytes, "conv=fdatasync")
    side = side_of(name, folder, state)
    try:
        if not name.endswith("_host"):
            yield {"save": "first"} | saved(side, 1, state, folder, synced_s)
        if not GPU:
            found = []
            for step in range(2, 2 + LATER):
                state.update(side.before_write)
                found.append(saved(side, step, state, folder, synced_s))
            yield {"save": "later"} | {key: median(each[key] for each in found) for key in found[0]}
        if training is not None:
            yield {"save": "in training"} | saved(side, 2 + LATER, state, folder, synced_s, training)
    finally:
        side.close()


def saved(
    side: Side, step: int, state: State, folder: Path, synced_s: float, training: Training | None = None
) -> dict[str, Any]:
    """One save: what it cost."""
    direct_s = dd_s(folder, state.bytes, "oflag=direct") if training is None else 0.0
    used, began = cpu_s(), time.perf_counter()
    found: dict[str, Any] = {}
    side.save(step)
    found["blocked_ms"] = (time.perf_counter() - began) * 1000
    if training is not None:
        found["lost_ms"] = training.lost_s(side) * 1000
    known = side.wait()
    found["durable_s"] = known or time.perf_counter() - began
    if training is None:
        found["cpu_ns"] = (cpu_s() - used) / state.bytes * 1e9
    found["written"] = written_bytes(folder)  # each side keeps one
    if training is None:
        found |= {"of_direct": found["durable_s"] / direct_s, "of_fdatasync": found["durable_s"] / synced_s}
    return found


class Training:
    """Steps as they are without a save, and what is lost when there is one."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._work = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) if GPU else None
        self._products = 1
        if GPU:
            self._compute()
            began = time.perf_counter()
            self._products = 20
            self._compute()
            self._products = round(STEP_S / (time.perf_counter() - began) * 20)
        self._step(lambda slots: None)
        self._idle_s = median(self._step(lambda slots: None) for _ in range(3))

    def lost_s(self, side: Side) -> float:
        """Seconds lost over the steps that follow a save."""
        steps = STEPS if GPU else 1
        return sum(self._step(side.before_write) for _ in range(steps)) - steps * self._idle_s

    def _step(self, before_write: Callable[[Sequence[Slot]], None]) -> float:
        """Compute and update; in host RAM at the same time, as `stream` does. Gives its seconds."""
        began = time.perf_counter()
        if GPU and self._state.device == "cpu":
            update = threading.Thread(target=self._state.update, args=(before_write,))
            update.start()
            self._compute()
            update.join()
        else:
            self._compute()
            self._state.update(before_write)
            if GPU:
                torch.cuda.synchronize()
        return time.perf_counter() - began

    def _compute(self) -> None:
        if self._work is not None:
            for _ in range(self._products):
                torch.mm(self._work, self._work)
            torch.cuda.synchronize()


def frozen(root: Path, state: State) -> dict[str, float]:
    """90 % of the parameters are what they were: `vault` alone."""
    with emptied(root / "frozen") as folder:
        side = OurStage("vault", folder, state, keep=2)
        first = saved(side, 1, state, folder, 1.0)
        before = [slot.master.clone() for slot in state.slots]
        state.update(side.before_write, share=0.1)
        changed = sum(
            4 + 3 * slot.master.nbytes
            for slot, old in zip(state.slots, before, strict=True)
            if not torch.equal(old, slot.master)
        )
        del before
        later = saved(side, 2, state, folder, 1.0)
        new_bytes = side.stage.metrics()["new_bytes"]
        state.update(side.before_write)
        saved(side, 3, state, folder, 1.0)
        whole = side.stage.metrics()["new_bytes"]
        side.close()
    return {
        "changed of the state": changed / state.bytes,
        "second save, bytes written / changed": new_bytes / changed,
        "second save, durable / first": later["durable_s"] / first["durable_s"],
        "second save, CPU ns per byte of state": later["cpu_ns"],
        "after AdamW on all parameters, bytes written / state": whole / state.bytes,
    }


def restore(root: Path, state: State) -> dict[str, float]:
    """`vault`: restoring and verifying, against reading the same files with dd."""
    with emptied(root / "restore") as folder:
        side = OurStage("vault", folder, state)
        side.save(1)
        side.wait()
        side.close()
        path = next(folder.glob("checkpoints/step-*"))
        packs = list(folder.glob("checkpoints/packs/*.pack"))
        stage = stage_of("vault", folder, state, reads=True)
        reads, loads, checks, used = [], [], [], []
        for _ in range(3):
            reads.append(timed(lambda: [dd(f"if={pack}", "of=/dev/null", "iflag=direct") for pack in packs]))
            began_s = cpu_s()
            loads.append(timed(lambda: stage.restore({"memory": state}, path)))
            used.append(cpu_s() - began_s)
            checks.append(timed(lambda: stage.verify(path)))
        assert not stage.verify(path)
        stage.close()
    return {
        "GB/s of dd iflag=direct": state.bytes / median(reads) / 1e9,
        "GB/s of a restore": state.bytes / median(loads) / 1e9,
        "restore, share of dd": median(r / load for r, load in zip(reads, loads, strict=True)),
        "restore, CPU ns per byte": median(used) / state.bytes * 1e9,
        "verify / restore": median(check / load for check, load in zip(checks, loads, strict=True)),
    }


def collection(root: Path) -> dict[str, float]:
    """100 steps of which each changed a tenth of the state, here and there; every tenth step stays."""
    from trainforge_loongforge.vault.checkpoint import VaultCheckpoint

    chance, whole = random.Random(0), VaultCheckpoint.chunk_bytes
    VaultCheckpoint.chunk_bytes = 2**16
    try:
        with emptied(root / "collection") as folder:
            state = State(MATRIX[0] * MATRIX[1] + MATRIX[1], "cpu")
            side = OurStage("vault", folder, state, keep=1000)
            rows = [
                row
                for tensor in state.tensors.values()
                if tensor.numel() > MATRIX[1]
                for row in tensor.view(-1, 2**14)
            ]
            for step in range(1, 101):
                for row in chance.sample(rows, len(rows) // 10):
                    row.add_(1e-3)
                side.save(step)
                side.wait()
            side.close()
            stage = stage_of("vault", folder, state, reads=True)
            paths = sorted(folder.glob("checkpoints/step-*"))
            removed = [path for number, path in enumerate(paths) if number % 10]
            before = written_bytes(folder)
            seconds = timed(lambda: stage.remove(removed))
            damaged = sum(len(stage.verify(path)) for path in paths if path not in removed)
            stage.close()
            assert not damaged
            return {
                "chunks of a step": len(rows),
                "MB before": before / 1e6,
                "MB after": written_bytes(folder) / 1e6,
                "MB beside what is needed": stage.metrics()["overhead_bytes"] / 1e6,
                "seconds": seconds,
            }
    finally:
        VaultCheckpoint.chunk_bytes = whole


# ------------------------------------------------------------------------------------------------------------ helpers


def copied_s(state: State) -> float:
    """Seconds of one copy of the state into warm memory, on all threads; from a GPU to page-locked memory."""
    tensors = [slot.master for slot in state.slots] + [slot.state[k] for slot in state.slots for k in MOMENTS]
    if state.device != "cpu":
        landing = torch.empty(MATRIX[0] * MATRIX[1], pin_memory=True)
        seconds = [timed(lambda: _land(tensors, landing)) for _ in range(2)]
        return min(seconds)
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    return median(timed(lambda: [c.copy_(t) for c, t in zip(copies, tensors, strict=True)]) for _ in range(5))


def _land(tensors: Collection[Tensor], landing: Tensor) -> None:
    for tensor in tensors:
        landing[: tensor.numel()].copy_(tensor.view(-1), non_blocking=True)
    torch.cuda.synchronize()


_took: dict[tuple[str, ...], float] = {}


def dd_s(folder: Path, size: int, *how: str) -> float:
    """Seconds that dd takes to write so many bytes; measured once on a GPU's machine, where time is short."""
    if GPU and how in _took:
        return _took[how] * size
    path = folder / "dd"
    count = max(1, min(size, DD_BYTES) // 2**23)
    seconds = timed(lambda: dd("if=/dev/zero", f"of={path}", f"count={count}", *how))
    path.unlink()
    _took[how] = seconds / (count * 2**23)
    return _took[how] * size


def dd(*arguments: str) -> None:
    """Run dd in blocks of 8 MiB."""
    subprocess.run(["dd", "bs=8M", *arguments], check=True, capture_output=True)


def timed(work: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def cpu_s() -> float:
    """CPU seconds of this process and its children that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


def written_bytes(folder: Path) -> int:
    """Of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def emptied(folder: Path) -> Iterator[Path]:
    """A folder that goes afterwards: the disk holds one side at a time."""
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
