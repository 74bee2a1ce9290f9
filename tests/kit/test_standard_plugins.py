"""The standard plugins pass the kit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from trainforge.testing import (
    CheckpointConformance,
    CommConformance,
    DataConformance,
    MemoryConformance,
    ModelConformance,
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


QWEN3 = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


class TestHf(ModelConformance):
    plugin = "hf"
    model: ClassVar = {"config": {"model_type": "qwen3", "tie_word_embeddings": True, **QWEN3}}

    def reread(self, out: Path) -> dict[str, Any]:
        return {"hf": str(out)}


class TestHfExperts(TestHf):
    model: ClassVar = {
        "config": {
            "model_type": "qwen3_moe",
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            **QWEN3,
        }
    }


class TestText(DataConformance):
    plugin = "text"
    model: ClassVar = {"vocab": 264}
    config: ClassVar[dict[str, Any]] = {"max_len": 16, "validation": 5, "workers": 0}

    def reread_tokenizer(self, out: Path) -> dict[str, Any]:
        return {"tokenizer": str(out)}

    @pytest.fixture(autouse=True)
    def _write_text(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        folder: Path = tmp_path_factory.mktemp("text")
        for index in range(12):
            (folder / f"{index:02d}.txt").write_text(f"Document {index} has words. " * (index % 4 + 1))
        monkeypatch.setattr(type(self), "config", {**self.config, "path": str(folder)})
