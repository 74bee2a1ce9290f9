"""Tokenizers: bytes, built in, and those of Hugging Face. All give numpy arrays of token ids."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainforge.errors import DataError
from trainforge_plugins.text.sources import split_text

if TYPE_CHECKING:
    from trainforge.context import Context

BYTES = "bytes"
DOCUMENT_END = 256
"""The token that ends a document in the byte vocabulary, after the 256 bytes."""

_PROBE_SECONDS = 10.0  # longest wait for the hub to say whether it has a tokenizer
BLOCK_BYTES = 1 << 16
"""Longest text that a Hugging Face tokenizer gets at once; bounds its memory, which is many times the text's."""


@dataclass(frozen=True)
class TokenizerSpec:
    """What a worker process needs to make the same tokenizer. `serialized` None is the byte tokenizer."""

    name: str
    end: int | None
    serialized: str | None = None

    def make(self) -> Tokenizer:
        """Make the tokenizer."""
        if self.serialized is None:
            return ByteTokenizer()
        import tokenizers

        return LibraryTokenizer(self.name, tokenizers.Tokenizer.from_str(self.serialized), self.end)


class Tokenizer(ABC):
    """Turns text into token ids and back.

    Attributes:
        name: what the recipe calls it.
        size: one more than the largest id it can give.
        end: the token that follows each document, or None when its vocabulary has none.
        fingerprint: differs when the tokens of some text differ.
    """

    name: str
    size: int
    end: int | None
    fingerprint: str

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint16 and uint32 that holds every id."""
        return np.dtype(np.uint16 if self.size <= 2**16 else np.uint32)

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray:
        """Token ids of valid UTF-8, without any special token."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""

    def spec(self) -> TokenizerSpec | None:
        """What makes this tokenizer again in another process, or None when it cannot leave this one."""
        return None


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 and a document end: 257 tokens, any text in any language, nothing to download."""

    name = BYTES
    size = DOCUMENT_END + 1
    end = DOCUMENT_END
    fingerprint = "bytes-1"

    def encode(self, text: bytes) -> np.ndarray:
        """The bytes themselves."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes; a broken character becomes U+FFFD and other tokens nothing."""
        return bytes(token for token in ids if token < DOCUMENT_END).decode("utf-8", "replace")

    def spec(self) -> TokenizerSpec:
        """What makes it again."""
        return TokenizerSpec(self.name, self.end)


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library. Long texts are taken in blocks of 64 KiB (see `safe_cut`)."""

    def __init__(self, name: str, backend: Any, end: int | None) -> None:
        self.name, self.end, self._backend = name, end, backend
        backend.no_truncation()
        backend.no_padding()
        self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=0) + 1
        self._serialized: str = backend.to_str()
        self.fingerprint = hashlib.sha256(f"{end}{self._serialized}".encode()).hexdigest()[:32]

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids, block by block."""
        ids: list[int] = []
        for block in split_text(text, BLOCK_BYTES):
            (encoding,) = self._backend.encode_batch_fast([block.decode("utf-8")], add_special_tokens=False)
            ids += encoding.ids  # `fast` keeps no offsets: 1.6 times as fast as `encode`
        return np.array(ids, dtype=self.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def spec(self) -> TokenizerSpec:
        """What makes it again."""
        return TokenizerSpec(self.name, self.end, self._serialized)


class PythonTokenizer(Tokenizer):
    """A Hugging Face tokenizer without a `tokenizers` backend. It stays in the main process."""

    def __init__(self, name: str, backend: Any, end: int | None) -> None:
        self.name, self.end, self._backend = name, end, backend
        vocabulary = backend.get_vocab()
        self.size = max(vocabulary.values(), default=0) + 1
        words = repr((type(backend).__name__, end, sorted(vocabulary.items())))
        hashed = hashlib.sha256(words.encode("utf-8", "backslashreplace"))
        for attribute in sorted(backend.vocab_files_names):  # merges and scores are in the files only
            file = getattr(backend, attribute, None)
            if isinstance(file, str | os.PathLike) and os.path.isfile(file):
                hashed.update(Path(file).read_bytes())
        self.fingerprint = hashed.hexdigest()[:32]

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids, block by block."""
        ids: list[int] = []
        for block in split_text(text, BLOCK_BYTES):
            ids += self._backend.encode(block.decode("utf-8"), add_special_tokens=False)
        return np.array(ids, dtype=self.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


def chosen_tokenizer(ctx: Context, wanted: str) -> str:
    """What `text.tokenizer` stands for: `auto` is the tokenizer of `model.hf`, or bytes for any other model."""
    if wanted != "auto":
        return wanted
    return str(getattr(ctx.model_config, "hf", None) or BYTES)


def load_tokenizer(ctx: Context, wanted: str) -> Tokenizer:
    """Load the tokenizer that `text.tokenizer` names.

    Raises:
        DataError: it does not exist, cannot be fetched or cannot be read.
    """
    name = chosen_tokenizer(ctx, wanted)
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_file():
        return _from_file(name, path)
    if not path.is_dir() and (
        name.startswith((".", "/", "~")) or name.count("/") > 1
    ):  # no hub id looks like that
        raise DataError(
            f"text.tokenizer: {name} does not exist: name a tokenizer's folder, a hub id, or bytes"
        )
    return _from_transformers(name, path if path.is_dir() else None)


def _from_file(name: str, path: Path) -> Tokenizer:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"text.tokenizer: {path} is not a tokenizer.json: {_first_line(error)}") from None
    known = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
    ends = [backend.token_to_id(token) for token in known]
    return LibraryTokenizer(name, backend, next((end for end in ends if end is not None), None))


def _from_transformers(name: str, folder: Path | None) -> Tokenizer:
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # workers are the parallelism; also silences a warning
    from transformers import AutoTokenizer

    trouble = None if folder is not None else _hub_trouble(name)
    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder or name), trust_remote_code=False, local_files_only=trouble is not None
        )
    except Exception as error:  # OSError, ValueError, network errors of several libraries
        if folder is not None:
            raise DataError(
                f"text.tokenizer: cannot read a tokenizer in {folder}: {_first_line(error)}: "
                "name another folder or id, or set text.tokenizer: bytes"
            ) from None
        raise DataError(
            f"text.tokenizer: cannot fetch the tokenizer {name!r} from the Hugging Face hub: "
            f"{_first_line(trouble or error)}: "
            "check the id and the network, or name a folder that holds it, or set text.tokenizer: bytes"
        ) from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        return PythonTokenizer(name, loaded, loaded.eos_token_id)
    return LibraryTokenizer(name, backend, loaded.eos_token_id)


def _hub_trouble(name: str) -> Exception | None:
    """Why the hub cannot give `name`, asked once: transformers would ask for most of a minute, and say each attempt."""
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return None  # transformers says so itself, and looks only into its cache
    try:
        huggingface_hub.HfApi().model_info(name, timeout=_PROBE_SECONDS)
    except Exception as error:  # of several libraries; the cache may still hold it
        return error
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__
