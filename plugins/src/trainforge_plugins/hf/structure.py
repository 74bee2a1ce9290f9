"""What a language model is made of: parameters in execution order, kinds, blocks, experts, ties."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from trainforge.stages import ParameterSpec

Kind = Literal["matrix", "embedding", "norm", "bias"]
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def number(config: Any, names: Iterable[str]) -> int | None:
    """The first of the attributes `names` that `config` has as a positive number."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def expert_count(config: Any) -> int | None:
    """How many experts a Mixture-of-Experts layer has, or None."""
    return number(config, _EXPERT_COUNTS)


def active_experts(config: Any) -> int | None:
    """How many experts a token is sent to, or None."""
    return number(config, _ACTIVE_COUNTS)


def find_blocks(module: nn.Module, layers: int | None, block_classes: Iterable[str] = ()) -> tuple[str, ...]:
    """Dotted names of the repeated blocks, in order: the outermost `ModuleList` that holds them.

    Args:
        module: where to look.
        layers: the number of blocks that the configuration speaks of, or None.
        block_classes: class names that transformers says must stay whole (`_no_split_modules`).
    """
    lists = [
        (name, part) for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part)
    ]
    classes = set(block_classes)
    of_class = [entry for entry in lists if all(type(child).__name__ in classes for child in entry[1])]
    of_length = [entry for entry in lists if len(entry[1]) == layers]
    chosen = of_class or of_length
    if not chosen:
        return ()
    name, blocks = next((entry for entry in of_class if entry in of_length), chosen[0])
    return tuple(f"{name}.{index}" if name else str(index) for index in range(len(blocks)))


@dataclass(frozen=True)
class Parts:
    """Dotted names of the language model below the head, and of the vision tower ("" when there is none)."""

    language: str
    tower: str = ""


def describe_parameters(
    module: nn.Module,
    blocks: Sequence[str],
    head_prefixes: Sequence[str],
    experts: int | None,
    parts: Parts | None = None,
) -> tuple[ParameterSpec, ...]:
    """Every distinct parameter in execution order: stem, blocks, final norm, head (within one: as registered).

    Between the language model's stem (its embeddings) and its blocks comes the vision tower in the same order, and
    what leads from the tower to the language model.

    Args:
        module: the whole model.
        blocks: names of its repeated blocks.
        head_prefixes: names of the modules that only the output head uses.
        experts: number of experts of its expert layers, or None.
        parts: where language model and vision tower lie; None: all is the language model.
    """
    aliases: dict[int, list[str]] = defaultdict(list)
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases[id(parameter)].append(name)
        first.setdefault(id(parameter), (name, parameter))
    block_of = {block: index for index, block in enumerate(blocks)}
    ranked = []
    behind: set[str] = set()  # parts whose blocks were met
    for place, (key, (name, parameter)) in enumerate(first.items()):
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        block = _block_index(name, block_of)
        part = _part(name, parts)
        if block is not None:
            behind.add(part)
        spec = ParameterSpec(
            name,
            tuple(parameter.shape),
            kind=parameter_kind(owner, leaf, parameter),
            trainable=parameter.requires_grad,
            block=block,
            experts=_stacked_experts(owner, leaf, parameter, experts),
            aliases=tuple(aliases[key][1:]),
        )
        head = any(name == prefix or name.startswith(prefix + ".") for prefix in head_prefixes)
        stage = (
            2 * (part in behind) if part == "tower" and block is None else _stage(spec, head, part in behind)
        )
        rank = (_RANKS.get(part, 0 if stage == 0 else 3), stage, -1 if block is None else block, place)
        ranked.append((rank, spec))
    return tuple(spec for _, spec in sorted(ranked, key=lambda entry: entry[0]))


_RANKS = {"tower": 1, "between": 2}
"""When the parts that only images go through have their turn: after the stem (0) of the language model."""


def _part(name: str, parts: Parts | None) -> str:
    """Which part a parameter belongs to: `tower`, `language` (with the head), or `between` the two."""
    if parts is None or not parts.tower:
        return "language"
    if name.startswith(f"{parts.tower}."):
        return "tower"
    shared = parts.tower.rpartition(".")[0]
    inside = name.startswith(f"{shared}.") and not name.startswith(f"{parts.language}.")
    return "between" if inside else "language"


def parameter_kind(owner: nn.Module, leaf: str, parameter: nn.Parameter) -> Kind:
    """What a parameter is, for decay groups.

    By the class of the module that owns it where that says so; anything else with one dimension scales or shifts
    channels (gates, sinks, decay rates) and is treated like a norm, because decay would pull it to zero.
    """
    if leaf == "bias" or leaf.endswith(("_bias", ".bias")):
        return "bias"
    if isinstance(owner, nn.Embedding):
        return "embedding"
    if is_norm(owner) or parameter.ndim <= 1:
        return "norm"
    return "matrix"


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer (by class name: most architectures bring their own)."""
    return "norm" in type(module).__name__.lower() and not list(module.children())


def _block_index(name: str, block_of: dict[str, int]) -> int | None:
    for match in re.finditer(r"\.", name):
        index = block_of.get(name[: match.start()])
        if index is not None:
            return index
    return None


def _stage(spec: ParameterSpec, head: bool, behind: bool) -> int:
    """0 stem, 1 blocks, 2 what follows the blocks, 3 head. Some models register their final norm first."""
    if spec.block is not None:
        return 1
    if head:
        return 3
    final_norm = (
        spec.kind in ("norm", "bias")
        and "emb" not in spec.name
        and "norm" in spec.name.replace("ln_", "norm")
    )
    return 2 if behind or final_norm else 0


def _stacked_experts(owner: nn.Module, leaf: str, parameter: nn.Parameter, experts: int | None) -> int:
    if experts is None or not parameter.ndim or parameter.shape[0] != experts:
        return 0
    stacked = any(p.ndim == 3 and p.shape[0] == experts for p in owner.parameters(recurse=False))
    if parameter.ndim == 3 or (stacked and parameter.ndim == 2 and leaf.endswith("bias")):
        return experts
    return 0
