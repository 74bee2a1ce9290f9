"""The training loop. It knows no strategy: it asks each stage for its part of the step, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainforge.cadence import clock_of_saves
from trainforge.errors import DataExhausted
from trainforge.evaluation import EvaluationCut, evaluate
from trainforge.measure import StepFigures
from trainforge.patience import Verdict, judge
from trainforge.saving import save, save_what_is_done, tell_committed
from trainforge.schedule import learning_rate
from trainforge.seeding import derive_seed, micro_batch_seed, seed_everything
from trainforge.stages import Update

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from trainforge.live import Run
    from trainforge.stages import Batch, Slot


@dataclass(frozen=True)
class Totals:
    """One step's numbers over all ranks, agreed on by one host-side reduction."""

    supervised: int
    real: int
    stop: bool
    save: bool
    ended: bool


def train(run: Run, stop_requested: Callable[[], bool]) -> str:
    """Take steps until `run.last_step`, or until a rank is asked to stop; saves at the end either way.

    Returns:
        `"finished"`, `"max_steps"`, `"early_stopped"` (by `train.early_stop`) or `"stopped"` (by a signal).

    Raises:
        DataExhausted: the data of a rank ended before; the steps done are saved.
    """
    state, save_clock = run.state, clock_of_saves(run)
    figures, saved = StepFigures(run), state.step
    stopped, verdict = False, Verdict()
    run.ledger.restart()
    while state.step < run.last_step and not (stopped or verdict.stop):
        step = state.step + 1
        run.doing = ("data", f"taking the batches of step {step}")
        seed_everything(derive_seed(run.seed, "data", step, run.ctx.rank))
        batches = _take(run)
        run.doing = ("comm", f"agreeing on the token counts of step {step}")
        totals = _agree(run, batches, stop=stop_requested(), save=save_clock.due(step))
        if batches is None or totals.ended:
            figures.read()
            save_what_is_done(run, saved)
            raise DataExhausted
        stopped = totals.stop
        run.ledger.lap("data")

        if totals.supervised > 0:
            figures.record(*_step(run, step, batches, totals), supervised=totals.supervised)
        else:
            state.empty_steps += 1  # no token is supervised anywhere: every weight and moment stays as it is
        state.step = step
        state.tokens += totals.real
        state.supervised += totals.supervised
        # One rank alone need not wait for the next step's agreement.
        stopped = stopped or (run.ctx.world == 1 and stop_requested())

        verdict = Verdict()
        if not stopped and _evaluation_due(run, step):
            try:
                verdict = judge(run, evaluate(run, stop_requested))
            except EvaluationCut:
                stopped = True
            run.ledger.lap("evaluate")
        last = stopped or verdict.stop or step == run.last_step
        saves = last or totals.save or verdict.save
        log = step % run.train.log_every == 0 or last
        if log or saves:
            figures.read()  # before saving, so that the checkpoint has the losses and counts of this step
        if saves:
            save(run)
            saved = step
            save_clock.done()
            run.ledger.lap("checkpoint")
        tell_committed(run)
        run.events.step_ended(run, step)
        run.ledger.lap("other")
        run.ledger.end_step()
        if log:
            figures.tell(step)
            run.ledger.lap("other")  # of the next step
    run.doing = ("checkpoint", "committing the last checkpoint")
    run.stages.checkpoint.wait()
    tell_committed(run)
    if stopped:
        return "stopped"  # also after the very last step, whose evaluation was left out
    if state.step >= run.steps:
        return "finished"
    return "early_stopped" if verdict.stop else "max_steps"


def _take(run: Run) -> Sequence[Batch] | None:
    """This rank's micro-batches of the next step; None when its data has ended."""
    try:
        return run.stages.data.take(run.ctx.batching.accumulate)
    except DataExhausted:
        return None


def _evaluation_due(run: Run, step: int) -> bool:
    """Every `eval_every` steps and at the end. Who asks a run to stop waits for saving only."""
    every = run.train.eval_every
    return step == run.steps or (every is not None and step % every == 0)


def _agree(run: Run, batches: Sequence[Batch] | None, *, stop: bool, save: bool) -> Totals:
    """Sum this step's token counts and wishes over ranks. Only rank 0's clock says when to save."""
    supervised, real, stops, saves, ends = run.stages.comm.control(
        [
            sum(batch.supervised for batch in batches or ()),
            sum(batch.real for batch in batches or ()),
            float(stop),
            float(save and run.ctx.rank == 0),
            float(batches is None),
        ]
    )
    return Totals(int(supervised), int(real), stops > 0, saves > 0, ends > 0)


def _step(
    run: Run, step: int, batches: Sequence[Batch], totals: Totals
) -> tuple[Tensor, Tensor, Tensor, float]:
    """One optimizer step; nothing in it waits for the device.

    Returns:
        This rank's share of the loss, the gradient norm and found_inf (0-dim, on the device), and the learning rate.
    """
    stages = run.stages
    for batch in batches:
        batch.seed = micro_batch_seed(run.seed, step, batch.index)
        run.row_tokens = max(run.row_tokens, batch.input_ids.shape[1])
    run.doing = ("memory", f"running forward and backward of step {step}")
    loss = stages.memory.forward_backward(batches, 1.0 / totals.supervised, run.sink)
    run.ledger.lap("compute")
    run.doing = ("comm", f"reducing the gradients of step {step}")
    used = stages.comm.finish()
    run.ledger.lap("comm")
    run.doing = ("optimizer", f"updating the weights in step {step}")
    norm = stages.memory.grad_norm()
    lr = learning_rate(run.train, step, run.steps)
    update = Update(step, lr, *_clipping(norm, run.train.clip))

    def update_slots(slots: Sequence[Slot]) -> None:
        stages.checkpoint.before_write(slots)
        stages.optimizer.update(slots, update)

    stages.memory.apply(update_slots, used)
    run.ledger.lap("optimizer")
    return loss, norm, update.found_inf, lr


def _clipping(norm: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Clip scale and found_inf, 0-dim fp32 on the norm's device. The scale is that of torch's `clip_grad_norm_`."""
    finite = norm.isfinite()
    scale = (clip / (norm + 1e-6)).clamp(max=1.0) if clip is not None else norm.new_ones(())
    return scale.where(finite, 1.0).float(), finite.logical_not().float()
