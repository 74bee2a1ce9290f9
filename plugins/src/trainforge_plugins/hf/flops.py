"""Model FLOPs of a causal language model, by its structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainforge.stages import ParameterSpec
from trainforge_plugins.hf.structure import active_experts


def active_parameters(parameters: Sequence[ParameterSpec], head: Sequence[str], config: Any) -> float:
    """Parameters that one token is multiplied with: active experts only, no embedding look-up, head included."""
    total = 0.0
    chosen = active_experts(config) or 0
    for spec in parameters:
        if spec.kind == "embedding" and spec.name not in head:
            continue
        share = min(1.0, chosen / spec.experts) if spec.experts and chosen else 1.0
        total += spec.elements * share
    return total


def attention_flops(config: Any, tokens: int) -> float:
    """Forward and backward FLOPs of attention per token at sequence length `tokens`, causal counted as causal.

    Scores and the weighted sum of values are 2 FLOPs each per head dimension and visible token; backward costs twice
    the forward. A token sees half the sequence on average, or its window.
    """
    layers = int(getattr(config, "num_hidden_layers", 0) or 0)
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    if not layers or not heads:
        return 0.0
    plain = getattr(config, "head_dim", None) or config.hidden_size // heads
    query = (getattr(config, "qk_nope_head_dim", 0) or 0) + (
        getattr(config, "qk_rope_head_dim", 0) or 0
    ) or plain
    value = getattr(config, "v_head_dim", None) or plain
    visible = sum(_visible(config, layer, tokens) for layer in range(layers))
    return 3.0 * 2.0 * heads * (query + value) * visible


def _visible(config: Any, layer: int, tokens: int) -> float:
    """Tokens that a token of this layer attends to, averaged over the sequence."""
    types = getattr(config, "layer_types", None)
    kind = types[layer] if types and layer < len(types) else None
    if (kind is not None and "attention" not in kind) or kind == "linear_attention":
        return 0.0
    window = getattr(config, "sliding_window", None) if kind in (None, "sliding_attention") else None
    if not window or window >= tokens:
        return tokens / 2
    return float(window) * (1 - window / (2 * tokens))
