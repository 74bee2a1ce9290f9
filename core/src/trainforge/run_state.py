"""`RunState`: the numbers that belong to the loop and survive in a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from trainforge.errors import CheckpointError
from trainforge.seeding import rng_state, set_rng_state
from trainforge.stages import PartState


@dataclass
class RunState:
    """Where a run is. Part `loop` of a checkpoint.

    Attributes:
        step: steps done.
        tokens: real tokens (no padding) trained on, over all ranks.
        supervised: tokens with a label, over all ranks.
        skipped_steps: steps that changed nothing because a gradient was not finite.
        empty_steps: steps that changed nothing because no token was supervised.
        loss_first: loss of the first logged interval.
        loss_last: loss of the last one.
        eval_loss: mean loss on the validation split, when it was last measured.
        eval_step: the step after which that was.
        eval_lowest: the lowest of them so far.
        eval_to_beat: the lowest that fell by more than `train.early_stop.min_delta`.
        evaluations_in_vain: how many evaluations since then did not.
    """

    step: int = 0
    tokens: int = 0
    supervised: int = 0
    skipped_steps: int = 0
    empty_steps: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    eval_loss: float | None = None
    eval_step: int | None = None
    eval_lowest: float | None = None
    eval_to_beat: float | None = None
    evaluations_in_vain: int = 0

    def state(self) -> PartState:
        """The counters and the random generators' states, all plain data."""
        return PartState(1, {"counters": asdict(self), "rng": rng_state()})

    def load(self, version: int, data: dict[str, Any]) -> None:
        """Take them back.

        Raises:
            CheckpointError: of another version, or a part of it is missing; it is named.
        """
        if version != 1:
            raise CheckpointError(
                f"the checkpoint's loop state (version {version}) is not one that this version reads"
            )
        for part, what in (("counters", "where the run was"), ("rng", "the states of the random generators")):
            if part not in data:
                raise CheckpointError(
                    f"the checkpoint lacks {part} ({what}) in its part loop, so the run cannot go on exactly: resume "
                    "from another one with --resume STEP, or start over with --fresh"
                )
        for field in fields(self):
            setattr(self, field.name, data["counters"].get(field.name, getattr(self, field.name)))
        set_rng_state(data["rng"])
