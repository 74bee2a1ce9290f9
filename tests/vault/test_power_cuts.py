"""Power cuts: at every moment of a save or a collection, what was promised is there afterwards."""

from __future__ import annotations

import os
import random
import shutil

import pytest
from tests.support.crash_fs import Recorder, crashes, write_tree
from tests.vault.store_toys import (
    PlainStorage,
    Toy,
    addresses,
    content,
    packs_in,
    read,
    ref_of,
    save,
    store_in,
)

from trainforge_loongforge.vault import packs
from trainforge_loongforge.vault.packs import PackWriter
from trainforge_loongforge.vault.storage import Storage

KIB = [content(seed, 1000) for seed in range(10)]


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("storage", [PlainStorage(), Storage()], ids=["plain", "real"])
def test_power_cuts_at_every_moment_of_three_saves(tmp_path, monkeypatch, storage):
    """What a save has reported is there after any power cut; what it has not leaves nothing that the next minds."""
    monkeypatch.setattr(packs, "PACK_BYTES", 600)
    contents = [[content(10 * at + k, 200) for k in range(5)] for at in range(3)]
    contents[2][0] = contents[0][0]  # shared with the first
    recorder = Recorder(tmp_path / "run")
    recorder.root.mkdir()
    with monkeypatch.context() as patch:
        recorder.install(patch)
        for at, chunks in enumerate(contents):
            store = store_in(recorder.root / "checkpoints/packs", storage, threads=1)
            refs = save(store, f"s{at}", chunks)
            recorder.mark(tuple(refs))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the real disk is not asked any more
    seen: set[str] = set()
    for length, tree in crashes(recorder.log, random.Random(0)):
        promised = [ref for op in recorder.log[:length] if op.kind == "mark" for ref in op.mark]
        if (what := repr((tree, promised))) not in seen:
            _check_after_the_cut(tmp_path / "after", tree, promised, contents[0])
            seen.add(what)
    assert len(seen) > 30


def test_a_killed_save_that_had_not_synced_its_folder_and_then_a_power_cut(tmp_path, monkeypatch):
    """The next process sees a name that is not on the disk yet, and uses the chunks behind it."""
    recorder = Recorder(tmp_path / "run")
    recorder.root.mkdir()
    folder = recorder.root / "packs"
    with monkeypatch.context() as patch:
        recorder.install(patch)
        save(store_in(folder), "s0", [content(9, 10)])
        with monkeypatch.context() as killing:
            killing.setattr(packs, "fsync_folder", lambda path: None)
            save(store_in(folder), "s1", [content(1, 100)])
        written = store_in(folder).write("s2", 0, [Toy(content(1, 100))])
        assert written.shared == 1
        recorder.mark(tuple(written.refs))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for length, tree in crashes(recorder.log, random.Random(0)):
        promised = [ref for op in recorder.log[:length] if op.kind == "mark" for ref in op.mark]
        _check_after_the_cut(tmp_path / "after", tree, promised, [content(5, 100)])


def _check_after_the_cut(place, tree, promised, more):
    shutil.rmtree(place, ignore_errors=True)
    write_tree(tree, place)
    (folder,) = list(place.rglob("packs")) or [place / "packs"]
    store = store_in(folder, threads=1)
    assert store.damaged == {}, "a pack that has its name is whole"
    for ref in promised:
        assert ref_of(read(store, ref)) == ref
    store.clean()
    assert not list(folder.glob(".tmp-*"))
    assert store_in(folder).verify(save(store, "next", more)) == {}


def test_power_cuts_at_every_moment_of_a_collection(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "run")
    folder = recorder.root / "packs"
    folder.mkdir(parents=True)
    (folder / ".tmp-killed-r00000-000.pack").write_bytes(b"left")
    refs = [save(store_in(folder), f"s{at}", [content(10 * at + k, 70) for k in range(4)]) for at in range(4)]
    live = [*refs[0][:1], *refs[1][:1], *refs[2], refs[3][0]]
    recorder = Recorder(recorder.root)
    begun = len(recorder.log)
    monkeypatch.setattr(packs, "PACK_BYTES", 250)  # so that old packs go between new ones
    with monkeypatch.context() as patch:
        recorder.install(patch)
        done = store_in(folder, threads=1).collect(addresses(*live))
    assert len(done.deleted) == 3
    truth = {ref: content(10 * at + k, 70) for at, row in enumerate(refs) for k, ref in enumerate(row)}
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the real disk is not asked any more
    count = 0
    for length, tree in crashes(recorder.log, random.Random(0)):
        if length < begun:
            continue
        place = tmp_path / "after"
        shutil.rmtree(place, ignore_errors=True)
        write_tree(tree, place)
        store = store_in(place / "packs", threads=1)
        assert store.damaged == {}
        assert [read(store, ref) for ref in live] == [truth[ref] for ref in live]
        again = store.collect(addresses(*live))
        assert (again.missing, again.damaged) == (frozenset(), {})
        assert [read(store, ref) for ref in live] == [truth[ref] for ref in live]
        assert not list((place / "packs").glob(".tmp-*"))
        count += 1
    assert count > 300


def test_a_killed_collection_that_had_not_synced_its_folder_and_then_a_power_cut(tmp_path, monkeypatch):
    """The next collection sees copies whose name is not on the disk yet, and deletes the pack they came from."""
    recorder = Recorder(tmp_path / "run")
    folder = recorder.root / "packs"
    folder.mkdir(parents=True)
    refs = save(store_in(folder), "s", KIB[:10])
    recorder = Recorder(recorder.root)
    begun = len(recorder.log)
    with monkeypatch.context() as patch:
        recorder.install(patch)
        with monkeypatch.context() as killing:
            killing.setattr(packs, "fsync_folder", dying)
            killing.setattr(PackWriter, "abandon", dying)
            killing.setattr(PackWriter, "_remove", dying)
            with pytest.raises(Killed):
                store_in(folder).collect(addresses(*refs[:2]))
        assert len(packs_in(folder)) == 2
        store_in(folder).collect(addresses(*refs[:2]))
        assert len(packs_in(folder)) == 1
    for length, tree in crashes(recorder.log, random.Random(0)):
        if length >= begun:
            place = tmp_path / "after"
            shutil.rmtree(place, ignore_errors=True)
            write_tree(tree, place)
            assert store_in(place / "packs").verify(refs[:2]) == {}


def dying(*arguments: object) -> None:
    raise Killed
