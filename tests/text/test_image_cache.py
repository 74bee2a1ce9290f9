"""Images over time: changed files, a cache, workers, ranks, resume, images that go away while a run trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.text.helpers import context, write_jsonl
from tests.text.vision_folders import picture, qwen_folder

from trainforge.context import SilentConsole
from trainforge.errors import DataError
from trainforge.stages import Batch
from trainforge_plugins.text import TextSection, build
from trainforge_plugins.text.data import TextData
from trainforge_plugins.text.inspection import shown

COUNT = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_folder(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Twelve rows, two in three with an image of its own."""
    made = []
    for number in range(COUNT):
        turns = [{"role": "user", "content": f"<image>{number}?"}, {"role": "assistant", "content": "yes"}]
        images: list[str] = []
        if number % 3:
            picture(tmp_path / f"{number}.png", 40 + number * 4, 60, number)
            images = [f"{number}.png"]
        else:
            turns[0]["content"] = f"{number}?"
        made.append({"messages": turns, "images": images})
    return write_jsonl(tmp_path / "rows.jsonl", made)


def open_data(rows: Path, model: Path, facts: dict[str, Any] | None = None, **section: Any) -> TextData:
    options = {"max_len": 128, "packing": False, "validation": None, "tokenizer": str(model), **section}
    ctx = context(rows.parent / "run", vocab_size=400, **{"micro": 2, **(facts or {})})
    data = build(ctx, TextSection(path=str(rows), **options))
    assert isinstance(data, TextData)
    assert isinstance(ctx.console, SilentConsole)
    data.notes = [line for line in ctx.console.lines if "tokenising again" in line]  # type: ignore[attr-defined]
    return data


def everything(data: TextData, steps: int, count: int = 1) -> list[Batch]:
    found = [batch for _ in range(steps) for batch in data.take(count)]
    data.close()
    return found


def same(one: Batch, other: Batch) -> bool:
    return (
        one.sample_ids == other.sample_ids
        and torch.equal(one.input_ids, other.input_ids)
        and one.inputs.keys() == other.inputs.keys()
        and all(torch.equal(one.inputs[name], other.inputs[name]) for name in one.inputs)
    )


def test_tokens_and_features_agree_in_every_batch(rows: Path, model: Path):
    data = open_data(rows, model)
    (pad,) = data.tokenizer.encode(b"<|image_pad|>").tolist()
    for batch in everything(data, 9):  # an epoch and a half
        grids = batch.inputs.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        assert int((batch.input_ids == pad).sum()) == int(grids.prod(1).sum()) // 4
        assert len(batch.inputs.get("pixel_values", ())) == int(grids.prod(1).sum())
        shown_rows = [number for number in batch.sample_ids if number % 3]
        assert len(grids) == len(shown_rows)


def test_ranks_workers_and_resume_give_the_same_batches(rows: Path, model: Path):
    one = everything(open_data(rows, model, {"accumulate": 2}), 3, 2)

    ranks = [open_data(rows, model, {"rank": rank, "world": 2}) for rank in range(2)]
    split = [batch for _ in range(3) for data in ranks for batch in data.take(1)]
    for data in ranks:
        data.close()
    assert len(split) == len(one)
    assert all(same(a, b) for a, b in zip(one, split, strict=True))

    whole = everything(open_data(rows, model), 8)
    data = open_data(rows, model)
    for _ in range(3):
        data.take(1)
    state = data.state()
    data.close()
    resumed = open_data(rows, model)
    resumed.take(1)  # what was begun for the next step must not be what comes after a load
    resumed.load(state.version, state.data)
    assert all(same(a, b) for a, b in zip(whole[3:], everything(resumed, 5), strict=True))

    elsewhere = rows.parent / "workers"
    parallel = open_data(rows, model, workers=1, cache=str(elsewhere))
    assert parallel.cache.digest == open_data(rows, model).cache.digest
    assert all(same(a, b) for a, b in zip(whole, everything(parallel, 8), strict=True))


def test_a_changed_image_rebuilds_and_a_touched_one_gives_the_same_data(rows: Path, model: Path):
    first = open_data(rows, model)
    assert open_data(rows, model).notes == []  # type: ignore[attr-defined]

    os.utime(rows.parent / "4.png", (1, 1))
    touched = open_data(rows, model)
    assert touched.notes == [f"tokenising again: {rows.parent / '4.png'} has changed"]  # type: ignore[attr-defined]
    assert touched.cache.digest == first.cache.digest

    picture(rows.parent / "4.png", 100, 100, 99)
    changed = open_data(rows, model)
    assert changed.notes == [f"tokenising again: {rows.parent / '4.png'} has changed"]  # type: ignore[attr-defined]
    assert changed.cache.digest != first.cache.digest

    (rows.parent / "4.png").unlink()
    gone = open_data(rows, model)
    assert gone.notes == [f"tokenising again: {rows.parent / '4.png'} is gone"]  # type: ignore[attr-defined]
    assert gone.ledger()["used"] == COUNT - 1
    assert open_data(rows, model).notes == []  # type: ignore[attr-defined]

    picture(rows.parent / "4.png", 56, 60, 4)
    back = open_data(rows, model)
    assert back.notes == [f"tokenising again: {rows.parent / '4.png'} is there now"]  # type: ignore[attr-defined]
    assert back.cache.digest == first.cache.digest


def test_a_changed_processor_rebuilds(rows: Path, tmp_path: Path):
    own = qwen_folder(tmp_path / "own")
    open_data(rows, own)
    qwen_folder(tmp_path / "own", max_pixels=56 * 56)
    assert open_data(rows, own).notes == [  # type: ignore[attr-defined]
        "tokenising again: the processor of images has changed"
    ]


@pytest.mark.parametrize("how", ["gone", "changed", "cut"])
def test_an_image_that_goes_away_ends_the_run_with_its_name(how: str, rows: Path, model: Path):
    data = open_data(rows, model, {"micro": COUNT})
    path = rows.parent / "5.png"
    if how == "gone":
        path.unlink()
    elif how == "changed":
        picture(path, 60, 60, 98)
    else:
        path.write_bytes(path.read_bytes()[:90])
    reason = "No such file or directory" if how == "gone" else "it has changed"
    with pytest.raises(DataError, match=f"the image {path} cannot be used any more: {reason}"):
        data.take(1)
    data.close()


def test_an_image_only_touched_trains_on(rows: Path, model: Path):
    data = open_data(rows, model, {"micro": COUNT})
    os.utime(rows.parent / "5.png", (5, 5))
    (batch,) = everything(data, 1)
    assert batch.sample_ids == tuple(batch.sample_ids)
    assert len(batch.inputs["image_grid_thw"]) == 8


def test_validation_has_its_images(rows: Path, model: Path):
    data = open_data(rows, model, validation=4)
    found = list(data.validation())
    data.close()
    assert sum(len(batch.inputs.get("image_grid_thw", ())) for batch in found) == sum(
        number % 3 != 0 for batch in found for number in batch.sample_ids
    )
    assert any(batch.inputs for batch in found)


def test_inspection_shows_images_as_such(rows: Path, model: Path):
    data = open_data(rows, model)
    text = shown(data.cache, data.tokenizer, 1, False)
    data.close()
    # 44 x 60 pixels become 56 x 56: 4 x 4 patches, one token for four
    assert "<|vision_start|>[image 44x60 \N{RIGHTWARDS ARROW} 4 tokens]<|vision_end|>1?<|im_end|>" in text
    assert "<|image_pad|>" not in text
    assert "[[yes<|im_end|>]]" in text


def test_the_images_of_an_open_cache_outlive_a_rebuild(rows: Path, model: Path):
    old = open_data(rows, model)
    kept = [old.cache.images.of(document) for document in range(COUNT)]
    assert sum(map(bool, kept)) == 8
    open_data(rows, model, train_on="all").close()  # another run on the same file, with other settings
    assert [old.cache.images.of(document) for document in range(COUNT)] == kept
    assert sum(len(batch.inputs.get("image_grid_thw", ())) for batch in everything(old, 6)) == 8
