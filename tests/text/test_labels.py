"""Which tokens are learnt, against spans written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.chats import (
    CHAT,
    SPECIAL,
    character_tokenizer,
    learnt,
    letters,
    pairs,
    subword_tokenizer,
    write_template,
)

from trainforge_plugins.text.chat import choose_template
from trainforge_plugins.text.conversation import BadRow, Conversation, Message
from trainforge_plugins.text.labels import Labeller, TrainOn
from trainforge_plugins.text.tokenizers import ByteTokenizer, Tokenizer

# (text, learnt?) of CHAT, written by hand
SPANS = {
    "chatml": [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi assistant<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        ("Hello.<|im_end|>", True),
        ("\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", False),
        ("4<|im_end|>", True),
        ("\n<|im_start|>user\nuser<|im_end|>\n<|im_start|>assistant\n", False),
        ("user<|im_end|>", True),
        ("\n", False),
    ],
    "llama3": [
        ("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>", False),
        ("<|start_header_id|>user<|end_header_id|>\n\nHi assistant<|eot_id|>", False),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", False),
        ("Hello.<|eot_id|>", True),
        ("<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>", False),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", False),
        ("4<|eot_id|>", True),
        ("<|start_header_id|>user<|end_header_id|>\n\nuser<|eot_id|>", False),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", False),
        ("user<|eot_id|>", True),
    ],
    "mistral": [
        ("<s>[INST] Be brief.\n\nHi assistant [/INST]", False),
        (" Hello.</s>", True),
        ("[INST] 2+2? [/INST]", False),
        (" 4</s>", True),
        ("[INST] user [/INST]", False),
        (" user</s>", True),
    ],
    "gemma": [
        ("<bos><start_of_turn>user\nBe brief.\n\nHi assistant<end_of_turn>\n", False),
        ("<start_of_turn>model\n", False),
        ("Hello.<end_of_turn>", True),
        ("\n<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n", False),
        ("4<end_of_turn>", True),
        ("\n<start_of_turn>user\nuser<end_of_turn>\n<start_of_turn>model\n", False),
        ("user<end_of_turn>", True),
        ("\n", False),
    ],
}

# The same formats as models bring them: without marks, with trimmed contents, dates and checks.
UNMARKED = {
    "chatml": (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' "
        "+ '\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    "llama3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' "
        "+ message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = '<|begin_of_text|>' + content %}{% endif %}{{ content }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ '<s>' }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = "
        "messages[0]['content'] %}{% else %}{% set rest = messages %}{% endif %}{% for message in rest %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}{% if message['role'] == 'user' %}{% if loop.first and system is defined %}"
        "{{ '[INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}{% else %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% else %}"
        "{{ ' ' + message['content'] + '</s>' }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n\\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for message in rest %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}{{ message['content'] | trim }}"
        "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
}


def labeller(tokenizer: Tokenizer, template: str, train_on: TrainOn = "assistant") -> Labeller:
    return Labeller(choose_template(template, tokenizer), tokenizer, train_on)


@pytest.mark.parametrize("name", SPANS)
def test_every_token_and_label_of_three_turns_with_a_system_prompt(name: str):
    tokenizer = character_tokenizer()
    encoded = labeller(tokenizer, name).encode(CHAT)
    expected = [(token, learn) for text, learn in SPANS[name] for token in letters(text)]
    assert pairs(tokenizer, encoded) == expected


@pytest.mark.parametrize("name", SPANS)
def test_templates_without_marks_give_the_same(tmp_path: Path, name: str):
    tokenizer = character_tokenizer()
    encoded = labeller(tokenizer, write_template(tmp_path, UNMARKED[name])).encode(CHAT)
    # no mark says that the space before Mistral's answer is the model's
    expected = [
        (token, learn and not (token == " " and i == 0))
        for text, learn in SPANS[name]
        for i, token in enumerate(letters(text))
    ]
    assert pairs(tokenizer, encoded) == expected


@pytest.mark.parametrize("make", [subword_tokenizer, ByteTokenizer])
@pytest.mark.parametrize("name", SPANS)
@pytest.mark.parametrize("marked", [True, False])
def test_any_tokenizer_learns_the_same_texts(
    tmp_path: Path, name: str, make: Callable[[], Tokenizer], marked: bool
):
    tokenizer = make()
    template = name if marked else write_template(tmp_path, UNMARKED[name])
    encoded = labeller(tokenizer, template).encode(CHAT)
    wanted = [text for text, learn in SPANS[name] if learn]
    assert [run.strip() for run in learnt(tokenizer, encoded)] == [text.strip() for text in wanted]
    assert tokenizer.show(encoded.ids.tolist()) == "".join(text for text, _ in SPANS[name])


def test_the_last_turn_or_everything(tmp_path: Path):
    tokenizer = character_tokenizer()
    last = labeller(tokenizer, "chatml", "last").encode(CHAT)
    assert learnt(tokenizer, last) == ["user<|im_end|>"]
    everything = labeller(tokenizer, "chatml", "all").encode(CHAT)
    assert everything.supervised.all()
    assert everything.targets == len(everything.ids) - 1


def test_a_turn_can_ask_not_to_be_learnt():
    tokenizer = character_tokenizer()
    turns = [m if m.content != "4" else Message("assistant", "4", trained=False) for m in CHAT.messages]
    encoded = labeller(tokenizer, "chatml").encode(Conversation(tuple(turns)))
    assert learnt(tokenizer, encoded) == ["Hello.<|im_end|>", "user<|im_end|>"]


TOOLS = Conversation(
    (
        Message("user", "sum?"),
        Message("assistant", "", ({"type": "function", "function": {"name": "add", "arguments": {"a": 1}}},)),
        Message("tool", "3"),
        Message("assistant", "It is 3.", reasoning="easy"),
    ),
    ({"type": "function", "function": {"name": "add"}},),
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(("name", "end"), [("chatml", "<|im_end|>"), ("plain", "<end>")])
def test_calls_and_thoughts_are_learnt(name: str, end: str):
    tokenizer = ByteTokenizer()
    encoded = labeller(tokenizer, name).encode(TOOLS)
    assert learnt(tokenizer, encoded) == [f"{CALL}{end}", f"<think>\neasy\n</think>\n\nIt is 3.{end}"]


def test_calls_without_marks_are_found_between_prefixes(tmp_path: Path):
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = character_tokenizer()
    encoded = labeller(tokenizer, write_template(tmp_path, source)).encode(TOOLS)
    assert learnt(tokenizer, encoded) == [f"{CALL}<|im_end|>", "It is 3.<|im_end|>"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}{{ m.content[:3] }}</s>{% endfor %}", "is not written as it is"),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}</s>{% endfor %}",
            r"message 1 \(system\) is left out",
        ),
        ("{% for m in messages %}{{ m.content | upper }}</s>{% endfor %}", "is not written as it is"),
        (
            "{{ messages | length }}{% for m in messages %}[{{ m.content }}]\n{% endfor %}",
            "without an end token",
        ),
        ("{{ raise_exception('no') }}", r"refuses it \(no\)"),
        ("{% for m in messages %}{{ m.content.nothing.at_all }}{% endfor %}", "refuses it"),
        (
            "{{ messages[-1].content | length }}{% for m in messages %}{{ m.content }}</s>{% endfor %}",
            "depends on the contents",
        ),
    ],
)
def test_a_template_that_does_not_write_the_contents_is_noticed(tmp_path: Path, source: str, words: str):
    template = write_template(tmp_path, source)
    with pytest.raises(BadRow, match=words) as caught:
        labeller(character_tokenizer(), template).encode(CHAT)
    assert "template.jinja" in caught.value.reason


def test_control_tokens_in_contents_are_not_let_in():
    chat = Conversation((Message("user", "a<|im_end|>b"), Message("assistant", "c")))
    with pytest.raises(BadRow, match=r"control token .*<\|im_end\|> in message 1"):
        labeller(character_tokenizer(), "chatml").encode(chat)
    encoded = labeller(ByteTokenizer(), "chatml").encode(chat)  # there it is text as any other
    assert learnt(ByteTokenizer(), encoded) == ["c<|im_end|>"]


TEXT = st.text(alphabet=st.sampled_from(list(' \n\tab<|>[]/"\\{}é😀')), min_size=1, max_size=12).filter(
    str.strip
)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), st.sampled_from(sorted(SPANS)), st.booleans())
def test_what_is_learnt_is_what_the_assistant_said(turns: list[tuple[str, str]], name: str, system: bool):
    messages = [Message("system", "s")] if system else []
    for question, answer in turns:
        messages += [Message("user", question), Message("assistant", answer)]
    tokenizer = ByteTokenizer()
    encoded = labeller(tokenizer, name).encode(Conversation(tuple(messages)))
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"}[name]
    space = " " if name == "mistral" else ""
    assert learnt(tokenizer, encoded) == [f"{space}{answer}{end}" for _, answer in turns]
    assert end in SPECIAL


@pytest.mark.parametrize("template", ["plain", "chatml", "llama3", "mistral", "gemma"])
@given(
    st.lists(
        st.tuples(st.text("ab \n{}éé😀", max_size=6), st.text("ab \n{}é😀", max_size=6)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([None, "", " ", "Be brief."]),
)
def test_a_built_in_template_is_rendered_by_its_skeleton_as_by_jinja(
    template: str, pairs_of_turns: list[tuple[str, str]], system: str | None
):
    tokenizer = character_tokenizer()
    tokenizer.variables = {"eos_token": "</s>"}
    chosen = choose_template(template, tokenizer)
    assert chosen.verbatim
    by_jinja = Labeller(replace(chosen, verbatim=False), tokenizer, "assistant")
    quick = Labeller(chosen, tokenizer, "assistant")
    start = () if system is None else (Message("system", system),)
    turns = [
        message
        for question, answer in pairs_of_turns
        for message in (Message("user", f"q{question}"), Message("assistant", f"{answer}."))
    ]
    quick.render(Conversation((*start, *(replace(turn, content="another") for turn in turns))))
    conversation = Conversation((*start, *turns))
    assert quick.render(conversation) == by_jinja.render(conversation)
    assert quick.render(conversation).text == chosen.render(conversation)[0]


def test_only_built_in_templates_are_taken_for_verbatim(tmp_path: Path):
    source = (
        "{% for m in messages %}{{ m.content | upper if m.content == 'x' else m.content }}</s>{% endfor %}"
    )
    chosen = choose_template(write_template(tmp_path, source), character_tokenizer())
    assert not chosen.verbatim
    labeller = Labeller(chosen, character_tokenizer(), "assistant")
    labeller.render(Conversation((Message("user", "a"), Message("assistant", "b"))))
    with pytest.raises(BadRow, match="is not written as it is"):
        labeller.render(Conversation((Message("user", "a"), Message("assistant", "x"))))


def test_a_blank_turn_does_not_depend_on_the_rows_before():
    labeller = Labeller(choose_template("plain", ByteTokenizer()), ByteTokenizer(), "assistant")
    for blank in ("", "  ", "\n", ""):
        turns = (Message("system", blank), Message("user", "a"), Message("assistant", "b"))
        expected = f"### System:\n{blank}\n\n### User:\na\n\n### Assistant:\nb\ufdd0\n\n"
        assert labeller.render(Conversation(turns)).text == expected


@pytest.mark.parametrize("place", ["arguments", "tools", "name"])
def test_control_tokens_in_calls_and_tools_are_not_let_in(place: str):
    def marked(here: str) -> str:
        return "a<|im_end|>b" if here == place else "ab"

    function = {"name": "f", "arguments": {"x": marked("arguments")}}
    call = Message("assistant", "", ({"type": "function", "function": function},))
    turns = (Message("user", "q"), call, Message("tool", "3", name=marked("name")), Message("assistant", "4"))
    tool = {"type": "function", "function": {"name": "f", "description": marked("tools")}}
    with pytest.raises(BadRow, match="control token") as caught:
        labeller(character_tokenizer(), "chatml").encode(Conversation(turns, (tool,)))
    where = {"arguments": " in message 2", "tools": "", "name": " in message 3"}[place]
    assert caught.value.detail == f"<|im_end|>{where}"


def test_a_turn_that_asks_not_to_be_learnt_is_not_with_everything_either():
    turns = (Message("user", "q"), Message("assistant", "no", trained=False), Message("user", "r"))
    encoded = labeller(ByteTokenizer(), "plain", "all").encode(
        Conversation((*turns, Message("assistant", "yes")))
    )
    text = "".join("~" if token == 256 else chr(token) for token in encoded.ids)
    learnt_bytes = "".join(letter for letter, here in zip(text, encoded.supervised, strict=True) if here)
    assert text == ("### User:\nq\n\n### Assistant:\nno~\n\n### User:\nr\n\n### Assistant:\nyes~\n\n")
    assert learnt_bytes == text.replace("no~", "")
