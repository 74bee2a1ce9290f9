"""summary.json and the lines at the end of a run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from trainforge.digest import weights_digest
from trainforge.measure import peak_device_bytes, peak_host_bytes
from trainforge.patience import why_early
from trainforge.seeding import preserved
from trainforge.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from trainforge.live import Run

_SAMPLE_TOKENS = 200


def summarise(run: Run, status: str, error: BaseException | None = None) -> dict[str, Any]:
    """What summary.json holds. Every rank calls it (the digest gathers sharded weights), rank 0 writes it.

    Args:
        status: `finished`, `max_steps` (stopped early as asked), `early_stopped` (by `train.early_stop`), `stopped`
            (by a signal, after saving) or `failed`.
        error: what ended a failed run. Then there is no digest: it takes a collective, and a failed rank must not
            wait in one for ranks that are gone.
    """
    state = run.state
    return {
        "status": status,
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "steps": state.step,
        "total_steps": run.steps,
        "resumed_from": run.resumed_from,
        "skipped_steps": state.skipped_steps,
        "empty_steps": state.empty_steps,
        "tokens": state.tokens,
        "supervised_tokens": state.supervised,
        "loss_first": state.loss_first,
        "loss_last": state.loss_last,
        "eval_loss": state.eval_loss,
        "tokens_per_s": run.tokens_measured / run.seconds_measured if run.seconds_measured else None,
        "step_ms": run.ledger.median_step_ms(),
        "ledger": run.ledger.mean_ms(),
        "bound_by": bound_by(run),
        "save_blocked_ms": max(run.save_blocked_ms, default=None),
        "seconds": time.perf_counter() - run.began,
        "peak_device_bytes": peak_device_bytes(run.ctx.device),
        "peak_host_bytes": peak_host_bytes(),
        "world": run.ctx.world,
        "device": str(run.ctx.device),
        "plugins": {stage: chosen.plugin for stage, chosen in run.plan.chosen.items()},
        "muted_observers": sorted(run.events.muted),
        "weights_digest": None if error else _digest(run),
    }


def bound_by(run: Run) -> str | None:
    """The name in the ledger that took the largest share of a step, or None before the first."""
    ledger = run.ledger.mean_ms()
    return max(ledger, key=ledger.__getitem__) if any(ledger.values()) else None


def show_summary(run: Run, summary: dict[str, Any]) -> None:
    """The end of a run on the screen: loss, speed, time per stage, where everything lies, and a sample."""
    note = run.console.note
    done = {
        "finished": "finished: {}",
        "max_steps": "stopped as asked: {}; saved, run again to go on",
        "early_stopped": "stopped early: {}; " + why_early(run.state, run.train),
        "stopped": "stopped by a signal: {}; saved, run again to resume",
    }[summary["status"]]
    taken = f"step {summary['steps']} of {run.steps} after {format_seconds(summary['seconds'])}"
    note(done.format(taken))
    first, last, held_out = summary["loss_first"], summary["loss_last"], summary["eval_loss"]
    if first is not None:
        note(
            f"loss        {first:.4f} → {last:.4f}"
            + (f" · validation {held_out:.4f}" if held_out is not None else "")
        )
    if summary["tokens_per_s"]:
        note(
            f"speed       {summary['tokens_per_s']:,.0f} tokens/s · {summary['step_ms']:.1f} ms per step (median)"
        )
    shares = " · ".join(f"{name} {value:.1f}" for name, value in summary["ledger"].items() if value >= 0.05)
    note(f"mean step   {shares} ms · bound by {summary['bound_by']}")
    memory = f"host {format_bytes(summary['peak_host_bytes'])}"
    if summary["peak_device_bytes"]:
        memory = f"device {format_bytes(summary['peak_device_bytes'])} · {memory}"
    note(f"peak memory {memory}")
    if summary["skipped_steps"] or summary["empty_steps"]:
        note(
            f"skipped     {summary['skipped_steps']} steps with gradients that were not finite, "
            f"{summary['empty_steps']} without a supervised token"
        )
    note(
        f"everything  {run.path}: summary.json, metrics.jsonl, recipe.yaml, plan.json, checkpoints/, log.txt"
    )
    if (
        summary["status"] != "stopped"
    ):  # who stopped it waits for the end, and a scheduler does not wait for long
        _show_sample(run)


def _digest(run: Run) -> str:
    run.doing = ("memory", "gathering the weights for their digest")
    run.stages.memory.drain()
    return weights_digest(run.stages.model.parameters, run.stages.memory.weights)


def _show_sample(run: Run) -> None:
    prompt = run.ctx.run.sample
    if not prompt:
        return
    try:
        said = _sample(run, prompt)
    except Exception as error:  # the run is done and saved: it does not fail for want of a sample
        said = f"none: {type(error).__name__}: {error} (run.sample)"
    run.console.note(f"sample      {said}")


def _sample(run: Run, prompt: str) -> str:
    ids = run.stages.data.encode(prompt)
    if not ids:
        return "none: the data has no tokenizer for it (run.sample)"
    with preserved(run.ctx.device):
        continuation = run.stages.memory.generate(ids, _SAMPLE_TOKENS, seed=run.seed)
    text = run.stages.data.decode(continuation) if continuation else None
    return f"{prompt}{text}" if text else "none: this memory cannot generate (run.sample)"
