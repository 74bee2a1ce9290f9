"""Lion: one moment per weight instead of AdamW's two, and steps of equal size (Chen et al., 2023, arXiv:2302.06675)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from pydantic import Field

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section
from trainforge.stages import Optimizer, ParameterSpec, Slot, StateSpec, Update


class LionSection(Section):
    """The recipe's `my_plugin` section: only what `train` does not already say."""

    beta1: float = Field(0.9, ge=0, lt=1, description="how much of the moment goes into a step")
    beta2: float = Field(0.99, ge=0, lt=1, description="how slowly the moment forgets")


class Lion(Optimizer):
    def __init__(self, config: LionSection, weight_decay: float, decay_exclude: Sequence[str]) -> None:
        self.config, self.weight_decay, self.decay_exclude = config, weight_decay, decay_exclude

    def state(self, spec: ParameterSpec) -> dict[str, StateSpec]:
        return {"exp_avg": StateSpec()}  # memory allocates it, wherever it keeps the weights

    def update(self, slots: Sequence[Slot], update: Update) -> None:
        import torch

        go = 1 - update.found_inf  # 0 when a gradient is not finite: then nothing may change
        for slot in slots:
            moment = slot.state["exp_avg"]
            grad = torch.nan_to_num(slot.grad * update.scale)  # scale is the clipping
            direction = torch.lerp(grad, moment, self.config.beta1).sign_()
            lr = update.lr * slot.spec.lr_scale  # train.lr_groups
            slot.master.mul_(1 - go * lr * self.decay(slot.spec))
            slot.master.sub_(direction * (go * lr))
            moment.lerp_(grad, go * (1 - self.config.beta2))

    def decay(self, spec: ParameterSpec) -> float:
        names = (spec.kind, spec.name, *spec.aliases)
        excluded = any(fnmatchcase(name, pattern) for name in names for pattern in self.decay_exclude)
        return 0.0 if excluded else self.weight_decay


def build(ctx, config: LionSection) -> Lion:
    return Lion(config, ctx.train.weight_decay, ctx.train.decay_exclude)


@hookimpl
def forge_optimizer() -> Provider:
    return Provider(build=build, config=LionSection)
