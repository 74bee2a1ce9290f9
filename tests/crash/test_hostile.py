"""Checkpoints that somebody made up or that the disk garbled: refused with a sentence, and nothing is done for them."""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.dcp.toys import checkpoint, varied, whole, zeros_like

from trainforge.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    stage = checkpoint(run_dir)
    stage.save(12, {"memory": whole(**varied(5))})
    stage.close()
    return run_dir / "checkpoints" / "step-00000012"


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "checkpoints" / saved.name)
    return tmp_path / "checkpoints" / saved.name


def sign(document: dict[str, Any]) -> bytes:
    """A checkpoint.json with the right checksum, as anybody can make one."""
    document = {key: value for key, value in document.items() if key != "checksum"}
    plain = (json.dumps(document, indent=1) + "\n").encode()
    return (json.dumps({**document, "checksum": xxhash.xxh3_128_hexdigest(plain)}, indent=1) + "\n").encode()


def tensor(document: dict[str, Any], name: str = "layers.0.w") -> dict[str, Any]:
    return next(t for t in document["parts"]["memory"]["tensors"] if t["name"] == name)


def span(document: dict[str, Any]) -> dict[str, Any]:
    return tensor(document)["spans"][0]


def renamed(name: str) -> Callable[[dict[str, Any]], None]:
    def rename(document: dict[str, Any]) -> None:
        document["files"][name] = document["files"].pop("rank-00000.safetensors")
        for stored in document["parts"]["memory"]["tensors"]:
            for piece in stored["spans"]:
                piece["file"] = name

    return rename


def file_entry(document: dict[str, Any]) -> dict[str, Any]:
    return document["files"]["rank-00000.safetensors"]


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{
        f"file name {name!r}": renamed(name)
        for name in (
            "../x",
            "/etc/passwd",
            "..",
            ".",
            "",
            "a/../../b",
            "checkpoint.json",
            "rank-00000.safetensors\n",
            "rank-0\0.st",
        )
    },
    "a span in a file that is not listed": lambda d: span(d).update(file="/etc/passwd"),
    "a negative offset": lambda d: span(d).update(offset=-1),
    "a negative place": lambda d: span(d).update(at=-8),
    "a place in the header": lambda d: span(d).update(at=0),
    "a negative length": lambda d: span(d).update(length=-84),
    "an absurd length": lambda d: span(d).update(length=2**60),
    "an absurd file": lambda d: file_entry(d).update(bytes=2**80),
    "a negative file": lambda d: file_entry(d).update(bytes=-1, header_bytes=-1),
    "an absurd header": lambda d: file_entry(d).update(header_bytes=2**50),
    "a huge shape": lambda d: tensor(d).update(shape=[2**40, 2**40]),
    "a huge shape with a span to match": lambda d: (
        tensor(d).update(shape=[2**40]),
        span(d).update(length=2**40),
    ),
    "a negative shape": lambda d: tensor(d).update(shape=[-12, -7]),
    "a thousand dimensions": lambda d: tensor(d).update(shape=[12, 7, *[1] * 1000]),
    "a span twice": lambda d: tensor(d)["spans"].append(copy.deepcopy(span(d))),
    "no span": lambda d: tensor(d).update(spans=[]),
    "a tensor twice": lambda d: d["parts"]["memory"]["tensors"].append(copy.deepcopy(tensor(d))),
    "two tensors of the same bytes": lambda d: span(d).update(at=tensor(d, "half")["spans"][0]["at"]),
    "a dtype that is a function of torch": lambda d: tensor(d).update(dtype="load"),
    "no checksum of a file": lambda d: file_entry(d).update(xxh3_128=""),
    "no checksum of a span": lambda d: span(d).update(xxh3_128=""),
    "a key with a slash": lambda d: tensor(d).update(key="../master"),
    "a negative step": lambda d: d.update(step=-1),
    "a world of none": lambda d: d.update(world=0),
    "no time": lambda d: d.update(saved_at=float("nan")),
    "another format": lambda d: d.update(format=99),
    "an unknown field": lambda d: d.update(more=1),
    "parts that are a list": lambda d: d.update(parts=[]),
    "a number for a name": lambda d: d.update(writer=7),
}


@pytest.mark.parametrize("trick", HOSTILE)
def test_what_cannot_be_is_refused_though_its_checksum_is_right(path: Path, trick: str):
    document = json.loads((path / "checkpoint.json").read_text())
    HOSTILE[trick](document)
    (path / "checkpoint.json").write_bytes(sign(document))
    assert_refused(path)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"step": ' + b"9" * 10_000 + b"}",
        b'{"step": 1e999, "writer": "dcp", "saved_at": 1' + b"0" * 400 + b"}",
        b'{"step": 12, "writer": "dcp", "saved_at": NaN}',
        b'"\\ud800"',
        b"null",
        b"",
    ],
    ids=[
        "deep lists",
        "deep objects",
        "a long number",
        "endless",
        "no time",
        "half a letter",
        "null",
        "empty",
    ],
)
def test_json_that_is_no_description_is_refused(path: Path, content: bytes):
    (path / "checkpoint.json").write_bytes(content)
    assert_refused(path)


def assert_refused(path: Path) -> None:
    stage = checkpoint(path.parent.parent)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    problems = stage.verify(path)
    assert len(problems) == 1
    assert str(path / "checkpoint.json") in problems[0]
    with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
        stage.restore({"memory": whole(**zeros_like(varied(5)))}, path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, (
        "memory was taken for it (KiB)"
    )


def test_the_untouched_one_is_sound_and_signing_it_anew_changes_nothing(path: Path):
    content = (path / "checkpoint.json").read_bytes()
    assert sign(json.loads(content)) == content
    assert checkpoint(path.parent.parent).verify(path) == []


def test_a_thousand_damages_are_each_named(path: Path):
    """Flipped bits, cut ends, swapped bytes and zeroed blocks, over all files: found by verify and by restore."""
    stage, chance = checkpoint(path.parent.parent), random.Random(7)
    files = {file: file.read_bytes() for file in sorted(path.iterdir())}
    parts = {"memory": whole(**zeros_like(varied(5)))}
    for trial in range(1000):
        file = list(files)[trial % len(files)]
        damaged = damage(files[file], trial, chance)
        if damaged == files[file]:
            continue
        file.write_bytes(damaged)
        problems = stage.verify(path)
        assert problems, (trial, file.name)
        assert str(file) in problems[0]
        with pytest.raises(CheckpointError, match=file.name):
            stage.restore(parts, path)
        file.write_bytes(files[file])
    assert stage.verify(path) == []


def damage(sound: bytes, trial: int, chance: random.Random) -> bytes:
    content, place = bytearray(sound), chance.randrange(len(sound))
    match (trial // 2) % 4:
        case 0 | 1:
            content[place] ^= 1 << chance.randrange(8)
        case 2:
            del content[place:]
        case 3:
            content[place : place + 64] = bytes(len(content[place : place + 64]))
    return bytes(content)
