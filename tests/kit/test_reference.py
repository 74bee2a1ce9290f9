"""The reference stages pass their own conformance classes."""

from __future__ import annotations

from typing import ClassVar

from trainforge.testing import (
    CheckpointConformance,
    CommConformance,
    DataConformance,
    MemoryConformance,
    ModelConformance,
    OptimizerConformance,
)

REFERENCE = "trainforge.testing.reference"


class TestMemory(MemoryConformance):
    plugin = REFERENCE


class TestOptimizer(OptimizerConformance):
    plugin = REFERENCE


class TestData(DataConformance):
    plugin = REFERENCE


class TestCheckpoint(CheckpointConformance):
    plugin = REFERENCE


class TestModel(ModelConformance):
    plugin = REFERENCE


class TestTiedModel(ModelConformance):
    plugin = REFERENCE
    model: ClassVar = {"tied": True, "auxiliary": 0.1, "freeze": ["blocks.0.up.weight"]}


class TestComm(CommConformance):
    plugin = REFERENCE
