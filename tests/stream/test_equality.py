"""`stream` trains as `resident` does: the same losses, norms and weights, bit for bit on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.hf import seeing
from tests.hf.tiny import values
from tests.stream.pairs import STREAM, compare_weights, pair, train_alike, walker

from trainforge_megatrain.stream.memory import Stream

CPU_ADAM = "trainforge_megatrain.cpu_adam"
ROWS = str(Path(__file__).parents[1] / "support/image_rows.py")
STEPS = 20
ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
TEXT = {
    "llama with dropout": ("llama", {"attention_dropout": 0.1}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3_moe": ("qwen3_moe", ROUTER),
    "mixtral": ("mixtral", ROUTER),
    "gemma2 tied": ("gemma2", {"attn_logit_softcapping": 3.0}),
    "qwen3_next": ("qwen3_next", {}),
}
TINY = {"dropout": 0.2, "auxiliary": 0.1, "freeze": ("blocks.0.up.weight", "blocks.1.out.bias")}
"""The model of the kit; each of its blocks has a parameter without a gradient."""


def _tolerance(accumulate: int, tied: bool) -> float:
    """Bits, but for tied weights: the head's share of several micro-batches is added up in another order."""
    return 1e-6 if tied and accumulate > 1 else 0.0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("case", TEXT)
def test_families_of_text_models(tmp_path: Path, case: str, accumulate: int):
    family, more = TEXT[case]
    ours, default = pair(
        tmp_path,
        ("hf", "adamw", "dcp"),
        model={"config": values(family, **more)},
        accumulate=accumulate,
    )
    losses = train_alike(ours, default, STEPS, _tolerance(accumulate, "tied" in case.split()))
    assert losses[-1] < losses[0] - 0.2


def test_the_routers_auxiliary_loss_takes_part(tmp_path: Path):
    """Router logits leave a block by another way than its output."""
    norms = []
    for weight in (0.0, 0.5):
        config = values("qwen3_moe", **ROUTER | {"router_aux_loss_coef": weight})
        facts = {"model": {"config": config}, "accumulate": 2}
        norms.append(walker(tmp_path / str(weight), STREAM, ("hf", "adamw", "dcp"), **facts).take().norm)
    assert abs(norms[1] / norms[0] - 1) > 1e-3


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl_moe"])
def test_families_that_see(tmp_path: Path, family: str, accumulate: int):
    """Steps with images, without, and with some micro-batches that have none: those pass the tower's blocks by."""

    def facts(images: bool) -> dict[str, Any]:
        rows = {"image_rows": {"family": family, "images": images}}
        return {
            "model": {"config": seeing.values(family)},
            "sections": rows,
            "accumulate": accumulate,
            "micro_batch": 3,
        }

    stages = ("hf", "adamw", "dcp", ROWS)
    ours, default = pair(tmp_path, stages, **facts(True))
    before = ours.weights()
    losses = train_alike(ours, default, 5)
    blind = walker(tmp_path / "blind", STREAM, stages, **facts(False))
    assert abs(losses[0] - blind.take().loss) > 1e-4, "the images change no loss"
    moved = {name for name, weight in ours.weights().items() if (weight != before[name]).any()}
    assert any("patch_embed" in name for name in moved), "no gradient reaches the first weight of the tower"
    blind_moved = {name for name, weight in blind.weights().items() if (weight != before[name]).any()}
    assert not any("vision" in name or "visual" in name for name in blind_moved)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_dropout_frozen_and_unused_parameters(tmp_path: Path, tied: bool, accumulate: int):
    """C34, §8: what is frozen or has no gradient shifts nothing and keeps every bit."""
    model = {"layers": 4, "tied": tied, **TINY}
    ours, default = pair(tmp_path, model=model, train={"weight_decay": 0.1}, accumulate=accumulate)
    before = ours.weights()
    train_alike(ours, default, STEPS, _tolerance(accumulate, tied))
    still = {name for name, weight in ours.weights().items() if (weight == before[name]).all()}
    assert still == {*TINY["freeze"], *(f"blocks.{i}.idle.weight" for i in range(4))}  # type: ignore[misc]
    held = {(named.key, named.extent.name) for named in ours.stages.memory.state().tensors}
    assert not any(name in TINY["freeze"] for _, name in held)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters_and_a_frozen_base(tmp_path: Path, dtype: str):
    lora = {"rank": 2, "targets": ["q_proj", "down_proj"]}
    model = {"config": values("llama"), "lora": lora}
    ours, default = pair(
        tmp_path, ("hf", "adamw", "dcp"), model=model, train={"lr": 1e-2, "dtype": dtype}, accumulate=1
    )
    losses = train_alike(ours, default, STEPS)
    assert losses[-1] < losses[0] - 0.05


def test_a_frozen_stem_and_a_frozen_block(tmp_path: Path):
    """Nothing before the second block needs a gradient: backward ends there, and leaves that block by its mark."""
    model = {"config": values("qwen3"), "freeze": ["*embed_tokens*", "*layers.0.*"]}
    ours, default = pair(tmp_path, ("hf", "adamw", "dcp"), model=model, accumulate=2)
    entered, enter = [], ours.stages.memory.rooms.enter  # type: ignore[attr-defined]
    ours.stages.memory.rooms.enter = lambda unit, way: (entered.append((unit.block, way)), enter(unit, way))  # type: ignore[attr-defined]
    train_alike(ours, default, 5)
    assert (0, 1) in entered
    assert {block for block, way in entered if way < 0} == {
        unit.block for unit in ours.stages.memory.blocks
    } - {0}  # type: ignore[attr-defined]


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_bf16_with_one_micro_batch(tmp_path: Path, master: str):
    model = {"layers": 3, **TINY}
    ours, default = pair(
        tmp_path, model=model, section={"master": master}, train={"dtype": "bf16"}, accumulate=1
    )
    train_alike(ours, default, STEPS)
    assert any((weight != weight.bfloat16().float()).any() for weight in ours.weights().values())


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "qwen3"])
def test_bf16_of_real_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str):
    """One micro-batch; and three whose sum travels in fp32, but for the head's gradient, which is not rounded first."""
    facts = {"model": {"config": values(family)}, "train": {"dtype": "bf16"}}
    stages = ("hf", "adamw", "dcp")
    train_alike(*pair(tmp_path / "one", stages, accumulate=1, **facts), 8)
    section = {"grads": "fp32"}
    ours, default = pair(tmp_path / "near", stages, section=section, accumulate=3, **facts)
    for _ in range(8):
        got, wanted = ours.take(), default.take()
        assert got.loss == pytest.approx(wanted.loss, rel=1e-3)
        assert got.norm == pytest.approx(wanted.norm, rel=1e-2)
    collect = Stream._collect_head
    monkeypatch.setattr(Stream, "_collect_head", lambda self, p, grad: collect(self, p, grad.to(p.dtype)))
    train_alike(*pair(tmp_path / "three", stages, section=section, accumulate=3, **facts), 8)


def test_bf16_sums_that_travel_in_bf16_are_rounded_once(tmp_path: Path):
    """The sum of three micro-batches is rounded on its way down: near, and not the same."""
    ours, default = pair(
        tmp_path, model=TINY, section={"grads": "bf16"}, train={"dtype": "bf16"}, accumulate=3
    )
    for _ in range(STEPS):
        got, wanted = ours.take(), default.take()
        assert got.loss == pytest.approx(wanted.loss, rel=2e-2)
        assert got.norm == pytest.approx(wanted.norm, rel=5e-2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_cpu_adam(tmp_path: Path, dtype: str):
    """The optimizer that this memory is made for takes halves and bf16 gradients as they are."""
    train = {"dtype": dtype, "eps": 1e-3}
    ours = walker(tmp_path / "a", STREAM, (CPU_ADAM, "dcp"), model=TINY, train=train, accumulate=1)
    default = walker(tmp_path / "b", "resident", model=TINY, train=train, accumulate=1)
    for _ in range(STEPS):
        got, wanted = ours.take(), default.take()
        assert got.loss == pytest.approx(wanted.loss, rel=1e-6 if dtype == "fp32" else 2e-3)
        assert got.norm == pytest.approx(wanted.norm, rel=1e-5 if dtype == "fp32" else 2e-2)
    if dtype == "fp32":
        compare_weights(ours, default, 1e-6)
