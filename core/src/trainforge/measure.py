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

    from trainforge.live import Run


class StepFigures:
    """Collects loss, norm and found_inf of each step as device tensors and turns them into one log entry."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._found_inf: list[Tensor] = []
        self._supervised: list[int] = []
        self._lr = 0.0
        self._norm: float | None = None
        self._loss_sum, self._loss_tokens = 0.0, 0  # of the finite steps read since the last `tell`
        self._streak = self._longest_streak = 0
        self._tokens_before = run.state.tokens
        self._since = time.perf_counter()

    def record(self, loss: Tensor, norm: Tensor, found_inf: Tensor, lr: float, *, supervised: int) -> None:
        """Keep one step's figures; reads nothing."""
        self._losses.append(loss)
        self._norms.append(norm)
        self._found_inf.append(found_inf)
        self._supervised.append(supervised)
        self._lr = lr

    def read(self) -> None:
        """Read the figures since the last call, the only place where a steady run waits for the device.

        Updates the run's losses and counts of skipped steps.
        """
        import torch

        if not self._losses:
            return
        state = self._run.state
        self._run.doing = (
            "memory",
            f"computing the steps up to {state.step}",
        )  # a device tells its errors only now
        losses = self._run.stages.comm.sum_ranks(torch.stack(self._losses).double()).tolist()
        skipped: list[float] = torch.stack(self._found_inf).tolist()
        self._norm = float(self._norms[-1])
        for loss, found_inf, supervised in zip(losses, skipped, self._supervised, strict=True):
            self._streak = self._streak + 1 if found_inf else 0
            self._longest_streak = max(self._longest_streak, self._streak)
            state.skipped_steps += int(found_inf)
            if not found_inf:
                self._loss_sum += loss * supervised
                self._loss_tokens += supervised
        if self._loss_tokens:
            state.loss_last = self._loss_sum / self._loss_tokens
            state.loss_first = state.loss_last if state.loss_first is None else state.loss_first
        for kept in (self._losses, self._norms, self._found_inf, self._supervised):
            kept.clear()

    def tell(self, step: int) -> None:
        """Tell observers what was read, with speed, memory and the time ledger.

        `tokens_per_s` is over wall time from log to log: saves, evaluation and the start-up of the first step count.

        Raises:
            TrainForgeError: too many steps in a row were not finite.
        """
        run, state = self._run, self._run.state
        metrics = self._losses_since_last_told()
        per_step_ms, step_ms = run.ledger.read()
        tokens, seconds = state.tokens - self._tokens_before, time.perf_counter() - self._since
        self._tokens_before, self._since = state.tokens, self._since + seconds
        run.tokens_measured += tokens
        run.seconds_measured += seconds
        metrics["tokens_per_s"] = tokens / max(seconds, 1e-9)
        metrics |= self._utilisation(metrics["tokens_per_s"])
        metrics |= {"lr": self._lr, "tokens": float(state.tokens), "step_ms": step_ms}
        metrics |= {f"ledger/{name}_ms": value for name, value in per_step_ms.items()}
        metrics |= {"skipped_steps": float(state.skipped_steps), "empty_steps": float(state.empty_steps)}
        if state.eval_loss is not None:
            metrics["eval_loss"] = state.eval_loss
        metrics["host_peak_bytes"] = float(peak_host_bytes())
        if run.ctx.device.type != "cpu":
            metrics["device_peak_bytes"] = float(peak_device_bytes(run.ctx.device))
        for stage, built in run.stages.named():
            run.doing = (stage, "giving its metrics")
            metrics |= {f"{stage}/{name}": value for name, value in built.metrics().items()}
        run.events.metrics_logged(run, step, metrics)
        if self._longest_streak >= run.train.max_bad_steps:
            raise TrainForgeError(
                f"the gradients of {self._longest_streak} steps in a row (before or at step {step}) were not finite, "
                f"so none of them changed a weight. Lower train.lr (now {run.train.lr:g}), look at the rows of these "
                "steps, or raise train.max_bad_steps; the checkpoints written so far are intact."
            )

    def _losses_since_last_told(self) -> dict[str, float]:
        """Mean loss per supervised token (absent when no step was finite) and the last gradient norm."""
        metrics = {} if self._norm is None else {"grad_norm": self._norm}
        if self._loss_tokens:
            metrics["loss"] = self._loss_sum / self._loss_tokens
        self._norm, self._loss_sum, self._loss_tokens = None, 0.0, 0
        return metrics

    def _utilisation(self, tokens_per_s: float) -> dict[str, float]:
        """Model TFLOP/s of one rank (6·N·T and causal attention, no recomputation), and their share of the peak."""
        run = self._run
        flops = run.stages.model.flops_per_token(run.row_tokens) * tokens_per_s / run.ctx.world
        peak = peak_bf16_flops(run.ctx.device)
        return {"model_tflops": flops / 1e12} | ({"mfu": flops / peak} if peak else {})


def peak_host_bytes() -> int:
    """The largest resident set this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_device_bytes(device: torch.device) -> int:
    """The most bytes that were allocated on the device at once (0 on a CPU)."""
    if device.type == "cpu":
        return 0
    import torch

    return int(torch.accelerator.max_memory_allocated(device))
