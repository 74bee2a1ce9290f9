"""From a conversation to the tokens of a row: template, labels and the policy for long ones, as workers need them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainforge.errors import DataError
from trainforge_plugins.text.chat import ChatTemplate
from trainforge_plugins.text.conversation import BadRow, Conversation
from trainforge_plugins.text.images import ImageFile, locate, open_image
from trainforge_plugins.text.labels import Encoded, Labeller, TrainOn
from trainforge_plugins.text.policy import Fitted, TooLong, fit
from trainforge_plugins.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from trainforge_plugins.text.vision import VisionProcessor


@dataclass(frozen=True)
class Rendering:
    """How conversations become rows; picklable.

    Attributes:
        template: the chat template.
        train_on: `assistant`, `last` or `all`.
        max_len: tokens that a conversation may have.
        too_long: what becomes of a longer one.
        processor: the folder or hub id of the processor of images, which is loaded when a row has some.
        processor_files: a hash of the processor's files, as far as they lie in a folder.
        own_code: whether code that the processor's folder brings may run.
        image_dir: where images lie whose paths are relative; None: beside the file that names them.
    """

    template: ChatTemplate
    train_on: TrainOn
    max_len: int
    too_long: TooLong
    processor: str = ""
    processor_files: str = ""
    own_code: bool = False
    image_dir: Path | None = None

    def identity(self) -> dict[str, Any]:
        """What decides tokens and labels, under the names that a person knows."""
        return {
            "text.template": f"{self.template.name} {self.template.fingerprint}",
            "text.train_on": self.train_on,
            "text.max_len": self.max_len,
            "text.too_long": self.too_long,
            "the processor of images": f"{self.processor} {self.processor_files}",
            "text.image_dir": str(self.image_dir or ""),
        }


def hash_of_processor(name: str) -> str:
    """A hash of the files in a processor's folder that say what it does; the same for all that is no folder."""
    hashed = hashlib.sha256()
    for file in sorted(Path(name).expanduser().glob("*processor_config.json")):
        hashed.update(file.read_bytes())
    return hashed.hexdigest()[:32]


class Renderer:
    """Renders conversations with one tokenizer.

    Attributes:
        opened: the images of the last conversation, as far as they were looked at.
    """

    def __init__(self, rendering: Rendering, tokenizer: Tokenizer) -> None:
        self._rendering = rendering
        self._labeller = Labeller(rendering.template, tokenizer, rendering.train_on)
        self._processor: VisionProcessor | None = None
        self.opened: list[ImageFile] = []

    def render(self, conversation: Conversation, folder: Path | None = None) -> Fitted:
        """Tokens and labels, at most `max_len` of them; images with relative paths lie below `folder`.

        Raises:
            BadRow: the conversation cannot be used; `DoesNotFit` when a larger `max_len` would help.
            DataError: it has images, and template or model have no place for them.
        """
        self.opened = []
        if not conversation.images:
            encoded = self._labeller.encode(conversation)
            return fit(encoded, self._rendering.max_len, self._rendering.too_long)
        encoded = self._with_images(conversation, folder)
        fitted = fit(encoded, self._rendering.max_len, self._rendering.too_long)
        images = [
            replace(file, start=start, tokens=stop - start)
            for file, (start, stop) in zip(self.opened, encoded.images, strict=True)
        ]
        return replace(fitted, images=tuple(images))

    def _with_images(self, conversation: Conversation, folder: Path | None) -> Encoded:
        processor = self._ready()
        rendered = self._labeller.render(conversation)
        pictures = []
        for image in conversation.images:
            file, picture, trouble = open_image(locate(image, self._rendering.image_dir or folder))
            self.opened.append(file)
            if picture is None:
                raise BadRow("an image cannot be used", f"{file.name}: {trouble}")
            pictures.append(picture)
        expansion = processor.expand(pictures)
        whole, spans = rendered.expanded(processor.placeholder, expansion.texts)
        encoded = self._labeller.encode_rendered(conversation, whole, spans)
        processor.check(rendered.text, pictures, encoded.ids.tolist(), expansion.inputs)
        return encoded

    def _ready(self) -> VisionProcessor:
        if self._processor is None:
            from trainforge_plugins.text.vision import load_processor

            self._processor = load_processor(self._rendering.processor, self._rendering.own_code)
            if not self._rendering.template.in_parts:
                raise DataError(
                    f"the rows have images, and the chat template {self._rendering.template.name} has no place for "
                    "them: set text.template: auto with a model that has a chat template for images, or a file with one"
                )
        return self._processor
