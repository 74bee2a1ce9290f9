"""From a conversation to the tokens of a row: template, labels and the policy for long ones, as workers need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainforge_plugins.text.chat import ChatTemplate
from trainforge_plugins.text.conversation import Conversation
from trainforge_plugins.text.labels import Labeller, TrainOn
from trainforge_plugins.text.policy import Fitted, TooLong, fit
from trainforge_plugins.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class Rendering:
    """How conversations become rows; picklable.

    Attributes:
        template: the chat template.
        train_on: `assistant`, `last` or `all`.
        max_len: tokens that a conversation may have.
        too_long: what becomes of a longer one.
    """

    template: ChatTemplate
    train_on: TrainOn
    max_len: int
    too_long: TooLong

    def identity(self) -> dict[str, Any]:
        """What decides tokens and labels, under the names that a person knows."""
        return {
            "text.template": f"{self.template.name} {self.template.fingerprint}",
            "text.train_on": self.train_on,
            "text.max_len": self.max_len,
            "text.too_long": self.too_long,
        }


class Renderer:
    """Renders conversations with one tokenizer."""

    def __init__(self, rendering: Rendering, tokenizer: Tokenizer) -> None:
        self._rendering = rendering
        self._labeller = Labeller(rendering.template, tokenizer, rendering.train_on)

    def render(self, conversation: Conversation) -> Fitted:
        """Tokens and labels, at most `max_len` of them.

        Raises:
            BadRow: the conversation cannot be used; `DoesNotFit` when a larger `max_len` would help.
        """
        encoded = self._labeller.encode(conversation)
        return fit(encoded, self._rendering.max_len, self._rendering.too_long)
