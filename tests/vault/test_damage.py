"""Damage: whatever lies on the disk, no wrong byte comes back, each chunk hit is named, and no bomb goes off."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
from pathlib import Path

import pytest
import zstandard
from tests.vault.store_toys import (
    Toy,
    content,
    flip,
    packs_in,
    read,
    ref_of,
    save,
    store_in,
)

from trainforge.errors import CheckpointError
from trainforge_loongforge.vault import packs, reading
from trainforge_loongforge.vault.hashing import Ref
from trainforge_loongforge.vault.packs import ZSTD, PackWriter


class TestDamage:
    """What lies on the disk is not what was written."""

    @pytest.mark.parametrize("compress", [False, True])
    def test_two_thousand_flips_truncations_and_deletions(self, tmp_path, compress):
        folder, chance = tmp_path / "packs", random.Random(5)
        chunks = [content(seed, size) for seed, size in enumerate([100, 5000, 64, 4096, 9000, 1])]
        if compress:
            chunks = [chunk[: len(chunk) // 2] * 2 if len(chunk) > 1 else chunk for chunk in chunks]
        refs: dict[str, list[Ref]] = {}
        for at in range(3):
            save_id = f"s{at}"
            part = chunks[2 * at : 2 * at + 2]
            refs[f"{save_id}-r00000-000.pack"] = save(store_in(folder, compress=compress), save_id, part)
        whole = {name: (folder / name).read_bytes() for name in refs}
        truth = dict(zip(itertools.chain(*refs.values()), chunks, strict=True))
        spans = {name: packs.read_index(folder / name) for name in refs}
        if compress:
            assert {entry.codec for entries in spans.values() for entry in entries} >= {ZSTD}
        for _ in range(1000):
            name = chance.choice(list(refs))
            data = whole[name]
            kind = chance.choice(["flip"] * 6 + ["cut", "gone"])
            at = chance.randrange(len(data))
            expected = set(refs[name])
            if kind == "flip":
                (folder / name).write_bytes(
                    data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
                )
                first, end = spans[name][0].at, spans[name][-1].at + spans[name][-1].stored
                if first <= at < end:  # a chunk, or the zeros behind one
                    hit = max((e for e in spans[name] if e.at <= at), key=lambda e: e.at)
                    expected = {ref for ref in refs[name] if ref.address == hit.address}
            elif kind == "cut":
                (folder / name).write_bytes(data[:at])
            else:
                (folder / name).unlink()
            store = store_in(folder)
            problems = store.verify(truth)
            assert set(problems) == expected, (kind, name, at)
            for ref, problem in problems.items():
                assert name in problem or kind == "gone"
                assert ref.address.hex()[:12] in problem
            for ref, chunk in truth.items():
                try:
                    assert read(store, ref) == chunk
                except CheckpointError:
                    assert ref in expected
                else:
                    assert ref not in expected or kind == "flip"  # it was in the padding
            store.close()
            (folder / name).write_bytes(data)

    def test_damage_after_the_index_was_read_is_found(self, tmp_path):
        """A running store does not trust its memory of what the disk held."""
        folder = tmp_path / "packs"
        store = store_in(folder)
        refs = save(store, "s1", [content(1, 100), content(2, 5000)])
        path = folder / "s1-r00000-000.pack"
        flip(path, path.stat().st_size - 60)  # the index
        assert set(store.verify(refs)) == set(refs)
        flip(path, path.stat().st_size - 60)
        assert store.verify(refs) == {}
        assert read(store, refs[0]) == content(1, 100)
        path.unlink()
        assert set(store.verify(refs)) == set(refs)

    def test_a_whole_copy_is_found_behind_a_damaged_one(self, tmp_path):
        one, two = store_in(tmp_path / "packs"), store_in(tmp_path / "packs")
        pieces = [[Toy(content(1, 500))], [Toy(content(1, 500))]]
        first = two_at_once(one, two, pieces)
        for name in packs_in(tmp_path / "packs"):
            flip(tmp_path / "packs" / name, 100)
            store = store_in(tmp_path / "packs")
            assert read(store, first) == content(1, 500)
            assert store.verify([first]) == {}
            flip(tmp_path / "packs" / name, 100)

    def test_a_missing_chunk_names_the_packs_that_cannot_be_read(self, tmp_path):
        store = store_in(tmp_path / "packs")
        (ref,) = save(store, "s1", [content(1, 500)])
        path = tmp_path / "packs/s1-r00000-000.pack"
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CheckpointError, match=r"is in no pack of .*s1-r00000-000\.pack is damaged"):
            read(store_in(tmp_path / "packs"), ref)

    def test_a_lost_pack_of_many_chunks_is_told_quickly(self, tmp_path, monkeypatch):
        store = store_in(tmp_path / "packs")
        refs = save(store, "s1", [number.to_bytes(8, "little") for number in range(3000)])
        (tmp_path / "packs/s1-r00000-000.pack").unlink()
        listed = [0]
        real = Path.iterdir

        def iterdir(path):
            listed[0] += path == tmp_path / "packs"
            return real(path)

        monkeypatch.setattr(Path, "iterdir", iterdir)
        assert set(store.verify(refs)) == set(refs)
        assert listed[0] < 10

    def test_a_length_that_differs_is_refused(self, tmp_path):
        store = store_in(tmp_path / "packs")
        (ref,) = save(store, "s1", [content(1, 500)])
        wrong = Ref(ref.address, ref.xxh3_128, 400)
        with pytest.raises(CheckpointError, match="it has 500 bytes there, not 400"):
            read(store, wrong)
        with pytest.raises(CheckpointError, match="500 bytes was to be read into 400"):
            store.read(ref, memoryview(bytearray(400)))

    def test_absurd_lengths_ask_for_no_memory(self, tmp_path):
        store = store_in(tmp_path / "packs")
        (ref,) = save(store, "s1", [content(1, 500)])
        absurd = Ref(ref.address, ref.xxh3_128, 2**50)
        assert list(store.verify([absurd])) == [absurd]
        with pytest.raises(CheckpointError, match="none is that long"):
            store.read_many([(absurd, lambda data: None)])

    def test_an_empty_folder_has_nothing(self, tmp_path):
        store = store_in(tmp_path / "nothing")
        ref = ref_of(b"x")
        assert not store.has(ref.address)
        with pytest.raises(CheckpointError, match="is in no pack of"):
            read(store, ref)
        assert not (tmp_path / "nothing").exists()


def two_at_once(one, two, pieces):
    """Two ranks write the same chunk in the same save: neither knows of the other's."""
    barrier = threading.Barrier(2)
    refs = []

    def work(store, rank):
        piece = pieces[rank][0]
        real = piece.opened
        piece.opened = lambda: (barrier.wait(), real())[1]
        refs.extend(store.write("both", rank, [piece]).refs)

    threads = [threading.Thread(target=work, args=(store, rank)) for rank, store in enumerate((one, two))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refs[0] == refs[1]
    return refs[0]


class TestCompression:
    """Chunks that are stored smaller."""

    def test_only_what_shrinks_is_compressed(self, tmp_path):
        store = store_in(tmp_path / "packs", compress=True)
        chunks = [b"a" * 10_000, content(1, 10_000)]
        written = store.write("s", 0, [Toy(chunk) for chunk in chunks])
        assert written.new_bytes < 11_000
        entries = packs.read_index(written.packs[0])
        assert [entry.codec for entry in entries] == [1, 0]
        plain = store_in(tmp_path / "packs")  # compressed chunks are always readable
        assert [read(plain, ref) for ref in written.refs] == chunks
        assert plain.verify(written.refs) == {}

    def test_a_missing_package_is_told_at_once(self, tmp_path, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
        with pytest.raises(CheckpointError, match=r"pip install 'trainforge-loongforge\[zstd\]'"):
            store_in(tmp_path / "packs", compress=True)

    @pytest.mark.parametrize("sized", [False, True])
    @pytest.mark.parametrize("real", [10, 999, 1001, 50 * 2**20])
    def test_a_bomb_is_never_unpacked_beyond_its_length(self, tmp_path, monkeypatch, sized, real):
        """The bytes stand for another number than the index says: refused, and at most that many are unpacked."""
        packed = zstandard.ZstdCompressor(write_content_size=sized).compress(bytes(real))
        packed += bytes(max(0, 10 - len(packed)))
        folder = tmp_path / "packs"
        folder.mkdir()
        claimed = max(1000, len(packed) + 1)
        ref = ref_of(bytes(claimed))
        writer = PackWriter(folder / "evil-r00000-000.pack", store_in(folder)._storage)
        writer.add(ref.address, ref.xxh3_128, memoryview(packed), ZSTD, claimed)
        writer.finish()
        store = store_in(folder)
        gc.collect()
        before = peak_bytes()
        with pytest.raises(CheckpointError, match="cannot be decompressed"):
            read(store, ref)
        assert peak_bytes() - before < 32 * 2**20

    def test_a_frame_that_wants_much_memory_is_refused(self, tmp_path):
        parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
        stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        packed = stream.compress(bytes(1000)) + stream.flush()
        assert zstandard.get_frame_parameters(packed).window_size == 2**27
        assert not reading._unpack(memoryview(packed), memoryview(bytearray(1000)))


def peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
