"""The reference stages pass their own conformance classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

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

    def reread_tokenizer(self, out: Path) -> dict[str, Any]:
        return {"letters": str(out / "letters.txt")}


class TestCheckpoint(CheckpointConformance):
    plugin = REFERENCE


class TestModel(ModelConformance):
    plugin = REFERENCE

    def reread(self, out: Path) -> dict[str, Any]:
        return {**self.model, "folder": str(out)}


class TestTiedModel(TestModel):
    model: ClassVar = {"tied": True, "auxiliary": 0.1, "freeze": ["blocks.0.up.weight"]}


class TestComm(CommConformance):
    plugin = REFERENCE
