"""`ReferenceOptimizer`: AdamW written out."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

from trainforge.stages import Optimizer, ParameterSpec, Slot, StateSpec, Update

if TYPE_CHECKING:
    from trainforge.sections import TrainSection


class ReferenceOptimizer(Optimizer):
    """AdamW (Loshchilov & Hutter, 2019) as in the paper, one torch operation per symbol."""

    def __init__(self, train: TrainSection) -> None:
        self._train = train

    def state(self, spec: ParameterSpec) -> dict[str, StateSpec]:
        """Both moments and the count of steps that this parameter has taken."""
        return {"exp_avg": StateSpec(), "exp_avg_sq": StateSpec(), "step": StateSpec(per_element=False)}

    @torch.no_grad()
    def update(self, slots: Sequence[Slot], update: Update) -> None:
        """Update each slot by itself."""
        train, (beta1, beta2) = self._train, self._train.betas
        for slot in slots:
            grad = slot.grad * update.scale
            step = slot.state["step"] + 1
            exp_avg = beta1 * slot.state["exp_avg"] + (1 - beta1) * grad
            exp_avg_sq = beta2 * slot.state["exp_avg_sq"] + (1 - beta2) * grad * grad
            denominator = (exp_avg_sq / (1 - beta2**step)).sqrt() + train.eps
            decay = train.weight_decay if self._decays(slot.spec) else 0.0
            lr = update.lr * slot.spec.lr_scale
            master = slot.master * (1 - lr * decay)
            master = master - lr * (exp_avg / (1 - beta1**step)) / denominator
            fresh = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            skip = update.found_inf > 0
            for key, value in fresh.items():
                slot.state[key].copy_(torch.where(skip, slot.state[key], value))
            slot.master.copy_(torch.where(skip, slot.master, master))

    def _decays(self, spec: ParameterSpec) -> bool:
        return not any(spec.kind == p or fnmatchcase(spec.name, p) for p in self._train.decay_exclude)
