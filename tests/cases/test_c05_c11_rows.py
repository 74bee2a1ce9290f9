"""C05, C07, C09, C10, C11: rows that cannot be used, in one file and whatever the locale; on one rank and on two."""

import json
import os
import subprocess
import sys

import pytest
from tests.run.runs import MODEL, Outcome, run, write_recipe
from tests.support.many_runs import Start, on_ranks

from trainforge.errors import DataError

LLAMA = MODEL | {"model_type": "llama", "tie_word_embeddings": False}
TRAIN = {"steps": 4, "global_batch": 2, "micro_batch": 1}
TEXT = {"max_len": 64, "packing": False, "workers": 2}
GOOD = {"instruction": "say it", "input": "", "output": "it"}
LONG = {"instruction": "a long question " * 9, "output": "yes"}


def as_bytes(row):
    return row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode()


BAD = {
    3: {"instruction": "lacks the answer", "input": ""},
    4: {"instruction": "q", "output": ""},
    5: {"instruction": "q", "output": None},
    6: b'{"instruction": "q", "output": "a",}',
    8: {"instruction": "q", "output": {"nested": "object"}},
    9: '{"instruction": "q", "output": "caf\xe9"}'.encode("latin-1"),
    10: rb'{"instruction": "q", "output": "half \ud83d pair"}',
    12: LONG,
}
REASONS = {
    "no column 'output'": 3,
    "'output' is empty": 4,
    "'output' is null": 5,
    "not JSON": 6,
    "'output' is not text": 8,
    "not UTF-8": 9,
    "half of a surrogate pair": 10,
}
FINE = {
    1: GOOD,
    2: {"instruction": "no input", "output": "is fine"},
    7: {"instruction": "a number", "output": 7},
    11: {"instruction": "grüße 😀", "input": "語", "output": "😀 語"},
    13: {"instruction": "null", "input": None, "output": "is missing"},
}


@pytest.fixture
def mixed(tmp_path):
    """A file of 20 rows, twelve of them of no use or unusual, behind a byte-order mark."""
    rows = [as_bytes({**FINE, **BAD}.get(number, GOOD)) for number in range(1, 21)]
    (tmp_path / "mixed.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(row + b"\n" for row in rows))
    text = TEXT | {"path": str(tmp_path / "mixed.jsonl"), "validation": 0}
    return write_recipe(tmp_path, model={"config": LLAMA}, train=TRAIN, text=text)


def check_rows(outcome, file):
    ledger = json.loads((outcome.folder / "rows.json").read_text())
    assert (ledger["seen"], ledger["used"]) == (20, 12)
    skipped = ledger["skipped"]
    for reason, line in REASONS.items():
        assert skipped[reason]["count"] == 1, reason
        assert skipped[reason]["rows"][0].startswith(f"{file}:{line}"), skipped[reason]
    offset = file.read_bytes().index(b"\xe9")
    assert f"(byte 0xe9 at offset {offset} of the file)" in skipped["not UTF-8"]["rows"][0]
    (too_long,) = skipped.keys() - REASONS.keys()
    assert skipped[too_long]["count"] == 1
    assert "max_len" in too_long
    log = (outcome.folder / "log.txt").read_text()
    for reason in skipped:
        assert log.count(reason) == 1, f"{reason} is said once, whatever the number of ranks"
    assert "5.00%" in log


@pytest.mark.ranks
def test_the_same_rows_for_one_rank_and_for_two_whatever_the_locale(tmp_path, mixed):
    one = run(mixed, tmp_path / "one")
    check_rows(one, tmp_path / "mixed.jsonl")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (tmp_path / "cache").rename(tmp_path / "cache of one rank")  # both tokenise
    command = [
        sys.executable,
        "-m",
        "trainforge.cli",
        "run",
        mixed,
        "--run-dir",
        tmp_path / "two",
        "--nproc",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    two = Outcome(0, tmp_path / "two")
    check_rows(two, tmp_path / "mixed.jsonl")
    assert (two.folder / "rows.json").read_bytes() == (one.folder / "rows.json").read_bytes()
    assert two.summary["world"] == 2
    assert two.summary["weights_digest"] == one.summary["weights_digest"]
    assert two.summary["supervised_tokens"] == one.summary["supervised_tokens"]


def no_weights(patch, rank):
    """Whoever loads a weight fails otherwise than expected."""

    def load(self, *arguments):
        raise AssertionError("a weight was loaded")

    patch.setattr("trainforge_plugins.hf.spec.HuggingFaceModel.load", load)


UNUSABLE = {
    "other columns": (
        [{"question": "q", "answer": "a"}] * 3,
        {"format": "alpaca"},
        ("question", "answer", "text.columns"),
    ),
    "strict": (
        [GOOD, {"instruction": "q", "output": None}],
        {"strict": True},
        (":2", "'output' is null", "strict"),
    ),
    "all too long": ([LONG] * 8, {"max_len": 16}, ("text.max_len (16)", "set text.max_len to at least")),
}


@pytest.mark.ranks
def test_what_has_no_usable_row_ends_before_a_weight_is_loaded(tmp_path, monkeypatch):
    starts, told = [], {}
    for name, (rows, section, _) in UNUSABLE.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "rows.jsonl").write_bytes(b"".join(as_bytes(row) + b"\n" for row in rows))
        text = TEXT | {"path": str(folder / "rows.jsonl"), "workers": 0} | section
        recipe = write_recipe(folder, model={"config": LLAMA}, train=TRAIN, text=text)
        starts.append(Start(recipe, folder / "two", change=no_weights))
        with monkeypatch.context() as patch:
            no_weights(patch, 0)
            with pytest.raises(DataError) as caught:
                run(recipe, folder / "one")
        assert caught.value.exit_code == 2
        told[name] = str(caught.value)
    # seven rows too long and one that is not: in every step one of two ranks has nothing to learn
    folder = tmp_path / "one of eight"
    folder.mkdir()
    (folder / "rows.jsonl").write_bytes(b"".join(as_bytes(row) + b"\n" for row in [LONG] * 7 + [GOOD]))
    text = TEXT | {"path": str(folder / "rows.jsonl"), "workers": 0, "validation": 0}
    recipe = write_recipe(folder, model={"config": LLAMA}, train=TRAIN, text=text)
    starts.append(Start(recipe, folder / "two"))
    one = run(recipe, folder / "one")

    *refused, trained = on_ranks(2, starts)
    for (name, (_, _, words)), ends in zip(UNUSABLE.items(), refused, strict=True):
        for end in ends:
            assert (end.code, end.error, end.text) == (2, "DataError", told[name])
        assert all(word in told[name] for word in words), told[name]
        assert not (tmp_path / name / "two/summary.json").exists()
    assert [end.code for end in trained] == [0, 0]
    two = Outcome(0, folder / "two")
    assert two.series("loss") == one.series("loss")
    assert all(loss > 0 for loss in two.series("loss"))
    assert two.summary["supervised_tokens"] == one.summary["supervised_tokens"] == 4 * 3
    assert two.summary["weights_digest"] == one.summary["weights_digest"]
