"""Optimizer `cpu_adam`: AdamW where the masters are, in host RAM at the speed of its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.stages import Optimizer


class CpuAdamSection(Section):
    """How the update in host RAM is computed; betas, eps and weight decay are in `train`."""

    backend: Literal["auto", "native", "torch", "deepspeed"] = Field(
        "auto",
        description="native: one pass in C++, compiled on first use; torch: its fused AdamW; deepspeed: "
        "DeepSpeedCPUAdam (fp32 masters only); auto: native, or torch where nothing can be compiled",
    )
    moments: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="how both moments are kept; bf16 takes 4 bytes per parameter less, and rounds them",
    )
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="threads of the native update, whatever OMP_NUM_THREADS says; auto: this rank's share of the "
        "cores, less one that launches work on an accelerator",
    )


def build(ctx: Context, config: CpuAdamSection) -> Optimizer:
    """Make the optimizer; compiles the kernel when it is not there yet."""
    from trainforge_megatrain.cpu_adam.optimizer import make_optimizer

    return make_optimizer(ctx, config)


@hookimpl
def forge_optimizer() -> Provider:
    """Give AdamW in host RAM."""
    return Provider(build=build, config=CpuAdamSection)
