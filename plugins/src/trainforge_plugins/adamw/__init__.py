"""Optimizer `adamw`: torch's fused AdamW on the masters, wherever memory keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.stages import Optimizer


class AdamWSection(Section):
    """Nothing of its own: betas, eps, weight decay and its exceptions are in `train`."""


def _build(ctx: Context, config: AdamWSection) -> Optimizer:
    from trainforge_plugins.adamw.optimizer import AdamW

    return AdamW(ctx.train)


@hookimpl
def forge_optimizer() -> Provider:
    """Give AdamW."""
    return Provider(build=_build, config=AdamWSection, default=True)
