"""The reference stages pass their own conformance classes."""

from __future__ import annotations

from trainforge.testing import MemoryConformance, OptimizerConformance

REFERENCE = "trainforge.testing.reference"


class TestMemory(MemoryConformance):
    plugin = REFERENCE


class TestOptimizer(OptimizerConformance):
    plugin = REFERENCE
