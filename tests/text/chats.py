"""Tokenizers and conversations for tests of instruction data."""

from __future__ import annotations

import re
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from trainforge_plugins.text.conversation import Conversation, Message
from trainforge_plugins.text.labels import Encoded
from trainforge_plugins.text.tokenizers import LibraryTokenizer, Tokenizer

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
)
LETTERS = "".join(map(chr, range(32, 127))) + "\n\t😀é"

CHAT = Conversation(
    (
        Message("system", "Be brief."),
        Message("user", "Hi assistant"),
        Message("assistant", "Hello."),
        Message("user", "2+2?"),
        Message("assistant", "4"),
        Message("user", "user"),
        Message("assistant", "user"),
    )
)
"""Three turns with a system prompt; contents that read like the template's own text."""


def letters(text: str) -> list[str]:
    """The tokens of `character_tokenizer`, found another way."""
    control = "|".join(map(re.escape, SPECIAL))
    return re.findall(f"{control}|[\\s\\S]", text)


def character_tokenizer() -> LibraryTokenizer:
    """One token for each character and for each control token."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    return LibraryTokenizer("characters", backend, vocabulary["</s>"])


def subword_tokenizer() -> LibraryTokenizer:
    """A byte-level BPE with merges such as `\\n\\n` and ` brief`, as most models have."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["Be brief.\n\nHello. Hi assistant user\n\nuser 2+2? Hello.\n"] * 9, trainer)
    return LibraryTokenizer("subwords", backend, backend.token_to_id("</s>"))


def pairs(tokenizer: Tokenizer, encoded: Encoded) -> list[tuple[str, bool]]:
    """Every (token, learnt?) of a conversation."""
    texts = [tokenizer.show([token]) for token in encoded.ids.tolist()]
    return list(zip(texts, encoded.supervised.tolist(), strict=True))


def learnt(tokenizer: Tokenizer, encoded: Encoded) -> list[str]:
    """The texts of the runs of tokens that have a label."""
    runs: list[list[int]] = []
    before = False
    for token, supervised in zip(encoded.ids.tolist(), encoded.supervised.tolist(), strict=True):
        if supervised:
            if not before:
                runs.append([])
            runs[-1].append(token)
        before = supervised
    return [tokenizer.show(run) for run in runs]


def write_template(folder: Path, source: str) -> str:
    """A template in a file, as `text.template` takes it."""
    path = folder / "template.jinja"
    path.write_text(source)
    return str(path)
