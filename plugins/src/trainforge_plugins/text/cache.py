"""The token cache: a data set's tokens in one memory-mapped file, built once under a lock.

A cache folder holds `index.json`, which names the data files that belong to it: all tokens one after the other; an
int64 for each document: where it begins; for conversations a byte for each token: whether it is to be learnt; and the
images of documents that have some (see `image_store`). Data files are written under other names, and the index is
replaced last and in one go, so that a reader sees the old cache or the new one; files no index names are left from a
build that was cut short and are removed by the next.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainforge.context import Console
from trainforge.errors import DataError
from trainforge.units import format_bytes
from trainforge_plugins.text.cache_writer import CacheWriter
from trainforge_plugins.text.image_store import ImageIndex, ImageWriter, changed_image
from trainforge_plugins.text.ledger import RowLedger
from trainforge_plugins.text.locking import give_head_start, locked
from trainforge_plugins.text.opening import is_remote
from trainforge_plugins.text.pool import tokenise_all, worker_count
from trainforge_plugins.text.rendering import Rendering
from trainforge_plugins.text.sources import Source
from trainforge_plugins.text.tokenise import Reading
from trainforge_plugins.text.tokenizers import Tokenizer
from trainforge_plugins.text.units import cut_units

VERSION = 4
READS_UNTIL_RELEASE = 64
COUNTED_AT_ONCE = 1 << 24
"""Labels that are looked at before their memory is given back: those of a large data set need not fit."""


@dataclass(frozen=True)
class CacheRequest:
    """What is to be in the cache, and how it is built when it is not there."""

    sources: Sequence[Source]
    tokenizer: Tokenizer
    field: str
    strict: bool
    workers: int | str
    worker_timeout_s: float
    rendering: Rendering | None = None

    def identity(self) -> dict[str, Any]:
        """Everything that decides the tokens. A cache with another identity is built again."""
        return {
            "version": VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "files": {str(s.path): [s.format, s.size, s.mtime_ns] for s in self.sources},
            "reading": [[str(s.path), s.repeat, s.share, s.limit, s.rows.identity()] for s in self.sources],
            "strict": self.strict,
            "rendering": {} if self.rendering is None else self.rendering.identity(),
        }


class TokenCache:
    """The tokens of a data set, read from disk as they are needed.

    Attributes:
        tokens: number of tokens.
        documents: number of documents.
        digest: hash of tokens, document starts and labels: the same exactly when the data are the same.
        top: the largest token id, and the row where it first stands.
        ledger: the row ledger of the build.
        conversations: whether the documents are conversations, with labels.
        images: the images of the documents that have some.
    """

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self.tokens: int = index["tokens"]
        self.documents: int = index["documents"]
        self.digest: str = index["digest"]
        self.top: tuple[int, str] = tuple(index["top"])
        self.ledger: dict[str, Any] = index["ledger"]
        self._maps = [_map(folder / name) for name in index["files"]]
        self._labels = np.frombuffer(self._maps[2], np.uint8) if len(self._maps) > 2 else None
        self._tokens = np.frombuffer(self._maps[0], np.dtype(index["dtype"]))
        self._starts = np.frombuffer(self._maps[1], np.int64)
        self.conversations = self._labels is not None
        self.images = ImageIndex(folder, index)
        self._reads = 0
        self._supervised: int | None = None

    def read(self, begin: int, end: int) -> np.ndarray:
        """The tokens from `begin` up to `end`, int64, copied. Reads past the last token give fewer."""
        self._reads += 1
        if self._reads % READS_UNTIL_RELEASE == 0:
            self._release()
        return self._tokens[begin:end].astype(np.int64)

    def supervised(self, begin: int, end: int) -> np.ndarray:
        """Which of the tokens from `begin` up to `end` are to be learnt, bool."""
        if self._labels is None:
            return np.ones(min(end, self.tokens) - begin, bool)
        return self._labels[begin:end].astype(bool)

    def count_supervised(self) -> int:
        """How many tokens are to be learnt, but for the first of each document."""
        if self._labels is None:
            return self.tokens - self.documents
        if self._supervised is None:
            self._supervised = 0
            for begin in range(0, self.tokens, COUNTED_AT_ONCE):
                labels = self._labels[begin : begin + COUNTED_AT_ONCE]
                low, high = np.searchsorted(self._starts, [begin, begin + COUNTED_AT_ONCE])
                firsts = labels[self._starts[low:high] - begin]
                self._supervised += int(np.count_nonzero(labels)) - int(np.count_nonzero(firsts))
                self._release()
        return self._supervised

    def _release(self) -> None:
        """Let go of the pages that were read: they stay in the system's cache, but count no longer as ours."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def bounds(self) -> np.ndarray:
        """Where each document begins, and where the last ends: int64 `[documents + 1]`."""
        return np.append(self._starts, self.tokens)

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
    root: Path, patterns: str | Sequence[str], request: CacheRequest, console: Console, first: bool, who: str
) -> TokenCache:
    """Open the cache of a data set below `root`, building it when it is missing or out of date.

    One process builds while the others wait for its lock; `first` marks the one that should (its progress is shown).
    `who` is this process, for the messages of those that wait. They wait twice as long as it does for a worker, so that
    it speaks first.

    Raises:
        DataError: no row can be used, or the cache cannot be written.
        WorkerError: a tokenising process died or got stuck, or the one that builds for all.
    """
    asked = [patterns] if isinstance(patterns, str) else list(patterns)
    places = [
        p if p.startswith("package:") or is_remote(p) else os.path.abspath(Path(p).expanduser())
        for p in asked
    ]
    named_by = json.dumps([places, request.field, request.tokenizer.name])
    folder = root / "text" / hashlib.sha256(named_by.encode()).hexdigest()[:20]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / "lock"
        if not first:
            give_head_start(lock, lambda: _valid_index(folder, request)[0] is not None)
        with locked(lock, console, 2 * request.worker_timeout_s) as progress:
            index, reason = _valid_index(folder, request)
            if index is None:
                if reason:
                    console.note(f"tokenising again: {reason}")
                index = _build(folder, request, console, lambda done: progress(f"{who}, after {done}"))
            return TokenCache(folder, index)  # under the lock: another build would remove its files
    except OSError as error:
        size = format_bytes(sum(s.text_bytes for s in request.sources) * request.tokenizer.dtype.itemsize)
        raise DataError(
            f"cannot keep the token cache in {folder}: {error.strerror or error}: set text.cache to a folder that can "
            f"be written and has up to {size} free"
        ) from None


def _valid_index(folder: Path, request: CacheRequest) -> tuple[dict[str, Any] | None, str]:
    """The index when it fits the request, else None and why not (nothing to say when there was no cache)."""
    path = folder / "index.json"
    if not path.exists():
        return None, _other_tokenizer(folder, request)
    try:
        index = json.loads(path.read_text("utf-8"))
        saved = index["identity"]
        widths = (
            index["tokens"] * np.dtype(index["dtype"]).itemsize,
            index["documents"] * 8,
            index["tokens"],
        )
        sizes = dict(zip(index.get("files", ()), widths, strict=False)) | index.get("images", {})
    except (ValueError, KeyError, TypeError):
        return None, f"{path} cannot be read"
    reason = _difference(saved, request.identity())
    for name, size in sizes.items():
        file = folder / name
        if not reason and (not file.exists() or file.stat().st_size != size):
            reason = f"{file} is missing or cut short"
    reason = reason or changed_image(folder, index)
    return (None, reason) if reason else (index, "")


def _other_tokenizer(folder: Path, request: CacheRequest) -> str:
    """Says when the same files have a cache of another tokenizer; each has its own, so that one may go back."""
    for path in folder.parent.glob("*/index.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            old = json.loads(path.read_text("utf-8"))["identity"]
            same = list(old["files"]) == [str(source.path) for source in request.sources]
            if same and old["tokenizer"] != request.tokenizer.fingerprint:
                return "the tokenizer has changed (the cache of the other one is kept)"
    return ""


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
    for key in {**new["rendering"], **old["rendering"]}:
        if old["rendering"].get(key) != new["rendering"].get(key):
            return f"{key} has changed"
    if list(old["files"]) != list(new["files"]):
        return "the files come in another order"
    if old["reading"] != new["reading"]:
        return "the weights of the sources, or the names of their columns, have changed"
    return "text.strict has changed" if old["strict"] != new["strict"] else ""


def _build(
    folder: Path, request: CacheRequest, console: Console, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Tokenise everything; leaves the new data files and the index that names them.

    Raises:
        DataError: no row can be used, or a file changed in the meantime.
    """
    for leftover in folder.glob("*.partial"):
        leftover.unlink()
    ledger = RowLedger(request.strict)
    kinds = ("tokens", "starts") if request.rendering is None else ("tokens", "starts", "labels")
    paths = [folder / f"{kind}.partial" for kind in kinds]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        images = ImageWriter(folder)
        stack.callback(images.close)
        writer = CacheWriter(files, request.tokenizer, images)
        _tokenise(request, writer, ledger, console, progress)
        for source in request.sources:
            if not source.is_current():
                raise DataError(
                    f"{source.path} changed while it was tokenised: wait until it is written, and start again"
                )
        for file in files:
            progress(f"writing {file.name}")
            file.flush()
            os.fsync(file.fileno())
        image_files = images.finish(folder, writer.digest())
    assert ledger.top is not None
    digest = writer.digest()
    names = [f"{kind}-{digest[:16]}.bin" for kind in kinds]
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
        "files": names,
        "images": image_files,
    }
    _replace_index(folder, index)
    for old in folder.glob("*.bin"):
        if old.name not in (*names, *image_files):
            old.unlink()  # a process that has it mapped keeps it until it ends
    return index


def _replace_index(folder: Path, index: dict[str, Any]) -> None:
    aside = folder / "index.partial"
    with aside.open("w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / "index.json")


def _tokenise(
    request: CacheRequest,
    writer: CacheWriter,
    ledger: RowLedger,
    console: Console,
    progress: Callable[[str], None],
) -> None:
    progress("starting")
    for source in request.sources:
        if source.size == 0 and isinstance(source.path, Path):
            ledger.add_file(source, "empty file")
    total = sum(source.size for source in request.sources)
    workers = worker_count(request.workers, request.sources, request.tokenizer)
    units = cut_units(request.sources)
    end = np.array([] if request.tokenizer.end is None else [request.tokenizer.end])
    with_rows = set()
    with console.task("tokenising", total, "B") as task:
        open_document = False
        for unit, piece in tokenise_all(
            units,
            request.tokenizer,
            Reading(request.field, request.rendering),
            workers,
            request.worker_timeout_s,
        ):
            if unit.format == "text" and len(piece.tokens) and not open_document:
                piece.starts = np.zeros(1, np.int64)
                open_document = True
            with_rows.add(unit.source)
            ledger.add(unit, piece)
            writer.write_images(piece)
            writer.write(piece.tokens, piece.starts, piece.labels)
            if unit.last and open_document:
                writer.write(end, np.empty(0, np.int64), None)
                open_document = False
            task.advance(unit.stop - unit.start)
            progress(str(unit))
    for number, source in enumerate(request.sources):
        if source.size and not source.repeat and number not in with_rows:
            ledger.add_file(source, "file without rows")
    longest = None if request.rendering is None else request.rendering.max_len
    ledger.require_rows(request.field, request.sources, longest)
