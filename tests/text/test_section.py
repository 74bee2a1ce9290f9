"""The recipe section, the provider and the quickstart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from tests.text.helpers import context, text_data, write_jsonl

from trainforge.errors import ConfigError, DataError
from trainforge.sections import RunSection, TrainSection
from trainforge.stages import Data
from trainforge_plugins import text
from trainforge_plugins.text import TextSection, estimate, forge_data

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = Path(text.__file__).parent / "quickstart.yaml"


def test_the_provider():
    provider = forge_data()
    assert provider.default
    assert provider.config is TextSection
    assert provider.quickstart == "trainforge_plugins.text:quickstart.yaml"


def test_the_example_is_the_packaged_quickstart():
    assert (ROOT / "examples" / "quickstart.yaml").read_bytes() == QUICKSTART.read_bytes()


def test_the_quickstart_builds(tmp_path: Path):
    recipe = yaml.safe_load(QUICKSTART.read_text("utf-8"))
    RunSection(**recipe["run"])
    train = TrainSection(**recipe["train"])
    section, model = recipe["text"], recipe["model"]["config"]
    data = text_data(
        tmp_path,
        section["path"],
        section={**section, "validation": 0.02},
        micro=train.global_batch or 1,
        vocab_size=model["vocab_size"],
        max_positions=model["max_position_embeddings"],
    )
    (batch,) = data.take(1)
    assert batch.input_ids.shape == (train.global_batch, section["max_len"])
    assert batch.real == batch.input_ids.numel()
    assert batch.document_ids is None
    assert data.ledger()["skipped"] == {}
    assert isinstance(data, Data)


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"path": "a", "max_len": 1},
        {"path": "a", "validation": -0.1},
        {"path": "a", "workers": -1},
        {"path": "a", "last_batch": "wrap"},
        {"path": "a", "filed": "x"},
    ],
)
def test_what_the_section_refuses(section: dict[str, object]):
    with pytest.raises(ValidationError):
        TextSection(**section)  # type: ignore[arg-type]


def test_lists_shares_counts_and_durations_are_taken():
    section = TextSection(path=["a", "b"], validation=100, worker_timeout="2min")  # type: ignore[arg-type]
    assert (section.path, section.validation, section.worker_timeout) == (("a", "b"), 100, 120.0)
    assert TextSection(path="a", validation="held.txt").validation == "held.txt"


def test_the_estimate_of_the_cache(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x" * 1000)
    ctx = context(tmp_path)
    section = TextSection(path=str(tmp_path / "a.txt"))
    assert estimate(ctx, ctx.model, section).disk == {"token cache": 2000}
    row = write_jsonl(tmp_path / "b.jsonl", [{"instruction": "q", "output": "a" * 100}])
    section = TextSection(path=str(row))
    assert estimate(ctx, ctx.model, section).disk == {"token cache": 3 * row.stat().st_size}


def test_the_path_of_validation_is_called_so(tmp_path: Path):
    (tmp_path / "a.txt").write_text("some words")
    with pytest.raises(DataError, match=r"^text\.validation: .*none\.txt does not exist"):
        text_data(tmp_path, str(tmp_path / "a.txt"), section={"validation": str(tmp_path / "none.txt")})


@pytest.mark.parametrize(
    ("name", "section", "words"),
    [
        ("a.txt", {"field": "body"}, "text.field is 'body'.*plain text, which has no fields"),
        ("b.jsonl", {"field": "body", "format": "alpaca"}, "text.field is 'body'.*conversations"),
        ("c.jsonl", {"columns": {"prompt": "text"}, "format": "jsonl"}, "text.columns is for conversations"),
        ("a.txt", {"tags": {"user_tag": "me"}}, "text.tags is for conversations"),
        (
            "a.txt",
            {"path": None, "sources": [{"columns": {"prompt": "x"}}]},
            r"text\.sources\[0\]\.columns is",
        ),
    ],
)
def test_what_could_change_nothing_is_refused(tmp_path: Path, name: str, section: dict[str, Any], words: str):
    (tmp_path / "a.txt").write_text("some words")
    write_jsonl(tmp_path / "b.jsonl", [{"instruction": "q", "output": "a"}])
    write_jsonl(tmp_path / "c.jsonl", [{"text": "some words"}])
    path = str(tmp_path / name)
    if "sources" in section:
        section = {**section, "sources": [{"path": path, **source} for source in section["sources"]]}
    with pytest.raises(ConfigError, match=words):
        text_data(tmp_path, path, section=section)
