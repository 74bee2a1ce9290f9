"""What a run of the standard plugins really did, seen from outside: calls counted, shapes noted, files looked at."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.run.runs import run, write_recipe

from trainforge.errors import TrainForgeError


@dataclass
class Seen:
    """The traces of one run."""

    folder: Path
    code: int = -1
    error: str = ""
    ids: list[tuple[int, ...]] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)  # micro-batches of each step
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    threads: int = 0
    evaluated: int = 0  # rows of the last evaluation
    evaluations: int = 0
    block_forwards: int = 0
    eager_attention: int = 0
    compiled: int = 0
    head_rows: int = 0  # the most at once
    processes: int = 0
    saves: int = 0
    verified: int = 0
    copied: int = 0  # chunks that an update copied because they were not written yet
    committed_at_return: bool = False
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)

    def series(self, name: str) -> list[float]:
        return [round(entry[name], 10) for entry in self.metrics]

    @property
    def log(self) -> str:
        return (self.folder / "run/log.txt").read_text()

    @property
    def codecs(self) -> set[int]:
        """How chunks are stored in the packs of the checkpoints."""
        from trainforge_loongforge.vault.packs import read_index

        packs = (self.folder / "run/checkpoints/packs").glob("*.pack")
        return {entry.codec for pack in packs for entry in read_index(pack)}

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "run/checkpoints").glob("step-*"))


def probed(
    folder: Path, sections: dict[str, dict[str, Any]], rows: int = 12, plugins: Sequence[str] = ()
) -> Seen:
    """Carry out a recipe in `folder` with these plugins, and watch."""
    seen = Seen(folder)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        _watch_data(patch, seen)
        _watch_model(patch, seen)
        _watch_checkpoints(patch, seen)
        try:
            outcome = run(write_recipe(folder, rows, **sections), folder / "run", plugins=plugins)
        except TrainForgeError as error:
            seen.error = str(error)
        else:
            seen.code, seen.summary, seen.metrics = outcome.code, outcome.summary, outcome.metrics
            seen.recipe = yaml.safe_load((folder / "run/recipe.yaml").read_text())
        finally:
            torch.set_num_threads(threads)
    return seen


def _watch_data(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    from trainforge_plugins.text.data import TextData

    take, validation, popen = TextData.take, TextData.validation, subprocess.Popen

    def watched_take(self, count):
        batches = take(self, count)
        seen.ids.append(tuple(i for batch in batches for i in batch.sample_ids))
        seen.cuts.append(len(batches))
        seen.shapes += [tuple(batch.input_ids.shape) for batch in batches]
        seen.threads = torch.get_num_threads()
        return batches

    def watched_validation(self):
        seen.evaluated, seen.evaluations = 0, seen.evaluations + 1
        for batch in validation(self):
            seen.evaluated += len(batch.sample_ids)
            yield batch

    class WatchedPopen(popen):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments, **options):
            seen.processes += 1
            super().__init__(*arguments, **options)

    patch.setattr(TextData, "take", watched_take)
    patch.setattr(TextData, "validation", watched_validation)
    patch.setattr(subprocess, "Popen", WatchedPopen)


def _watch_model(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    from trainforge_plugins.hf.spec import HuggingFaceModel

    block, eager = modeling_qwen2.Qwen2DecoderLayer.forward, modeling_qwen2.eager_attention_forward
    head = HuggingFaceModel.head

    def watched_block(self, *arguments, **options):
        seen.block_forwards += 1
        return block(self, *arguments, **options)

    def watched_eager(*arguments, **options):
        seen.eager_attention += 1
        return eager(*arguments, **options)

    def watched_head(self, hidden):
        seen.head_rows = max(seen.head_rows, hidden.shape[0])
        return head(self, hidden)

    def counted_compile(self, *arguments, **options):
        seen.compiled += 1

    patch.setattr(modeling_qwen2.Qwen2DecoderLayer, "forward", watched_block)
    patch.setattr(modeling_qwen2, "eager_attention_forward", watched_eager)
    patch.setattr(HuggingFaceModel, "head", watched_head)
    patch.setattr(torch.nn.Module, "compile", counted_compile)


def _watch_checkpoints(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    from trainforge.toolbox.checkpointing.protocol import Save
    from trainforge.toolbox.checkpointing.stage import FolderCheckpoint
    from trainforge_loongforge.vault.snapshot import LivePiece
    from trainforge_plugins.dcp import manifest

    save, write, verify_file = FolderCheckpoint.save, Save.run, manifest.verify_file
    copy = LivePiece.read_into

    def watched_save(self, step, parts):
        save(self, step, parts)
        seen.saves += 1
        seen.committed_at_return = (seen.folder / f"run/checkpoints/step-{step:08d}").exists()

    def slow_write(self):
        time.sleep(0.2)
        return write(self)

    def watched_verify(path, entry):
        seen.verified += 1
        return verify_file(path, entry)

    def watched_copy(self, out):
        seen.copied += 1
        copy(self, out)

    patch.setattr(FolderCheckpoint, "save", watched_save)
    patch.setattr(Save, "run", slow_write)
    patch.setattr(manifest, "verify_file", watched_verify)
    patch.setattr(LivePiece, "read_into", watched_copy)
