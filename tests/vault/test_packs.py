"""Packs: what is written comes back, nothing half-written has a name, and no file can make the reader do harm."""

from __future__ import annotations

import errno
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.vault.store_toys import PlainSink, PlainStorage, content, ref_of

from trainforge.errors import CheckpointError
from trainforge_loongforge.vault import packs
from trainforge_loongforge.vault.packs import Entry, PackWriter, read_index

HEADER = b"TFPACK\r\n" + struct.pack("<II", 1, 0)
ENTRY = struct.Struct("<32s16sQQQB")


def write(path: Path, chunks: list[bytes]) -> list[Entry]:
    writer = PackWriter(path, PlainStorage())
    for chunk in chunks:
        ref = ref_of(chunk)
        writer.add(ref.address, ref.xxh3_128, memoryview(chunk))
    assert writer.finish() == path.stat().st_size
    return writer.entries


def by_hand(
    path: Path,
    entries: list[tuple[int, int, int, int]],
    *,
    body: bytes = bytes(112),
    version: int = 1,
    size: int | None = None,
    at: int | None = None,
    length: int | None = None,
    address: bytes | None = None,
) -> Path:
    """A pack with any numbers (at, stored, length, codec) in its index, and checksums that match."""
    index = b"".join(
        ENTRY.pack(address or bytes([place]) * 32, bytes(16), *entry) for place, entry in enumerate(entries)
    )
    head = HEADER[:8] + struct.pack("<II", version, 0) + body
    at = len(head) if at is None else at
    length = len(index) if length is None else length
    footer = struct.pack("<QQ16s8s", at, length, xxhash.xxh3_128_digest(index), b"TFPACK\r\n")
    path.write_bytes(head + index + footer)
    if size is not None:
        os.truncate(path, size)
    return path


SIZES = st.sampled_from([0, 1, 63, 64, 65, 4095, 4096, 4097, 8192, 12345])


@given(sizes=st.lists(SIZES, max_size=12))
def test_what_is_written_lies_where_the_index_says(tmp_path_factory, sizes):
    path = tmp_path_factory.mktemp("packs") / "a.pack"
    chunks = list(dict.fromkeys(content(seed, size) for seed, size in enumerate(sizes)))
    entries = write(path, chunks)
    assert read_index(path) == entries
    data = path.read_bytes()
    end = 16
    for entry, chunk in zip(entries, chunks, strict=True):
        assert data[entry.at : entry.at + entry.stored] == chunk
        assert entry.at % (4096 if len(chunk) >= 4096 else 64) == 0
        assert not any(data[end : entry.at])
        assert (entry.address, entry.xxh3_128) == (ref_of(chunk).address, ref_of(chunk).xxh3_128)
        end = entry.at + entry.stored


def test_the_format_is_as_documented(tmp_path):
    """Byte by byte by another hand, so that packs of today can be read tomorrow."""
    path = tmp_path / "a.pack"
    one, two = content(1, 10), content(2, 5000)
    write(path, [one, two])
    expected = HEADER + bytes(48) + one
    expected += bytes(4096 - len(expected)) + two
    index = b"".join(
        ref_of(chunk).address
        + ref_of(chunk).xxh3_128
        + at.to_bytes(8, "little")
        + 2 * len(chunk).to_bytes(8, "little")
        + b"\0"
        for chunk, at in ((one, 64), (two, 4096))
    )
    footer = len(expected).to_bytes(8, "little") + len(index).to_bytes(8, "little")
    footer += xxhash.xxh3_128_digest(index) + b"TFPACK\r\n"
    assert path.read_bytes() == expected + index + footer


def test_it_has_its_name_only_when_finished(tmp_path):
    writer = PackWriter(tmp_path / "a.pack", PlainStorage())
    writer.add(bytes(32), bytes(16), memoryview(b"x" * 100))
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-a.pack"]
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["a.pack"]


def test_it_is_synced_then_named_then_its_folder_is_synced(tmp_path, monkeypatch):
    done: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        done.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))

    def rename(*arguments: object) -> None:
        done.append("rename")
        real_rename(*arguments)

    writer = PackWriter(tmp_path / "a.pack", PlainStorage())
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    writer.finish()
    assert done == ["sync .tmp-a.pack", "rename", f"sync {tmp_path.name}"]


def test_a_pack_is_never_written_over(tmp_path):
    write(tmp_path / "a.pack", [b"first"])
    before = (tmp_path / "a.pack").read_bytes()
    with pytest.raises(CheckpointError, match=r"a\.pack exists already"):
        PackWriter(tmp_path / "a.pack", PlainStorage())
    assert (tmp_path / "a.pack").read_bytes() == before


@pytest.mark.parametrize("what", ["append", "finish", "rename", "folder"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failure_goes_up_and_leaves_nothing(tmp_path, monkeypatch, what, code):
    writer = PackWriter(tmp_path / "a.pack", PlainStorage())
    writer.add(bytes(32), bytes(16), memoryview(b"x" * 100))

    def fail(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    if what in ("append", "finish"):
        monkeypatch.setattr(PlainSink, what, fail)
    elif what == "rename":
        monkeypatch.setattr(Path, "rename", fail)
    else:
        monkeypatch.setattr(packs, "fsync_folder", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        writer.finish()
    assert not list(tmp_path.iterdir())


def test_abandon_never_raises(tmp_path, monkeypatch):
    writer = PackWriter(tmp_path / "a.pack", PlainStorage())
    monkeypatch.setattr(PlainSink, "abandon", lambda self: 1 / 0)
    writer.abandon()
    writer.abandon()
    assert not list(tmp_path.iterdir())


def test_a_truncated_pack_is_refused(tmp_path):
    path = tmp_path / "a.pack"
    write(path, [content(1, 100), content(2, 4096)])
    for length in range(path.stat().st_size - 1, -1, -1):
        os.truncate(path, length)
        with pytest.raises(CheckpointError, match=r"a\.pack is damaged"):
            read_index(path)


ABSURD = {
    "a chunk at 2**63": {"entries": [(2**63, 64, 64, 0)]},
    "a chunk of 2**63 bytes": {"entries": [(64, 2**63, 2**63, 0)]},
    "a length that decompression would have to believe": {"entries": [(64, 64, 2**40, 1)]},
    "raw bytes that stand for more": {"entries": [(64, 64, 128, 0)]},
    "compressed bytes that stand for fewer": {"entries": [(64, 64, 64, 1)]},
    "an unknown codec": {"entries": [(64, 64, 64, 7)]},
    "a chunk in the header": {"entries": [(0, 128, 128, 0)]},
    "a chunk that is not aligned": {"entries": [(65, 63, 63, 0)]},
    "chunks that overlap": {"entries": [(64, 64, 64, 0), (64, 64, 64, 0)]},
    "bytes that belong to no chunk": {"entries": [(64, 10, 10, 0)]},
    "no chunk in a long body": {"entries": []},
    "a chunk twice": {"entries": [(64, 32, 32, 0), (128, 0, 0, 0)], "address": bytes(32)},
    "an index beyond the file": {"entries": [(64, 64, 64, 0)], "at": 2**62},
    "an index in the header": {"entries": [(64, 64, 64, 0)], "at": 3},
    "an index of 2**62 bytes": {"entries": [(64, 64, 64, 0)], "length": 73 * 2**56},
    "an index of a broken entry": {"entries": [(64, 64, 64, 0)], "at": 127, "length": 74},
}


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_index_is_refused_before_anything_is_allocated(tmp_path, name):
    path = by_hand(tmp_path / "a.pack", **ABSURD[name])
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"a\.pack is damaged: it"):
        read_index(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_the_same_by_hand_with_sane_numbers_is_read(tmp_path):
    path = by_hand(tmp_path / "a.pack", [(64, 64, 64, 0)])
    assert read_index(path) == [Entry(bytes(32), bytes(16), 64, 64, 64, 0)]


def test_a_huge_sparse_file_whose_index_fits_is_refused(tmp_path):
    path = tmp_path / "a.pack"
    count = 73 * (2**20 + 1)
    with path.open("wb") as file:
        file.write(HEADER)
        file.truncate(16 + count)
        file.seek(16 + count)
        file.write(struct.pack("<QQ16s8s", 16, count, bytes(16), b"TFPACK\r\n"))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="its index cannot lie"):
        read_index(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_pack_of_a_later_version_says_what_to_do(tmp_path):
    path = by_hand(tmp_path / "a.pack", [(64, 64, 64, 0)], version=2)
    with pytest.raises(CheckpointError, match="version 2, and this TrainForge reads version 1: install"):
        read_index(path)


def test_a_pack_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"a\.pack cannot be read: No such file"):
        read_index(tmp_path / "a.pack")


def test_any_flip_outside_the_chunks_and_their_padding_is_seen(tmp_path):
    path = tmp_path / "a.pack"
    entries = write(path, [content(1, 100), content(2, 4096)])
    whole = path.read_bytes()
    inside = set(range(entries[0].at, entries[-1].at + entries[-1].stored))
    outside = [at for at in range(len(whole)) if at not in inside]
    assert len(outside) > 200
    for at in outside:
        for bit in (0, 7):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(CheckpointError, match=r"a\.pack is"):
                read_index(path)
