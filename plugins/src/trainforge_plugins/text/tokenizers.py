"""Tokenizers: bytes, built in, and those of Hugging Face. All give numpy arrays of token ids."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from trainforge.errors import DataError
from trainforge_plugins.text.units import split_text

if TYPE_CHECKING:
    from trainforge.context import Context

BYTES = "bytes"
DOCUMENT_END = 256
"""The token that ends a document in the byte vocabulary, after the 256 bytes."""

_PROBE_SECONDS = 10.0  # longest wait for the hub to say whether it has a tokenizer
END_TEXT = "\ufdd0"
"""What stands for the document end of the byte vocabulary in a rendered conversation: a character that Unicode keeps
for such use inside a program, so that no text has it."""

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
        special: texts that become control tokens wherever they stand.
        variables: what chat templates may ask for (`eos_token`, `bos_token`, ...), with its text.
        chat_template: the tokenizer's own chat template, or None.
        prefix: the token that it puts before a text when it is asked for control tokens; empty without one.
    """

    name: str
    size: int
    end: int | None
    fingerprint: str
    special: Sequence[str] = ()
    variables: Mapping[str, str] = MappingProxyType({})
    chat_template: str | None = None
    prefix: str = ""

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint16 and uint32 that holds every id."""
        return np.dtype(np.uint16 if self.size <= 2**16 else np.uint32)

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray:
        """Token ids of valid UTF-8, without any special token."""

    @abstractmethod
    def encode_with_ends(self, text: str, cuts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of a text with control tokens, and after which character each token ends; both int64 `[tokens]`.

        `cuts` are the characters that matter; a tokenizer that cannot tell where its tokens end takes the text in
        pieces between them.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""

    def continuation(self, ids: Sequence[int]) -> str:
        """The text that a model wrote, up to the first end token: what comes after it is no part of the document."""
        ids = list(ids)
        return self.decode(ids[: ids.index(self.end)] if self.end in ids else ids)

    @abstractmethod
    def show(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens too, for a person."""

    def spec(self) -> TokenizerSpec | None:
        """What makes this tokenizer again in another process, or None when it cannot leave this one."""
        return None


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 and a document end: 257 tokens, any text in any language, nothing to download."""

    name = BYTES
    size = DOCUMENT_END + 1
    end = DOCUMENT_END
    fingerprint = "bytes-1"
    special = (END_TEXT,)
    variables = MappingProxyType({"eos_token": END_TEXT})

    def encode(self, text: bytes) -> np.ndarray:
        """The bytes themselves."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes; a broken character becomes U+FFFD and other tokens nothing."""
        return bytes(token for token in ids if token < DOCUMENT_END).decode("utf-8", "replace")

    def encode_with_ends(self, text: str, cuts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of each character, and the document end for `END_TEXT`."""
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        sizes = np.ones(len(code_points), np.int64)
        for first in (0x80, 0x800, 0x10000):
            sizes += code_points >= first
        points = code_points == ord(END_TEXT)
        sizes[points] = 1
        ids = np.frombuffer(text.replace(END_TEXT, "\0").encode("utf-8"), np.uint8).astype(np.int64)
        ids[(np.cumsum(sizes) - sizes)[points]] = DOCUMENT_END
        return ids, np.repeat(np.arange(1, len(text) + 1), sizes)

    def show(self, ids: Sequence[int]) -> str:
        """The text, with `<end>` for the document end."""
        parts, start, ids = [], 0, list(ids)
        for at in [i for i, token in enumerate(ids) if token >= DOCUMENT_END] + [len(ids)]:
            parts += [self.decode(ids[start:at]), "<end>" if at < len(ids) else ""]
            start = at + 1
        return "".join(parts)

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
        added = backend.get_added_tokens_decoder()
        self.special = tuple(added[token].content for token in sorted(added) if added[token].special)
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

    def show(self, ids: Sequence[int]) -> str:
        """The text, special tokens too."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def encode_with_ends(self, text: str, cuts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and ends of one tokenisation."""
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        return np.array(encoding.ids, np.int64), np.array([end for _, end in encoding.offsets], np.int64)

    def spec(self) -> TokenizerSpec:
        """What makes it again."""
        return TokenizerSpec(self.name, self.end, self._serialized)


class PythonTokenizer(Tokenizer):
    """A Hugging Face tokenizer without a `tokenizers` backend. It stays in the main process."""

    def __init__(self, name: str, backend: Any, end: int | None) -> None:
        self.name, self.end, self._backend = name, end, backend
        vocabulary = backend.get_vocab()
        self.size = max(vocabulary.values(), default=0) + 1
        self.special = tuple(backend.all_special_tokens)
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

    def show(self, ids: Sequence[int]) -> str:
        """The text, special tokens too."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def encode_with_ends(self, text: str, cuts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids piece by piece: a tokenizer written in Python does not say where its tokens end."""
        ids: list[int] = []
        ends: list[int] = []
        edges = sorted({0, *cuts, len(text)})
        for start, stop in pairwise(edges):
            piece = self._backend.encode(text[start:stop], add_special_tokens=False)
            ids += piece
            ends += [stop] * len(piece)
        return np.array(ids, np.int64), np.array(ends, np.int64)


def chosen_tokenizer(ctx: Context, wanted: str) -> str:
    """What `text.tokenizer` stands for: `auto` is the tokenizer of `model.hf`, or bytes for any other model."""
    if wanted != "auto":
        return wanted
    return str(getattr(ctx.model_config, "hf", None) or BYTES)


def own_code_allowed(ctx: Context) -> bool:
    """Whether code that a model's folder brings may run (`model.trust_remote_code`)."""
    return bool(getattr(ctx.model_config, "trust_remote_code", False))


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
    return _from_transformers(name, path if path.is_dir() else None, own_code_allowed(ctx))


def _from_file(name: str, path: Path) -> Tokenizer:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"text.tokenizer: {path} is not a tokenizer.json: {_first_line(error)}") from None
    known = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
    ends = [(token, backend.token_to_id(token)) for token in known]
    token, end = next(((token, end) for token, end in ends if end is not None), ("", None))
    tokenizer = LibraryTokenizer(name, backend, end)
    tokenizer.variables = {"eos_token": token} if token else {}
    return tokenizer


def _from_transformers(name: str, folder: Path | None, code: bool = False) -> Tokenizer:
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # workers are the parallelism; also silences a warning
    from transformers import AutoTokenizer

    trouble = None if folder is not None else _hub_trouble(name)
    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder or name), trust_remote_code=code, local_files_only=trouble is not None
        )
    except Exception as error:  # OSError, ValueError, network errors of several libraries
        if not code and "trust_remote_code" in str(error):
            raise DataError(
                f"text.tokenizer: {name} needs Python code of its own, which could do anything that you can: read it "
                "and allow it with model.trust_remote_code: true, name another tokenizer, or set text.tokenizer: bytes"
            ) from None
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
    tokenizer: Tokenizer = (
        PythonTokenizer(name, loaded, loaded.eos_token_id)
        if backend is None
        else LibraryTokenizer(name, backend, loaded.eos_token_id)
    )
    tokenizer.variables = {
        key: str(value) for key, value in loaded.special_tokens_map.items() if isinstance(value, str)
    }
    if loaded.chat_template:  # a text, or several by name
        tokenizer.chat_template = str(loaded.get_chat_template())
    elif folder is not None:
        tokenizer.chat_template = _template_of_processor(folder)
    if loaded("")["input_ids"] == [loaded.bos_token_id]:
        tokenizer.prefix = str(loaded.bos_token)
    return tokenizer


def _template_of_processor(folder: Path) -> str | None:
    """The chat template that older processors keep in a file of their own."""
    try:
        found = json.loads((folder / "chat_template.json").read_text("utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


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
