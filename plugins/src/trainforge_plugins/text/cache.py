"""The token cache: a data set's tokens in one memory-mapped file, built once under a lock.

A cache folder holds `index.json`, which names the two data files that belong to it: all tokens one after the other,
and an int64 for each document: where it begins. Data files are written under other names, and the index is replaced
last and in one go, so that a reader sees the old cache or the new one; files no index names are left from a build
that was cut short and are removed by the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from trainforge.context import Console
from trainforge.errors import DataError
from trainforge.units import format_bytes
from trainforge_plugins.text.ledger import RowLedger
from trainforge_plugins.text.pool import tokenise_all, worker_count
from trainforge_plugins.text.sources import Source
from trainforge_plugins.text.tokenise import Reading
from trainforge_plugins.text.tokenizers import Tokenizer
from trainforge_plugins.text.units import cut_units

VERSION = 2
READS_UNTIL_RELEASE = 64
LOCK_POLL_S = 0.1
HEAD_START_S = 2.0


@dataclass(frozen=True)
class CacheRequest:
    """What is to be in the cache, and how it is built when it is not there."""

    sources: Sequence[Source]
    tokenizer: Tokenizer
    field: str
    strict: bool
    workers: int | str
    worker_timeout_s: float

    def identity(self) -> dict[str, Any]:
        """Everything that decides the tokens. A cache with another identity is built again."""
        return {
            "version": VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "files": {str(s.path): [s.format, s.size, s.mtime_ns] for s in self.sources},
            "reading": [[str(s.path), s.repeat, s.share, s.limit, s.rows.identity()] for s in self.sources],
            "strict": self.strict,
        }


class TokenCache:
    """The tokens of a data set, read from disk as they are needed.

    Attributes:
        tokens: number of tokens.
        documents: number of documents.
        digest: hash of tokens and document starts: the same exactly when the data are the same.
        top: the largest token id, and the row where it first stands.
        ledger: the row ledger of the build.
    """

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self.tokens: int = index["tokens"]
        self.documents: int = index["documents"]
        self.digest: str = index["digest"]
        self.top: tuple[int, str] = tuple(index["top"])
        self.ledger: dict[str, Any] = index["ledger"]
        self._maps = [_map(folder / index["tokens_file"]), _map(folder / index["starts_file"])]
        self._tokens = np.frombuffer(self._maps[0], np.dtype(index["dtype"]))
        self._starts = np.frombuffer(self._maps[1], np.int64)
        self._reads = 0

    def read(self, begin: int, end: int) -> np.ndarray:
        """The tokens from `begin` up to `end`, int64, copied. Reads past the last token give fewer."""
        self._reads += 1
        if self._reads % READS_UNTIL_RELEASE == 0:
            for (
                mapped
            ) in self._maps:  # pages stay in the system's cache, but no longer count as this process's
                mapped.madvise(mmap.MADV_DONTNEED)
        return self._tokens[begin:end].astype(np.int64)

    def starts(self, begin: int, end: int) -> np.ndarray:
        """Where documents begin after `begin` and up to `end` (inclusive), relative to `begin`."""
        low, high = np.searchsorted(self._starts, [begin, end], side="right")
        return self._starts[low:high] - begin


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    return mapped


def open_cache(
    root: Path, patterns: str | Sequence[str], request: CacheRequest, console: Console, first: bool
) -> TokenCache:
    """Open the cache of a data set below `root`, building it when it is missing or out of date.

    One process builds while the others wait for its lock; `first` marks the one that should (its progress is shown).

    Raises:
        DataError: no row can be used, or the cache cannot be written.
        WorkerError: a tokenising process died or got stuck.
    """
    asked = [patterns] if isinstance(patterns, str) else list(patterns)
    places = [p if p.startswith("package:") else os.path.abspath(Path(p).expanduser()) for p in asked]
    key = hashlib.sha256(json.dumps([places, request.field, request.tokenizer.name]).encode()).hexdigest()[
        :20
    ]
    folder = root / "text" / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not first:
            _wait_for_index(folder, request)
        with _locked(folder / "lock", console):
            index, reason = _valid_index(folder, request)
            if index is None:
                if reason:
                    console.note(f"tokenising again: {reason}")
                index = _build(folder, request, console)
        return TokenCache(folder, index)
    except OSError as error:
        size = format_bytes(sum(s.text_bytes for s in request.sources) * request.tokenizer.dtype.itemsize)
        raise DataError(
            f"cannot keep the token cache in {folder}: {error.strerror or error}: set text.cache to a folder that can "
            f"be written and has up to {size} free"
        ) from None


def _wait_for_index(folder: Path, request: CacheRequest) -> None:
    """Give the process that should build a moment to take the lock."""
    until = time.monotonic() + HEAD_START_S
    while (
        time.monotonic() < until
        and not (folder / "lock").exists()
        and _valid_index(folder, request)[0] is None
    ):
        time.sleep(LOCK_POLL_S)


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system gives it back when this process ends, however that happens."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.note("waiting for another process, which tokenises the same text")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _valid_index(folder: Path, request: CacheRequest) -> tuple[dict[str, Any] | None, str]:
    """The index when it fits the request, else None and why not (nothing to say when there was no cache)."""
    path = folder / "index.json"
    if not path.exists():
        return None, ""
    try:
        index = json.loads(path.read_text("utf-8"))
        saved = index["identity"]
        sizes = {index["tokens_file"]: index["tokens"] * np.dtype(index["dtype"]).itemsize}
        sizes[index["starts_file"]] = index["documents"] * 8
    except (ValueError, KeyError, TypeError):
        return None, f"{path} cannot be read"
    reason = _difference(saved, request.identity())
    for name, size in sizes.items():
        file = folder / name
        if not reason and (not file.exists() or file.stat().st_size != size):
            reason = f"{file} is missing or cut short"
    return (None, reason) if reason else (index, "")


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What makes a cache with identity `old` useless for `new`, for a person; empty when nothing does."""
    if old["version"] != new["version"]:
        return f"the cache has version {old['version']}, and this program writes version {new['version']}"
    if old["tokenizer"] != new["tokenizer"]:
        return "the tokenizer has changed"
    for path in new["files"]:
        if path not in old["files"]:
            return f"{path} was added"
        if old["files"][path] != new["files"][path]:
            (was, size_was, _), (now, size_now, _) = old["files"][path], new["files"][path]
            if was != now:
                return f"{path} is read as {now} instead of {was}"
            sizes = f"{size_was} to {size_now} bytes" if size_was != size_now else "same size, written anew"
            return f"{path} has changed ({sizes})"
    for path in old["files"]:
        if path not in new["files"]:
            return f"{path} is gone"
    if list(old["files"]) != list(new["files"]):
        return "the files come in another order"
    if old["reading"] != new["reading"]:
        return "the weights of the sources, or the names of their columns, have changed"
    return "text.strict has changed" if old["strict"] != new["strict"] else ""


def _build(folder: Path, request: CacheRequest, console: Console) -> dict[str, Any]:
    """Tokenise everything; leaves the new data files and the index that names them."""
    for leftover in folder.glob("*.partial"):
        leftover.unlink()
    ledger = RowLedger(request.strict)
    paths = [folder / "tokens.partial", folder / "starts.partial"]
    with paths[0].open("wb") as tokens_file, paths[1].open("wb") as starts_file:
        writer = _Writer(tokens_file, starts_file, request.tokenizer)
        _tokenise(request, writer, ledger, console)
        for file in (tokens_file, starts_file):
            file.flush()
            os.fsync(file.fileno())
    assert ledger.top is not None
    digest = writer.digest()
    names = [f"tokens-{digest[:16]}.bin", f"starts-{digest[:16]}.bin"]
    for path, name in zip(paths, names, strict=True):
        path.replace(folder / name)
    index = {
        "identity": request.identity(),
        "dtype": request.tokenizer.dtype.name,
        "tokens": writer.tokens,
        "documents": writer.documents,
        "digest": digest,
        "top": ledger.top,
        "ledger": ledger.as_dict(),
        "tokens_file": names[0],
        "starts_file": names[1],
    }
    _replace_index(folder, index)
    for old in folder.glob("*.bin"):
        if old.name not in names:
            old.unlink()  # a process that has it mapped keeps it until it ends
    return index


def _replace_index(folder: Path, index: dict[str, Any]) -> None:
    aside = folder / "index.partial"
    with aside.open("w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / "index.json")


class _Writer:
    """Appends tokens and document starts to the two data files."""

    def __init__(self, tokens_file: BinaryIO, starts_file: BinaryIO, tokenizer: Tokenizer) -> None:
        self._tokens_file, self._starts_file, self._dtype = tokens_file, starts_file, tokenizer.dtype
        self._hashes = (xxhash.xxh3_128(), xxhash.xxh3_128())
        self.tokens = self.documents = 0

    def write(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        """Append tokens; `starts` are relative to the first of them."""
        starts = (starts + self.tokens).astype(np.int64)
        tokens = tokens.astype(self._dtype, copy=False)
        for file, hashed, values in zip(
            (self._tokens_file, self._starts_file), self._hashes, (tokens, starts), strict=True
        ):
            file.write(values.data)
            hashed.update(values.data)
        self.tokens += len(tokens)
        self.documents += len(starts)

    def digest(self) -> str:
        """Hash of all that was written."""
        both = self._hashes[0].digest() + self._hashes[1].digest() + self._dtype.str.encode()
        return str(xxhash.xxh3_128(both).hexdigest())


def _tokenise(request: CacheRequest, writer: _Writer, ledger: RowLedger, console: Console) -> None:
    for source in request.sources:
        if source.size == 0 and isinstance(source.path, Path):
            ledger.add_empty(source)
    total = sum(source.size for source in request.sources)
    workers = worker_count(request.workers, request.sources, request.tokenizer)
    units = cut_units(request.sources)
    end = np.array([] if request.tokenizer.end is None else [request.tokenizer.end])
    with console.task("tokenising", total, "B") as task:
        open_document = False
        for unit, piece in tokenise_all(
            units, request.tokenizer, Reading(request.field), workers, request.worker_timeout_s
        ):
            if unit.format == "text" and len(piece.tokens) and not open_document:
                piece.starts = np.zeros(1, np.int64)
                open_document = True
            ledger.add(unit, piece)
            writer.write(piece.tokens, piece.starts)
            if unit.last and open_document:
                writer.write(end, np.empty(0, np.int64))
                open_document = False
            task.advance(unit.stop - unit.start)
    ledger.require_rows(request.field, request.sources)
