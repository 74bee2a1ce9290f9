"""What `python -m benchmarks checkpoint` measures: a state, and those who save it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from tests.support.context import make_context
from torch import Tensor

from trainforge.stages import Checkpoint, NamedTensor, ParameterSpec, PartState, Slot

READY_S = 15.0  # what a run does before its first save, at least
MATRIX = (4096, 1024)
MOMENTS = ("exp_avg", "exp_avg_sq")


class State:
    """Masters, moments and counts of so many parameters: matrices of 16 MiB, and a vector beside each."""

    def __init__(self, parameters: int, device: str) -> None:
        torch.manual_seed(0)
        matrix, vector = MATRIX[0] * MATRIX[1], MATRIX[1]
        noise, gradient = (torch.randn(2, matrix) * 0.02).to(device)
        self.device, self.slots = device, list[Slot]()
        for number in range(max(1, parameters // (matrix + vector))):
            for kind, shape in (("weight", MATRIX), ("bias", (vector,))):
                spec = ParameterSpec(f"layers.{number}.{kind}", shape)
                start = noise[: spec.elements]
                master = start * (1 + number / 1000)
                state = {"exp_avg": master * 0.1, "exp_avg_sq": master.square()}
                state["step"] = torch.ones((), device=device)
                self.slots.append(Slot(spec, spec.extent, master, gradient[: spec.elements], state))

    @property
    def specs(self) -> list[ParameterSpec]:
        """Of all parameters."""
        return [slot.spec for slot in self.slots]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by a name of its own, for those who save a dictionary."""
        return {f"{named.key}.{named.extent.name}": named.tensor for named in self.state().tensors}

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def state(self) -> PartState:
        """As a memory stage gives it."""
        found = []
        for slot in self.slots:
            found.append(NamedTensor("master", slot.extent, slot.master))
            found.extend(NamedTensor(key, slot.extent, slot.state[key]) for key in MOMENTS)
            found.append(NamedTensor("step", slot.extent.number, slot.state["step"]))
        return PartState(tensors=tuple(found))

    def load(self, version: int, data: dict[str, Any]) -> None:
        """There is no plain data."""

    def update(self, before_write: Callable[[Sequence[Slot]], None], share: float = 1.0) -> None:
        """AdamW on the last `share` of the parameters, two slots at a time, as memory stages hand them out."""
        begin = round(len(self.slots) * (1 - share)) // 2 * 2
        for at in range(begin, len(self.slots), 2):
            slots = self.slots[at : at + 2]
            before_write(slots)
            torch._fused_adamw_(
                [slot.master.view(-1) for slot in slots],
                [slot.grad for slot in slots],
                *([slot.state[key].view(-1) for slot in slots] for key in MOMENTS),
                [],
                [slot.state["step"] for slot in slots],
                lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip


class Side(Protocol):
    """Somebody who saves."""

    def save(self, step: int) -> None:
        """Returns when an update may follow, perhaps with something to do first."""

    def wait(self) -> float | None:
        """Until it is on the disk; seconds from `save` to that, where it is known better than by the caller."""

    def before_write(self, slots: Sequence[Slot]) -> None:
        """These are about to change."""

    def close(self) -> None:
        """Give everything back."""


class TorchSave:
    """`torch.save`, and an fsync."""

    def __init__(self, folder: Path, state: State) -> None:
        self._folder, self._state = folder, state

    def save(self, step: int) -> None:
        """Write everything."""
        for old in self._folder.iterdir():
            old.unlink()
        self._file = (self._folder / f"{step}.pt").open("wb")
        torch.save(self._state.tensors, self._file)

    def wait(self) -> None:
        """For the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def before_write(self, slots: Sequence[Slot]) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """There is nothing to give back."""


class TorchDcp(TorchSave):
    """torch.distributed.checkpoint, asynchronous: staging that is kept, page-locked on a GPU; files are fsynced."""

    def __init__(self, folder: Path, state: State) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(folder, state)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        gpu = state.device != "cpu"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=gpu,
                use_shared_memory=False,
                use_async_staging=gpu,
                use_non_blocking_copy=gpu,
            )
        )

    def save(self, step: int) -> None:
        """Returns when all is staged: an update may not come before."""
        import torch.distributed.checkpoint as dcp

        for old in self._folder.iterdir():
            shutil.rmtree(old)
        path = self._folder / str(step)
        threads = min(8, len(os.sched_getaffinity(0)))
        writer = dcp.FileSystemWriter(path, thread_count=threads, sync_files=True)
        found = dcp.async_save(self._state.tensors, storage_writer=writer, async_stager=self._stager)
        if not hasattr(found, "staging_completion"):
            self._uploaded = found
            return
        found.staging_completion.result()
        self._uploaded = found.upload_completion

    def wait(self) -> None:
        """For the disk."""
        self._uploaded.result()

    def close(self) -> None:
        """Give staging and the group back."""
        import torch.distributed as dist

        self._stager.close()
        dist.destroy_process_group()
        del self._stager, self._uploaded
        with contextlib.suppress(AttributeError):
            torch._C._host_emptyCache()


class OurStage:
    """A checkpoint plugin of ours, as a run has it."""

    def __init__(self, plugin: str, folder: Path, state: State, keep: int = 1) -> None:
        self.stage = stage_of(plugin, folder, state, keep=keep)
        self._parts = {"memory": state}
        reserving = getattr(self.stage, "_reserving", None)
        if reserving is not None:
            reserving.join(READY_S)

    def save(self, step: int) -> None:
        """Returns when training goes on."""
        self.stage.save(step, self._parts)

    def wait(self) -> float:
        """For the disk, and for pruning, which does not count."""
        self.stage.wait()
        return self.stage.metrics()["durable_ms"] / 1000

    def before_write(self, slots: Sequence[Slot]) -> None:
        """Copy what is not written."""
        self.stage.before_write(slots)

    def close(self) -> None:
        """Give everything back."""
        self.stage.close()


def stage_of(
    plugin: str, folder: Path, state: State, *, keep: int = 1, reads: bool = False, **section: Any
) -> Checkpoint:
    """The checkpoint stage of a plugin; with `reads` as those have it who only read."""
    if plugin == "dcp":
        from trainforge_plugins import dcp as package

        config: Any = package.DcpSection(**section)
    else:
        from trainforge_loongforge import vault as package

        config = package.VaultSection(**section)
    built: dict[str, Any] = {"memory": state}
    if not reads:
        optimizer = SimpleNamespace(state=lambda spec: {})
        built |= {"model": SimpleNamespace(parameters=state.specs), "optimizer": optimizer}
    ctx = make_context(run_dir=folder, plugin=plugin, keep=keep, built=built, device=state.device)
    return package.build(ctx, config)


def side_of(name: str, folder: Path, state: State) -> Side:
    """By the names of SIDES."""
    if name == "torch":
        return TorchSave(folder, state)
    if name == "torch_dcp":
        return TorchDcp(folder, state)
    return OurStage(name.removesuffix("_host"), folder, state)
