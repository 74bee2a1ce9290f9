"""A data plugin for tests: rows with images made by hand, as a model's processor would give them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section

STEPS = ("images", "images", "text", "half", "images")
"""What the rows of each step hold; in a half one every other micro-batch has images."""


class ImageRowsSection(Section):
    """Which rows are handed out."""

    family: str = Field(description="whose processor is followed")
    images: bool = Field(True, description="whether there are any")


def rows_of(family: str, step: int, index: int, images: bool = True) -> Any:
    """Token ids, which are real, and further inputs of micro-batch number `index` of a step."""
    from tests.hf import seeing

    ids, real, inputs = seeing.rows(family, seed=100 * step + index)
    kind = STEPS[step % len(STEPS)]
    if images and (kind == "images" or (kind == "half" and index % 2 == 0)):
        return ids, real, inputs
    return ids.where(ids != seeing.IMAGE, 1), real, {}


def _build(ctx: Any, config: ImageRowsSection) -> Any:
    from tests.hf import seeing

    from trainforge.stages import Data, PartState

    class ImageRows(Data):
        samples, steps_per_epoch = 1000, 1000
        step = 0

        def take(self, count: int) -> list[Any]:
            indices = [i * ctx.world + ctx.rank for i in range(count)]
            batches = [
                seeing.batch(*rows_of(config.family, self.step, index, config.images), index=index)
                for index in indices
            ]
            self.step += 1
            return batches

        def state(self) -> PartState:
            return PartState(data={"step": self.step})

        def load(self, version: int, data: dict[str, Any]) -> None:
            self.step = data["step"]

    return ImageRows()


@hookimpl
def forge_data() -> Provider:
    """Hand out rows with images."""
    return Provider(build=_build, config=ImageRowsSection)
