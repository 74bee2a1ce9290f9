"""Models without weights, and what planning makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainforge.context import Context
from trainforge.sections import RunSection
from trainforge.testing import load_plugin, tiny_context
from trainforge.testing.bench import build_stage
from trainforge_megatrain.stream import StreamSection
from trainforge_megatrain.stream.forecast import Rates
from trainforge_megatrain.stream.sizes import Sizes

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
# per block: q, k, v with bias, o, three of the MLP, two norms
BLOCK = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 160 + 2 * 64

RATES = Rates(compute=1e12, upload=1e10, download=1e10, host_update=1e9, device_update=1e11)


def described(
    folder: Path, config: Mapping[str, Any] = QWEN, *, run: Mapping[str, Any] | None = None, **facts: Any
) -> Context:
    """A context with the model on meta and the default optimizer; further arguments are `tiny_context`'s."""
    ctx = tiny_context(folder, model={"config": dict(config)}, **facts)
    ctx.run = RunSection.model_validate({"seed": 0, **(run or {})})
    build_stage(ctx, load_plugin("hf"), "model", {})
    build_stage(ctx, load_plugin("adamw"), "optimizer", {})
    return ctx


def sizes_of(ctx: Context, **section: Any) -> Sizes:
    """The sizes with this section of `stream`."""
    return Sizes.of(ctx, ctx.model, ctx.optimizer, StreamSection.model_validate(section))
