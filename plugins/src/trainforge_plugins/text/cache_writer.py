"""Appends to the data files of a token cache while it is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

import numpy as np
import xxhash

from trainforge_plugins.text.image_store import NO_DOCUMENT, ImageWriter
from trainforge_plugins.text.tokenise import Piece
from trainforge_plugins.text.tokenizers import Tokenizer


class CacheWriter:
    """Appends tokens, document starts and perhaps labels to the data files, and images to theirs."""

    def __init__(self, files: Sequence[BinaryIO], tokenizer: Tokenizer, images: ImageWriter) -> None:
        self._files, self._dtype, self._images = files, tokenizer.dtype, images
        self._hashes = [xxhash.xxh3_128() for _ in files]
        self.tokens = self.documents = 0

    def write(self, tokens: np.ndarray, starts: np.ndarray, labels: np.ndarray | None) -> None:
        """Append tokens; `starts` are relative to the first of them; `labels` for conversations."""
        starts = (starts + self.tokens).astype(np.int64)
        tokens = tokens.astype(self._dtype, copy=False)
        parts = (tokens, starts) if labels is None else (tokens, starts, labels)
        for file, hashed, values in zip(self._files, self._hashes, parts, strict=True):
            file.write(values.data)
            hashed.update(values.data)
        self.tokens += len(tokens)
        self.documents += len(starts)

    def write_images(self, piece: Piece) -> None:
        """Note the images of a piece whose documents come next."""
        for document, images in piece.images:
            self._images.add(self.documents + document, images)
        if piece.unused_images:
            self._images.add(NO_DOCUMENT, piece.unused_images)

    def digest(self) -> str:
        """Hash of all that was written."""
        parts = [
            *(hashed.digest() for hashed in self._hashes),
            self._dtype.str.encode(),
            self._images.digest(),
        ]
        return str(xxhash.xxh3_128(b"".join(parts)).hexdigest())
