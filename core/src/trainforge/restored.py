"""Weights that a checkpoint will fill: then nobody reads or draws the initial ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from trainforge.stages import Extent, ModelSpec


def leave_out_initial_weights(model: ModelSpec) -> None:
    """Let `model.load` give zeros for trained parameters, and `load_buffers` do nothing.

    Every memory asks for initial weights while it is built. Where a checkpoint replaces them at once, reading a model
    folder for it takes as long as reading the checkpoint. Frozen parameters are in no checkpoint and are loaded.
    """
    trained = {spec.name for spec in model.parameters if spec.trainable}
    load = model.load

    def load_frozen(name: str, out: Tensor, extent: Extent) -> None:
        if name in trained:
            out.zero_()
        else:
            load(name, out, extent)

    own: Any = model
    own.load, own.load_buffers = load_frozen, lambda: None
