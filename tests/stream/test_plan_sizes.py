"""The bytes that the plan counts are those that a run takes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from tests.stream.plans import BLOCK, QWEN, described, sizes_of

from trainforge.toolbox.streams import Streams
from trainforge_megatrain.stream import StreamSection
from trainforge_megatrain.stream.memory import Stream
from trainforge_megatrain.stream.sizes import (
    LOADING,
    active_share,
    kept_by_autograd,
    on_device,
    on_host,
    page_locked,
)
from trainforge_megatrain.stream.units import Place, divide

PLACES = [Place.KEPT, Place.DEVICE, Place.STREAMED, Place.STREAMED, Place.STREAMED, Place.KEPT, Place.DEVICE]


def bytes_of(tensors) -> int:
    """Of distinct storages."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def lasting(needs) -> int:
    """Without what is given back when everything is loaded."""
    return sum(size for name, size in needs.items() if name != LOADING)


def set_places(units) -> None:
    for unit, place in zip(units, [*PLACES, Place.DEVICE], strict=True):
        unit.place = place


@pytest.mark.parametrize(
    ("dtype", "section", "accumulate"),
    [
        ("fp32", {}, 1),
        ("bf16", {}, 1),
        ("bf16", {}, 3),
        ("bf16", {"master": "fp32", "grads": "fp32"}, 3),
        ("bf16", {"grads": "fp32"}, 1),
        ("bf16", {"slots": 3}, 1),
    ],
)
def test_what_is_counted_is_what_is_allocated(tmp_path, dtype, section, accumulate):
    ctx = described(tmp_path, train={"dtype": dtype}, accumulate=accumulate)
    sizes = sizes_of(ctx, **section)

    def place(units) -> bool:
        set_places(units)
        return False

    streams = Streams(ctx.device)
    memory = Stream(ctx, StreamSection.model_validate(section), streams, ThreadPoolExecutor(1), place)
    try:
        held = {
            where: [
                tensor
                for unit in memory.units
                if (unit.place is Place.DEVICE) == (where == "device")
                for tensor in (
                    unit.storage.weights,
                    unit.storage.low,
                    unit.storage.masters,
                    unit.storage.grads,
                    *unit.storage.state.values(),
                )
                if tensor is not None
            ]
            for where in ("host", "device")
        }
        assert lasting(on_host(memory.units, sizes)) == bytes_of(held["host"])
        rooms = [room.weights for room in memory.rooms._of.values()]
        boxes = [*memory.grads._boxes, *memory.grads._own.values()]
        parcels = [t for box in boxes for t in (box.sums, box.parcel) if t is not None]
        counted = on_device(memory.units, sizes)
        kinds = ("weights that stay", "masters and optimizer state", "gradients", "slots")
        assert sum(counted[kind] for kind in kinds) == bytes_of([*held["device"], *rooms, *parcels])
    finally:
        memory.close()


def test_inputs_that_wait_in_host_ram_are_counted_there_and_locked(tmp_path):
    ctx = described(tmp_path, accumulate=3, micro_batch=2)
    ctx.row_tokens = 32
    units = divide(ctx.model)
    set_places(units)
    here, there = sizes_of(ctx), replace(sizes_of(ctx), offload=True)
    inputs = 3 * 3 * 2 * 32 * 64 * 4  # streamed blocks, micro-batches, rows, tokens, width, fp32
    assert on_device(units, here)["block inputs"] == inputs
    assert on_host(units, there)["block inputs"] == inputs
    assert page_locked(units, there) - page_locked(units, here) == inputs
    assert on_device(units, there)["block inputs"] == 4 * 2 * 32 * 64 * 4
    assert "block inputs" not in on_host(units, here)


def test_a_block_is_counted_by_hand(tmp_path):
    ctx = described(tmp_path)
    block = divide(ctx.model)[2]
    padded = sum(-(-spec.elements // 64) * 64 for spec in block.specs)
    assert sum(spec.elements for spec in block.specs) == BLOCK
    block.place = Place.STREAMED
    counted = on_host([block], sizes_of(ctx))
    assert lasting(counted) == padded * (4 + 8 + 4)
    assert counted[LOADING] == 64 * 160 * 4 * 3  # its largest matrix in fp32, and two temporaries


@pytest.mark.parametrize("recompute", [True, False])
def test_autograd_keeps_about_what_is_foreseen_of_a_block(tmp_path, recompute):
    """What PyTorch's saved tensors really hold; eager, as it runs on a device."""
    ctx = described(tmp_path, train={"dtype": "fp32", "recompute": recompute}, micro_batch=2)
    ctx.row_tokens = 64
    units = divide(ctx.model)
    saved: dict[int, int] = {}
    module = ctx.model.module.to_empty(device="cpu")
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = torch.zeros(2, 64, 64, requires_grad=True)
    tables = torch.zeros(1, 64, 16), torch.zeros(1, 64, 16)
    block = module.get_submodule(ctx.model.blocks[0])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(hidden, position_embeddings=tables)
    assert out is not None
    foreseen = kept_by_autograd(units[1], sizes_of(ctx))
    assert 0.6 * foreseen < sum(saved.values()) < 1.25 * foreseen


MOE = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize("freeze", [[], ["*.0.*"]])
def test_the_share_of_experts_is_found_from_the_models_own_count(tmp_path, family, freeze):
    ctx = described(tmp_path, {**QWEN, "model_type": family, **MOE[family]})
    ctx.model.parameters = tuple(
        replace(spec, trainable=not (freeze and spec.block == 0)) for spec in ctx.model.parameters
    )
    assert active_share(ctx.model) == pytest.approx(
        2 / 8, rel=1e-2
    )  # attention of the one token is in the count
    assert active_share(described(tmp_path).model) == 1.0


RSS = """
import sys
from pathlib import Path
from tests.stream.plans import described, sizes_of
from concurrent.futures import ThreadPoolExecutor
import torch
from trainforge.toolbox.streams import Streams
from trainforge_megatrain.stream import StreamSection
from trainforge.toolbox.host_limits import resident_set
from trainforge_megatrain.stream.memory import Stream
from trainforge_megatrain.stream.sizes import on_device, on_host

class Zeros:  # drawing random weights takes longest, and weights of zero lie in RAM like any others
    def fill(self, spec, out, extent): out.zero_()
    def fill_buffers(self, module): pass
    def close(self): pass

def build(folder, **shape):
    config = dict(model_type="qwen2", vocab_size=8192, max_position_embeddings=128, tie_word_embeddings=True, **shape)
    ctx = described(Path(folder), config, train={"dtype": "bf16"}, accumulate=1)
    ctx.row_tokens = 16
    ctx.model.weights_source = Zeros()
    return ctx, Stream(ctx, StreamSection(), Streams(ctx.device), ThreadPoolExecutor(1), lambda units: False)

build(
    sys.argv[1], hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2)
before = resident_set()  # the base: with everything loaded that a small model needs
ctx, memory = build(
    sys.argv[1], hidden_size=768, intermediate_size=3072, num_hidden_layers=10, num_attention_heads=12,
    num_key_value_heads=12)
taken = resident_set() - before
sizes = sizes_of(ctx)
device = on_device(memory.units, sizes)
planned = sum(on_host(memory.units, sizes).values())
planned += sum(device[kind] for kind in ("weights that stay", "gradients", "slots"))
print(sum(spec.elements for spec in ctx.model.parameters), taken, planned)
"""


@pytest.mark.slow
def test_resident_memory_is_within_5_percent_of_the_plan(tmp_path):
    """A model of 100 million parameters in a process of its own: what it takes beyond that of a tiny one."""
    done = subprocess.run(
        [sys.executable, "-c", RSS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    parameters, taken, planned = map(int, done.stdout.split())
    assert parameters > 95e6
    assert abs(taken - planned) < 0.05 * planned
