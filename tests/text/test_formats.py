"""Every format gives the conversation that its publisher meant, or says why a row has none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.reading import turns

from trainforge_plugins.text.conversation import BadRow, Conversation, Message
from trainforge_plugins.text.formats import COLUMN_NAMES, TAG_NAMES, RowFormat, to_conversation
from trainforge_plugins.text.values import parse_json

AUTO = RowFormat()
Q_AND_A = [("user", "q"), ("assistant", "a")]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def reason(row: Any, rows: RowFormat = AUTO) -> str:
    with pytest.raises(BadRow) as caught:
        to_conversation(row, rows)
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "q", "output": "a"}, Q_AND_A),
        ({"instruction": "q", "input": None, "output": "a"}, Q_AND_A),
        ({"instruction": "q", "input": "more", "output": "a"}, [("user", "q\nmore"), ("assistant", "a")]),
        ({"instruction": "", "input": "q", "output": "a"}, Q_AND_A),
        ({"instruction": "q", "output": "a", "system": "s"}, [("system", "s"), *Q_AND_A]),
        (
            {"instruction": "q", "output": "a", "history": [["q0", "a0"]]},
            [("user", "q0"), ("assistant", "a0"), *Q_AND_A],
        ),
        ({"instruction": "q", "output": "a", "text": "both"}, Q_AND_A),
        ({"prompt": "q", "completion": "a"}, Q_AND_A),
        ({"prompt": "q", "response": "a"}, Q_AND_A),
        (
            {
                "prompt": [{"role": "user", "content": "q"}],
                "completion": [{"role": "assistant", "content": "a"}],
            },
            Q_AND_A,
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, Q_AND_A),
        (
            {
                "system": "s",
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            },
            [("system", "s"), *Q_AND_A],
        ),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, Q_AND_A),
        (
            {
                "messages": [
                    {"role": "developer", "content": "s"},
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "2"}],
                    },
                    {"role": "assistant", "content": "a"},
                ]
            },
            [("system", "s"), ("user", "q2"), ("assistant", "a")],
        ),
        (
            {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'},
            Q_AND_A,
        ),
    ],
)
def test_rows_of_each_format(row: dict[str, Any], expected: list[tuple[str, str]]):
    assert turns(to_conversation(row, AUTO)) == expected


def test_sharegpt_with_tools():
    row = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "42"},
            {"from": "gpt", "value": "a"},
        ],
        "tools": json.dumps([{"name": "f", "parameters": {"type": "object"}}]),
    }
    assert to_conversation(row, AUTO) == Conversation(
        (
            Message("user", "q"),
            Message("assistant", "", tool_calls=(CALL,)),
            Message("tool", "42"),
            Message("assistant", "a"),
        ),
        (TOOL,),
    )


def test_openai_with_tools_reasoning_and_weight():
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                ],
            },
            {"role": "tool", "content": "42", "tool_call_id": "c", "name": "f"},
            {"role": "assistant", "content": "b", "weight": 0},
            {"role": "assistant", "content": "a", "reasoning_content": "think"},
        ],
        "tools": [TOOL],
    }
    assert to_conversation(row, AUTO) == Conversation(
        (
            Message("user", "q"),
            Message("assistant", "", tool_calls=({**CALL, "id": "c"},)),
            Message("tool", "42", name="f", tool_call_id="c"),
            Message("assistant", "b", trained=False),
            Message("assistant", "a", reasoning="think"),
        ),
        (TOOL,),
    )


def test_columns_and_tags_are_mapped_under_either_name():
    row = {"question": "q", "extra": "more", "answer": "a"}
    expected = [("user", "q\nmore"), ("assistant", "a")]
    for columns in (
        {"prompt": "question", "query": "extra", "response": "answer"},
        {"instruction": "question", "input": "extra", "output": "answer"},
    ):
        assert turns(to_conversation(row, RowFormat("auto", columns))) == expected
    talk = {"talk": [{"who": "me", "what": "q"}, {"who": "bot", "what": "a"}]}
    tags = {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "bot"}
    assert turns(to_conversation(talk, RowFormat("sharegpt", {"messages": "talk"}, tags))) == Q_AND_A


def test_an_unknown_name_in_a_mapping_is_refused():
    with pytest.raises(ValueError, match=r"columns: 'qestion' is none of prompt, query"):
        RowFormat("auto", {"qestion": "q"})
    with pytest.raises(ValueError, match=r"tags: 'human' is none of role_tag"):
        RowFormat("auto", {}, {"human": "user"})


def test_auto_tries_the_formats_in_the_documented_order():
    row = {
        "prompt": "p",
        "completion": "c",
        "instruction": "i",
        "output": "o",
        "conversations": [],
        "messages": [],
    }
    order = []
    for keys in (
        ("messages",),
        ("conversations",),
        ("instruction", "output"),
        ("prompt", "completion"),
    ):
        order.append(AUTO.recognise(row))
        for key in keys:
            del row[key]
    assert order == ["openai", "sharegpt", "alpaca", "prompt_completion"]
    assert AUTO.recognise(row) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        ("-0.50", "-0.50"),
        ("1e400", None),
        ("true", "true"),
        ("null", None),
        ('""', None),
        ('" \\n"', None),
        ('{"a": 1}', None),
        ("[1]", None),
        ("NaN", None),
        ('"\\ud83d"', None),
        ('"\\ud83d\\ude00"', "😀"),
    ],
)
@pytest.mark.parametrize(
    "row", ['{"instruction": "q", "output": %s}', '{"conversations": [{"from": "human", "value": "q"}, %s]}']
)
def test_one_rule_for_values_that_are_not_text(row: str, text: str, answer: str | None):
    value = text if "output" in row else f'{{"from": "gpt", "value": {text}}}'
    parsed = parse_json(row % value)
    if answer is None:
        assert "{'" not in reason(parsed)
    else:
        assert to_conversation(parsed, AUTO).messages[-1].content == answer


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"instruction": "q"}, "no column 'output'"),
        ({"instruction": "q", "output": None}, "'output' is null"),
        ({"instruction": "q", "output": ""}, "'output' is empty"),
        ({"instruction": "q", "output": {"a": 1}}, "'output' is not text (it is an object)"),
        ({"output": "a"}, "no column 'instruction'"),
        ({"instruction": "", "output": "a"}, "'instruction' is empty"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "'history' is not a list of"),
        ({"question": "q", "answer": "a"}, "none of the columns of a known format ('messages';"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": None}, "'messages' is null"),
        ({"messages": {"role": "user"}}, "'messages' is not a list (it is an object)"),
        ({"messages": "hello"}, "'messages' is text that is not JSON"),
        ({"messages": ["hello"]}, "a turn of 'messages' is not an object (turn 1, it is text)"),
        ({"messages": [{"content": "x"}]}, "has no role ('from' or 'role')"),
        ({"messages": [{"role": "bird", "content": "x"}]}, "a role that is not known"),
        ({"messages": [{"role": "user", "content": "q"}]}, "no assistant turn"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "an answer without a question"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]},
            "'content' of an assistant turn is empty (turn 2)",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "video"}]},
                    {"role": "assistant", "content": "a"},
                ]
            },
            "'content' has a part that is neither text nor image (turn 1, 'video')",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "system", "content": "s"},
                    {"role": "assistant", "content": "a"},
                ]
            },
            "a system turn that is not the first",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": "not json"},
                ]
            },
            "'value' is text that is not JSON (turn 2)",
        ),
        ({"instruction": "q", "output": "a", "tools": "[1]"}, "'tools' holds a thing that is not an object"),
    ],
)
def test_what_is_said_of_rows_that_cannot_be_used(row: dict[str, Any], words: str):
    assert words in reason(row)


COLUMNS = [
    "instruction",
    "input",
    "output",
    "prompt",
    "completion",
    "system",
    "history",
    "messages",
    "conversations",
]
KEYS = st.sampled_from(
    [*COLUMNS, "role", "content", "from", "value", "tools", "tool_calls", "function", "name", "arguments"]
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "function_call", "x"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | ROLES
    | st.text(st.characters(codec=None), max_size=8)
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=25,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={"role": ROLES, "from": ROLES, "content": JSON, "value": JSON, "tool_calls": JSON},
    ),
    max_size=5,
)


@given(
    row=st.dictionaries(KEYS, JSON | TURNS, max_size=6),
    format=st.sampled_from(["auto", "alpaca", "sharegpt", "openai", "prompt_completion"]),
    columns=st.dictionaries(st.sampled_from(COLUMN_NAMES), KEYS | st.just(""), max_size=3),
    tags=st.dictionaries(st.sampled_from(TAG_NAMES), KEYS | ROLES, max_size=3),
)
def test_any_object_gives_a_sound_conversation_or_a_reason(row, format, columns, tags):
    found: Conversation | BadRow
    try:
        found = to_conversation(row, RowFormat(format, columns, tags))
    except BadRow as bad:
        found = bad
    if isinstance(found, BadRow):
        assert found.reason
        assert "\n" not in found.reason + found.detail
        return
    conversation = found
    messages, tools = conversation.for_template()
    json.dumps([messages, tools], ensure_ascii=False, allow_nan=False).encode("utf-8")
    assert all(isinstance(message.content, str) for message in conversation.messages)
    assert all(message.role in ("system", "user", "assistant", "tool") for message in conversation.messages)
    assert any(message.role == "assistant" for message in conversation.messages)
    assert all(message.role != "system" for message in conversation.messages[1:])


def test_a_call_can_ask_not_to_be_learnt():
    calls = [{"from": "function_call", "value": '{"name": "f"}', "weight": weight} for weight in (0, 1)]
    row = {"conversations": [{"from": "human", "value": "q"}, *calls]}
    assert [m.trained for m in to_conversation(row, RowFormat()).messages] == [True, False, True]
