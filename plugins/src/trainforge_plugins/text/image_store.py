"""What a token cache keeps of images: for each document the files of its images, never their pixels.

Two files beside the tokens: a line of JSON for each document with images (and for each row that could not be used, so
that an image which is put right is noticed), and int64 pairs: the document, and where its line begins.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from trainforge_plugins.text.images import ImageFile

NO_DOCUMENT = -1
KINDS = ("images", "image_places")


class ImageWriter:
    """Writes the two files of a cache; none when no row has an image."""

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / f"{kind}.partial" for kind in KINDS]
        self._files: list[BinaryIO] = []
        self._hash = xxhash.xxh3_128()
        self._at = 0

    def add(self, document: int, images: Sequence[ImageFile]) -> None:
        """Append the images of a document, or with `NO_DOCUMENT` those of a row that is not used."""
        if not self._files:
            self._files = [path.open("wb") for path in self._paths]
        line = json.dumps([asdict(image) for image in images]).encode("ascii") + b"\n"
        self._files[0].write(line)
        self._files[1].write(np.array([document, self._at], np.int64).data)
        self._at += len(line)
        if document != NO_DOCUMENT:
            facts = [document, [(image.digest, image.start, image.tokens) for image in images]]
            self._hash.update(json.dumps(facts).encode("ascii"))

    def digest(self) -> bytes:
        """Hash of the images that documents have; empty when no row has one."""
        return self._hash.digest() if self._files else b""

    def finish(self, folder: Path, digest: str) -> dict[str, int]:
        """Put the files on disk under names with `digest`; gives names and sizes for the index."""
        found = {}
        for kind, path, file in zip(KINDS, self._paths, self._files, strict=False):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            name = f"{kind}-{digest[:16]}.bin"
            found[name] = path.stat().st_size
            path.replace(folder / name)
        return found

    def close(self) -> None:
        """Close what an error left open."""
        for file in self._files:
            file.close()


class ImageIndex:
    """The images of a cache's documents, read from disk as they are needed.

    Attributes:
        documents: the documents that have images, ascending, int64.
    """

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        names = list(index.get("images", ()))
        places = (
            np.fromfile(folder / names[1], np.int64).reshape(-1, 2) if names else np.empty((0, 2), np.int64)
        )
        self._map = (
            _map(folder / names[0]) if names else b""
        )  # stays readable when another build removes the file
        used = places[places[:, 0] != NO_DOCUMENT]
        self.documents, self._lines = used[:, 0].copy(), used[:, 1].copy()

    def of(self, document: int) -> list[ImageFile]:
        """The images of a document, in order; empty when it has none."""
        at = int(np.searchsorted(self.documents, document))
        if at == len(self.documents) or self.documents[at] != document:
            return []
        line = int(self._lines[at])
        return _images(self._map[line : self._map.find(b"\n", line)])


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def changed_image(folder: Path, index: dict[str, Any]) -> str:
    """The first image of a cache whose file is not as it was, with how it changed; empty when none is."""
    for image in _all_images(folder, index):
        if not image.is_current():
            there = os.path.exists(image.path)
            how = "is gone" if not there else "has changed" if image.mtime_ns >= 0 else "is there now"
            return f"{image.path} {how}"
    return ""


def _all_images(folder: Path, index: dict[str, Any]) -> Iterator[ImageFile]:
    names = list(index.get("images", ()))
    if names:
        with (folder / names[0]).open("rb") as lines:
            for line in lines:
                yield from _images(line)


def _images(line: bytes) -> list[ImageFile]:
    return [ImageFile.from_json(value) for value in json.loads(line)]
