"""Memory `resident`: everything on the device: masters, working copies, gradients, moments, activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainforge.hookspecs import hookimpl
from trainforge.provider import Estimate, Provider, Section, Traits

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.stages import Memory, ModelSpec


class ResidentSection(Section):
    """Nothing of its own: dtype, recomputation, compilation and the loss chunk are in `train`."""


def _build(ctx: Context, config: ResidentSection) -> Memory:
    from trainforge_plugins.resident.memory import Resident

    return Resident(ctx)


def _estimate(ctx: Context, model: ModelSpec, config: ResidentSection) -> Estimate:
    from trainforge_plugins.resident.estimate import estimate

    return estimate(ctx, model)


@hookimpl
def forge_memory() -> Provider:
    """Give the memory that keeps the whole model on the device."""
    return Provider(
        build=_build,
        config=ResidentSection,
        traits=Traits(gradients_on="device", holds_shards=True),
        default=True,
        estimate=_estimate,
    )
