"""Images of a row: how rows name them, and how their files are opened. Knows no model."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from trainforge_plugins.text.conversation import IMAGE, BadRow, ImageReference, Message
from trainforge_plugins.text.opening import need
from trainforge_plugins.text.values import kind_of, parse_json

if TYPE_CHECKING:
    from PIL.Image import Image

TEXT_MARK = "<image>"
"""What stands for an image in a text, as LLaVA and LLaMA-Factory write it."""

MOST_PIXELS = 89_478_485
"""Pixels of an image above which Pillow warns of a decompression bomb: a quarter of a GiB as RGB."""

_MARK = re.compile(f"{IMAGE}|{re.escape(TEXT_MARK)}")
_PATH_KEYS = ("path", "image", "url", "image_url")


def read_reference(value: Any, key: str) -> ImageReference:
    """The image that a value names: a path, a `data:` address, bytes, or an object that holds one of these.

    Raises:
        BadRow: it names none.
    """
    if isinstance(value, bytes):
        return ImageReference(data=value)
    if isinstance(value, str):
        return _from_text(value, key)
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes) and value["bytes"]:
            return ImageReference(data=value["bytes"])
        if isinstance(value.get("base64"), str):
            return ImageReference(data=_decoded(value["base64"]))
        for name in _PATH_KEYS:
            if value.get(name) is not None:
                return read_reference(value[name], name)
    raise BadRow(f"{key!r} names no image", f"it is {kind_of(value)}")


def _from_text(text: str, key: str) -> ImageReference:
    if not text.strip() or "\0" in text:
        raise BadRow(f"{key!r} names no image")
    if text.startswith("data:"):
        head, comma, body = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise BadRow("an image in a data: address that is not base64")
        return ImageReference(data=_decoded(body))
    if text.startswith("file://"):
        return ImageReference(path=text.removeprefix("file://"))
    if "://" in text:
        raise BadRow("an image at an address, which is not fetched", text[:80])
    return ImageReference(path=text)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRow("an image in a data: address that is not base64") from None


def read_column(value: Any, column: str) -> list[ImageReference]:
    """The images of a column: a list, one image, or (in CSV) a list as JSON text; null is none.

    Raises:
        BadRow: it names something that is no image.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError):
            raise BadRow(f"{column!r} is text that is not JSON") from None
    if value is None or value == "":
        return []
    return [read_reference(item, column) for item in (value if isinstance(value, list) else [value])]


def place_images(
    messages: list[Message], column: list[ImageReference], marked: bool, name: str
) -> list[Message]:
    """Give each image of a row's column its place: marks in the text, and parts that name no image themselves.

    Args:
        messages: the turns; parts of their contents that are images are `IMAGE` already.
        column: the images of the row, in order.
        marked: whether `<image>` in a text stands for an image; else it is text.
        name: of the column, for messages.

    Raises:
        BadRow: there are more or fewer places than images, or an image in an assistant's turn.
    """
    left = iter(column)
    placed = []
    places = 0
    for message in messages:
        if message.content.count(IMAGE) != len(message.images):
            raise BadRow("a text holds U+FDD3, which stands for images in this program")
        marks = _MARK.findall(message.content) if marked else [IMAGE] * len(message.images)
        if marks and message.role == "assistant":
            raise BadRow("an image in an assistant's turn")
        parts = iter(message.images)
        images = [next(parts) if mark == IMAGE else None for mark in marks]
        places += images.count(None)
        images = [image or next(left, None) for image in images]
        content = message.content.replace(TEXT_MARK, IMAGE) if marked else message.content
        placed.append(replace(message, content=content, images=tuple(images)))
    if places != len(column):
        raise BadRow(
            f"the number of {TEXT_MARK} marks is not the number of images in {name!r}",
            f"marks: {places}, images: {len(column)}",
        )
    return placed


def locate(image: ImageReference, folder: Path | None) -> ImageReference:
    """The image with its whole path: one that is relative lies below `folder`."""
    if image.data is not None:
        return image
    path = os.path.join(folder or "", os.path.expanduser(image.path))
    return replace(image, path=os.path.abspath(path))


@dataclass(frozen=True)
class ImageFile:
    """An image as it was when its row was tokenised; what a cache keeps of it.

    Attributes:
        path: its file; empty when the row holds the image itself.
        size, mtime_ns: of that file; -1 when there was none.
        digest: hash of its bytes; empty when they could not be read.
        width, height: pixels; 0 when it could not be opened.
        start: the first token of the row that stands for it.
        tokens: how many do.
        data: its bytes in base64 when the row holds the image itself.
    """

    path: str
    size: int = -1
    mtime_ns: int = -1
    digest: str = ""
    width: int = 0
    height: int = 0
    start: int = 0
    tokens: int = 0
    data: str = ""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ImageFile:
        """What `dataclasses.asdict` made."""
        return cls(**value)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.path or "an image that the row holds"

    def is_current(self) -> bool:
        """Whether its file has the size and time that it had."""
        return not self.path or _stamp(self.path) == (self.size, self.mtime_ns)

    def read(self) -> bytes:
        """Its bytes now.

        Raises:
            OSError: the file cannot be read.
        """
        return Path(self.path).read_bytes() if self.path else base64.b64decode(self.data)


def _stamp(path: str) -> tuple[int, int]:
    try:
        facts = os.stat(path)
    except OSError:
        return -1, -1
    return facts.st_size, facts.st_mtime_ns


def open_image(reference: ImageReference) -> tuple[ImageFile, Image | None, str]:
    """Open an image that `locate` has given its whole path.

    Gives the facts about its file, the image as RGB, and why it cannot be used (then without an image).
    """
    file = ImageFile(reference.path, *_stamp(reference.path))
    if reference.data is not None:
        encoded = base64.b64encode(reference.data).decode("ascii")
        file = ImageFile("", len(reference.data), 0, data=encoded)
    try:
        raw = file.read()
    except OSError as error:
        return file, None, error.strerror or type(error).__name__
    file = replace(file, digest=digest_of(raw))
    try:
        image = decode(raw)
    except UnusableImage as error:
        return file, None, str(error)
    return replace(file, width=image.width, height=image.height), image, ""


class UnusableImage(Exception):
    """Bytes that are no image that can be used; says why."""


def decode(raw: bytes) -> Image:
    """Decode an image of any kind that Pillow reads, turned as its camera says, as RGB.

    Raises:
        UnusableImage: it is none, is damaged or cut short, has no pixels, or too many.
    """
    pillow = need("PIL.Image", "reading images")
    turned = need("PIL.ImageOps", "reading images").exif_transpose
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bombs, which the size tells, and of broken metadata
            image = pillow.open(io.BytesIO(raw))
        if image.width * image.height > MOST_PIXELS:
            raise UnusableImage(f"it has {image.width} x {image.height} pixels, more than {MOST_PIXELS:,}")
        if image.width < 1 or image.height < 1:
            raise UnusableImage("it has no pixels")
        rgb: Image = turned(image).convert("RGB")
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise UnusableImage(f"it has more than {MOST_PIXELS:,} pixels") from None
    except pillow.UnidentifiedImageError:
        raise UnusableImage("it is no image of a known kind") from None
    except UnusableImage:
        raise
    except Exception as error:  # decoders raise whatever their format leads them to
        raise UnusableImage(f"it is damaged: {error}") from None
    return rgb


def digest_of(raw: bytes) -> str:
    """The hash by which a changed image is told."""
    return xxhash.xxh3_128_hexdigest(raw)
