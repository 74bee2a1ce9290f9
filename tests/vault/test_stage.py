"""Saved is restored, bit for bit: every dtype and layout, whichever way a chunk was read and wherever it was cut."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dcp.toys import Toy
from tests.vault.toys import (
    Split,
    all_bits,
    bits,
    keyed,
    other_bits,
    random_bits,
    slot_of,
    stage_in,
    step_path,
)

from trainforge.errors import CheckpointError
from trainforge.toolbox.checkpointing import folders
from trainforge.toolbox.checkpointing.dtypes import ITEM_BYTES
from trainforge_loongforge.vault import hashing
from trainforge_loongforge.vault.packs import CHUNK_BYTES
from trainforge_loongforge.vault.storage import Source

SHAPES = ((), (0,), (0, 4), (1,), (33,), (5, 7, 3))
WAYS = {
    "copied": ("p", {}),
    "where it lies": ("memory", {}),
    "waiting": ("memory", {"background": False}),
    "compressed": ("memory", {"compress": True}),
}


def saved_and_restored(folder, part, tensors, names, **options):
    """Save tensors (by key and name), overwrite them, and restore them into memory of other bits."""
    stage = stage_in(folder, names, **options)
    wanted = all_bits(tensors)
    stage.save(1, {part: keyed(tensors)})
    if part == "memory":
        stage.before_write([slot_of(name) for name in names])
    for tensor in tensors.values():
        tensor.copy_(other_bits({("", ""): tensor})["", ""])
    stage.wait()
    (info,) = stage.committed()
    assert stage.verify(info.path) == []
    stage.close()
    reader, target = stage_in(folder, reads=True), other_bits(tensors)
    reader.restore({part: keyed(target)}, info.path)
    reader.close()
    assert all_bits(target) == wanted
    return info


@pytest.mark.parametrize("way", WAYS)
def test_every_dtype_and_shape(tmp_path, way):
    part, section = WAYS[way]
    tensors = {
        (key, f"{dtype}{number}"): random_bits(dtype, shape, number)
        for key in ("exp_avg", "value")
        for dtype in ITEM_BYTES
        for number, shape in enumerate(SHAPES)
    }
    saved_and_restored(tmp_path, part, tensors, {name for _, name in tensors}, **section)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_masters_of_every_dtype(tmp_path, dtype, way):
    part, section = WAYS[way]
    tensors = {("master", "w"): torch.arange(3).to(getattr(torch, dtype))}
    assert saved_and_restored(tmp_path, part, tensors, {"w"}, **section).finite


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 70), max_size=4),
    chunk=st.integers(1, 9),
    way=st.sampled_from(sorted(WAYS)),
)
def test_any_sizes_cuts_and_grids(tmp_path_factory, dtype, sizes, cuts, chunk, way):
    """One tensor in several spans, others whole; other spans when they come back."""
    folder = tmp_path_factory.mktemp("any")
    part, section = WAYS[way]
    truth = {f"w{i}": random_bits(dtype, (size,), i) for i, size in enumerate(sizes)}

    def spans(tensors, edges):
        parts = {}
        for name, tensor in tensors.items():
            inner = sorted({min(edge, tensor.numel()) for edge in edges} - {0, tensor.numel()})
            pairs = list(itertools.pairwise([0, *inner, tensor.numel()]))
            parts["value", name] = [(tuple(tensor.shape), a, tensor[a:b]) for a, b in pairs]
        return Toy(parts)

    stage = stage_in(folder, truth, chunk_bytes=chunk * 8, **section)
    stage.save(1, {part: spans(truth, cuts)})
    stage.wait()
    for edges in ([], [size // 2 + 1 for size in sizes], cuts):
        target = {name: random_bits(dtype, (len(t),), 99) for name, t in truth.items()}
        stage.restore({part: spans(target, edges)}, step_path(folder, 1))
        assert all_bits(target) == all_bits(truth)
    stage.close()


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_sizes_around_a_chunk(tmp_path, dtype, more):
    elements = CHUNK_BYTES // ITEM_BYTES[dtype] + more
    tensors = {("value", "w"): random_bits(dtype, (elements,), 1), ("master", "v"): torch.ones(elements // 2)}
    saved_and_restored(tmp_path, "memory", tensors, {"w"})
    document = json.loads((step_path(tmp_path, 1) / "checkpoint.json").read_text())
    chunks = {t["name"]: [c[0] for c in t["chunks"]] for t in document["parts"]["memory"]["tensors"]}
    assert chunks["w"] == ([elements] if more <= 0 else [elements - 1, 1])


@pytest.mark.parametrize("way", WAYS)
def test_strides_and_views_of_one_slab(tmp_path, way):
    """Each has its own bytes; those of a slab begin wherever they begin, and what lies between them is left alone."""
    part, section = WAYS[way]
    slab = random_bits("bfloat16", (100,), 3)
    tensors = {
        ("value", "transposed"): random_bits("float32", (5, 7), 1).t(),
        ("value", "every second"): random_bits("int16", (40,), 2)[::2],
        ("value", "expanded"): torch.tensor([1.5]).expand(1, 1),
        ("value", "a"): slab[1:34],
        ("value", "b"): slab[34:99].view(5, 13),
    }
    wanted = all_bits(tensors)
    info = saved_and_restored(tmp_path, part, tensors, {name for _, name in tensors}, **section)
    reader, target = stage_in(tmp_path, reads=True), torch.zeros(100, dtype=torch.bfloat16)
    views = {("value", "a"): target[1:34], ("value", "b"): target[34:99].view(5, 13)}
    reader.restore({part: keyed(views)}, info.path)
    assert all_bits(views) == {place: wanted[place] for place in views}
    assert target[0].item() == target[99].item() == 0


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    """C44: two names of one storage; and views of one flat slab are not taken for shared."""
    weight, slab = torch.randn(300, 10), torch.randn(6000)
    views = {"first": slab[:3000], "second": slab[3000:]}
    stage = stage_in(tmp_path)
    stage.save(1, {"p": keyed({("value", "embed"): weight, ("value", "head"): weight})})
    stage.save(2, {"p": keyed({("value", name): view for name, view in views.items()})})
    stage.wait()
    tied, apart = (stage.describe(step_path(tmp_path, step)) for step in (1, 2))
    assert tied["tensors"]["p/value/embed"] == tied["tensors"]["p/value/head"]
    assert (tied["bytes"], tied["new_bytes"]) == (2 * weight.nbytes, weight.nbytes)
    assert apart["tensors"]["p/value/first"] != apart["tensors"]["p/value/second"]
    assert apart["bytes"] == apart["new_bytes"] == slab.nbytes
    back = torch.zeros(300, 10)
    stage.restore({"p": keyed({("value", "embed"): back, ("value", "head"): back})}, step_path(tmp_path, 1))
    assert bits(back) == bits(weight)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("edges", [(), (1,), (37, 38, 200)])
def test_split_masters(tmp_path, way, edges):
    """They are fp32 in it, however they are cut, and go back into halves cut in another way."""
    part, section = WAYS[way]
    values = random_bits("float32", (23, 11), 4)
    values[~values.isfinite()] = -0.0
    live = Split("w", values, edges)
    stage = stage_in(tmp_path, {"w"}, chunk_bytes=64, **section)
    stage.save(1, {part: live})
    stage.before_write([slot_of("w")] if part == "memory" else [])
    live.fill(torch.zeros(253))
    stage.wait()
    (info,) = stage.committed()
    assert info.finite
    whole, other = torch.ones(23, 11), Split("w", torch.ones(23, 11), (100,))
    stage.restore({part: keyed({("master", "w"): whole})}, info.path)
    stage.restore({part: other}, info.path)
    assert bits(whole) == bits(other.values()) == bits(values)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
@pytest.mark.parametrize("kept", ["whole", "split"])
def test_masters_that_are_not_finite_are_marked(tmp_path, way, value, kept):
    """One element in the last chunk of several; 3.4e38 is finite, also where its upper half alone would not be."""
    part, section = WAYS[way]
    masters, moments = torch.ones(100), torch.full((100,), float("nan"))
    masters[-1] = value
    tensors = {("master", "w"): masters, ("exp_avg", "w"): moments}
    stage = stage_in(tmp_path, {"w"}, chunk_bytes=64, **section)
    stage.save(1, {part: keyed(tensors) if kept == "whole" else Split("w", masters)})
    stage.wait()
    (info,) = stage.committed()
    assert info.finite is (value == 3.4e38)
    assert json.loads((info.path / "checkpoint.json").read_text())["finite"] is info.finite


def test_plain_data_of_any_json_comes_back(tmp_path):
    data = {
        "limits": [float("inf"), -float("inf"), 1e-300, 2**70, -0.0],
        "words": ["ä", "\ud800", ""],
        "nested": {"": [None, True, {"deep": []}]},
    }
    stage = stage_in(tmp_path)
    stage.save(1, {"p": keyed({}, data)})
    stage.wait()
    target = keyed({})
    stage.restore({"p": target}, step_path(tmp_path, 1))
    assert target.loaded == (3, data)


def test_plain_data_that_is_no_number_comes_back(tmp_path):
    """NaN is not equal to itself: reading back what was written must not take it for damage."""
    stage = stage_in(tmp_path)
    stage.save(1, {"p": keyed({}, {"loss": float("nan")})})
    stage.wait()
    target = keyed({})
    stage.restore({"p": target}, step_path(tmp_path, 1))
    loss = target.loaded[1]["loss"]
    assert loss != loss


def test_chunks_that_lie_nowhere_are_told_before_somebody_needs_them(tmp_path):
    stage = stage_in(tmp_path, keep=2)
    stage.save(1, {"p": keyed({("value", "w"): torch.randn(10)})})
    stage.wait()
    assert not [line for line in stage._console.lines if "no pack holds" in line]
    for pack in (tmp_path / "checkpoints/packs").iterdir():
        pack.unlink()
    stage.save(2, {"p": keyed({("value", "w"): torch.randn(10)})})
    stage.wait()
    told = [line for line in stage._console.lines if "no pack holds" in line]
    assert len(told) == 1
    assert told[0].startswith("vault: no pack holds 1 chunk that checkpoints name")
    assert "verify` says which" in told[0]


# ------------------------------------------------------------------------------------------------- deduplication


@pytest.fixture
def hashed(monkeypatch):
    """Sizes of what was hashed for its address."""
    sizes, real = [], hashing.blake3

    def counting(data):
        sizes.append(memoryview(data).nbytes)
        return real(data)

    monkeypatch.setattr(hashing, "blake3", counting)
    return sizes


def test_only_what_changed_is_written_and_hashed(tmp_path, hashed):
    """A part stays as it is: the second save adds what changed, to the byte, and hashes no more."""
    tensors = {("value", f"frozen{i}"): torch.randn(1000) for i in range(9)}
    tensors["master", "w"] = torch.randn(1000)
    stage = stage_in(tmp_path, {"w"}, keep=3, chunk_bytes=1000)
    stage.save(1, {"memory": keyed(tensors)})
    stage.wait()
    assert stage.metrics()["new_bytes"] == 40_000 == sum(hashed)
    hashed.clear()
    tensors["master", "w"][:250] += 1  # one chunk of four
    stage.save(2, {"memory": keyed(tensors)})
    stage.wait()
    assert stage.metrics()["new_bytes"] == 1000
    assert hashed == [1000]
    assert stage.describe(step_path(tmp_path, 2))["new_bytes"] == 1000
    hashed.clear()
    stage.save(3, {"memory": keyed(tensors)})
    stage.wait()
    assert stage.metrics()["new_bytes"] == 0
    assert hashed == []


def test_what_was_restored_is_not_hashed_again(tmp_path, hashed):
    tensors = {("value", f"w{i}"): torch.randn(1000) for i in range(5)}
    first = stage_in(tmp_path, chunk_bytes=1000)
    first.save(1, {"p": keyed(tensors)})
    first.close()
    hashed.clear()
    second, target = stage_in(tmp_path, chunk_bytes=1000), other_bits(tensors)
    second.restore({"p": keyed(target)}, step_path(tmp_path, 1))
    target["value", "w3"][0] += 1
    second.save(2, {"p": keyed(target)})
    second.close()
    assert hashed == [1000]
    assert second.describe(step_path(tmp_path, 2))["new_bytes"] == 1000


def test_equal_chunks_at_two_places_are_stored_once(tmp_path):
    """Within a save, and between a save and what lies there; also under another dtype, name and part."""
    values = torch.arange(500, dtype=torch.int32)
    stage = stage_in(tmp_path, chunk_bytes=1000, keep=3)
    parts = {"p": keyed({("a", "x"): values, ("b", "y"): values.view(torch.float32)})}
    stage.save(1, parts)
    stage.wait()
    assert stage.metrics()["new_bytes"] == 2000
    stage.save(2, {"q": keyed({("c", "z"): values.clone().view(20, 25)})})
    stage.wait()
    assert stage.metrics()["new_bytes"] == 0
    for step in (1, 2):
        assert stage.verify(step_path(tmp_path, step)) == []
    stage.remove([step_path(tmp_path, 1)])
    target = torch.zeros(20, 25, dtype=torch.int32)
    stage.restore({"q": keyed({("c", "z"): target})}, step_path(tmp_path, 2))
    assert torch.equal(target.view(-1), values)


def test_the_same_bytes_in_another_shape_or_dtype_have_another_digest(tmp_path):
    stage = stage_in(tmp_path, keep=3)
    zeros = torch.zeros(2, 3, dtype=torch.bfloat16)
    for step, tensor in enumerate((zeros, zeros.view(3, 2), zeros.half())):
        stage.save(step, {"p": keyed({("a", "x"): tensor})})
        stage.wait()
    digests = [stage.describe(step_path(tmp_path, step))["tensors"]["p/a/x"] for step in range(3)]
    assert len(set(digests)) == 3


def test_a_known_chunk_that_was_pruned_is_written_again(tmp_path):
    """What was known of the last save is of no use once its pack has gone."""
    tensor = torch.randn(1000)
    stage = stage_in(tmp_path, keep=5)
    for step, content in ((1, tensor.clone()), (2, tensor + 1)):
        tensor.copy_(content)
        stage.save(step, {"p": keyed({("v", "w"): tensor})})
        stage.wait()
    stage.remove([step_path(tmp_path, 2)])
    stage.save(3, {"p": keyed({("v", "w"): tensor})})
    stage.wait()
    assert stage.verify(step_path(tmp_path, 3)) == []
    assert stage.metrics()["new_bytes"] == tensor.nbytes


def test_what_cannot_be_saved_is_named(tmp_path):
    stage = stage_in(tmp_path)
    with pytest.raises(CheckpointError, match="p/v/w has dtype complex64, which cannot be saved"):
        stage.save(1, {"p": keyed({("v", "w"): torch.zeros(3, dtype=torch.complex64)})})
    stage.save(2, {"p": keyed({("v", "w"): torch.zeros(3)})})
    stage.close()


def test_what_has_its_name_keeps_its_chunks(tmp_path, monkeypatch):
    """The disk fails just after the rename, and refuses to take it back: a committed name never stands for nothing."""
    stage, tensors = stage_in(tmp_path), {("v", "w"): torch.randn(100)}
    final, rename, fsync = step_path(tmp_path, 1), Path.rename, folders.fsync_folder

    def one_way(self, target):
        if self == final:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    def failing(path):
        if path == final.parent and final.exists():
            raise OSError(5, "Input/output error")
        fsync(path)

    monkeypatch.setattr(Path, "rename", one_way)
    monkeypatch.setattr(folders, "fsync_folder", failing)
    stage.save(1, {"p": keyed(tensors)})
    with pytest.raises(CheckpointError, match="Input/output error"):
        stage.wait()
    monkeypatch.undo()
    assert final.exists()
    assert stage.verify(final) == []
    stage.save(2, {"p": keyed(tensors)})
    stage.wait()
    assert [stage.verify(step_path(tmp_path, step)) for step in (1, 2)] == [[], []]


def test_a_disk_that_refuses_to_read_for_a_moment_costs_no_checkpoint(tmp_path, monkeypatch):
    first = stage_in(tmp_path, keep=3)
    for step in (1, 2):
        first.save(step, {"p": keyed({("a", "x"): torch.randn(100)})})
    first.close()
    stage = stage_in(tmp_path, keep=3)

    def refuse(self, path, storage):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Source, "__init__", refuse)
        stage.save(3, {"p": keyed({("a", "x"): torch.randn(100)})})
        stage.wait()
    for step in (1, 2, 3):
        assert stage.verify(step_path(tmp_path, step)) == []


def test_what_was_set_aside_and_cannot_be_read_for_a_moment_keeps_its_chunks(tmp_path):
    stage = stage_in(tmp_path, keep=1)
    stage.save(1, {"p": keyed({("a", "x"): torch.randn(100)})})
    stage.wait()
    aside = step_path(tmp_path, 1).rename(tmp_path / "checkpoints" / "abandoned-step-00000001-5")
    document = aside / "checkpoint.json"
    document.rename(tmp_path / "elsewhere")
    document.symlink_to(document)  # reading it is an OSError now
    stage.save(2, {"p": keyed({("a", "x"): torch.randn(100)})})
    stage.wait()
    (tmp_path / "elsewhere").rename(document)
    assert stage.verify(aside) == []
