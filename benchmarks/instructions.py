"""Instruction rows of any number for benchmarks: no row repeats, words come as often as in a language."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

WORDS = 50_000
POOL = 4_000_000


def write_rows(path: Path, size: int, seed: int = 0) -> int:
    """Write about `size` bytes of JSONL, half the rows as alpaca and half as ShareGPT; gives the number of rows."""
    written = count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows(seed):
            written += file.write(json.dumps(row) + "\n")
            count += 1
            if written >= size:
                break
    return count


def rows(seed: int) -> Iterator[dict[str, object]]:
    """Rows without end: questions of some 12 to 20 words, answers of some 60, chats of two turns or more."""
    chance = np.random.default_rng(seed)
    words = vocabulary(chance)
    weights = 1 / np.arange(10, len(words) + 10)  # Zipf's law, less steep for the most common words
    pool = [words[i] for i in chance.choice(len(words), POOL, p=weights / weights.sum())]

    def text(mean: int) -> str:
        length = 1 + int(chance.exponential(mean))
        start = int(chance.integers(0, POOL - length))
        return " ".join(pool[start : start + length])

    while True:
        if chance.random() < 0.5:
            given = text(20) if chance.random() < 0.4 else ""
            yield {"instruction": f"{text(12)}?", "input": given, "output": f"{text(60)}."}
        else:
            turns = []
            for _ in range(1 + int(chance.geometric(0.4))):
                turns.append({"from": "human", "value": f"{text(20)}?"})
                turns.append({"from": "gpt", "value": f"{text(60)}.\n{text(5)}."})
            yield {"conversations": turns}


def vocabulary(chance: np.random.Generator) -> list[str]:
    """Words of English letters, common ones short; some with capitals, accents or digits."""
    letters = list("etaoinshrdlcumwfgypbvkjxqz")
    weights = 1 / np.arange(3, 3 + len(letters))
    words = []
    for rank in range(WORDS):
        length = 1 + int(chance.integers(0, 4 + int(np.log2(rank + 1) / 2)))
        word = "".join(chance.choice(letters, length, p=weights / weights.sum()))
        kind = chance.random()
        words.append(word.capitalize() if kind < 0.1 else f"{word}é" if kind < 0.12 else word)
    return words
