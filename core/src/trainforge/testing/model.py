"""A tiny causal language model in plain torch, with every oddity that a memory must get right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainforge.errors import ConfigError
from trainforge.seeding import derive_seed
from trainforge.stages import Batch, Extent, ModelSpec, ParameterSpec
from trainforge.testing.reference import TinyModelSection
from trainforge.toolbox.parameters import round_to_bf16


class TinyBlock(nn.Module):
    """Pre-norm attention and MLP. `idle` is never used: a parameter without a gradient in every block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        # No bias: a key's has no gradient but rounding, which Adam would blow up.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.idle = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map `[rows, tokens, width]` to the same shape; `mask` is True where a token may look."""
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self._drop(self.out(seen.transpose(1, 2).reshape(rows, tokens, width)))
        return x + self._drop(self.down(functional.silu(self.up(self.norm2(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class TinyModule(nn.Module):
    """Embedding, blocks, norm and head. Called with ids it gives hidden states, not logits."""

    def __init__(self, config: TinyModelSection) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(
            TinyBlock(config.width, config.heads, config.dropout) for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        """Give the final hidden states `[rows, tokens, width]`."""
        rows, tokens = input_ids.shape
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=input_ids.device).tril()
        mask = mask.expand(rows, 1, tokens, tokens)
        if document_ids is not None:
            mask = mask & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
        x = self.embedding(input_ids)
        x = x + torch.sin(position_ids[..., None] * torch.arange(1, x.shape[-1] + 1, device=x.device)).to(
            x.dtype
        )
        x = functional.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)  # type: ignore[no-any-return]


class TinyModel(ModelSpec):
    """The tiny model as a stage: tied or not, with dropout, an unused parameter per block and frozen ones."""

    module: TinyModule

    def __init__(self, config: TinyModelSection, seed: int) -> None:
        with torch.device("meta"):
            self.module = TinyModule(config)
        self.config, self._seed = config, seed
        self.blocks = tuple(f"blocks.{index}" for index in range(config.layers))
        self.parameters = tuple(self._spec(name, p) for name, p in self._in_order())
        self.head_parameters = ("embedding.weight",) if config.tied else ("head.weight",)
        self.vocab_size, self.max_positions = config.vocab, config.max_positions

    def _in_order(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())  # tied ones appear once, under their first name

    def _spec(self, name: str, parameter: nn.Parameter) -> ParameterSpec:
        path = name.split(".")
        kind = "embedding" if path[0] == "embedding" else "norm" if "norm" in name else "matrix"
        return ParameterSpec(
            name,
            tuple(parameter.shape),
            "bias" if path[-1] == "bias" else kind,  # type: ignore[arg-type]
            name not in self.config.freeze,
            int(path[1]) if path[0] == "blocks" else None,
            aliases=("head.weight",) if self.config.tied and name == "embedding.weight" else (),
        )

    def flops_per_token(self, tokens: int) -> float:
        """6·N (without the look-up) plus causal attention: 6 · layers · tokens · width."""
        active = sum(p.elements for p in self.parameters if "idle" not in p.name)
        if not self.config.tied:
            active -= self.config.vocab * self.config.width
        return 6.0 * active + 6.0 * self.config.layers * tokens * self.config.width

    def export(self, out: Path, weights: Callable[[str], Tensor], dtype: Literal["bf16", "fp32"]) -> None:
        """Write the bytes of each parameter into a file of its name; `folder` of the section reads them."""
        for spec in self.parameters:
            value = weights(spec.name).flatten()
            if dtype == "bf16":
                rounded = torch.empty(value.shape, dtype=torch.bfloat16)
                round_to_bf16(value, rounded)
                value = rounded
            (out / f"{spec.name}.{dtype}").write_bytes(value.view(torch.uint8).numpy().tobytes())

    def load(self, name: str, out: Tensor, extent: Extent) -> None:
        """Fill from `folder`, or a generator seeded by (seed, name): norms start near 1, biases near 0."""
        if self.config.folder is not None:
            values = _exported(Path(self.config.folder), name)
            out.copy_(values[extent.offset : extent.offset + extent.length])
            return
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "weights", name))
        values = torch.randn(extent.global_shape, generator=generator).flatten()
        values = 1 + 0.1 * values if "norm" in name else 0.2 * values
        out.copy_(values[extent.offset : extent.offset + extent.length])

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Run everything but the head."""
        hidden = self.module(batch.input_ids, batch.position_ids, batch.document_ids)
        auxiliary = self.config.auxiliary * hidden.float().pow(2).mean() if self.config.auxiliary else None
        return hidden, auxiliary

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[n, vocab]`."""
        return self.module.head(hidden)  # type: ignore[no-any-return]


def _exported(folder: Path, name: str) -> Tensor:
    """A parameter that was exported, flat."""
    for dtype, suffix in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        file = folder / f"{name}.{suffix}"
        if file.is_file():
            return torch.frombuffer(bytearray(file.read_bytes()), dtype=dtype)
    raise ConfigError(
        f"model.folder: {folder} holds no {name}: name a folder that the tiny model was exported to"
    )
