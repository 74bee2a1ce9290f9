"""What lies on disk: exact, checked byte by byte, readable by others."""

from __future__ import annotations

import json
import random
import shutil
from itertools import pairwise

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.dcp.toys import Toy, checkpoint, varied, whole, zeros_like

from trainforge.errors import CheckpointError
from trainforge_plugins.dcp import manifest
from trainforge_plugins.dcp.checkpoint import DcpCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path):
    tensors = varied(5)
    part = whole(**tensors)
    part.data = {"consumed": 12, "nested": {"rng": [2**127, -1], "text": "é😀", "lr": 1e-5, "none": None}}
    stage = checkpoint(tmp_path)
    stage.save(12, {"memory": part, "plain": Toy({}, {"a": 1})})
    stage.close()
    return tensors, part, tmp_path / "checkpoints" / "step-00000012"


def test_what_is_restored_is_what_was_saved(saved):
    tensors, part, path = saved
    target = zeros_like(tensors)
    memory, plain = whole(**target), Toy({})
    checkpoint(path.parent.parent).restore({"memory": memory, "plain": plain}, path)
    for name, tensor in tensors.items():
        assert target[name].dtype == tensor.dtype
        assert torch.equal(target[name], tensor), name
    assert memory.loaded == (3, part.data)
    assert plain.loaded == (3, {"a": 1})


def test_the_description_is_json_with_the_fields_of_the_contract(saved):
    _, _, path = saved
    document = json.loads((path / "checkpoint.json").read_text())
    assert (document["step"], document["writer"], document["format"], document["world"]) == (12, "dcp", 1, 1)
    for name, entry in document["files"].items():
        assert xxhash.xxh3_128_hexdigest((path / name).read_bytes()) == entry["xxh3_128"]


def test_the_weights_can_be_read_with_safetensors_alone(saved):
    tensors, _, path = saved
    stored = load_file(path / "rank-00000.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(stored[f"memory/master/{name}[0:{tensor.numel()}]"], tensor.reshape(-1)), name


def test_the_weights_can_be_read_with_torchs_own_load(saved):
    from torch.distributed.checkpoint.state_dict_loader import load

    from trainforge_plugins.dcp.reading import CheckpointReader

    tensors, _, path = saved
    target = {"memory/master/layers.0.w": torch.zeros(12 * 7)}
    load(target, storage_reader=CheckpointReader(path))
    assert torch.equal(target["memory/master/layers.0.w"].view(12, 7), tensors["layers.0.w"])


def test_every_flipped_bit_is_found_by_verify_and_by_restore(saved):
    tensors, _, path = saved
    stage = checkpoint(path.parent.parent)
    assert stage.verify(path) == []
    files = sorted(path.iterdir())
    assert len(files) == 2
    chance = random.Random(0)
    parts = {"memory": whole(**zeros_like(tensors)), "plain": Toy({})}
    for trial in range(200):
        file = files[trial % len(files)]
        sound = file.read_bytes()
        place = chance.randrange(len(sound))
        flipped = bytearray(sound)
        flipped[place] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
        problems = stage.verify(path)
        assert problems, (file, place)
        assert str(file) in problems[0]
        with pytest.raises(CheckpointError) as caught:
            stage.restore(parts, path)
        assert str(file) in str(caught.value)
        file.write_bytes(sound)
    assert stage.verify(path) == []


def test_who_reads_ranges_gets_what_was_saved_or_the_damaged_file_named(saved):
    tensors, part, path = saved
    stage, file = checkpoint(path.parent.parent, reads=True), path / "rank-00000.safetensors"
    contents = stage.contents(path)
    assert {name: (one.version, one.data) for name, one in contents.items()} == {
        "memory": (3, part.data),
        "plain": (3, {"a": 1}),
    }
    found = {named.extent.name: named for named in contents["memory"].tensors}
    assert found.keys() == tensors.keys()

    def refused(name):
        """Whether reading is refused, and the file named; when it is not, what is read is right."""
        named = next(n for n in stage.contents(path)["memory"].tensors if n.extent.name == name)
        out = torch.ones(named.extent.length, dtype=named.dtype)
        try:
            named.read(0, out)
        except CheckpointError as error:
            return str(file) in str(error)
        assert torch.equal(out, tensors[name].reshape(-1)), name
        return False

    sound = file.read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    for place in [*range(0, header, 97), *range(header, len(sound), 11)]:
        file.write_bytes(sound[:place] + bytes([sound[place] ^ 16]) + sound[place + 1 :])
        assert sum(refused(name) for name in tensors) == (place >= header), place
    for damaged in (sound[:-1], sound + b"x", None):
        file.write_bytes(damaged) if damaged is not None else file.unlink()
        assert all(refused(name) for name in tensors if name != "empty")


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "no description", "not json", "a list"])
def test_a_file_that_is_not_as_written_is_named(saved, damage):
    tensors, _, path = saved
    file = path / (
        "rank-00000.safetensors" if damage in ("missing", "shorter", "longer") else "checkpoint.json"
    )
    content = file.read_bytes()
    changed = {"shorter": content[:-1], "longer": content + b"\0", "not json": b"\x80abc", "a list": b"[1]"}
    file.write_bytes(changed[damage]) if damage in changed else file.unlink()
    stage = checkpoint(path.parent.parent)
    assert str(file) in stage.verify(path)[0]
    with pytest.raises(CheckpointError, match=file.name):
        stage.restore({"memory": whole(**zeros_like(tensors))}, path)


def test_the_description_is_parsed_once_for_weights_that_are_read_one_by_one(saved, monkeypatch):
    tensors, _, path = saved
    stage, parsed, real = checkpoint(path.parent.parent, reads=True), [], manifest.read_manifest
    monkeypatch.setattr(manifest, "read_manifest", lambda folder: parsed.append(folder) or real(folder))
    for name, tensor in tensors.items():
        target = {name: torch.zeros_like(tensor)}
        stage.restore({"memory": whole(**target)}, path)
        assert torch.equal(target[name], tensor), name
    assert parsed == [path]
    description = path / "checkpoint.json"
    description.write_text(description.read_text().replace("bfloat16", "float16"))
    with pytest.raises(CheckpointError, match="checksum does not match"):
        stage.restore({"memory": whole(half=torch.zeros(33).bfloat16())}, path)


def test_what_is_missing_or_of_another_shape_is_named(saved):
    _, _, path = saved
    stage = checkpoint(path.parent.parent)
    with pytest.raises(CheckpointError, match="no part sampler"):
        stage.restore({"sampler": Toy({})}, path)
    with pytest.raises(CheckpointError, match="no tensor memory/master/other"):
        stage.restore({"memory": whole(other=torch.zeros(2))}, path)
    with pytest.raises(CheckpointError, match=r"memory/master/half has shape \[33\].* and \[34\]"):
        stage.restore({"memory": whole(half=torch.zeros(34).bfloat16())}, path)
    with pytest.raises(CheckpointError, match="memory/master/half is bfloat16"):
        stage.restore({"memory": whole(half=torch.zeros(33))}, path)


def test_nothing_is_unpickled(saved, monkeypatch):
    import pickle

    def forbidden(*_args, **_kwargs):
        raise AssertionError("pickle was used")

    tensors, _, path = saved
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    checkpoint(path.parent.parent).restore({"memory": whole(**zeros_like(tensors))}, path)


def test_plain_data_that_is_not_json_is_refused_with_the_parts_name(tmp_path):
    with pytest.raises(CheckpointError, match="sampler"):
        checkpoint(tmp_path).save(1, {"sampler": Toy({}, {"x": {1, 2}})})
    assert list((tmp_path / "checkpoints").iterdir() if (tmp_path / "checkpoints").exists() else []) == []


cuts = st.lists(st.integers(1, 59), max_size=6, unique=True).map(lambda c: [0, *sorted(c), 60])


@settings(max_examples=25, deadline=None)
@given(stored=cuts, wanted=cuts, chunk_bytes=st.sampled_from([16, 40, 4096]))
def test_any_cut_is_read_back_as_any_other(tmp_path_factory, stored, wanted, chunk_bytes):
    folder = tmp_path_factory.mktemp("cuts")
    truth = torch.arange(60, dtype=torch.float32)

    def spans(edges, source):
        return Toy({("m", "w"): [((6, 10), a, source[a:b].clone()) for a, b in pairwise(edges)]})

    before = DcpCheckpoint.chunk_bytes
    DcpCheckpoint.chunk_bytes = chunk_bytes
    try:
        stage = checkpoint(folder, verify=False)
        stage.save(1, {"p": spans(stored, truth)})
        stage.wait()
    finally:
        DcpCheckpoint.chunk_bytes = before
    target = spans(wanted, torch.zeros(60))
    stage.restore({"p": target}, folder / "checkpoints" / "step-00000001")
    assert torch.equal(torch.cat([t for _, _, t in target.spans["m", "w"]]), truth)
    shutil.rmtree(folder)


def test_a_span_that_nobody_holds_or_one_held_twice_is_refused(tmp_path):
    stage = checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"p/m/w .*no rank holds its elements 4 to 6"):
        stage.save(1, {"p": Toy({("m", "w"): [((6,), 0, torch.zeros(4))]})})
    with pytest.raises(CheckpointError, match=r"p/m/w: rank 0 gives elements 2 to 4 twice"):
        stage.save(1, {"p": Toy({("m", "w"): [((6,), 0, torch.zeros(4)), ((6,), 2, torch.zeros(4))]})})


def test_the_estimate_counts_masters_and_optimizer_state():
    from types import SimpleNamespace

    from tests.support.context import make_context

    from trainforge.stages import ParameterSpec, StateSpec
    from trainforge_plugins.dcp import DcpSection, estimate

    model = SimpleNamespace(
        parameters=(ParameterSpec("w", (10, 5)), ParameterSpec("frozen", (9,), trainable=False))
    )
    moments = {"exp_avg": StateSpec(), "exp_avg_sq": StateSpec(), "step": StateSpec(per_element=False)}
    ctx = make_context(built={"optimizer": SimpleNamespace(state=lambda spec: moments)}, keep=2)
    needed = estimate(ctx, model, DcpSection())
    assert sum(needed.host.values()) == 50 * 4 * 3 + 4
    assert sum(needed.disk.values()) == 3 * (50 * 4 * 3 + 4)
