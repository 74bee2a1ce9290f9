"""Registries as LLaMA-Factory keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.text.reading import read, turns

from trainforge.errors import DataError
from trainforge_plugins.text import TextSection

REGISTRY: dict[str, Any] = {
    "identity": {"file_name": "identity.json"},
    "mapped": {
        "file_name": "mapped.jsonl",
        "columns": {"prompt": "question", "response": "answer", "query": None},
    },
    "chats": {
        "file_name": "chats.json",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "system": "about", "tools": "functions"},
        "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "bot"},
    },
    "messages": {
        "file_name": "messages.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
        },
    },
    "few": {
        "file_name": "mapped.jsonl",
        "columns": {"prompt": "question", "response": "answer"},
        "num_samples": 2,
    },
    "folder": {"file_name": "many", "subset": "sub"},
    "hub": {"hf_hub_url": "someone/something"},
    "pairs": {"file_name": "identity.json", "ranking": True},
    "videos": {"file_name": "identity.json", "columns": {"videos": "films"}},
    "typo": {"file_name": "identity.json", "formating": "alpaca"},
    "other": {"file_name": "identity.json", "formatting": "chatml"},
    "nothing": {"formatting": "alpaca"},
    "column": {"file_name": "identity.json", "columns": {"qestion": "q"}},
    "count": {"file_name": "identity.json", "num_samples": "all"},
    "half": {"file_name": "identity.json", "columns": {"prompt": "q"}},
    "gone": {"file_name": "none.json"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dataset_info.json").write_text(json.dumps(REGISTRY), "utf-8")
    (tmp_path / "identity.json").write_text('[{"instruction": "q", "input": "", "output": "identity"}]')
    lines = [{"question": f"q{i}", "answer": f"a{i}", "input": "not used"} for i in range(5)]
    (tmp_path / "mapped.jsonl").write_text("\n".join(map(json.dumps, lines)))
    talk = [{"who": "me", "what": "q"}, {"who": "bot", "what": "a"}]
    (tmp_path / "chats.json").write_text(json.dumps([{"about": "s", "functions": "", "talk": talk}]))
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "messages.jsonl").write_text(json.dumps({"messages": talk}))
    (tmp_path / "many" / "sub").mkdir(parents=True)
    (tmp_path / "many" / "b.json").write_text('[{"instruction": "q", "output": "not this"}]')
    (tmp_path / "many" / "sub" / "a.json").write_text('[{"instruction": "q", "output": "in sub"}]')
    return tmp_path


def test_one_several_and_names_with_commas(folder: Path):
    assert read(dataset="identity", dataset_dir=folder).answers == ["identity"]
    both = ["identity", "a0", "a1", "a2", "a3", "a4"]
    assert read(dataset=["identity", "mapped"], dataset_dir=folder).answers == both
    assert read(dataset="identity, mapped", dataset_dir=folder).answers == both


def test_columns_that_an_entry_does_not_name_are_not_used(folder: Path):
    (_, first), *_ = read(dataset="mapped", dataset_dir=folder).used
    assert turns(first) == [("user", "q0"), ("assistant", "a0")]
    (folder / "identity.json").write_text(
        '[{"instruction": "q", "input": "i", "output": "a", "system": "s"}]'
    )
    (_, first), *_ = read(dataset="identity", dataset_dir=folder).used
    assert turns(first) == [("user", "q\ni"), ("assistant", "a")]


def test_columns_and_tags_of_an_entry(folder: Path):
    ((_, conversation),) = read(dataset="chats", dataset_dir=folder).used
    assert turns(conversation) == [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert read(dataset="messages", dataset_dir=folder).answers == ["a"]


def test_the_first_rows_of_an_entry_with_num_samples(folder: Path):
    assert read(dataset="few", dataset_dir=folder).answers == ["a0", "a1"]
    rows = json.dumps([{"question": f"q{i}", "answer": f"a{i}"} for i in range(5)])
    (folder / "mapped.jsonl").write_text(rows[1:-1].replace("}, {", "}\n\n{"))
    found = read(dataset="few", dataset_dir=folder, unit_bytes=10)
    assert [place for place, _ in found.used] == ["mapped.jsonl:1", "mapped.jsonl:3"]


def test_a_folder_and_its_subset(folder: Path):
    assert read(dataset="folder", dataset_dir=folder).answers == ["in sub"]


def test_num_samples_is_for_one_file(folder: Path):
    registry = {"all": {"file_name": "many", "num_samples": 2}}
    (folder / "dataset_info.json").write_text(json.dumps(registry))
    (folder / "many" / "c.json").write_text('[{"instruction": "q", "output": "nor this"}]')
    with pytest.raises(
        DataError, match=r"num_samples of 'all' is for one file, and .*many holds 3: name one"
    ):
        read(dataset="all", dataset_dir=folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("identiti", "did you mean identity?"),
        ("hub", "hf_hub_url names 'someone/something' on a hub"),
        ("pairs", "preference pairs"),
        ("videos", "the column 'videos'"),
        ("typo", "unknown key 'formating': did you mean formatting?"),
        ("other", "formatting is 'chatml': set alpaca, sharegpt or openai"),
        ("nothing", "no file_name"),
        ("column", "columns: 'qestion' is none of"),
        ("count", "num_samples is 'all'"),
        ("half", "columns names none for prompt or response"),
        ("gone", "does not exist"),
        (" , ", "text.dataset is empty"),
    ],
)
def test_one_sentence_for_each_mistake(folder: Path, name: str, words: str):
    with pytest.raises(DataError) as caught:
        read(dataset=name, dataset_dir=folder)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_registries_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(DataError, match=r"text\.dataset_dir: cannot read .*dataset_info\.json"):
        read(dataset="x", dataset_dir=tmp_path)
    for text in ('{"x": }', "[1]", "[" * 100_000, '{"x": 1}'):
        (tmp_path / "dataset_info.json").write_text(text)
        with pytest.raises(DataError, match=r"dataset_info\.json"):
            read(dataset="x", dataset_dir=tmp_path)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, "give one of path, sources and dataset"),
        ({"path": "a", "dataset": "b"}, "path and dataset are given"),
        ({"dataset": "a", "format": "alpaca"}, "format is in dataset_info.json"),
        ({"path": "a", "dataset_dir": "b"}, "dataset_dir is only used with dataset"),
        ({"path": "a", "columns": {"answr": "x"}}, "columns: 'answr' is none of"),
        ({"sources": []}, "sources"),
        ({"sources": [{"path": "a", "weight": 0}]}, "weight"),
        ({"sources": [{"path": "a", "tags": {"x": "y"}}]}, "tags: 'x' is none of"),
    ],
)
def test_sections_that_cannot_be(section: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=words):
        TextSection(**section)


def test_a_section_survives_being_written_with_all_defaults():
    for section in (TextSection(dataset="a"), TextSection(path="a"), TextSection(sources=[{"path": "a"}])):
        assert TextSection.model_validate(json.loads(section.model_dump_json())) == section
