"""JSON documents that tell whether they are what was written; small files that are on the disk once they have a name.

A sealed document has, last, the field `checksum`: the xxh3-128 of the same JSON without that field. A reader also
serializes what it has parsed and compares it with the bytes of the file, so that any change to the file is found,
even one that parses to the same values.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import xxhash

from trainforge.errors import CheckpointError

NAME = "checkpoint.json"
"""Of the document that makes a folder a checkpoint."""
_MOST_BYTES = 2**30


def write_sealed(path: Path, document: dict[str, Any]) -> None:
    """Write a document with its checksum, and bring it to the disk.

    Raises:
        CheckpointError: it does not consist of JSON types.
    """
    try:
        content = _sealed(document)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the plain data of a part cannot be written as JSON: {error}") from error
    write_durably(path, content)


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a document, checking its checksum; without that field.

    Raises:
        CheckpointError: it is missing or altered.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{path} is damaged: it is larger than any description of a checkpoint")
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: this is not a complete checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        document: dict[str, Any] = json.loads(content)
        del document["checksum"]
        sound = _sealed(document) == content
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: it is not the JSON that was written") from error
    if not sound:
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content")
    return document


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file under a temporary name, fsync it, and give it its name."""
    aside = path.with_name(path.name + ".part")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def canonical(document: dict[str, Any]) -> bytes:
    """The bytes of a document; it has no others."""
    return (json.dumps(document, indent=1) + "\n").encode()


def _sealed(document: dict[str, Any]) -> bytes:
    """The bytes of a document with its checksum, which is its last field; serialized once, since it may be large."""
    content = canonical(document)
    checksum = xxhash.xxh3_128_hexdigest(content)
    comma = "," if document else ""
    return (
        content.removesuffix(b"\n}\n" if document else b"}\n")
        + f'{comma}\n "checksum": "{checksum}"\n}}\n'.encode()
    )
