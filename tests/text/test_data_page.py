"""The examples of docs/data.md do what the page says of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from trainforge_plugins.text import TextSection
from trainforge_plugins.text.conversation import IMAGE, BadRow, Conversation
from trainforge_plugins.text.formats import RowFormat, to_conversation

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text("utf-8")
EXAMPLES = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
RECIPES = [
    part
    for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for part in re.split("(?m)^(?=text:)", text)
    if part
]


def example(column: str) -> Conversation:
    """The example with this column."""
    (row,) = (row for row in EXAMPLES if column in row)
    return to_conversation(row, RowFormat())


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


def test_questions_and_answers():
    assert turns(example("instruction")) == [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", "Hello! What can I do?"),
        ("user", "Name the capital.\nFrance"),
        ("assistant", "Paris."),
    ]
    assert turns(example("completion")) == [
        ("user", "Name the capital of France."),
        ("assistant", "Paris."),
    ]


def test_sharegpt_and_openai_hold_the_same_conversation():
    openai, _ = (to_conversation(row, RowFormat()) for row in EXAMPLES if "messages" in row)
    for conversation in (example("conversations"), openai):
        assert turns(conversation) == [
            ("system", "You can look up the weather."),
            ("user", "What is the weather in Paris?"),
            ("assistant", ""),
            ("tool", '{"sky": "clear"}'),
            ("assistant", "Clear."),
        ]
        (call,) = conversation.messages[2].tool_calls
        assert call["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
        assert [tool["function"]["name"] for tool in conversation.tools] == ["weather"]


def test_images_and_texts():
    pictured = example("images")
    assert turns(pictured)[0] == ("user", f"{IMAGE}What is in this picture?")
    assert [image.path for image in pictured.images] == ["shots/0001.png"]
    with pytest.raises(BadRow, match="none of the columns"):
        example("text")


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_taken(recipe: str):
    TextSection(**yaml.safe_load(recipe)["text"])


def test_all_examples_were_found():
    assert (len(EXAMPLES), len(RECIPES)) == (7, 5)
