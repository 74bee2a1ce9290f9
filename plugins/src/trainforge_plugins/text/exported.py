"""The tokenizer without the data: for a prompt, and as files in an exported model's folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainforge.errors import DataError
from trainforge_plugins.text.tokenizers import (
    BYTES,
    DOCUMENT_END,
    Tokenizer,
    chosen_tokenizer,
    load_tokenizer,
    own_code_allowed,
)

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge_plugins.text import TextSection

END_TOKEN = "<|endoftext|>"
"""How files name the byte vocabulary's document end. Unlike here, a text that spells it is read as that token."""

_FILES = (
    *("tokenizer*", "*.tiktoken", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template*", "additional_chat_templates", "*processor_config.json"),
)


class RunTokenizer:
    """The tokenizer of a run, as `Provider.tokenizer` promises it."""

    def __init__(self, ctx: Context, config: TextSection) -> None:
        self._name = chosen_tokenizer(ctx, config.tokenizer)
        self._code = own_code_allowed(ctx)
        self._tokenizer: Tokenizer = load_tokenizer(ctx, config.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without an end token."""
        return [int(token) for token in self._tokenizer.encode(text.encode("utf-8", "replace"))]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids that a model wrote, up to the end of the document."""
        return self._tokenizer.continuation(ids)

    def save(self, out: Path) -> None:
        """Copy the tokenizer's files; the byte tokenizer is written as a tokenizer.json that does the same."""
        path = Path(self._name).expanduser()
        if self._name == BYTES:
            (out / "tokenizer.json").write_text(_bytes_as_json(), encoding="utf-8")
            _write_config(out, END_TOKEN)
        elif path.is_file():
            shutil.copyfile(path, out / "tokenizer.json")
            _write_config(out, self._end_token(path))
        else:
            patterns = (*_FILES, "*.py") if self._code else _FILES
            _copy(path if path.is_dir() else _fetched(self._name, patterns), out, patterns)

    def _end_token(self, path: Path) -> str | None:
        if self._tokenizer.end is None:
            return None
        import tokenizers

        token: str | None = tokenizers.Tokenizer.from_file(str(path)).id_to_token(self._tokenizer.end)
        return token


def _copy(folder: Path, out: Path, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        for file in sorted(folder.glob(pattern)):
            if file.is_dir():
                shutil.copytree(file, out / file.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(file, out / file.name)


def _fetched(name: str, patterns: Sequence[str]) -> Path:
    """Where the hub's files of a tokenizer lie; they were fetched when it was loaded."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=[*patterns, "additional_chat_templates/*"], local_files_only=True
            )
        )
    except Exception as error:
        raise DataError(
            f"text.tokenizer: the files of {name} are not in the hub's cache ({type(error).__name__}): fetch it again"
        ) from None


def _write_config(out: Path, end: str | None) -> None:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if end is not None:
        config["eos_token"] = end
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _bytes_as_json() -> str:
    """The 256 bytes as a vocabulary of the `tokenizers` library, and the document end as a special token.

    The library writes bytes as letters: printable Latin-1 as itself, the others, in order, from U+0100 on.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TOKEN, special=True, normalized=False)])
    assert tokenizer.token_to_id(END_TOKEN) == DOCUMENT_END
    return str(tokenizer.to_str(pretty=True))
