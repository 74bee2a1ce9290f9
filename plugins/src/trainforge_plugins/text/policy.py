"""What becomes of a conversation that is longer than a row: dropped, or cut where the recipe says, and counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainforge_plugins.text.conversation import BadRow
from trainforge_plugins.text.images import ImageFile
from trainforge_plugins.text.labels import Encoded

TooLong = Literal["drop", "cut_prompt", "cut_tail"]
UNSUPERVISED = "no token to learn from"
KEPT_OF_A_PROMPT = 1


class DoesNotFit(BadRow):
    """A row that would be usable with a larger `max_len`.

    Attributes:
        needed: the smallest `max_len` with which this policy would use it.
    """

    def __init__(self, reason: str, needed: int) -> None:
        super().__init__(reason, f"needs {needed} tokens")
        self.needed = needed


@dataclass(frozen=True)
class Fitted:
    """A conversation that fits into a row.

    Attributes:
        ids: token ids, int64 `[tokens]`.
        supervised: bool `[tokens]`.
        truncated: whether it was cut.
        images: the files of its images, with the tokens that stand for them.
    """

    ids: np.ndarray
    supervised: np.ndarray
    truncated: bool
    images: tuple[ImageFile, ...] = ()


def fit(encoded: Encoded, max_len: int, too_long: TooLong) -> Fitted:
    """Bring a conversation to at most `max_len` tokens.

    - `drop`: one that is longer is not used.
    - `cut_prompt`: tokens are taken from the middle of the contents of system, user and tool turns, always from the
      longest, until it fits. The template's own tokens and all that the assistant writes stay. The prompt's token
      behind a gap has no label: it does not follow what stands before the gap.
    - `cut_tail`: turns that do not fit are left off at the end. An assistant turn that fits in part keeps its
      beginning and its end token, but the end token has no label: the answer does not end there.

    One with images is never cut: it would no longer be about what they show.

    Raises:
        DoesNotFit: it is longer and cannot be used; says which length would do.
        BadRow: it has no token to learn from, at any length.
    """
    if not encoded.targets:
        raise BadRow(UNSUPERVISED)
    if len(encoded.ids) <= max_len:
        return Fitted(encoded.ids, encoded.supervised, False)
    if too_long == "drop":
        raise DoesNotFit("longer than text.max_len", len(encoded.ids))
    if encoded.images:
        raise DoesNotFit("longer than text.max_len, and rows with images are not cut", len(encoded.ids))
    keep, supervised = (
        _without_middles(encoded, max_len) if too_long == "cut_prompt" else _beginning(encoded, max_len)
    )
    return Fitted(encoded.ids[keep], supervised[keep], True)


def _without_middles(encoded: Encoded, max_len: int) -> tuple[np.ndarray, np.ndarray]:
    excess = len(encoded.ids) - max_len
    lengths = [stop - start for start, stop in encoded.prompts]
    removable = sum(max(0, length - KEPT_OF_A_PROMPT) for length in lengths)
    if removable < excess:
        raise DoesNotFit(
            "longer than text.max_len even with its prompts cut to nothing", len(encoded.ids) - removable
        )
    keep = np.ones(len(encoded.ids), bool)
    answers = np.zeros(len(encoded.ids), bool)
    for turn in encoded.turns:
        answers[turn.start : turn.stop] = True
    supervised = encoded.supervised.copy()
    for (start, stop), left in zip(encoded.prompts, levelled(lengths, sum(lengths) - excess), strict=True):
        gap, resume = start + (left + 1) // 2, stop - left // 2
        keep[gap:resume] = False
        if gap < resume < len(keep):
            supervised[resume] &= answers[resume]
    return keep, supervised


def levelled(lengths: list[int], total: int) -> list[int]:
    """Lower the largest of `lengths` to a common level (or one less) so that together they are `total`."""
    low, high = 0, max(lengths)
    while low < high:  # the lowest level that leaves enough
        level = (low + high) // 2
        if sum(min(length, level) for length in lengths) >= total:
            high = level
        else:
            low = level + 1
    cut = [min(length, low) for length in lengths]
    over = sum(cut) - total
    for i, length in enumerate(cut):
        if over and length == low:
            cut[i] -= 1
            over -= 1
    return cut


def _beginning(encoded: Encoded, max_len: int) -> tuple[np.ndarray, np.ndarray]:
    keep, supervised = _cut_at(encoded, max_len)
    if not np.count_nonzero(supervised[keep][1:]):
        lengths = sorted({n for t in encoded.turns for n in (t.start + 1 + t.stop - t.end, t.stop)})
        needed = next(
            (n for n in lengths if (cut := _cut_at(encoded, n))[1][cut[0]][1:].any()), len(encoded.ids)
        )
        raise DoesNotFit("longer than text.max_len, which leaves no token to learn from", needed)
    return keep, supervised


def _cut_at(encoded: Encoded, length: int) -> tuple[np.ndarray, np.ndarray]:
    """What `cut_tail` keeps in `length` tokens, and which tokens have a label then."""
    keep = np.zeros(len(encoded.ids), bool)
    supervised = encoded.supervised.copy()
    for turn in encoded.turns:
        if turn.stop <= length:
            keep[: turn.stop] = True
            continue
        room = length - (turn.stop - turn.end)
        if room > turn.start:
            keep[:room] = keep[turn.end : turn.stop] = True
            supervised[turn.end : turn.stop] = False
        break
    return keep, supervised
