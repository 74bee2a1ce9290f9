"""Opens the files of a data set, wherever they lie and however they are compressed."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from trainforge.errors import DataError

Compression = Literal["", "gz", "zst"]
READ_BYTES = 1 << 16

EXTRAS = {"pyarrow": "parquet", "zstandard": "zstd", "fsspec": "remote", "PIL": "images"}
"""Which extra of trainforge-plugins brings which package."""


def is_remote(pattern: str) -> bool:
    """Whether `pattern` is an address (`s3://...`, `https://...`) and not a path."""
    return "://" in pattern


def need(package: str, what: str) -> Any:
    """Import an optional package.

    Raises:
        DataError: it is not installed; names the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise DataError(
            f"{what} needs the package {package.partition('.')[0]}, which is not installed: "
            f"pip install 'trainforge-plugins[{EXTRAS[package.partition('.')[0]]}]'"
        ) from None


@dataclass(frozen=True)
class RemoteFile:
    """A file that fsspec reads: its address, its bytes (0 when unknown) and what changes when it changes."""

    address: str
    size: int
    stamp: str


def find_remote(pattern: str) -> list[RemoteFile]:
    """The files that an address names, a glob among them or a folder; sorted.

    Raises:
        DataError: fsspec or the package for this protocol is missing, or nothing is found there.
    """
    fsspec = need("fsspec", f"reading {pattern}")
    try:
        system, path = fsspec.core.url_to_fs(pattern)
        paths = system.glob(path) if any(sign in path for sign in "*[") else [path]
        files: list[RemoteFile] = []
        for place in sorted(paths):
            info = system.info(place)
            if info.get("type") == "directory":
                files += [_described(system, name) for name in sorted(system.find(place))]
            else:
                files.append(_described(system, place))
    except ImportError as error:
        raise DataError(f"cannot read {pattern}: {error}: pip install 'trainforge-plugins[remote]'") from None
    except Exception as error:  # each system has its own
        raise DataError(
            f"cannot read {pattern} ({type(error).__name__}: {error}): check the address"
        ) from None
    if not files:
        raise DataError(f"no file matches {pattern}: check the address")
    return files


def _described(system: Any, place: str) -> RemoteFile:
    info = system.info(place)
    stamps = [str(info[key]) for key in ("ETag", "etag", "LastModified", "mtime", "created") if info.get(key)]
    return RemoteFile(system.unstrip_protocol(place), int(info.get("size") or 0), stamps[0] if stamps else "")


@contextmanager
def open_raw(place: Path | str) -> Iterator[BinaryIO]:
    """Open a file or an address as it is stored."""
    if isinstance(place, Path):
        with place.open("rb") as file:
            yield file
    else:
        with need("fsspec", f"reading {place}").open(place, "rb") as file:
            yield file


@contextmanager
def open_plain(place: Path | str, compression: Compression) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file and take its compression off; the second value is the stored file, whose `tell` shows the progress.

    Raises:
        DataError: the file cannot be read, is damaged or was cut short, here or while it is being read.
    """
    try:
        with open_raw(place) as raw:
            if compression == "gz":
                yield cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb")), raw
            elif compression == "zst":
                yield cast(BinaryIO, io.BufferedReader(_Zstd(raw, str(place)), READ_BYTES)), raw
            else:
                yield raw, raw
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"cannot read {place}: {error.strerror or error}: check the file") from None
    except (EOFError, zlib.error) as error:
        raise DataError(f"cannot read {place} to its end: {error}: fetch or compress it again") from None


class _Zstd(io.RawIOBase):
    """Reads zstd frames one after the other, and notices when the last is cut short."""

    def __init__(self, raw: BinaryIO, name: str) -> None:
        self._package = need("zstandard", f"reading {name}")
        self._raw = raw
        self._frame: Any = None
        self._given = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._given:
            stored = self._raw.read(READ_BYTES)
            if not stored:
                if self._frame is not None:
                    raise EOFError("the compressed data end in the middle")
                return 0
            self._given = memoryview(self._expand(stored))
        count = min(len(target), len(self._given))
        target[:count] = self._given[:count]
        self._given = self._given[count:]
        return count

    def _expand(self, stored: bytes) -> bytes:
        parts = []
        while stored:
            if self._frame is None:
                self._frame = self._package.ZstdDecompressor().decompressobj()
            try:
                parts.append(self._frame.decompress(stored))
            except self._package.ZstdError as error:
                raise OSError(f"not zstd or damaged ({error})") from None
            stored = b""
            if self._frame.eof:
                stored, self._frame = self._frame.unused_data, None
        return b"".join(parts)
