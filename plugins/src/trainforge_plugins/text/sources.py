"""Finds the files of a data set: by path, folder, glob, Python package or address."""

from __future__ import annotations

import glob
import importlib.resources
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal

from trainforge.errors import DataError
from trainforge_plugins.text.containers import json_shape
from trainforge_plugins.text.formats import RowFormat
from trainforge_plugins.text.opening import (
    READ_BYTES,
    Compression,
    RemoteFile,
    find_remote,
    is_remote,
    open_plain,
)

Format = Literal["text", "jsonl", "chat"]
"""What a file holds: plain text, rows with a text each, or rows that are conversations."""

Container = Literal["lines", "json", "csv", "tsv", "parquet"]

CONTAINERS: dict[str, Container] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
BINARY_SUFFIXES = (".bz2", ".xz", ".zip", ".tar", ".tgz", ".arrow", ".pdf", ".docx", ".xlsx")
REGISTRY = "dataset_info.json"
COMPRESSED_TO_TEXT = 4
"""Bytes of text that one compressed byte is taken to hold, where sizes are only estimated."""


@dataclass(frozen=True)
class Source:
    """One input file, as it was when it was found.

    Attributes:
        path: where it lies; a text for an address that fsspec reads.
        format: what its rows are.
        size: bytes as stored, compressed or not.
        mtime_ns: when it was changed; for an address what its system says instead.
        container: how rows lie in it.
        compression: what has to be taken off first.
        rows: how its rows become conversations.
        repeat: the number of this pass over the file, from 0, when `text.sources` gives it a weight.
        share: how much of the rows this pass uses, chosen by a key.
        limit: rows that are read at most, the first ones.
        has_images: whether some of its first rows have images, so that its rows take long.
    """

    path: Path | str
    format: Format
    size: int
    mtime_ns: int | str
    container: Container = "lines"
    compression: Compression = ""
    rows: RowFormat = field(default_factory=RowFormat)
    repeat: int = 0
    share: float = 1.0
    limit: int | None = None
    has_images: bool = False

    @property
    def in_spans(self) -> bool:
        """Whether workers can read parts of the file themselves."""
        plain = self.format == "text" or self.container == "lines"
        return plain and not self.compression and isinstance(self.path, Path) and self.limit is None

    def is_current(self) -> bool:
        """Whether the file has the size and time that it had; of an address nobody asks again."""
        if not isinstance(self.path, Path):
            return True
        try:
            status = self.path.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)

    @property
    def text_bytes(self) -> int:
        """Bytes of text, about."""
        packed = self.compression or self.container == "parquet"
        return self.size * (COMPRESSED_TO_TEXT if packed else 1)


def find_sources(
    patterns: str | Sequence[str], format: Literal["auto", "text", "jsonl"], option: str = "text.path"
) -> list[Source]:
    """Give the files that `patterns` name, in their order, files of a folder or glob sorted; each file once.

    `option` is what the recipe calls the patterns, for messages.

    Raises:
        DataError: a pattern finds nothing, or a file cannot be read, or is of a kind that holds no text.
    """
    found: dict[Path | str, Source] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if is_remote(pattern):
            for file in find_remote(pattern):
                found[file.address] = _remote(file, format, option)
            continue
        for path in _expand(pattern, option):
            absolute = Path(os.path.abspath(path))
            if absolute not in found:
                found[absolute] = _local(absolute, format, option)
    if not found:
        raise DataError(f"{option} is an empty list: name at least one file")
    if all(source.size == 0 for source in found.values()):
        names = ", ".join(str(path) for path in list(found)[:3])
        raise DataError(
            f"{option}: {names} {'is' if len(found) == 1 else 'are'} empty: give a file that holds text"
        )
    return list(found.values())


def _expand(pattern: str, option: str) -> list[Path]:
    if pattern.startswith("package:"):
        return [_in_package(pattern, option)]
    path = Path(pattern).expanduser()
    if path.is_dir():
        return _in_folder(path, option)
    if path.exists():
        return [path]
    if glob.has_magic(pattern):
        matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        files = [match for match in matches if not match.is_dir() and match.name != REGISTRY]
        if files:
            return files
        raise DataError(f"{option}: no file matches {pattern} (looked in {os.getcwd()})")
    raise DataError(f"{option}: {pattern} does not exist (looked in {os.getcwd()}): check the path")


def _in_package(pattern: str, option: str) -> Path:
    package, _, inside = pattern.removeprefix("package:").partition("/")
    try:
        path = Path(str(importlib.resources.files(package).joinpath(inside)))
    except (ModuleNotFoundError, TypeError, ValueError):
        raise DataError(
            f"{option}: {pattern} names the package {package!r}, which is not installed"
        ) from None
    if not inside or not path.is_file():
        raise DataError(f"{option}: {pattern}: the package {package} holds no file {inside!r}")
    return path


def _in_folder(folder: Path, option: str) -> list[Path]:
    files = sorted(
        Path(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if _suffixes(name)[0] in (*TEXT_SUFFIXES, *CONTAINERS)
        and not name.startswith(".")
        and name != REGISTRY
    )
    if not files:
        raise DataError(
            f"{option}: the folder {folder} holds no file that ends in "
            f"{', '.join((*TEXT_SUFFIXES, *CONTAINERS))}: "
            f"name the files with a glob such as {folder}/**/*.log"
        )
    return files


def _suffixes(name: str) -> tuple[str, Compression]:
    """What a name says of the content, and of its compression."""
    path = PurePath(name.lower().partition("?")[0])
    compression = COMPRESSIONS.get(path.suffix, "")
    return (PurePath(path.stem).suffix if compression else path.suffix), compression


def _local(path: Path, format: Literal["auto", "text", "jsonl"], option: str) -> Source:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{option}: {path} is not a regular file: save its content in a file first")
    except OSError as error:
        raise DataError(f"{option}: cannot read {path}: {error.strerror}: check its permissions") from None
    return _describe(path, path.name, format, status.st_size, status.st_mtime_ns, option)


def _remote(file: RemoteFile, format: Literal["auto", "text", "jsonl"], option: str) -> Source:
    return _describe(file.address, file.address.rpartition("/")[2], format, file.size, file.stamp, option)


def _describe(
    path: Path | str,
    name: str,
    format: Literal["auto", "text", "jsonl"],
    size: int,
    stamp: int | str,
    option: str,
) -> Source:
    suffix, compression = _suffixes(name)
    container = CONTAINERS.get(suffix)
    if suffix in BINARY_SUFFIXES or (format == "text" and container == "parquet"):
        raise DataError(
            f"{option}: {path} is a {suffix} file, not text: unpack or convert it to .txt or .jsonl"
        )
    start = b""
    if container != "parquet" and (size or not isinstance(path, Path)):
        with open_plain(path, compression) as (file, _):
            start = file.read(READ_BYTES)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{option}: {path} is UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
    if container == "json" and json_shape(start) == "lines":
        container = "lines"
    kind: Format = "text" if format == "text" or (format == "auto" and container is None) else "jsonl"
    return Source(path, kind, size, stamp, container or "lines", compression)
