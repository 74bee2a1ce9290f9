"""What is measured while training: figures stay on the device until they are logged, then they are read once."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

from trainforge.errors import TrainForgeError
from trainforge.toolbox.devices import peak_bf16_flops

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trainforge.runner import Run


class StepFigures:
    """Collects loss, norm and found_inf of each step as device tensors and turns them into one log entry."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._found_inf: list[Tensor] = []
        self._supervised: list[int] = []
        self._lr = 0.0
        self._streak = 0
        self._tokens_before = run.state.tokens
        self._since = time.perf_counter()

    def record(self, loss: Tensor, norm: Tensor, found_inf: Tensor, lr: float, *, supervised: int) -> None:
        """Keep one step's figures; reads nothing."""
        self._losses.append(loss)
        self._norms.append(norm)
        self._found_inf.append(found_inf)
        self._supervised.append(supervised)
        self._lr = lr

    def log(self, step: int) -> None:
        """Read the figures since the last log (the only place where a steady run waits for the device).

        Raises:
            TrainForgeError: too many steps in a row were not finite.
        """
        run = self._run
        metrics = self._read_losses(step) if self._losses else {}
        per_step_ms, step_ms = run.ledger.read()
        now = time.perf_counter()
        run.tokens_measured += run.state.tokens - self._tokens_before
        run.seconds_measured += now - self._since
        metrics["tokens_per_s"] = (run.state.tokens - self._tokens_before) / max(now - self._since, 1e-9)
        self._tokens_before, self._since = run.state.tokens, now
        metrics |= self._utilisation(metrics["tokens_per_s"])
        metrics |= {"lr": self._lr, "tokens": float(run.state.tokens), "step_ms": step_ms}
        metrics |= {f"ledger/{name}_ms": value for name, value in per_step_ms.items()}
        metrics |= {
            "skipped_steps": float(run.state.skipped_steps),
            "empty_steps": float(run.state.empty_steps),
        }
        if run.state.eval_loss is not None:
            metrics["eval_loss"] = run.state.eval_loss
        metrics |= {"host_peak_bytes": float(peak_host_bytes())}
        if run.ctx.device.type != "cpu":
            metrics["device_peak_bytes"] = float(peak_device_bytes(run.ctx.device))
        for stage, built in run.stages.named():
            metrics |= {f"{stage}/{name}": value for name, value in built.metrics().items()}
        run.events.metrics_logged(run, step, metrics)
        if self._streak >= run.train.max_skipped:
            raise TrainForgeError(
                f"the gradients of {self._streak} steps in a row (up to step {step}) were not finite, so none of them "
                f"changed a weight. Lower train.lr (now {run.train.lr:g}), look at the rows of these steps, or raise "
                "train.max_skipped; the checkpoints written so far are intact."
            )

    def _utilisation(self, tokens_per_s: float) -> dict[str, float]:
        """Model TFLOP/s of one rank (6·N·T and causal attention, no recomputation), and their share of the peak."""
        run = self._run
        flops = run.stages.model.flops_per_token(run.row_tokens) * tokens_per_s / run.ctx.world
        peak = peak_bf16_flops(run.ctx.device)
        return {"model_tflops": flops / 1e12} | ({"mfu": flops / peak} if peak else {})

    def _read_losses(self, step: int) -> dict[str, float]:
        """Loss (weighted by supervised tokens, non-finite steps left out) and the last norm."""
        import torch

        run = self._run
        losses = run.stages.comm.sum_ranks(torch.stack(self._losses).double()).tolist()
        norms: list[float] = torch.stack(self._norms).tolist()
        skipped: list[float] = torch.stack(self._found_inf).tolist()
        total = weight = 0.0
        for loss, found_inf, supervised in zip(losses, skipped, self._supervised, strict=True):
            self._streak = self._streak + 1 if found_inf else 0
            run.state.skipped_steps += int(found_inf)
            if not found_inf:
                total, weight = total + loss * supervised, weight + supervised
        metrics = {"grad_norm": norms[-1]}
        if weight:
            run.state.loss_last = metrics["loss"] = total / weight
            if run.state.loss_first is None:
                run.state.loss_first = metrics["loss"]
        for kept in (self._losses, self._norms, self._found_inf, self._supervised):
            kept.clear()
        return metrics


def peak_host_bytes() -> int:
    """The largest resident set this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_device_bytes(device: torch.device) -> int:
    """The most bytes that were allocated on the device at once (0 on a CPU)."""
    if device.type == "cpu":
        return 0
    import torch

    return int(torch.accelerator.max_memory_allocated(device))
