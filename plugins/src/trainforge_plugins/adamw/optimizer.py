"""AdamW in torch's fused, functional form."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainforge.sections import TrainSection
from trainforge.stages import Optimizer, ParameterSpec, Slot, StateSpec, Update
from trainforge.toolbox.weight_decay import weight_decay


class AdamW(Optimizer):
    """Decoupled weight decay (Loshchilov and Hutter, 2019), one fused kernel call per decay and learning rate.

    Steps are counted per parameter: one that had no gradient in a step keeps its count, as its moments do.
    """

    def __init__(self, train: TrainSection) -> None:
        self._train = train
        self.beta1, self.beta2 = train.betas
        self.eps = train.eps
        self._decays: dict[str, float] = {}  # matching patterns takes longer than launching the kernel

    def state(self, spec: ParameterSpec) -> dict[str, StateSpec]:
        """Two moments per element and a count of steps."""
        return {"exp_avg": StateSpec(), "exp_avg_sq": StateSpec(), "step": StateSpec(per_element=False)}

    def decay(self, spec: ParameterSpec) -> float:
        """The weight decay of a parameter: none when its kind, its name or an alias is excluded."""
        return weight_decay(spec, self._train)

    def update(self, slots: Sequence[Slot], update: Update) -> None:
        """Update masters and moments in place; with `found_inf` nothing changes, without asking the device."""
        groups: dict[tuple[torch.device, float, float], list[Slot]] = {}
        for slot in slots:
            name = slot.spec.name
            if name not in self._decays:
                self._decays[name] = self.decay(slot.spec)
            key = (slot.master.device, self._decays[name], slot.spec.lr_scale)
            groups.setdefault(key, []).append(slot)
        for (device, decay, lr_scale), group in groups.items():
            self._update_group(group, decay, update.lr * lr_scale, device, update)

    def _update_group(
        self, slots: list[Slot], decay: float, lr: float, device: torch.device, update: Update
    ) -> None:
        found_inf = update.found_inf.to(device, torch.float32, non_blocking=True)
        scale = update.scale.to(device, torch.float32, non_blocking=True)
        steps = [slot.state["step"] for slot in slots]
        # The kernel returns at once when found_inf is 1, so the count is the only thing to take care of here.
        torch._foreach_add_(steps, [1.0 - found_inf] * len(steps))
        torch._fused_adamw_(
            [slot.master for slot in slots],
            [slot.grad for slot in slots],
            [slot.state["exp_avg"] for slot in slots],
            [slot.state["exp_avg_sq"] for slot in slots],
            [],
            steps,
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale.reciprocal(),  # the kernel divides by it
            found_inf=found_inf,
        )
