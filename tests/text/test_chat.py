"""Which template is taken, and what is refused before any row is read."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from tests.text.chats import SPECIAL, character_tokenizer, subword_tokenizer, write_template
from tests.text.helpers import context
from transformers import PreTrainedTokenizerFast

from trainforge.errors import ConfigError
from trainforge_plugins.text.chat import BUILT_IN, choose_template
from trainforge_plugins.text.conversation import BadRow, Conversation, Message
from trainforge_plugins.text.tokenizers import END_TEXT, ByteTokenizer, load_tokenizer

PROBE = Conversation((Message("user", "question"), Message("assistant", "answer")))
"""A conversation that every template must take."""

OWN = "{% for m in messages %}{{ bos_token }}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("in_config", [True, False])
def test_auto_is_the_tokenizers_own(tmp_path: Path, in_config: bool):
    backend = subword_tokenizer()._backend
    saved = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")
    if in_config:
        saved.chat_template = OWN
    saved.save_pretrained(tmp_path)
    if not in_config:
        (tmp_path / "chat_template.jinja").write_text(OWN)
    tokenizer = load_tokenizer(context(tmp_path), str(tmp_path))
    template = choose_template("auto", tokenizer)
    assert template.render(PROBE)[0] == "<s>user:question</s><s>assistant:answer</s>"
    assert choose_template("chatml", tokenizer).source == BUILT_IN["chatml"]


def test_auto_is_plain_for_a_tokenizer_without_one():
    template = choose_template("auto", ByteTokenizer())
    assert template.name == "plain"
    text, (span,) = template.render(PROBE)
    assert text == f"### User:\nquestion\n\n### Assistant:\nanswer{END_TEXT}\n\n"
    assert text[slice(*span)] == f"answer{END_TEXT}"


def test_a_template_needs_an_end_token_that_exists():
    tokenizer = character_tokenizer()
    with pytest.raises(ConfigError, match=r"plain ends turns with eos_token, and .* has none"):
        choose_template("plain", tokenizer)


def test_a_template_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"neither auto, one of plain, chatml, .* nor a file"):
        choose_template("chat-ml", ByteTokenizer())
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        choose_template(str(tmp_path / "latin"), ByteTokenizer())


def test_the_date_does_not_change_the_tokens(tmp_path: Path):
    source = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    text, _ = choose_template(write_template(tmp_path, source), ByteTokenizer()).render(PROBE)
    assert text == "2025questionanswer"
    assert datetime.date.today().year != 2025


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma"])
def test_templates_without_a_place_for_tools_say_so(name: str):
    template = choose_template(name, character_tokenizer())
    with pytest.raises(BadRow, match="no place for tools"):
        template.render(Conversation(PROBE.messages, ({"type": "function", "function": {"name": "f"}},)))
    with pytest.raises(BadRow, match="no place for tool calls"):
        template.render(Conversation((*PROBE.messages, Message("tool", "3"))))


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_templates_that_want_turns_to_alternate_say_so(name: str):
    template = choose_template(name, character_tokenizer())
    with pytest.raises(BadRow, match="must take turns"):
        template.render(Conversation((Message("user", "a"), *PROBE.messages)))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_generation_prompt_is_what_stands_before_an_answer(name: str):
    tokenizer = ByteTokenizer()
    template = choose_template(name, tokenizer)
    prompt, _ = template.render(Conversation(PROBE.messages[:1]), generation_prompt=True)
    text, ((start, _),) = template.render(PROBE)
    assert text[:start] == prompt
    assert set(template.ends) >= {"<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", END_TEXT}
    assert set(SPECIAL) <= set(choose_template("chatml", character_tokenizer()).ends)


def test_the_fingerprint_follows_source_and_tokens(tmp_path: Path):
    one, two = (choose_template(name, ByteTokenizer()) for name in ("chatml", "gemma"))
    other = choose_template("chatml", character_tokenizer())
    assert len({one.fingerprint, two.fingerprint, other.fingerprint}) == 3
    assert one.fingerprint == choose_template("chatml", ByteTokenizer()).fingerprint
