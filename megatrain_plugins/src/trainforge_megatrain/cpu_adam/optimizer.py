"""`CpuAdam`: checks slots, knows rates and decay, and hands the work to a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trainforge.errors import ConfigError
from trainforge.stages import Optimizer, ParameterSpec, Slot, StateSpec, Update
from trainforge.toolbox.weight_decay import weight_decay
from trainforge_megatrain.cpu_adam.backends import DeepSpeed, Fused, HostBackend, Hyper, Native, Work
from trainforge_megatrain.cpu_adam.building import NoKernel, load_kernel
from trainforge_megatrain.cpu_adam.threads import Pool, ignored_omp_threads, update_threads

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.sections import TrainSection
    from trainforge_megatrain.cpu_adam import CpuAdamSection

_SLOW_BETA2 = 0.996  # 1 - beta2 below 2^-8: the step of a decaying bf16 moment is less than half its last bit


class CpuAdam(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) on slots wherever they lie: in host RAM by a backend, on a device by torch.

    The same states by the same names as the default optimizer's, so a checkpoint moves freely between the two.
    """

    def __init__(self, train: TrainSection, host: HostBackend, moments: str = "float32") -> None:
        self._train, self._host, self._moments = train, host, moments
        self._device = Fused(Hyper(*train.betas, train.eps))
        self._decays: dict[str, float] = {}  # matching patterns takes longer than the update of a small slot
        self._read: tuple[Update, float, bool] | None = None
        self.takes_split_masters = host.takes_halves
        self.takes_bf16_gradients = host.takes_halves

    def state(self, spec: ParameterSpec) -> dict[str, StateSpec]:
        """Two moments per element and a count of steps."""
        moment = StateSpec(dtype=self._moments)
        return {"exp_avg": moment, "exp_avg_sq": moment, "step": StateSpec(per_element=False)}

    @torch.no_grad()
    def update(self, slots: Sequence[Slot], update: Update) -> None:
        """Update masters and moments in place; with `found_inf` every bit stays.

        For slots in host RAM the clip scale and `found_inf` are read, once per `Update`, on the current stream of the
        calling thread; a device is asked nothing for slots of its own.

        Raises:
            ValueError: a slot holds a tensor that cannot be updated (dtype, length, strides, place).
        """
        places: dict[torch.device, list[Work]] = {}
        for slot in slots:
            self._check(slot)
            work = Work(slot, update.lr * slot.spec.lr_scale, self._decay(slot.spec))
            places.setdefault(slot.master.device, []).append(work)
        host = places.pop(torch.device("cpu"), [])
        if host:
            scale, skipped = self._numbers(update)
            if not skipped:
                self._host.update(host, scale)
        for device, works in places.items():
            self._device.update_on(device, works, update.scale, update.found_inf)

    def metrics(self) -> dict[str, float]:
        """Threads of the update in host RAM."""
        return {"threads": float(self._host.threads)}

    def close(self) -> None:
        """End the threads."""
        self._host.close()

    def _decay(self, spec: ParameterSpec) -> float:
        if spec.name not in self._decays:
            self._decays[spec.name] = weight_decay(spec, self._train)
        return self._decays[spec.name]

    def _numbers(self, update: Update) -> tuple[float, bool]:
        read = self._read
        if read is None or read[0] is not update:
            read = self._read = (update, float(update.scale), float(update.found_inf) > 0)
        return read[1:]

    def _check(self, slot: Slot) -> None:
        """Raise unless the slot is what a kernel that looks at nothing may be given."""
        split = slot.low is not None
        moments, halves = (getattr(torch, self._moments),), self.takes_split_masters
        wanted: dict[str, tuple[torch.Tensor | None, tuple[torch.dtype, ...]]] = {
            "master": (slot.master, (torch.bfloat16,) if split and halves else (torch.float32,)),
            "gradient": (slot.grad, (torch.float32, torch.bfloat16)[: 1 + halves]),
            "exp_avg": (slot.state.get("exp_avg"), moments),
            "exp_avg_sq": (slot.state.get("exp_avg_sq"), moments),
        }
        if split:
            wanted["lower half of the master"] = (slot.low, (torch.int16,))
        for what, (tensor, dtypes) in wanted.items():
            problem = _problem(tensor, dtypes, slot)
            if problem:
                raise ValueError(f"{slot.extent.name}: its {what} {problem}")
        step = slot.state.get("step")
        if step is None or step.dtype != torch.float32 or step.dim() or step.device != slot.master.device:
            raise ValueError(f"{slot.extent.name}: its step must be a 0-dim float32 beside the master")


def _problem(tensor: torch.Tensor | None, dtypes: Sequence[torch.dtype], slot: Slot) -> str | None:
    """What is wrong with a tensor of a slot, as the end of a sentence; None when nothing is."""
    if tensor is None:
        return "is missing: memory must hold what Optimizer.state asks for"
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"is {str(tensor.dtype).removeprefix('torch.')}; it must be {names} for this optimizer"
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.dim() != 1:
        return f"must be a contiguous 1-D tensor, not one of shape {list(tensor.shape)}"
    if tensor.numel() != slot.extent.length:
        return f"has {tensor.numel()} elements; the extent has {slot.extent.length}"
    if tensor.is_meta:
        return "is on the meta device and has no storage: materialise it before the update"
    if tensor.device != slot.master.device:
        return f"is on {tensor.device} and its master on {slot.master.device}: they must lie together"
    return None


def make_optimizer(ctx: Context, config: CpuAdamSection) -> CpuAdam:
    """Choose the backend, start its threads and say what was taken.

    Raises:
        ConfigError: the backend asked for is not there, or cannot do what is asked.
    """
    hyper = Hyper(*ctx.train.betas, ctx.train.eps)
    if config.backend == "deepspeed" and config.moments == "bf16":
        raise ConfigError("cpu_adam.moments: bf16 is not for cpu_adam.backend: deepspeed; take auto")
    if config.moments == "bf16" and ctx.train.betas[1] > _SLOW_BETA2:
        ctx.console.warn(
            f"cpu_adam.moments: bf16 with train.betas[1] = {ctx.train.betas[1]:g}: a second moment changes by less "
            f"than bf16 can hold, and stays where it is; keep fp32 moments, or a beta2 of at most {_SLOW_BETA2}"
        )
    host = _backend(ctx, config, hyper)
    ctx.console.note(_report(host))
    return CpuAdam(ctx.train, host, {"fp32": "float32", "bf16": "bfloat16"}[config.moments])


def _backend(ctx: Context, config: CpuAdamSection, hyper: Hyper) -> HostBackend:
    if config.backend == "deepspeed":
        return DeepSpeed(hyper)
    if config.backend == "torch":
        return Fused(hyper)
    try:
        return Native(Pool(load_kernel(ctx.cache_dir), update_threads(ctx, config.threads)), hyper)
    except NoKernel as error:
        if config.backend == "native":
            raise ConfigError(f"cpu_adam.backend: native cannot be had: {error}") from error
        ctx.console.warn(f"cpu_adam updates with torch's fused AdamW, which takes more passes: {error}")
        return Fused(hyper)


def _report(host: HostBackend) -> str:
    omp = ignored_omp_threads(host.threads) if host.name == "native" else None
    aside = f" (OMP_NUM_THREADS={omp} does not count here)" if omp else ""
    return f"cpu_adam: {host.name} update on {host.threads} thread{'s' * (host.threads > 1)}{aside}"
