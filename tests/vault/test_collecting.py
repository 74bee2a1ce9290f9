"""Collections: exactly what is live stays readable, whatever happens meanwhile, and little else stays."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.vault.store_toys import (
    PlainSink,
    Toy,
    addresses,
    content,
    packs_in,
    read,
    ref_of,
    save,
    store_in,
)

from trainforge.errors import CheckpointError
from trainforge_loongforge.vault.hashing import Ref
from trainforge_loongforge.vault.packs import PackWriter, read_index
from trainforge_loongforge.vault.store import Store

KIB = [content(seed, 1000) for seed in range(400)]


def overhead(folder: Path, live: set[bytes]) -> float:
    """The share of stored bytes that is not needed, counted from outside."""
    entries = [entry for name in packs_in(folder) for entry in read_index(folder / name)]
    stored = sum(entry.stored for entry in entries)
    needed = {entry.address: entry.stored for entry in entries if entry.address in live}
    return (stored - sum(needed.values())) / stored if stored else 0.0


def test_a_dead_pack_goes_and_a_live_one_stays_as_it_is(tmp_path):
    store = store_in(tmp_path / "packs")
    save(store, "old", KIB[:3])
    refs = save(store, "new", KIB[3:6])
    before = (tmp_path / "packs/new-r00000-000.pack").stat()
    size = (tmp_path / "packs/old-r00000-000.pack").stat().st_size
    done = store.collect(addresses(*refs))
    assert packs_in(tmp_path / "packs") == ["new-r00000-000.pack"]
    assert (tmp_path / "packs/new-r00000-000.pack").stat() == before
    assert (done.deleted, done.freed_bytes, done.rewritten_bytes) == (("old-r00000-000.pack",), size, 0)
    assert (done.live_bytes, done.overhead_bytes, done.missing, done.damaged) == (3000, 0, frozenset(), {})


def test_a_pack_that_is_mostly_dead_is_written_anew(tmp_path):
    store = store_in(tmp_path / "packs", compress=True)
    chunks = [*KIB[:9], b"a" * 5000]
    refs = save(store, "s", chunks)
    done = store.collect(addresses(*refs[2:4], refs[9]))
    (name,) = packs_in(tmp_path / "packs")
    assert name != "s-r00000-000.pack"
    assert done.rewritten_bytes == (tmp_path / "packs" / name).stat().st_size
    assert done.overhead_bytes == 0
    for one in (store, store_in(tmp_path / "packs")):
        assert [read(one, refs[at]) for at in (2, 3, 9)] == [chunks[at] for at in (2, 3, 9)]
        assert not any(one.has(refs[at].address) for at in (0, 1, 4, 5, 6, 7, 8))


@pytest.mark.parametrize(("live", "stays"), [(6, True), (5, False)])
def test_more_than_half_stays_and_half_does_not(tmp_path, live, stays):
    store = store_in(tmp_path / "packs")
    refs = save(store, "s", KIB[:10])
    done = store.collect(addresses(*refs[:live]))
    assert (packs_in(tmp_path / "packs") == ["s-r00000-000.pack"]) is stays
    assert done.overhead_bytes == (4000 if stays else 0)
    assert store.verify(refs[:live]) == {}


def test_a_retried_save_hides_nothing(tmp_path):
    """C39: six saves, two kept, one fails and is retried; each kept one restores alone."""
    folder = tmp_path / "packs"
    saved: list[tuple[list[Ref], list[bytes]]] = []
    store = store_in(folder)
    for step in range(6):
        chunks = [KIB[0], KIB[1 + step // 2], KIB[20 + step], KIB[40 + step]]
        if step == 4:
            save(store, f"failed{step}", [*chunks, KIB[60]])
            store.undo(f"failed{step}", 0)
        saved.append((save(store, f"s{step}", chunks), chunks))
        kept = saved[-2:]
        store.collect({ref.address for refs, _ in kept for ref in refs})
        for refs, chunks_of in kept:
            alone = store_in(folder)
            assert [read(alone, ref) for ref in refs] == chunks_of
    assert overhead(folder, {ref.address for refs, _ in saved[-2:] for ref in refs}) < 0.5


class Killed(BaseException):
    """The process is gone."""


saves = st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=8)


@given(plan=saves, data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_saves_any_live_set_any_kill(tmp_path_factory, plan, data):
    """Exactly the live chunks stay readable; killed anywhere, none is lost, and the next collection ends the work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # a kill loses nothing that was written
        _try(tmp_path_factory.mktemp("store") / "packs", plan, data)


def _try(folder: Path, plan: list[list[int]], data: st.DataObject) -> None:
    sizes = [0, 1, 64, 700, 4096, 5000]
    truth: dict[Ref, bytes] = {}
    for at, numbers in enumerate(plan):
        chunks = [content(number, sizes[number % 6]) for number in numbers]
        refs = save(store_in(folder, threads=1), f"s{at}", chunks, rank=at % 2)
        truth |= dict(zip(refs, chunks, strict=True))
    live = data.draw(st.sets(st.sampled_from(sorted(truth, key=lambda ref: ref.address)))) if truth else set()
    _collect_and_be_killed(folder, addresses(*live), data.draw(st.integers(1, 60)))
    survivor = store_in(folder, threads=1)
    assert [read(survivor, ref) for ref in live] == [truth[ref] for ref in live]
    done = survivor.collect(addresses(*live))
    for one in (survivor, store_in(folder, threads=1)):
        assert [read(one, ref) for ref in live] == [truth[ref] for ref in live]
        assert one.verify(live) == {}
    assert (done.missing, done.damaged) == (frozenset(), {})
    assert overhead(folder, set(addresses(*live))) < 0.5
    assert not [name for name in packs_in(folder) if name.startswith(".tmp-")]
    if not any(ref.length for ref in live):
        assert sum(entry.stored for name in packs_in(folder) for entry in read_index(folder / name)) == 0
    assert survivor.collect(addresses(*live)).deleted == (), "nothing is left to do"


def _collect_and_be_killed(folder: Path, live: list[bytes], kill_at: int) -> None:
    """Collect, and end at the k-th call that changes the disk."""
    calls = [0]

    def until_then(real):
        def called(*arguments, **options):
            calls[0] += 1
            if calls[0] >= kill_at:
                raise Killed  # and whatever tries to clean up is dead too
            return real(*arguments, **options)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "unlink"), (os, "rename"), (os, "fsync"), (PlainSink, "append")):
            patch.setattr(owner, name, until_then(getattr(owner, name)))
        with contextlib.suppress(Killed):
            store_in(folder, threads=1).collect(live)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_stops_it_and_costs_nothing_live(tmp_path, monkeypatch, code):
    store = store_in(tmp_path / "packs")
    save(store, "dead", KIB[20:30])
    refs = save(store, "s", KIB[:10])

    def fail(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(PlainSink, "finish", fail)
        with pytest.raises(OSError, match=os.strerror(code)):
            store.collect(addresses(*refs[:2]))
    assert packs_in(tmp_path / "packs") == ["s-r00000-000.pack"]  # what is dead made room first
    assert store.verify(refs) == {}
    store.collect(addresses(*refs[:2]))
    assert store.verify(refs[:2]) == {}


class TestDamage:
    """What cannot be read is kept for as long as it may be needed."""

    def test_a_pack_without_an_index_is_kept_while_a_live_chunk_is_missing(self, tmp_path):
        folder = tmp_path / "packs"
        (needed,) = save(store_in(folder), "s", KIB[:1])
        os.truncate(folder / "s-r00000-000.pack", (folder / "s-r00000-000.pack").stat().st_size - 1)
        store = store_in(folder)
        done = store.collect(addresses(needed))
        assert packs_in(folder) == ["s-r00000-000.pack"]
        assert done.missing == {needed.address}
        assert "s-r00000-000.pack is damaged" in done.damaged["s-r00000-000.pack"]
        (again,) = save(store, "t", KIB[:1])  # saved anew: nobody needs the damaged one any more
        assert store.collect(addresses(again)).damaged == {}
        assert packs_in(folder) == ["t-r00000-000.pack"]

    def test_a_damaged_live_chunk_keeps_its_pack_and_the_others_are_saved(self, tmp_path):
        folder = tmp_path / "packs"
        refs = save(store_in(folder), "s", KIB[:10])
        path = folder / "s-r00000-000.pack"
        data = bytearray(path.read_bytes())
        data[read_index(path)[1].at] ^= 1
        path.write_bytes(data)
        store = store_in(folder)
        done = store.collect(addresses(*refs[:3]))
        assert path.read_bytes() == data
        assert done.missing == {refs[1].address}
        assert list(done.damaged) == [path.name]
        assert done.rewritten_bytes > 0
        assert set(store.verify(refs[:3])) == {refs[1]}
        count = len(packs_in(folder))
        assert store_in(folder).collect(addresses(*refs[:3])).missing == {refs[1].address}
        assert len(packs_in(folder)) == count, "copies do not pile up"

    @pytest.mark.parametrize("bad", ["one", "two"])
    def test_of_two_copies_the_whole_one_is_kept(self, tmp_path, bad):
        """The pack that is most alive holds a damaged copy: the other one may not go for it."""
        folder = tmp_path / "packs"
        folder.mkdir()
        shared = KIB[0]
        for name, others in (("one", KIB[1:9]), ("two", KIB[11:13])):
            writer = PackWriter(folder / f"{name}-r00000-000.pack", store_in(folder)._storage)
            for chunk in [shared, *others]:
                ref = ref_of(chunk)
                writer.add(ref.address, ref.xxh3_128, memoryview(chunk))
            writer.finish()
        path = folder / f"{bad}-r00000-000.pack"
        data = bytearray(path.read_bytes())
        data[64] ^= 1
        path.write_bytes(data)
        live = [ref_of(chunk) for chunk in [shared, *KIB[1:9]]]
        store = store_in(folder)
        done = store.collect(addresses(*live))
        assert read(store, live[0]) == read(store_in(folder), live[0]) == shared
        assert "two-r00000-000.pack" in done.deleted
        assert store_in(folder).verify(live) == {}


def test_two_copies_of_a_chunk_become_one(tmp_path):
    folder = tmp_path / "packs"
    folder.mkdir()
    for name in ("one", "two", "three"):
        writer = PackWriter(folder / f"{name}-r00000-000.pack", store_in(folder)._storage)
        ref = ref_of(KIB[0])
        writer.add(ref.address, ref.xxh3_128, memoryview(KIB[0]))
        writer.finish()
    store = store_in(folder)
    assert store.collect([ref.address]).live_bytes == 1000
    assert len(packs_in(folder)) == 1
    assert read(store, ref) == KIB[0]


def test_copies_in_packs_that_both_go_become_one(tmp_path):
    folder = tmp_path / "packs"
    folder.mkdir()
    for at in (0, 1):
        writer = PackWriter(folder / f"s{at}-r00000-000.pack", store_in(folder)._storage)
        for chunk in [KIB[0], *KIB[10 * at + 1 : 10 * at + 6]]:
            ref = ref_of(chunk)
            writer.add(ref.address, ref.xxh3_128, memoryview(chunk))
        writer.finish()
    store = store_in(folder)
    live = [ref_of(KIB[0]), ref_of(KIB[1]), ref_of(KIB[11])]
    assert len(store.collect(addresses(*live)).deleted) == 2
    (name,) = packs_in(folder)
    assert sorted(entry.address for entry in read_index(folder / name)) == sorted(addresses(*live))
    assert store_in(folder).verify(live) == {}


def test_others_read_while_packs_are_rewritten(tmp_path):
    """A reader that holds no lock never misses a live chunk."""
    folder = tmp_path / "packs"
    writer = store_in(folder)
    live = {save(writer, f"s{at}", KIB[10 * at : 10 * at + 10])[0]: KIB[10 * at] for at in range(10)}
    reader, stop, problems, rounds = store_in(folder), threading.Event(), [], [0]

    def keep_reading():
        while not stop.is_set():
            for ref, chunk in list(live.items()):
                try:
                    assert read(reader, ref) == chunk
                except Exception as error:
                    problems.append(error)
            rounds[0] += 1

    thread = threading.Thread(target=keep_reading)
    thread.start()
    for at in range(10, 40):
        (ref, *_) = save(writer, f"s{at}", KIB[10 * at : 10 * at + 10])
        live[ref] = KIB[10 * at]
        assert writer.collect(addresses(*live)).rewritten_bytes > 0
    stop.set()
    thread.join()
    assert problems == []
    assert rounds[0] > 1


def test_a_hundred_manifests_are_collected_in_five_seconds(tmp_path):
    """100 saves of 4 ranks, each of 200 chunks of which a tenth changes each time; all but ten saves go."""
    folder = tmp_path / "packs"
    store = store_in(folder)
    chance, numbers, kept = random.Random(1), list(range(800)), []
    for step in range(100):
        for at in chance.sample(range(800), 80):
            numbers[at] = 1000 + step * 800 + at
        refs = []
        for rank in range(4):
            chunks = [number.to_bytes(8, "little") * 20 for number in numbers[rank * 200 : rank * 200 + 200]]
            refs += save(store, f"s{step}", chunks, rank)
        kept.append(refs)
    assert len(packs_in(folder)) == 400
    fresh = store_in(folder)
    begun = time.perf_counter()
    everything = fresh.collect({ref.address for refs in kept for ref in refs})
    live = {ref.address for refs in kept[::10] for ref in refs}
    done = fresh.collect(live)
    took = time.perf_counter() - begun
    assert everything.deleted == ()
    assert len(done.deleted) > 100
    assert fresh.verify({ref for refs in kept[::10] for ref in refs}) == {}
    assert overhead(folder, live) < 0.5
    assert took < 5.0


def test_a_real_kill_leaves_what_the_next_collection_ends(tmp_path):
    """kill -9 at random moments of real collections."""
    folder = tmp_path / "packs"
    store = store_in(folder)
    live, truth = [], []
    for at in range(40):
        refs = save(store, f"s{at}", KIB[10 * at : 10 * at + 10])
        live.append(refs[3])
        truth.append(KIB[10 * at + 3])
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.vault.store_toys import store_in\n"
        "live = [bytes.fromhex(line) for line in sys.argv[2].split()]\n"
        "store = store_in(Path(sys.argv[1]))\nprint('ready', flush=True)\nstore.collect(live)\n"
    )
    arguments = [sys.executable, "-c", code, str(folder), " ".join(ref.address.hex() for ref in live)]
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02):
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay)
        process.kill()
        process.wait()
        process.stdout.close()
        after = store_in(folder)
        assert [read(after, ref) for ref in live] == truth
    after.collect(addresses(*live))
    assert [read(after, ref) for ref in live] == truth
    assert len(packs_in(folder)) == 1


def test_an_empty_folder(tmp_path):
    done = store_in(tmp_path / "packs").collect([])
    assert (done.deleted, done.missing) == ((), frozenset())
    with pytest.raises(CheckpointError):
        read(store_in(tmp_path / "packs"), ref_of(b"x"))


def test_toys_are_pieces(tmp_path):
    """A store works with any storage of the documented shape."""
    store: Store = store_in(tmp_path / "packs")
    assert store.write("s", 0, [Toy(b"x")]).new_chunks == 1
