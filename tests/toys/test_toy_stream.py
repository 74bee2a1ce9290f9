"""Streaming blocks through a small device is the same training, bit for bit."""

from __future__ import annotations

from trainforge.testing import MemoryConformance

TOY = "./tests/toys/toy_stream.py"


class TestRules(MemoryConformance):
    plugin = TOY
