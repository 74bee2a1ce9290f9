"""A tokenizer.json alone says nothing of conversations: the user is told what to set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.text.helpers import context, write_jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainforge.errors import ConfigError
from trainforge_plugins.text import TextSection, build

TURNS = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "the answer"}]


def bare_folder(folder: Path, *special: str) -> Path:
    """A folder with tokenizer.json and nothing else."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=262, special_tokens=[*special], initial_alphabet=alphabet)
    backend.train_from_iterator(["the question and the answer"], trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def notes_on_chats(folder: Path, **section: Any) -> list[str]:
    """What is noted while a data stage is built on conversations."""
    rows = write_jsonl(folder / "chats.jsonl", [{"messages": TURNS}] * 4)
    ctx, notes = context(folder), []
    ctx.console.note = notes.append  # type: ignore[method-assign]
    build(ctx, TextSection(path=str(rows), max_len=128, validation=None, **section)).close()
    return [note for note in notes if "template" in note]


def test_conversations_written_as_plain_for_want_of_a_template_are_told(tmp_path: Path):
    file = bare_folder(tmp_path / "bare", "</s>") / "tokenizer.json"
    (note,) = notes_on_chats(tmp_path, tokenizer=str(file))
    assert f"'{file}' brings no chat template, so conversations are written as plain" in note
    assert "set text.template to it (chatml, llama3, mistral, gemma or a file)" in note
    assert "chat_template.jinja" in note
    assert notes_on_chats(tmp_path, tokenizer=str(file), template="plain") == []
    assert notes_on_chats(tmp_path, tokenizer="bytes") == []


def test_a_folder_that_names_no_end_token_says_what_to_set(tmp_path: Path):
    folder = bare_folder(tmp_path / "bare", "<|im_start|>", "<|im_end|>")
    with pytest.raises(ConfigError) as error:
        notes_on_chats(tmp_path, tokenizer=str(folder))
    assert (
        "set text.template to one that has ends of its own (chatml, llama3, mistral, gemma or a file)"
        in str(error.value)
    )
    assert "tokenizer_config.json names an eos_token" in str(error.value)
    assert notes_on_chats(tmp_path, tokenizer=str(folder), template="chatml") == []
