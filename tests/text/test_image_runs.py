"""Whole runs on rows with images, through the command's own path: what is learnt can only be seen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from tests.hf import seeing
from tests.run.runs import Outcome
from tests.text.helpers import write_jsonl
from tests.text.vision_folders import LLAVA_SPECIAL, QWEN_SPECIAL, llava_folder, qwen_folder

import trainforge

COLOURS = {"A": (230, 20, 20), "B": (20, 20, 230)}


def recipe(folder: Path, family: str, **train: Any) -> Path:
    """Sixteen pictures of one colour each; the question is always the same and the answer is the colour."""
    if family == "qwen2_5_vl":
        model = qwen_folder(folder / "model", patch_size=2, min_pixels=8 * 8, max_pixels=12 * 12)
        tokens = {
            "image_token_id": QWEN_SPECIAL.index("<|image_pad|>"),
            "video_token_id": QWEN_SPECIAL.index("<|video_pad|>"),
            "vision_start_token_id": QWEN_SPECIAL.index("<|vision_start|>"),
            "vision_end_token_id": QWEN_SPECIAL.index("<|vision_end|>"),
        }
        values = seeing.values(family, 330, **tokens)
    else:
        model = llava_folder(folder / "model")
        values = seeing.values(family, 330, image_token_index=LLAVA_SPECIAL.index("<image>"))
        values["vision_config"] = {**values["vision_config"], "image_size": 32, "patch_size": 8}
    values["text_config"] = {**values["text_config"], "max_position_embeddings": 128}
    rows = []
    for number in range(16):
        answer = "AB"[number % 2]
        red, green, blue = COLOURS[answer]
        name = f"{number}.png"
        Image.new("RGB", (8 + number % 3 * 2, 8), (red, green + number, blue)).save(folder / name)
        turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns, "images": [name]})
    write_jsonl(folder / "rows.jsonl", rows)
    made = {
        "run": {"name": "r", "device": "cpu", "threads": 1},
        "model": {"config": values},
        "train": {
            "steps": 40,
            "global_batch": 8,
            "micro_batch": 4,
            "lr": 0.005,
            "schedule": "constant",
            "warmup": 0,
            "log_every": 1,
            **train,
        },
        "text": {
            "path": str(folder / "rows.jsonl"),
            "tokenizer": str(model),
            "max_len": 128,
            "validation": None,
            "cache": str(folder / "cache"),
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(made))
    return folder / "recipe.yaml"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_a_run_learns_what_only_the_picture_says_and_resumes_exactly(family: str, tmp_path: Path):
    path = recipe(tmp_path, family)
    assert trainforge.run(path, run_dir=tmp_path / "whole") == 0
    whole = Outcome(0, tmp_path / "whole")
    # two tokens an answer: the letter, which is A or B as often, and the end; blind, no loss is below ln(2) / 2
    assert whole.series("loss")[-1] < math.log(2) / 4
    ledger = json.loads((tmp_path / "whole/rows.json").read_text())
    assert (ledger["seen"], ledger["used"]) == (16, 16)

    assert trainforge.run(path, run_dir=tmp_path / "parts", max_steps=7) == 0
    assert trainforge.run(path, run_dir=tmp_path / "parts", max_steps=5) == 0
    assert Outcome(0, tmp_path / "parts").series("loss") == whole.series("loss")[:12]
