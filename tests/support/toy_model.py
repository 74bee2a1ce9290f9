"""A tiny causal transformer behind `ModelSpec`, with everything that makes memories stumble, each on request.

config = ToyConfig(tied=True, dropout=0.1)
model = ToyModel(config)                      # on meta; a memory fills it
batches = toy_batches(config, 3, step=1)      # 3 micro-batches of step 1
module = plain_module(config)                 # the same bits as an ordinary module, for reference loops
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainforge.stages import IGNORED, Batch, Extent, ModelSpec, ParameterSpec


@dataclass(frozen=True)
class ToyConfig:
    """What the toy has.

    Attributes:
        experts: experts per block (stacked tensors, router, auxiliary loss); 0 gives a dense MLP.
        branch: each block has a linear layer that only micro-batches whose first token is 1 go through.
        unused: a parameter that never gets a gradient.
        odd: 0-dim, 0-element and transposed parameters, and one whose gradient is an `expand`.
        bias, softcap: of the output head.
        frozen: name patterns of parameters that are not trained.
    """

    layers: int = 2
    width: int = 16
    vocab: int = 37
    max_positions: int = 32
    tied: bool = False
    dropout: float = 0.0
    experts: int = 0
    branch: bool = False
    unused: bool = False
    odd: bool = False
    bias: bool = False
    softcap: float | None = None
    frozen: tuple[str, ...] = ()
    seed: int = 0


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.weight


class Experts(nn.Module):
    """Top-1 routing over stacked experts; gives the output and a load-balancing loss."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.empty(count, width, 2 * width))
        self.down = nn.Parameter(torch.empty(count, 2 * width, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).float().softmax(-1)
        chosen = F.one_hot(probabilities.argmax(-1), probabilities.shape[-1])
        gates = (probabilities * chosen).to(x.dtype)
        inner = F.gelu(torch.einsum("rtw,ewh->rteh", x, self.up))
        out = torch.einsum("rteh,ehw,rte->rtw", inner, self.down, gates)
        balance = (probabilities.mean((0, 1)) * chosen.float().mean((0, 1))).sum() * chosen.shape[-1]
        return out, 0.01 * balance


class Block(nn.Module):
    """Attention and MLP, both residual. Gives `x`, or `(x, auxiliary loss)` with experts."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        width = config.width
        self.p = config.dropout
        self.attention_norm = Norm(width)
        # no bias here: a key's bias has a gradient of exactly zero, whose rounding noise Adam would blow up
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp_norm = Norm(width)
        if config.experts:
            self.experts = Experts(width, config.experts)
        else:
            self.up = nn.Linear(width, 2 * width, bias=False)
            self.down = nn.Linear(2 * width, width)
        if config.branch:
            self.branch = nn.Linear(width, width, bias=False)
        self.has_experts, self.has_branch = bool(config.experts), config.branch

    def forward(self, x: Tensor, mask: Tensor, through_branch: bool) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + F.dropout(self.out(weights @ v), self.p, self.training)
        inner = self.mlp_norm(x)
        if self.has_branch and through_branch:
            inner = inner + self.branch(inner)
        if self.has_experts:
            out, aux = self.experts(inner)
            return x + F.dropout(out, self.p, self.training), aux
        return x + F.dropout(self.down(F.gelu(self.up(inner))), self.p, self.training)


class Odd(nn.Module):
    """Parameters of unusual shape and layout, all of them used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(()))
        self.empty = nn.Parameter(torch.empty(0, width))
        self.turned = nn.Parameter(torch.empty(width, width))
        self.shift = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.gain) + x @ self.turned.t() + self.empty.sum() + 0.01 * self.shift.sum()


class ToyModule(nn.Module):
    """Embedding, blocks, norm, head."""

    positions: Tensor

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        if config.odd:
            self.odd = Odd(config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        if config.unused:
            self.unused = nn.Linear(config.width, config.width, bias=False)
        self.norm = Norm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=config.bias)
        if config.tied:
            self.head.weight = self.embed.weight
        with torch.device("cpu"):
            place = torch.arange(config.max_positions)[:, None] / 10 ** (
                torch.arange(config.width) / config.width
            )
            self.register_buffer("positions", place.sin(), persistent=False)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        x = self.embed(batch.input_ids) + self.positions[batch.position_ids].to(self.embed.weight.dtype)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()[None]
        if batch.document_ids is not None:
            mask = mask & (batch.document_ids[:, :, None] == batch.document_ids[:, None, :])
        through_branch = self.config.branch and int(batch.input_ids[0, 0]) == 1
        aux: Tensor | None = None
        if self.config.odd:
            x = self.odd(x)
        for block in self.blocks:
            x = block(x, mask, through_branch)
            if isinstance(x, tuple):
                x, balance = x
                aux = balance if aux is None else aux + balance
        return self.norm(x), aux

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        cap = self.config.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class ToyModel(ModelSpec):
    """The toy on the meta device; counts in `loaded` how often each parameter was asked for."""

    def __init__(self, config: ToyConfig = ToyConfig()) -> None:
        self.config = config
        with torch.device("meta"):
            self.module = ToyModule(config)
        aliases = {"embed.weight": ("head.weight",)} if config.tied else {}
        self.parameters = tuple(
            ParameterSpec(
                name,
                tuple(parameter.shape),
                _kind(name),
                not any(fnmatch(name, pattern) for pattern in config.frozen),
                int(name.split(".")[1]) if name.startswith("blocks.") else None,
                config.experts if name.endswith((".experts.up", ".experts.down")) else 0,
                aliases.get(name, ()),
            )
            for name, parameter in self.module.named_parameters()
        )
        self.blocks = tuple(f"blocks.{i}" for i in range(config.layers))
        self.head_parameters = ("embed.weight" if config.tied else "head.weight",)
        if config.bias:
            self.head_parameters += ("head.bias",)
        self.vocab_size, self.max_positions = config.vocab, config.max_positions
        self.loaded: dict[str, int] = {}

    def flops_per_token(self, tokens: int) -> float:
        used = sum(p.elements for p in self.parameters if p.kind != "embedding")
        return 6.0 * used + 6.0 * self.config.layers * self.config.width * tokens

    def load(self, name: str, out: Tensor, extent: Extent) -> None:
        self.loaded[name] = self.loaded.get(name, 0) + 1
        values = toy_weight(self.config, name, extent.global_shape).reshape(-1)
        out.copy_(values[extent.offset : extent.offset + extent.length])

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        hidden: tuple[Tensor, Tensor | None] = self.module(batch)
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        return self.module.logits(hidden)


def toy_weight(config: ToyConfig, name: str, shape: Sequence[int]) -> Tensor:
    """The initial fp32 values of a parameter: a pure function of (seed, name, shape)."""
    digest = hashlib.sha256(f"{config.seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    values = 0.2 * torch.randn(tuple(shape), generator=generator)
    return 1 + values if _kind(name) == "norm" else values


def plain_module(config: ToyConfig) -> ToyModule:
    """The same model as an ordinary fp32 module on the CPU, frozen parameters marked."""
    module = ToyModule(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(toy_weight(config, name, parameter.shape))
            parameter.requires_grad_(not any(fnmatch(name, pattern) for pattern in config.frozen))
    return module


def toy_batches(
    config: ToyConfig,
    count: int = 1,
    *,
    step: int = 1,
    rows: int = 2,
    tokens: int = 8,
    supervised: Sequence[int] | None = None,
    packed: bool = False,
    seed: int = 0,
) -> list[Batch]:
    """Micro-batches of one step, a pure function of the arguments; `supervised[i]` labels count in the i-th."""
    batches = []
    for index in range(count):
        mixed = (seed * 1000 + step) * 1000 + index
        draw = torch.Generator().manual_seed(mixed)
        ids = torch.randint(config.vocab, (rows, tokens + 1), generator=draw)
        labels = ids[:, 1:].clone()
        wanted = rows * tokens if supervised is None else supervised[index]
        masked = torch.randperm(rows * tokens, generator=draw)[wanted:]
        labels.view(-1)[masked] = IGNORED
        positions = torch.arange(tokens).repeat(rows, 1)
        documents = None
        if packed:
            documents = (positions >= tokens // 2).long()
            positions = positions % (tokens // 2)
        batches.append(
            Batch(
                ids[:, :-1].contiguous(),
                labels,
                positions,
                documents,
                supervised=wanted,
                real=rows * tokens,
                index=index,
                sample_ids=tuple(range(index * rows, (index + 1) * rows)),
                seed=mixed,
            )
        )
    return batches


def _kind(name: str) -> str:
    if "norm" in name:
        return "norm"
    if name.endswith("bias"):
        return "bias"
    return "embedding" if name.startswith("embed") else "matrix"
