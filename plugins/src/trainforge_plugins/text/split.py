"""Holds rows out for validation: a rule that needs no list and does not depend on seed, ranks or batch size."""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS = 16


@dataclass(frozen=True)
class Split:
    """Which of `rows` rows are held out: the last ones of each of `blocks` equal stretches, `block` rows in each.

    Stretches spread the held-out rows over all files; blocks keep them from lying between training rows of the same
    page.
    """

    rows: int
    blocks: int
    block: int

    @property
    def held_out(self) -> int:
        """Number of validation rows."""
        return self.blocks * self.block

    @property
    def training(self) -> int:
        """Number of training rows."""
        return self.rows - self.held_out

    def training_row(self, index: int) -> int:
        """The row number of training row `index`."""
        if not self.blocks:
            return index
        kept = self._stretch - self.block
        stretch = index // kept if kept else self.blocks
        return index + min(stretch, self.blocks) * self.block

    def validation_row(self, index: int) -> int:
        """The row number of validation row `index`."""
        stretch, place = divmod(index, self.block)
        return (stretch + 1) * self._stretch - self.block + place

    @property
    def _stretch(self) -> int:
        return self.rows // self.blocks


def split_rows(rows: int, wanted: int) -> Split:
    """Hold out `wanted` of `rows` rows, or as many fewer as make equal blocks (at most 15 fewer)."""
    if wanted == 0:
        return Split(rows, 0, 0)
    blocks = min(wanted, BLOCKS)
    return Split(rows, blocks, wanted // blocks)
