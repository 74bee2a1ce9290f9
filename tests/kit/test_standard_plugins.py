"""The standard plugins pass the kit."""

from __future__ import annotations

from trainforge.testing import (
    CheckpointConformance,
    CommConformance,
    MemoryConformance,
    ObserverConformance,
    OptimizerConformance,
)


class TestResident(MemoryConformance):
    plugin = "resident"


class TestAdamW(OptimizerConformance):
    plugin = "adamw"


class TestDdp(CommConformance):
    plugin = "ddp"


class TestDcp(CheckpointConformance):
    plugin = "dcp"


class TestJsonl(ObserverConformance):
    plugin = "jsonl"


class TestProgress(ObserverConformance):
    plugin = "progress"
