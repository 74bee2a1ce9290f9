"""Lists of turns, as ShareGPT and OpenAI write them, and the tools that they call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainforge_plugins.text.conversation import IMAGE, BadRow, ImageReference, Message
from trainforge_plugins.text.images import read_reference
from trainforge_plugins.text.values import check_characters, kind_of, structured, text_of

CALL = "call"
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
    "function_call": CALL,
}
"""The roles of files and what they are to a template; a call is an assistant's turn."""

ROLE_OF_TAG = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": CALL,
    "system_tag": "system",
}


@dataclass(frozen=True)
class Tags:
    """The keys of a turn, and what its roles are called."""

    role_keys: tuple[str, ...]
    content_keys: tuple[str, ...]
    roles: Mapping[str, str]

    @classmethod
    def of(cls, tags: Mapping[str, str]) -> Tags:
        """The tags that are given, and the usual ones for the rest."""
        named = {tags[tag]: role for tag, role in ROLE_OF_TAG.items() if tag in tags}
        return cls(
            (tags["role_tag"],) if "role_tag" in tags else ("from", "role"),
            (tags["content_tag"],) if "content_tag" in tags else ("value", "content"),
            ROLES | named,
        )


def read_turns(turns: list[Any], column: str, tags: Tags, complete: bool = True) -> list[Message]:
    """The messages of a list of turns; `complete`: an assistant's turn without text or call is refused.

    Raises:
        BadRow: a turn cannot be understood; its number is the detail.
    """
    messages = []
    for number, turn in enumerate(turns, start=1):
        try:
            messages.append(_message(turn, column, tags, complete))
        except BadRow as bad:
            raise BadRow(bad.reason, ", ".join(filter(None, (f"turn {number}", bad.detail)))) from None
    return messages


def _message(turn: Any, column: str, tags: Tags, complete: bool) -> Message:
    if not isinstance(turn, dict):
        raise BadRow(f"a turn of {column!r} is not an object", f"it is {kind_of(turn)}")
    role = _role(turn, column, tags)
    key = next((name for name in tags.content_keys if turn.get(name) is not None), tags.content_keys[-1])
    if role == CALL:
        return Message("assistant", "", tool_calls=_calls(turn.get(key), key), trained=_is_trained(turn))
    content, images = _content(turn.get(key), key)
    if role == "assistant":
        return replace(_assistant(turn, content, key, complete), images=images)
    if role == "tool":
        return Message(
            role,
            content,
            name=_optional(turn, "name"),
            tool_call_id=_optional(turn, "tool_call_id"),
            images=images,
        )
    if role == "user" and not content.strip():
        raise BadRow(f"{key!r} of a user turn is empty")
    return Message(role, content, images=images)


def _role(turn: dict[str, Any], column: str, tags: Tags) -> str:
    for key in tags.role_keys:
        if turn.get(key) is not None:
            name = turn[key]
            role = tags.roles.get(name) if isinstance(name, str) else None
            if role is None:
                shown = repr(name[:30]) if isinstance(name, str) else kind_of(name)
                raise BadRow("a role that is not known (text.tags maps roles)", ascii(shown)[1:-1])
            return role
    raise BadRow(f"a turn of {column!r} has no role ({' or '.join(map(repr, tags.role_keys))})")


def _content(value: Any, key: str) -> tuple[str, tuple[ImageReference | None, ...]]:
    """Text, or the joined parts of a list as OpenAI writes them, with the images among them (None: named elsewhere)."""
    if not isinstance(value, list):
        return text_of(value, key), ()
    texts: list[str] = []
    images: list[ImageReference | None] = []
    for part in value:
        if isinstance(part, str):
            texts.append(text_of(part, key))
        elif isinstance(part, dict) and part.get("type", "text") == "text":
            texts.append(text_of(part.get("text"), "text"))
        elif isinstance(part, dict) and part.get("type") in ("image", "image_url"):
            texts.append(IMAGE)
            named = any(value is not None for name, value in part.items() if name != "type")
            images.append(read_reference(part, "image") if named else None)
        else:
            raise BadRow(f"{key!r} has a part that is neither text nor image", _part_kind(part))
    return "".join(texts), tuple(images)


def _part_kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    return ascii(kind[:30]) if isinstance(kind, str) else kind_of(kind)


def _assistant(turn: dict[str, Any], content: str, key: str, complete: bool) -> Message:
    calls: tuple[dict[str, Any], ...] = ()
    if turn.get("tool_calls"):
        calls = _calls(turn["tool_calls"], "tool_calls")
    elif turn.get("function_call"):
        calls = _calls(turn["function_call"], "function_call")
    if complete and not calls and not content.strip():
        raise BadRow(f"{key!r} of an assistant turn is empty")
    reasoning = _optional(turn, "reasoning_content") or _optional(turn, "reasoning")
    return Message("assistant", content, calls, reasoning=reasoning, trained=_is_trained(turn))


def _is_trained(turn: dict[str, Any]) -> bool:
    return bool(turn.get("weight") != 0)


def _optional(turn: dict[str, Any], key: str) -> str:
    return text_of(turn.get(key), key)


def _calls(value: Any, key: str) -> tuple[dict[str, Any], ...]:
    """Calls as OpenAI writes them, from one or several, bare or wrapped in `function`, as objects or as JSON text."""
    found = structured(value, key)
    calls = []
    for item in found if isinstance(found, list) else [found]:
        call = _wrapped(item, key)
        arguments = structured(call["function"].get("arguments"), "arguments")
        if arguments is not None and not isinstance(arguments, dict):
            raise BadRow("the arguments of a call are not an object", f"they are {kind_of(arguments)}")
        call["function"]["arguments"] = arguments or {}
        calls.append(call)
    if not calls:
        raise BadRow(f"{key!r} holds no call")
    return tuple(calls)


def _wrapped(item: Any, key: str) -> dict[str, Any]:
    """`{"type": "function", "function": item}`, unless it is one already; keys that are null are left out."""
    if not isinstance(item, dict):
        raise BadRow(f"{key!r} holds a thing that is not an object", f"it is {kind_of(item)}")
    inner = item.get("function") if item.get("function") is not None else item
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise BadRow(f"{key!r} holds a function without a name")
    check_json(item, key)
    function = {name: value for name, value in inner.items() if value is not None}
    outer = {"id": item["id"]} if inner is not item and isinstance(item.get("id"), str) else {}
    return {"type": "function", "function": function, **outer}


def check_json(value: Any, key: str) -> None:
    """Refuse what a template could not write as JSON.

    Raises:
        BadRow: it holds half a surrogate pair, a number that is not finite, or a thing that JSON lacks.
    """
    try:
        check_characters(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, RecursionError):
        raise BadRow(f"{key!r} holds a value that JSON cannot write") from None


def read_tools(value: Any, column: str) -> tuple[dict[str, Any], ...]:
    """The descriptions of the tools of a row, from a list or its JSON text, bare or wrapped in `function`.

    Raises:
        BadRow: they are no list of named functions.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    found = structured(value, column)
    if not isinstance(found, list):
        raise BadRow(f"{column!r} is not a list", f"it is {kind_of(found)}")
    return tuple(_wrapped(item, column) for item in found)
