"""The pixels of a step's images, decoded and processed in the background while the step before is computed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from trainforge.errors import DataError
from trainforge_plugins.text.conversation import BadRow
from trainforge_plugins.text.image_store import ImageIndex
from trainforge_plugins.text.images import ImageFile, UnusableImage, decode, digest_of
from trainforge_plugins.text.vision import VisionProcessor, joined

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

MOST_THREADS = 4


class Pictures:
    """Gives the inputs that a processor makes of the images of documents.

    Files are read and decoded by a few threads; the processor is called by one at a time, since tokenizers of the
    `tokenizers` library must not be called from two threads at once.
    """

    def __init__(self, index: ImageIndex, processor: VisionProcessor) -> None:
        self._index, self._processor = index, processor
        self._lock = threading.Lock()
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="images")
        self._asked: dict[int, Future[dict[str, Tensor]]] = {}

    def prepare(self, documents: Sequence[int]) -> None:
        """Begin with the images of `documents`, and forget what was begun for others."""
        for document in set(self._asked) - set(documents):
            self._asked.pop(document).cancel()
        for document in documents:
            if document not in self._asked:
                self._asked[document] = self._pool.submit(self._process, document)

    def inputs(self, documents: Sequence[int]) -> dict[str, Tensor]:
        """The inputs of all images of `documents`, in order, along dimension 0; empty for none.

        Raises:
            DataError: an image is not what it was when its row was tokenised.
        """
        begun = [
            self._asked.pop(document)
            if document in self._asked
            else self._pool.submit(self._process, document)
            for document in documents
        ]
        return joined([future.result() for future in begun])

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _process(self, document: int) -> dict[str, Tensor]:
        files = self._index.of(document)
        images = [_opened(file) for file in files]
        try:
            with self._lock:
                return self._processor.expand(images).inputs
        except BadRow as bad:
            raise DataError(
                f"{files[0].name}: {bad}, though it took it when the rows were tokenised"
            ) from None


def _opened(file: ImageFile) -> Image:
    try:
        raw = file.read()
        if digest_of(raw) != file.digest:
            raise UnusableImage("it has changed")
        return decode(raw)
    except (OSError, UnusableImage) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"the image {file.name} cannot be used any more: {why} since its row was tokenised: put it back as it was "
            "and resume, or start a new run, which leaves out what it cannot use"
        ) from None
