"""`forge data inspect`: lengths, a few rows with what is learnt of them, and the row ledger."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from trainforge_plugins.text.cache import TokenCache
from trainforge_plugins.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge_plugins.text import TextSection

_BAR = 40
_BUCKETS = 10
_SHOWN_TOKENS = 400


@click.command()
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Documents to show, from the first.",
)
def inspect(ctx: Context, config: TextSection, rows: int) -> None:
    """Show what a run of RECIPE would train on.

    Lengths as a histogram, a few rows as the model reads them (what is learnt is green, or in [[ ]] where there are no
    colours), and each row that is not used, with the reason.
    """
    # torch comes with it, and help must not wait for that
    from trainforge_plugins.text.data import build_data

    data = build_data(ctx, config)
    console = ctx.console
    for line in data.start_report():
        console.note(line)
    for line in histogram(np.diff(data.cache.bounds())):
        console.note(line)
    coloured = console.terminal is not None and console.terminal.is_terminal
    for number in range(min(rows, data.cache.documents)):
        console.note(f"\n--- {number + 1} of {data.cache.documents:,} ---")
        click.echo(shown(data.cache, data.tokenizer, number, coloured), color=coloured)
    console.note("")
    for line in ledger_lines(data.ledger()):
        console.note(line)


def histogram(lengths: np.ndarray) -> list[str]:
    """Lengths of documents in tokens, as bars."""
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // _BUCKETS))
    counts = np.bincount((lengths - low) // width)
    digits = len(f"{high:,}")
    lines = [f"tokens per document: least {low:,}, median {int(np.median(lengths)):,}, most {high:,}"]
    for bucket, count in enumerate(counts.tolist()):
        start = low + bucket * width
        stop = min(high, start + width - 1)
        bar = "#" * (-(-count * _BAR // int(counts.max())))
        lines.append(f"  {start:>{digits},} to {stop:>{digits},}  {bar:<{_BAR}}  {count:,}")
    return lines


def shown(cache: TokenCache, tokenizer: Tokenizer, number: int, coloured: bool) -> str:
    """A document as text, its beginning if it is long; runs of tokens that are learnt stand out; images as such."""
    bounds = cache.bounds()
    begin, end = int(bounds[number]), int(bounds[number + 1])
    parts: list[str] = []
    at, left = begin, _SHOWN_TOKENS
    for image in cache.images.of(number):
        if begin + image.start - at > left:
            break
        parts += _runs(cache, tokenizer, at, begin + image.start, coloured)
        parts.append(f"[image {image.width}x{image.height} \N{RIGHTWARDS ARROW} {image.tokens:,} tokens]")
        left -= begin + image.start - at
        at = begin + image.start + image.tokens
    stop = min(end, at + left)
    parts += _runs(cache, tokenizer, at, stop, coloured)
    if stop < end:
        parts.append(f" ... ({end - stop:,} more tokens)")
    return "".join(parts)


def _runs(cache: TokenCache, tokenizer: Tokenizer, begin: int, stop: int, coloured: bool) -> list[str]:
    """The text of the tokens from `begin` up to `stop`, those that are learnt marked."""
    if begin == stop:
        return []
    ids, supervised = cache.read(begin, stop).tolist(), cache.supervised(begin, stop)
    edges = [0, *(np.flatnonzero(np.diff(supervised)) + 1).tolist(), len(ids)]
    parts = []
    for start, after in pairwise(edges):
        text = _visible(tokenizer.show(ids[start:after]))
        if supervised[start] and cache.conversations:
            text = click.style(text, fg="green") if coloured else f"[[{text}]]"
        parts.append(text)
    return parts


def _visible(text: str) -> str:
    """The text without characters that would steer the terminal."""
    return "".join(c if c in "\t\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def ledger_lines(ledger: dict[str, Any]) -> list[str]:
    """The row ledger: counts, and for each reason the rows that were kept by number."""
    lines = [
        f"rows: {ledger['seen']:,} seen, {ledger['used']:,} used, {ledger['truncated']:,} cut, "
        f"{sum(entry['count'] for entry in ledger['skipped'].values()):,} skipped"
    ]
    for reason, entry in ledger["skipped"].items():
        lines.append(f"{entry['count'] or len(entry['rows']):,} skipped: {reason}")
        lines += [f"  {row}" for row in entry["rows"]]
        if entry["count"] > len(entry["rows"]):
            lines.append(f"  and {entry['count'] - len(entry['rows']):,} more")
    return lines
