"""Chat templates: the tokenizer's own, five built in, or a file. A template turns a conversation into one text.

The built-in ones are written for this project after the published descriptions of each format (ChatML by OpenAI,
Llama 3 by Meta, Mistral by Mistral AI, Gemma by Google). They mark what the assistant writes with `{% generation %}`.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainforge.errors import ConfigError
from trainforge_plugins.text.conversation import BadRow, Conversation
from trainforge_plugins.text.tokenizers import BYTES

if TYPE_CHECKING:
    from trainforge_plugins.text.tokenizers import Tokenizer

_CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
)
_THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_NO_TOOLS = (
    "{% if tools %}{{ raise_exception('it has no place for tools') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' or m.tool_calls %}"
    "{{ raise_exception('it has no place for tool calls') }}{% endif %}{% endfor %}"
)
_MERGED_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns, and the user begins') }}{% endif %}{% endfor %}"
)

BUILT_IN = {
    "plain": (
        "{% if tools %}### Tools:\n{{ tools | tojson }}\n\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}### Assistant:\n"
        f"{{% generation %}}{_THOUGHT}{{{{ m.content }}}}{_CALLS}{{{{ eos_token }}}}{{% endgeneration %}}"
        "{{ '\\n\\n' }}"
        "{% else %}### {{ m.role | capitalize }}:\n{{ m.content }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
    ),
    "chatml": (
        "{% if tools %}<|im_start|>system\n"
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
        "# Tools\n\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        f"{{% generation %}}{_THOUGHT}{{{{ m.content }}}}{_CALLS}<|im_end|>{{% endgeneration %}}{{{{ '\\n' }}}}"
        "{% elif not (tools and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        f"{_NO_TOOLS}<|begin_of_text|>"
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "mistral": (
        f"{_NO_TOOLS}{_MERGED_SYSTEM}<s>"
        "{% for m in turns %}{% if m.role == 'user' %}"
        "[INST] {{ system if loop.first }}{{ m.content }} [/INST]"
        "{% else %}{% generation %} {{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}"
    ),
    "gemma": (
        f"{_NO_TOOLS}{_MERGED_SYSTEM}<bos>"
        "{% for m in turns %}{% if m.role == 'user' %}"
        "<start_of_turn>user\n{{ system if loop.first }}{{ m.content }}<end_of_turn>\n{% else %}"
        "<start_of_turn>model\n{% generation %}{{ m.content }}<end_of_turn>{% endgeneration %}{{ '\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
}
"""Sources of the built-in templates, by the name that `text.template` takes."""

_NAMED = f"{', '.join(name for name in BUILT_IN if name != 'plain')} or a file"

_BUILT_IN_ENDS = ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>")


_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_IMAGE_PART = re.compile(r"""(['"])image\1""")
_TODAY = re.compile(r"""strftime_now\((['"])(.*?)\1\)""")


def fix_date(source: str) -> str:
    """Have a template that writes today's date always write 1 January 2025: the same data give the same tokens."""
    return _TODAY.sub(lambda call: repr(datetime(2025, 1, 1).strftime(call[2])), source)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and what it needs; picklable, so that workers can have it.

    Attributes:
        name: what messages call it.
        source: Jinja.
        variables: (name, text) of special tokens that the source may use.
        ends: texts that may end an assistant's turn, longest first.
        in_parts: whether it takes contents as lists of parts, as templates of image-text models do.
        prefix: what stands before a text that does not begin with it, as processors put it there.
        verbatim: whether it is known to write contents as they are, and all else by the roles alone.
    """

    name: str
    source: str
    variables: tuple[tuple[str, str], ...]
    ends: tuple[str, ...]
    in_parts: bool = False
    prefix: str = ""
    verbatim: bool = False

    @property
    def fingerprint(self) -> str:
        """Differs when the text of some conversation does."""
        facts = json.dumps([self.source, sorted(self.variables), self.ends, self.in_parts, self.prefix])
        return hashlib.sha256(facts.encode("utf-8", "backslashreplace")).hexdigest()[:32]

    def render(
        self, conversation: Conversation, *, generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character spans that the template marks as written by the assistant (perhaps none).

        Raises:
            BadRow: the template refuses the conversation.
        """
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        messages, tools = conversation.for_template(self.in_parts)
        try:
            (text,), spans = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=_GENERATION.search(self.source) is not None,
                add_generation_prompt=generation_prompt,
                **dict(self.variables),
            )
        except TemplateError as error:
            raise BadRow(f"the chat template {self.name} refuses it", str(error)) from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise BadRow(
                f"the chat template {self.name} fails on it", f"{type(error).__name__}: {error}"
            ) from None
        before = "" if text.startswith(self.prefix) else self.prefix
        shift = len(before)
        return before + text, [(start + shift, stop + shift) for start, stop in spans[0]] if spans else []


def choose_template(wanted: str, tokenizer: Tokenizer) -> ChatTemplate:
    """The template that `text.template` names: `auto` is the tokenizer's own, or `plain` when it has none.

    Raises:
        ConfigError: there is none of that name, or it cannot be used for training.
    """
    if wanted == "auto":
        own = tokenizer.chat_template
        name, source = ("of the tokenizer", own) if own else ("plain", BUILT_IN["plain"])
    elif wanted in BUILT_IN:
        name, source = wanted, BUILT_IN[wanted]
    else:
        name, source = wanted, _from_file(wanted)
    variables = dict(tokenizer.variables)
    special = [*tokenizer.special, variables.get("eos_token", ""), *_BUILT_IN_ENDS]
    ends = tuple(sorted({text for text in special if text}, key=lambda text: (-len(text), text)))
    if "eos_token" in source and "eos_token" not in variables:
        raise ConfigError(
            f"text.template: the chat template {name} ends turns with eos_token, and the tokenizer "
            f"{tokenizer.name!r} has none: set text.template to one that has ends of its own ({_NAMED}), or "
            "text.tokenizer to a folder whose tokenizer_config.json names an eos_token"
        )
    in_parts = _IMAGE_PART.search(source) is not None
    prefix = tokenizer.prefix if in_parts else ""
    facts = (name, fix_date(source), tuple(sorted(variables.items())), ends, in_parts, prefix)
    return ChatTemplate(*facts, verbatim=source in BUILT_IN.values())


def missing_template(wanted: str, tokenizer: Tokenizer) -> str | None:
    """What a person is told when `auto` finds no chat template. Not with bytes: no model was tuned with them."""
    if wanted != "auto" or tokenizer.chat_template or tokenizer.name == BYTES:
        return None
    return (
        f"text.template: the tokenizer {tokenizer.name!r} brings no chat template, so conversations are written as "
        f"plain. If the model was tuned with another one, set text.template to it ({_NAMED}), or text.tokenizer to a "
        "folder that has chat_template.jinja"
    )


def _from_file(wanted: str) -> str:
    path = Path(wanted).expanduser()
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"text.template: {wanted} is neither auto, one of {', '.join(BUILT_IN)}, nor a file that can be read "
            f"({getattr(error, 'strerror', None) or 'not UTF-8'})"
        ) from None


def as_text(value: Any) -> str:
    """A value as templates write it into JSON."""
    return json.dumps(value, ensure_ascii=False)
