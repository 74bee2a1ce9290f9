"""The token cache: built once, under a lock, again only for a reason that is said, and never half."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
from tests.text.chats import subword_tokenizer
from tests.text.helpers import context, text_data, write_jsonl

from trainforge.context import SilentConsole
from trainforge.errors import DataError
from trainforge_plugins.text import TextSection, build, cache
from trainforge_plugins.text.data import TextData
from trainforge_plugins.text.pool import WorkerError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders in which a cache was built."""
    folders: list[Path] = []
    original = cache._build

    def counted(folder: Path, *more: object) -> object:
        folders.append(folder)
        return original(folder, *more)

    monkeypatch.setattr(cache, "_build", counted)
    return folders


def notes(folder: Path, path: Path, **section: object) -> list[str]:
    ctx = context(folder)
    options = {"path": str(path), "max_len": 8, "validation": None, **section}
    build(ctx, TextSection(**options))
    assert isinstance(ctx.console, SilentConsole)
    return ctx.console.lines


def folder_of(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "cache" / "text").iterdir()
    return folder


def rows(data: TextData) -> np.ndarray:
    return np.stack([data._rows[i].input_ids for i in range(len(data._rows))])


def test_the_second_run_builds_nothing(tmp_path: Path, builds: list[Path]):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello world"}, "bad"])
    first, second = (text_data(tmp_path, str(path)) for _ in range(2))
    assert len(builds) == 1
    assert np.array_equal(rows(first), rows(second))
    assert first.ledger() == second.ledger()
    assert first.state() == second.state()


def test_a_rebuild_says_why(tmp_path: Path, builds: list[Path]):
    data = tmp_path / "data"
    data.mkdir()
    one = write_jsonl(data / "a.jsonl", [{"text": "hello"}])
    assert notes(tmp_path, data) == []
    write_jsonl(one, [{"text": "hello there"}])
    os.utime(one, ns=(0, 10**9))
    assert notes(tmp_path, data) == [f"tokenising again: {one} has changed (18 to 24 bytes)"]
    os.utime(one, ns=(0, 2 * 10**9))
    assert notes(tmp_path, data) == [f"tokenising again: {one} has changed (same size, written anew)"]
    two = write_jsonl(data / "b.jsonl", [{"text": "more"}])
    assert notes(tmp_path, data) == [f"tokenising again: {two} was added"]
    two.unlink()
    assert notes(tmp_path, data) == [f"tokenising again: {two} is gone"]
    assert notes(tmp_path, data, strict=True) == ["tokenising again: text.strict has changed"]
    assert notes(tmp_path, data, format="text") == [
        f"tokenising again: {one} is read as text instead of jsonl"
    ]
    assert len(builds) == 7
    assert len(list(folder_of(tmp_path).glob("*.bin"))) == 2


def test_another_tokenizer_is_said_and_has_a_cache_of_its_own(tmp_path: Path, builds: list[Path]):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    other = tmp_path / "tokenizer.json"
    subword_tokenizer()._backend.save(str(other))
    assert notes(tmp_path, path) == []
    assert notes(tmp_path, path, tokenizer=str(other)) == [
        "tokenising again: the tokenizer has changed (the cache of the other one is kept)"
    ]
    assert notes(tmp_path, path) == notes(tmp_path, path, tokenizer=str(other)) == []
    assert len(builds) == 2


@pytest.mark.parametrize("damage", ["cut", "gone", "index"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, damage: str):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello world"}])
    wanted = rows(text_data(tmp_path, str(path)))
    (tokens,) = folder_of(tmp_path).glob("tokens-*.bin")
    if damage == "cut":
        os.truncate(tokens, 3)
    elif damage == "gone":
        tokens.unlink()
    else:
        (folder_of(tmp_path) / "index.json").write_text('{"identity": ')
    (line,) = notes(tmp_path, path)
    assert ("index.json cannot be read" if damage == "index" else f"{tokens} is missing or cut short") in line
    assert np.array_equal(rows(text_data(tmp_path, str(path))), wanted)


def test_a_build_that_was_cut_short_leaves_the_old_cache_and_then_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    text_data(tmp_path, str(path))
    index = (folder_of(tmp_path) / "index.json").read_bytes()
    write_jsonl(path, [{"text": "something else"}])
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_replace_index", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            text_data(tmp_path, str(path))
    assert (folder_of(tmp_path) / "index.json").read_bytes() == index
    assert len(list(folder_of(tmp_path).glob("*.bin"))) == 4
    assert text_data(tmp_path, str(path)).ledger()["tokens"] == 15
    assert len(list(folder_of(tmp_path).glob("*.bin"))) == 2
    assert not list(folder_of(tmp_path).glob("*.partial"))


def test_an_open_cache_outlives_a_rebuild(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    old = text_data(tmp_path, str(path))
    before = rows(old)
    write_jsonl(path, [{"text": "other text"}])
    text_data(tmp_path, str(path))
    assert np.array_equal(rows(old), before)


def test_small_tokens_take_two_bytes(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    text_data(tmp_path, str(path))
    (tokens,) = folder_of(tmp_path).glob("tokens-*.bin")
    assert tokens.stat().st_size == 2 * 6


@pytest.mark.ranks
def test_processes_that_start_together_build_once(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("some words in a line\n" * 1000)
    code = (
        "import sys, time; from pathlib import Path; from tests.text.helpers import text_data\n"
        "from trainforge_plugins.text import cache\n"
        "folder, path, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])\n"
        "original = cache._build\n"
        "def slow_build(*arguments):\n"
        "    print('built')\n"
        "    time.sleep(2)\n"
        "    return original(*arguments)\n"
        "cache._build = slow_build\n"
        "(folder / f'ready{rank}').touch()\n"
        "while len(list(folder.glob('ready*'))) < 3: time.sleep(0.01)\n"
        "print(text_data(folder, path, rank=rank, world=3).state().data)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(path), str(rank)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum(output.count("built") for output in outputs) == 1
    assert len({output[-1] for output in outputs}) == 1


def test_who_shows_its_progress_builds_again_too(tmp_path: Path, builds: list[Path]):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    text_data(tmp_path, str(path))
    write_jsonl(path, [{"text": "hello there"}])
    lines: list[str] = []

    def other_rank() -> None:
        ctx = context(tmp_path, rank=1, world=2)
        build(ctx, TextSection(path=str(path), max_len=8, validation=None))
        assert isinstance(ctx.console, SilentConsole)
        lines.extend(ctx.console.lines)

    second = threading.Thread(target=other_rank)
    second.start()
    time.sleep(0.3)  # the lock file is there from before, and nobody has it
    (line,) = notes(tmp_path, path)
    second.join()
    assert line.startswith("tokenising again: ")
    assert not [line for line in lines if "tokenising" in line and "waiting" not in line]
    assert len(builds) == 2


def test_a_cache_is_opened_before_the_next_build_may_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    opened = cache.TokenCache.__init__

    def looking(self: cache.TokenCache, *arguments: object) -> None:
        with (folder_of(tmp_path) / "lock").open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        opened(self, *arguments)

    monkeypatch.setattr(cache.TokenCache, "__init__", looking)
    assert text_data(tmp_path, str(path)).cache.documents == 1


@pytest.mark.parametrize("change", ["longer", "gone"])
def test_a_file_that_changes_while_it_is_tokenised_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    write = cache.CacheWriter.write

    def meanwhile(self: cache.CacheWriter, *arguments: Any) -> None:
        write(self, *arguments)
        write_jsonl(path, [{"text": "hello"}, {"text": "more"}]) if change == "longer" else path.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(cache.CacheWriter, "write", meanwhile)
        with pytest.raises(DataError, match=r"a\.jsonl changed while it was tokenised: wait"):
            text_data(tmp_path, str(path))
    write_jsonl(path, [{"text": "hello"}, {"text": "more"}])
    assert text_data(tmp_path, str(path)).cache.documents == 2


@pytest.fixture
def held(tmp_path: Path) -> Iterator[TextIO]:
    """The lock of the cache of `a.jsonl`, in the hands of another process."""
    text_data(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])))
    with (folder_of(tmp_path) / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def test_who_waits_for_a_stuck_process_says_so_in_time(tmp_path: Path, held: TextIO):
    held.write("rank 0 (process 17), after a.jsonl (bytes 0 to 20)")
    held.flush()
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        text_data(tmp_path, str(tmp_path / "a.jsonl"), section={"worker_timeout": 0.3}, rank=1, world=2)
    assert time.monotonic() - began >= 0.6
    words = (
        "stuck for 600 ms: ",
        "rank 0 (process 17), after a.jsonl (bytes 0 to 20)",
        "text.worker_timeout",
    )
    assert all(word in str(caught.value) for word in words)


def test_who_waits_for_a_process_that_gets_on_goes_on_waiting(tmp_path: Path, held: TextIO):
    def work() -> None:
        for i in range(15):
            held.write(f" unit {i}")
            held.flush()
            time.sleep(0.1)
        fcntl.flock(held, fcntl.LOCK_UN)

    worker = threading.Thread(target=work)
    worker.start()
    data = text_data(tmp_path, str(tmp_path / "a.jsonl"), section={"worker_timeout": 0.4}, rank=1, world=2)
    worker.join()
    assert data.ledger()["used"] == 1


def test_who_tokenises_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, shown = tmp_path / "a.txt", []
    path.write_text("some words\n" * 100)
    monkeypatch.setattr("trainforge_plugins.text.units.cut_units.__defaults__", (545,))
    write = cache.CacheWriter.write

    def looking(self: cache.CacheWriter, *arguments: object) -> None:
        shown.append((folder_of(tmp_path) / "lock").read_text())
        write(self, *arguments)

    monkeypatch.setattr(cache.CacheWriter, "write", looking)
    text_data(tmp_path, str(path))
    who = f"rank 0 (process {os.getpid()}), after"
    assert shown[:2] == [f"{who} starting", f"{who} {path} (bytes 0 to 550)"]
    assert (folder_of(tmp_path) / "lock").read_text() == ""


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    with pytest.raises(DataError) as caught:
        text_data(tmp_path, str(path), section={"cache": tmp_path / "file"})
    message = str(caught.value)
    assert all(word in message for word in (str(tmp_path / "file"), "Not a directory", "text.cache", "free"))
    assert "\n" not in message


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.CacheWriter, "write", full)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    with pytest.raises(DataError, match=r"No space left on device: set text\.cache"):
        text_data(tmp_path, str(path))


def test_the_section_decides_where_the_cache_lies(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    text_data(tmp_path, str(path), section={"cache": tmp_path / "mine"})
    (index,) = (tmp_path / "mine").rglob("index.json")
    assert json.loads(index.read_text())["tokens"] == 6
    assert not (tmp_path / "cache").exists()
