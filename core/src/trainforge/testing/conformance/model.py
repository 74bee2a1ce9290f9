"""The rules of the model stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainforge.stages import IGNORED, Batch, Extent, ModelSpec, ParameterSpec
from trainforge.testing.bench import Stages
from trainforge.testing.conformance.base import assert_close
from trainforge.testing.conformance.exporting import ModelExportRules


class ModelConformance(ModelExportRules):
    """Whether a model is described completely before it has storage, and computes what the description says.

    Override `reread` when a recipe can start from a folder that the model was exported to.

    Attributes:
        model: the recipe's `model` section: something tiny (2 or 3 layers, width 16 to 64, fp32).
        tokens: length of the test's sequences.
    """

    stage = "model"
    model: ClassVar[Mapping[str, Any]] = {}
    tokens: ClassVar[int] = 8

    def build(self, folder: Path, **facts: Any) -> Stages:
        """All six stages; the reference memory fills the model."""
        return super().build(folder, **{"model": dict(self.model), **facts})

    def described(self, folder: Path, **facts: Any) -> ModelSpec:
        """The model as planning sees it: built alone, without a memory."""
        from trainforge.testing.bench import build_stage, load_plugin, tiny_context

        facts = {"model": self.model, "train": self.train, "device": self.device, **facts}
        ctx = tiny_context(folder, **facts)
        model: ModelSpec = build_stage(ctx, load_plugin(self.plugin), "model", {})
        return model

    def batch(self, model: ModelSpec, *, rows: int = 2, seed: int = 0) -> Batch:
        """A batch of random ids."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(model.vocab_size, (rows, self.tokens), generator=generator)
        labels = torch.cat([ids[:, 1:], torch.full((rows, 1), IGNORED)], 1)
        positions = torch.arange(self.tokens).repeat(rows, 1)
        return Batch(ids, labels, positions, None, rows * (self.tokens - 1), ids.numel()).to(
            torch.device(self.device)
        )

    def hidden(self, stages: Stages, batch: Batch) -> Tensor:
        """Hidden states without dropout."""
        stages.model.module.eval()
        with torch.no_grad():
            return stages.model.hidden(batch)[0]

    def test_nothing_has_storage(self, tmp_path: Path) -> None:
        """Parameters lie on meta until memory fills them."""
        for name, parameter in self.described(tmp_path).module.named_parameters():
            assert parameter.is_meta, (
                f"{name} lies on {parameter.device}: build the module under torch.device('meta')"
            )

    def test_every_parameter_is_described(self, tmp_path: Path) -> None:
        """`parameters` are exactly those of the module: names, shapes, each storage once, ties as aliases."""
        model = self.described(tmp_path)
        actual = dict(model.module.named_parameters(remove_duplicate=False))
        told: dict[str, ParameterSpec] = {}
        for spec in model.parameters:
            for name in (spec.name, *spec.aliases):
                assert name in actual, f"parameters names {name}, which the module does not have"
                assert name not in told, f"{name} is described twice"
                told[name] = spec
                shape = tuple(actual[name].shape)
                assert shape == spec.shape, f"{name} has shape {shape}; its ParameterSpec says {spec.shape}"
        missing = sorted(set(actual) - set(told))
        assert not missing, f"parameters does not name {missing[:5]}"
        owners: dict[int, str] = {}
        for name, parameter in actual.items():
            first = owners.setdefault(id(parameter), told[name].name)
            assert first == told[name].name, (
                f"{name} is tied to {first}: give it as an alias, not as a parameter"
            )

    def test_blocks(self, tmp_path: Path) -> None:
        """`blocks` are submodules in forward order; `ParameterSpec.block` says which block owns a parameter."""
        model = self.described(tmp_path)
        assert model.blocks, "blocks is empty: streaming and recomputation walk by blocks"
        for name in model.blocks:
            model.module.get_submodule(name)
        for spec in model.parameters:
            owner = next((i for i, name in enumerate(model.blocks) if spec.name.startswith(f"{name}.")), None)
            assert spec.block == owner, f"{spec.name}: block is {spec.block}, but it lies in block {owner}"
        order = [spec.block for spec in model.parameters if spec.block is not None]
        assert order == sorted(order), "parameters must come in execution order"

    def test_experts_are_stacked(self, tmp_path: Path) -> None:
        """`experts` is the size of dimension 0."""
        for spec in self.described(tmp_path).parameters:
            if spec.experts:
                assert spec.shape[0] == spec.experts, (
                    f"{spec.name}: {spec.experts} experts, but shape {spec.shape}"
                )

    def test_initial_weights_are_the_same_bits_everywhere(self, tmp_path: Path) -> None:
        """`load` fills any span, in any order, on any rank, with the same finite bits."""
        one, other = self.described(tmp_path), self.described(tmp_path, rank=1, world=2)
        for spec in reversed(one.parameters):
            whole, again = torch.full((spec.elements,), float("nan")), torch.empty(spec.elements)
            other.load(spec.name, again, spec.extent)
            one.load(spec.name, whole, spec.extent)
            assert torch.isfinite(whole).all(), f"load({spec.name!r}) left elements unfilled or not finite"
            same = torch.equal(whole, again)
            assert same, f"load({spec.name!r}) gives other bits on rank 1: seed by (seed, name)"
            first, length = spec.elements // 3, spec.elements - spec.elements // 2
            span = torch.empty(length)
            one.load(spec.name, span, Extent(spec.name, spec.shape, first, length))
            same = torch.equal(span, whole[first : first + length])
            assert same, (
                f"load({spec.name!r}) of elements {first} to {first + length} is not that span of the whole"
            )

    def test_shapes(self, tmp_path: Path) -> None:
        """Hidden states `[rows, tokens, width]`, logits `[n, vocab]`, an auxiliary loss that is a number."""
        stages = self.build(tmp_path)
        batch = self.batch(stages.model)
        hidden, auxiliary = stages.model.hidden(batch)
        assert hidden.shape[:2] == batch.input_ids.shape, f"hidden() gave {tuple(hidden.shape)}"
        assert auxiliary is None or auxiliary.dim() == 0, "the auxiliary loss must be 0-dim"
        logits = stages.model.head(hidden.flatten(0, 1)[:5])
        assert logits.shape == (5, stages.model.vocab_size), f"head() gave {tuple(logits.shape)}"

    def test_the_head_works_token_by_token(self, tmp_path: Path) -> None:
        """`head` of a chunk is that chunk of `head`: the loss is taken in chunks."""
        stages = self.build(tmp_path)
        states = self.hidden(stages, self.batch(stages.model)).flatten(0, 1)
        with torch.no_grad():
            whole = stages.model.head(states)
            chunked = torch.cat([stages.model.head(chunk) for chunk in torch.split(states, 3)])
        assert_close(chunked, whole, "head() chunk by chunk", tolerance=1e-5)

    def test_the_head_uses_what_it_says(self, tmp_path: Path) -> None:
        """`head_parameters` are exactly those that `head` depends on."""
        stages = self.build(tmp_path)
        model = stages.model
        states = self.hidden(stages, self.batch(model)).flatten(0, 1)
        model.head(states).sum().backward()  # type: ignore[no-untyped-call]
        got = {n for n, p in model.module.named_parameters() if p.grad is not None}
        trainable = {spec.name for spec in model.parameters if spec.trainable}
        told = set(model.head_parameters) & trainable
        assert got == told, f"head() depends on {sorted(got)}; head_parameters says {sorted(told)}"

    def test_it_is_causal(self, tmp_path: Path) -> None:
        """A later token does not change earlier hidden states."""
        stages = self.build(tmp_path)
        batch = self.batch(stages.model)
        ids = batch.input_ids.clone()
        ids[:, -1] = (ids[:, -1] + 1) % stages.model.vocab_size
        before, after = self.hidden(stages, batch), self.hidden(stages, replace(batch, input_ids=ids))
        assert_close(after[:, :-1], before[:, :-1], "hidden states before a changed token", tolerance=1e-5)
        assert not torch.allclose(after[:, -1], before[:, -1]), (
            "the hidden state of a changed token stayed the same"
        )

    def test_documents_do_not_see_each_other(self, tmp_path: Path) -> None:
        """A packed document gives the hidden states that it has alone; padding changes nothing."""
        stages = self.build(tmp_path)
        batch = self.batch(stages.model, rows=1)
        cut, end = self.tokens // 2, self.tokens - 1
        documents = torch.zeros_like(batch.input_ids)
        documents[:, cut:], documents[:, end:] = 1, -1
        positions = batch.position_ids.clone()
        positions[:, cut:] -= cut
        positions[:, end:] = 0
        packed = replace(batch, document_ids=documents, position_ids=positions, documents=3, real=end)
        both = self.hidden(stages, packed)
        for first, last in ((0, cut), (cut, end)):
            alone = replace(
                batch,
                input_ids=batch.input_ids[:, first:last],
                position_ids=batch.position_ids[:, : last - first],
            )
            what = f"hidden states of a packed document (tokens {first} to {last})"
            assert_close(both[:, first:last], self.hidden(stages, alone), what, tolerance=1e-4)

    def test_flops(self, tmp_path: Path) -> None:
        """Positive, growing with length, at least 6 per matrix element of the blocks unless experts are idle."""
        model = self.described(tmp_path)
        short, long = model.flops_per_token(8), model.flops_per_token(64)
        assert 0 < short <= long, f"flops_per_token gives {short:g} for 8 tokens and {long:g} for 64"
        total = sum(spec.elements for spec in model.parameters)
        assert short <= 6.0 * total + 100 * total, (
            f"flops_per_token(8) = {short:g} is far beyond 6·N = {6 * total:g}"
        )

    def test_limits(self, tmp_path: Path) -> None:
        """`vocab_size` is the embedding's number of rows; `max_positions` is a number or None."""
        model = self.described(tmp_path)
        rows = {spec.shape[0] for spec in model.parameters if spec.kind == "embedding"}
        assert not rows or model.vocab_size in rows, (
            f"vocab_size is {model.vocab_size}; embeddings have {sorted(rows)}"
        )
        assert model.max_positions is None or model.max_positions > 0, (
            "max_positions must be positive or None"
        )
