"""The store: what is saved comes back, nothing is written twice, no failure leaves half of it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.vault.store_toys import (
    PlainSink,
    PlainSource,
    PlainStorage,
    Toy,
    content,
    flip,
    packs_in,
    read,
    ref_of,
    save,
    store_in,
)

from trainforge_loongforge.vault import hashing, packs, reading
from trainforge_loongforge.vault.packs import CHUNK_BYTES
from trainforge_loongforge.vault.storage import Storage

SOME = [content(seed, size) for seed, size in enumerate([1, 100, 4095, 4096, 4097, 70_000, 0, 300_000])]


def test_what_is_saved_comes_back_in_this_process_and_the_next(tmp_path):
    store = store_in(tmp_path / "packs")
    refs = save(store, "s1", SOME)
    assert refs == [ref_of(chunk) for chunk in SOME]
    for one in (store, store_in(tmp_path / "packs")):
        assert [read(one, ref) for ref in refs] == SOME
        assert one.verify(refs) == {}
    assert packs_in(tmp_path / "packs") == ["s1-r00000-000.pack"]


def test_what_is_unchanged_shared_and_new_is_counted(tmp_path):
    store = store_in(tmp_path / "packs")
    old = content(1, 5000)
    (known,) = save(store, "s1", [old])
    pieces = [
        Toy(old, known),  # unchanged
        Toy(old),  # nothing known, but the store holds it
        Toy(content(2, 5000), known),  # changed: new
        Toy(content(2, 5000)),  # the same in this save
        Toy(content(3, 70)),  # new
    ]
    written = store.write("s2", 3, pieces)
    assert (written.unchanged, written.shared, written.new_chunks) == (1, 2, 2)
    assert written.new_bytes == 5070
    assert written.refs == [ref_of(piece.data) for piece in pieces]
    assert [path.name for path in written.packs] == ["s2-r00003-000.pack"]
    assert [(piece.opened_times, piece.is_open) for piece in pieces] == [(1, False)] * 5


def test_nothing_new_writes_no_file(tmp_path):
    store = store_in(tmp_path / "packs")
    refs = save(store, "s1", SOME)
    written = store.write("s2", 0, [Toy(chunk, ref) for chunk, ref in zip(SOME, refs, strict=True)])
    assert (written.unchanged, written.new_chunks, written.packs) == (len(SOME), 0, [])
    assert packs_in(tmp_path / "packs") == ["s1-r00000-000.pack"]


def test_what_is_unchanged_is_not_addressed_again(tmp_path, monkeypatch):
    store = store_in(tmp_path / "packs")
    refs = save(store, "s1", SOME)
    monkeypatch.setattr(hashing, "blake3", None)
    assert store.write("s2", 0, [Toy(c, r) for c, r in zip(SOME, refs, strict=True)]).refs == refs


def test_what_is_known_but_lost_is_written_again(tmp_path):
    store = store_in(tmp_path / "packs")
    (ref,) = save(store, "s1", [content(1, 500)])
    (tmp_path / "packs/s1-r00000-000.pack").unlink()
    written = store.write("s2", 0, [Toy(content(1, 500), ref)])
    assert (written.new_chunks, written.unchanged) == (1, 0)
    assert read(store_in(tmp_path / "packs"), ref) == content(1, 500)


def test_what_was_found_damaged_is_written_again(tmp_path):
    store = store_in(tmp_path / "packs")
    (ref,) = save(store, "s1", [content(1, 500)])
    flip(tmp_path / "packs/s1-r00000-000.pack", 64 + 17)
    assert list(store.verify([ref])) == [ref]
    assert not store.has(ref.address)
    assert store.write("s2", 0, [Toy(content(1, 500), ref)]).new_chunks == 1
    assert store.has(ref.address)
    assert read(store, ref) == read(store_in(tmp_path / "packs"), ref) == content(1, 500)
    assert store.verify([ref]) == {}


@given(
    sizes=st.lists(st.sampled_from([0, 1, 64, 4096, 5000, 20_000]), max_size=30),
    threads=st.integers(1, 4),
    compress=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_pieces_on_any_number_of_threads_keep_their_order(tmp_path_factory, sizes, threads, compress):
    folder = tmp_path_factory.mktemp("store") / "packs"
    chunks = [content(seed % 7, size) for seed, size in enumerate(sizes)]
    store = store_in(folder, threads=threads, compress=compress)
    written = store.write("s", 0, [Toy(chunk) for chunk in chunks])
    assert written.refs == [ref_of(chunk) for chunk in chunks]
    assert written.new_chunks == len(set(chunks))
    got: dict[int, bytes] = {}
    outs = [bytearray(len(chunk)) for chunk in chunks]
    wanted = [(ref, memoryview(out)) for ref, out in zip(written.refs, outs, strict=True)]
    wanted += [
        (ref, lambda data, at=at: got.__setitem__(at, bytes(data))) for at, ref in enumerate(written.refs)
    ]
    store_in(folder, threads=threads).read_many(wanted)
    assert [bytes(out) for out in outs] == chunks == [got[at] for at in range(len(chunks))]


@pytest.mark.parametrize(
    ("size", "count", "allowed"),
    [(CHUNK_BYTES, 24, 4), (CHUNK_BYTES // 2, 24, 8), (CHUNK_BYTES // 2 - 1, 24, 2), (100, 3000, 2)],
)
def test_few_pieces_are_open_at_a_time(tmp_path, size, count, allowed):
    """Memory: what is open is bounded, however slow the disk and however many pieces there are."""
    lock, now, most = threading.Lock(), [0], [0]

    class Counting(Toy):
        def __enter__(self):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            return super().__enter__()

        def __exit__(self, *error):
            with lock:
                now[0] -= 1
            super().__exit__(*error)

    pieces = [Counting(content(seed, size)) for seed in range(count)]
    written = store_in(tmp_path / "packs", threads=2).write("s", 0, pieces)
    assert written.new_chunks == count
    assert now[0] == 0
    assert 1 <= most[0] <= allowed


def test_tiny_pieces_are_handed_to_threads_by_the_hundred(tmp_path, monkeypatch):
    """Thousands of tiny tensors: no task per piece, neither for writing nor for reading."""
    tasks = [0]
    real = ThreadPoolExecutor.submit

    def submit(*arguments, **options):
        tasks[0] += 1
        return real(*arguments, **options)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    store = store_in(tmp_path / "packs", Storage())
    chunks = [number.to_bytes(100, "little") for number in range(5000)]
    refs = save(store, "s", chunks)
    assert tasks[0] <= 5000 / 512 + 1
    outs = [bytearray(100) for _ in refs]
    store.read_many([(ref, memoryview(out)) for ref, out in zip(refs, outs, strict=True)])
    assert [bytes(out) for out in outs] == chunks
    assert tasks[0] <= 5000 / 512 + 1 + 5000 / 256 + 1


def test_a_chunk_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(ValueError, match="none may have more than 4194304"):
        save(store_in(tmp_path / "packs"), "s", [bytes(CHUNK_BYTES + 1)])
    assert packs_in(tmp_path / "packs") == []


def test_packs_are_of_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "PACK_BYTES", 20_000)
    store = store_in(tmp_path / "packs")
    chunks = [content(seed, 6000) for seed in range(7)]
    written = store.write("s", 1, [Toy(chunk) for chunk in chunks])
    assert [path.name for path in written.packs] == [f"s-r00001-00{k}.pack" for k in range(4)]
    assert [read(store, ref) for ref in written.refs] == chunks


def test_undo_removes_this_rank_of_this_save_only(tmp_path):
    store = store_in(tmp_path / "packs")
    (kept,) = save(store, "s1", [content(1, 100)], rank=1)
    (other,) = save(store, "s2", [content(2, 100)], rank=0)
    (gone,) = save(store, "s2", [content(3, 100)], rank=1)
    (tmp_path / "packs/.tmp-s2-r00001-001.pack").write_bytes(b"half")
    store.undo("s2", 1)
    assert packs_in(tmp_path / "packs") == ["s1-r00001-000.pack", "s2-r00000-000.pack"]
    assert [store.has(ref.address) for ref in (kept, other, gone)] == [True, True, False]
    assert save(store, "s2", [content(3, 100)], rank=1) == [gone]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".tmp-x", "a*"])
def test_a_save_id_cannot_lead_elsewhere(tmp_path, name):
    store = store_in(tmp_path / "packs")
    with pytest.raises(ValueError, match="cannot be the name of a save"):
        store.undo(name, 0)
    with pytest.raises(ValueError, match="cannot be the name of a save"):
        save(store, name, [b"x"])


def test_ranks_and_processes_see_each_others_packs(tmp_path):
    one, two = store_in(tmp_path / "packs"), store_in(tmp_path / "packs")
    (ref,) = save(one, "s1", [content(1, 100)])
    assert not two.has(ref.address)
    assert read(two, ref) == content(1, 100)  # reading looks again by itself
    written = two.write("s2", 1, [Toy(content(1, 100))])
    assert (written.shared, written.new_chunks) == (1, 0)


class TestFailures:
    """ENOSPC, EIO and what pieces raise: it goes up, everything is closed, and the folder is as before."""

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
    def test_at_every_call_of_the_disk(self, tmp_path, monkeypatch, code):
        monkeypatch.setattr(packs, "PACK_BYTES", 20_000)
        store = store_in(tmp_path / "packs")
        refs = save(store, "s1", SOME)
        before = packs_in(tmp_path / "packs")
        failed = 0
        for fail_at in range(1, 200):
            calls = [0]

            def ask(calls=calls, fail_at=fail_at):
                calls[0] += 1
                if calls[0] == fail_at:
                    raise OSError(code, os.strerror(code))

            pieces = [Toy(content(100 + seed, 6000)) for seed in range(7)]
            with monkeypatch.context() as patch:
                for owner, name in ((PlainSink, "append"), (PlainSink, "finish"), (Path, "rename")):
                    patch.setattr(owner, name, asking(getattr(owner, name), ask))
                patch.setattr(packs, "fsync_folder", asking(packs.fsync_folder, ask))
                try:
                    store.write("s2", 0, pieces)
                    break
                except OSError as error:
                    met = error.errno
            assert met == code
            failed += 1
            assert packs_in(tmp_path / "packs") == before
            assert not any(piece.is_open for piece in pieces)
            assert not any(store.has(ref_of(piece.data).address) for piece in pieces)
            assert store.verify(refs) == {}
        assert failed > 20

    def test_short_writes_and_interrupts_by_the_kernel(self, tmp_path, monkeypatch):
        """A file takes 1,000 bytes at a time."""
        real = Path.open

        class Short:
            def __init__(self, file):
                self._file = file

            def write(self, data):
                return self._file.write(memoryview(data)[:1000])

            def __getattr__(self, name):
                return getattr(self._file, name)

        def opened(path, mode="r", *arguments, **options):
            file = real(path, mode, *arguments, **options)
            return Short(file) if "w" in mode else file

        monkeypatch.setattr(Path, "open", opened)
        store = store_in(tmp_path / "packs")
        refs = save(store, "s1", SOME)
        assert [read(store, ref) for ref in refs] == SOME

    @pytest.mark.parametrize("bad", [0, 5, 19])
    def test_a_piece_that_fails(self, tmp_path, bad):
        class Broken(Toy):
            def opened(self):
                raise RuntimeError("gone")

        pieces = [(Broken if at == bad else Toy)(bytes([at]) * CHUNK_BYTES) for at in range(20)]
        with pytest.raises(RuntimeError, match="gone"):
            store_in(tmp_path / "packs", threads=2).write("s", 0, pieces)
        assert packs_in(tmp_path / "packs") == []
        assert not any(piece.is_open for piece in pieces)
        assert all(piece.opened_times <= 1 for piece in pieces)


def asking(real, ask):
    def asked(*arguments, **options):
        ask()
        return real(*arguments, **options)

    return asked


def test_files_are_not_closed_while_a_thread_reads_them(tmp_path, monkeypatch):
    """More packs than may be open, and more threads than that."""
    monkeypatch.setattr(reading, "_OPEN_PACKS", 1)
    broken, most, is_open = [], [0], [0]

    class Watched(PlainSource):
        busy, closed = 0, False

        def __init__(self, path):
            super().__init__(path)
            is_open[0] += 1
            most[0] = max(most[0], is_open[0])

        def read_into(self, at, out):
            self.busy += 1
            time.sleep(0.0005)
            if self.closed:
                broken.append(self)
            super().read_into(at, out)
            self.busy -= 1

        def close(self):
            if self.busy:
                broken.append(self)
            self.closed = True
            is_open[0] -= 1
            super().close()

    storage = PlainStorage()
    storage.open = Watched
    store = store_in(tmp_path / "packs", storage)
    refs = [save(store, f"s{at}", [content(at, 100)])[0] for at in range(60)]
    outs = [bytearray(100) for _ in refs]
    wanted = [(ref, memoryview(out)) for ref, out in zip(refs, outs, strict=True)]
    threads = [threading.Thread(target=store.read_many, args=(wanted[k::4], 1)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bytes(out) for out in outs] == [content(at, 100) for at in range(60)]
    assert broken == []
    assert most[0] <= 1 + len(threads)
    store.close()
    assert is_open[0] == 0


@pytest.mark.parametrize("where", ["disk", "memory"])
@pytest.mark.parametrize("compress", [False, True])
def test_with_the_real_storage(tmp_path, where, compress):
    """C45: odd sizes, a disk that takes O_DIRECT or not, and a folder in memory: the same bytes."""
    folder = tmp_path if where == "disk" else Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        storage = Storage.choose("posix", folder)
        store = store_in(folder / "packs", storage, compress=compress)
        chunks = [
            *SOME,
            content(50, CHUNK_BYTES),
            b"ab" * (CHUNK_BYTES // 2 - 1),
            content(51, CHUNK_BYTES - 1),
        ]
        refs = save(store, "s1", chunks)
        other = store_in(folder / "packs")
        assert [read(other, ref) for ref in refs] == [read(store, ref) for ref in refs] == chunks
        assert store.verify(refs) == {}
        done = store.collect([ref.address for ref in refs[4:6]])
        assert done.rewritten_bytes > 0
        assert [read(store_in(folder / "packs"), ref) for ref in refs[4:6]] == chunks[4:6]
        store.close()
    finally:
        if where == "memory":
            shutil.rmtree(folder)
