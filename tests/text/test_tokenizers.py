"""Bytes and Hugging Face tokenizers, and what is said when one cannot be had or does not fit the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tests.text.helpers import context, text_data, write_jsonl
from tokenizers import decoders, models, pre_tokenizers, trainers

from trainforge.errors import DataError
from trainforge_plugins.text import tokenizers as ours
from trainforge_plugins.text.tokenizers import (
    ByteTokenizer,
    LibraryTokenizer,
    PythonTokenizer,
    load_tokenizer,
)

SENTENCES = ["the whale swam in the sea", "the sea was deep", "grüße an den wal", "  two  spaces\n\n\nlines"]


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<end>"], initial_alphabet=alphabet)
    made.train_from_iterator(SENTENCES * 5, trainer)
    return made


@pytest.fixture
def folder(tmp_path: Path, backend: tokenizers.Tokenizer) -> Path:
    path = tmp_path / "tokenizer"
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "model_max_length": 16}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@given(st.text())
def test_bytes_go_both_ways(text: str):
    tokenizer = ByteTokenizer()
    raw = text.encode("utf-8", "replace")
    ids = tokenizer.encode(raw)
    assert ids.tolist() == list(raw)
    assert tokenizer.decode([*ids.tolist(), 256]) == raw.decode()


def test_a_folder_gives_the_librarys_ids_and_an_end_token(
    tmp_path: Path, folder: Path, backend: tokenizers.Tokenizer
):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in SENTENCES])
    data = text_data(
        tmp_path, str(path), section={"tokenizer": str(folder), "max_len": 200, "shuffle": False}
    )
    (batch,) = data.take(1)
    end = backend.token_to_id("<end>")
    expected = [token for text in SENTENCES for token in [*backend.encode(text).ids, end]]
    assert batch.input_ids[0, : batch.real].tolist() == expected
    assert data.decode(backend.encode(SENTENCES[2]).ids) == SENTENCES[2]
    assert data.encode(SENTENCES[3]) == backend.encode(SENTENCES[3]).ids


@pytest.mark.ranks
def test_a_tokenizer_in_python_works_and_stays_in_this_process(tmp_path: Path):
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    tokenizer = load_tokenizer(context(tmp_path), str(tmp_path / "byt5"))
    assert isinstance(tokenizer, PythonTokenizer)
    assert tokenizer.spec() is None
    text = "grüße\n an"
    expected = [byte + 3 for byte in text.encode()]  # ByT5: three special tokens, then the bytes
    assert tokenizer.encode(text.encode()).tolist() == expected
    assert tokenizer.end == 1
    assert tokenizer.decode([*expected, 1]) == text
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text}, {"text": "b"}])
    section = {"tokenizer": str(tmp_path / "byt5"), "max_len": 16, "shuffle": False, "workers": 2}
    (batch,) = text_data(tmp_path, str(path), section=section, vocab_size=400).take(1)
    assert batch.input_ids[0, : batch.real].tolist() == [*expected, 1, ord("b") + 3, 1]


def test_the_fingerprint_of_a_tokenizer_in_python_has_its_files(tmp_path: Path):
    from transformers import ByT5Tokenizer

    class WithFile(ByT5Tokenizer):
        vocab_files_names: ClassVar[dict[str, str]] = {"merges_file": "merges.txt"}

    prints = []
    for merges in ("a b", "a b", "b a"):
        backend = WithFile()
        backend.merges_file = str(tmp_path / "merges.txt")
        (tmp_path / "merges.txt").write_text(merges)
        prints.append(PythonTokenizer("x", backend, 1).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_workers_make_the_same_tokenizer(tmp_path: Path, folder: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in SENTENCES * 50])
    states = [
        text_data(
            tmp_path,
            str(path),
            section={"tokenizer": str(folder), "workers": workers, "cache": tmp_path / f"c{workers}"},
        ).state()
        for workers in (0, 2)
    ]
    assert states[0] == states[1]


def test_long_texts_are_taken_in_blocks_without_changing_tokens(
    backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ours, "BLOCK_BYTES", 100)
    text = "\n".join(SENTENCES * 20)
    assert LibraryTokenizer("x", backend, 0).encode(text.encode()).tolist() == backend.encode(text).ids


def test_auto_takes_the_models_tokenizer_or_bytes(tmp_path: Path, folder: Path):
    assert load_tokenizer(context(tmp_path), "auto").name == "bytes"
    assert load_tokenizer(context(tmp_path, hf=str(folder)), "auto").name == str(folder)
    assert load_tokenizer(context(tmp_path, hf=str(folder)), "bytes").name == "bytes"


def test_a_single_file_is_enough(tmp_path: Path, folder: Path):
    loaded = load_tokenizer(context(tmp_path), str(folder / "tokenizer.json"))
    assert loaded.encode(b"the sea").dtype == np.uint16
    assert loaded.end is None


def test_a_tokenizer_without_an_end_token_says_so(tmp_path: Path, folder: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in SENTENCES])
    data = text_data(tmp_path, str(path), section={"tokenizer": str(folder / "tokenizer.json")})
    assert "no end token" in data.start_report()[0]


def test_a_changed_tokenizer_builds_the_cache_again(tmp_path: Path, folder: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in SENTENCES])
    section = {"tokenizer": str(folder)}
    before = text_data(tmp_path, str(path), section=section)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "t"}))
    after = text_data(tmp_path, str(path), section=section)
    assert before.state().data["fingerprint"]["tokenizer"] != after.state().data["fingerprint"]["tokenizer"]
    assert before.state().data["fingerprint"]["data set"] != after.state().data["fingerprint"]["data set"]


def test_a_token_past_the_embedding_is_named_with_its_row(
    tmp_path: Path, folder: Path, backend: tokenizers.Tokenizer
):
    backend.add_tokens(["<image>", "<audio>"])
    backend.save(str(folder / "tokenizer.json"))
    audio = backend.token_to_id("<audio>")
    rows = [{"text": "the sea"}, {"text": "the <audio> sea"}, {"text": "<audio>"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError) as caught:
        text_data(tmp_path, str(path), section={"tokenizer": str(folder)}, vocab_size=audio)
    for word in (
        f"token id {audio}",
        f"{path}:2",
        f"{audio} rows",
        "text.tokenizer",
        f"at least {audio + 1}",
    ):
        assert word in str(caught.value)
    write_jsonl(path, rows[:1])  # the tokenizer may be larger as long as no such token is used
    text_data(tmp_path, str(path), section={"tokenizer": str(folder)}, vocab_size=audio)


def test_bytes_need_room_for_the_document_end(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    with pytest.raises(DataError, match=r"token id 256 .* only 256 rows: .*at least 257"):
        text_data(tmp_path, str(path), vocab_size=256)
    text_data(tmp_path, str(path), vocab_size=257)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nothing/here", ["./nothing/here", "does not exist"]),
        ("{0}/none/of/it", ["does not exist", "bytes"]),
        ("{0}/empty", ["cannot read a tokenizer in", "text.tokenizer: bytes"]),
        ("{0}/broken.json", ["broken.json", "is not a tokenizer.json"]),
    ],
)
def test_a_tokenizer_that_is_not_there(tmp_path: Path, name: str, words: list[str]):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError) as caught:
        load_tokenizer(context(tmp_path), name.format(tmp_path))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as caught:
        load_tokenizer(context(tmp_path), "nobody/no-such-model")
    message = str(caught.value)
    assert "\n" not in message
    assert all(
        word in message for word in ("nobody/no-such-model", "cannot fetch", "network", "folder", "bytes")
    )


def test_a_hub_that_does_not_answer_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    import huggingface_hub

    asked = []

    def fail(self: object, name: str, timeout: float) -> None:
        asked.append((name, timeout))
        raise ConnectionError("no route to it")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(DataError, match=r"cannot fetch .*no route to it"):
        load_tokenizer(context(tmp_path), "nobody/no-such-model")
    assert asked == [("nobody/no-such-model", 10.0)]
    assert capfd.readouterr() == ("", "")


@example("a\x7f\x80\u07ff\u0800\uffff\U00010000\ufdd0\ufdd0b")
@given(st.text(st.characters(codec="utf-8") | st.just("\ufdd0")))
def test_bytes_say_after_which_character_they_end(text: str):
    ids, ends = ByteTokenizer().encode_with_ends(text, [])
    slow = [
        (token, number)
        for number, character in enumerate(text, start=1)
        for token in ([256] if character == "\ufdd0" else character.encode())
    ]
    assert list(zip(ids.tolist(), ends.tolist(), strict=True)) == slow
