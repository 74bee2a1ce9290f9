"""Exit codes and messages: a person's mistake is one message and exit 2; a traceback needs `--debug`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import trainforge.planning
from trainforge.cli import main
from trainforge.errors import CheckpointError, ConfigError, ProviderError


def forge(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="forge")


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(
        "train: {steps: 1}\ntext: {path: x.txt}\nmodel: {config: {model_type: qwen2}}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "none.yaml"], "none.yaml cannot be read: No such file"),
        (["run", "recipe.yaml", "--plugins", "txet"], "did you mean text?"),
        (["run", "recipe.yaml", "--plugins", "./mine.py"], "mine.py cannot be read"),
        (["run", "recipe.yaml", "--set", "train.lrr=1"], "did you mean train.lr?"),
        (["plan", "recipe.yaml", "--set", "train.lr=no"], "train.lr: must be a valid number"),
        (["plan", "recipe.yaml", "--stage", "comm"], "must look like STAGE=PLUGIN"),
        (["plan", "recipe.yaml", "--stage", "comm=a", "--stage", "comm=b"], "given twice: a and b"),
        (["plan", "recipe.yaml", "--without", "progres"], "did you mean progress?"),
        (["run", "recipe.yaml", "--devices", "0,x"], "must be different card numbers"),
        (["run", "recipe.yaml", "--devices", "1,1"], "must be different card numbers"),
        (["plugins", "nobody"], "no plugin is called nobody"),
        (["checkpoints", "nowhere"], "is no run folder"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(arguments: list[str], says: str):
    result = forge(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert "Traceback" not in result.output
    for debugged in (forge("--debug", *arguments), forge(*arguments, "--debug")):
        assert debugged.exit_code == 2
        assert "Traceback" in debugged.stderr
        assert says in debugged.stderr


@pytest.mark.parametrize(
    ("error", "code", "says", "hint"),
    [
        (ConfigError("change it"), 2, "error: change it", False),
        (CheckpointError("bad disk"), 1, "error: bad disk", True),
        (
            ProviderError("p", "data", "reading", OSError("gone")),
            1,
            "p (data) failed while reading: OSError: gone",
            True,
        ),
        (ValueError("ours"), 1, "error: ValueError: ours", True),
    ],
)
def test_exit_codes_by_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, says: str, hint: bool
):
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(trainforge.planning, "make_plan", fail)
    result = forge("plan", "recipe.yaml")
    assert result.exit_code == code
    assert says in result.stderr
    assert ("Run with --debug for the traceback." in result.stderr) == hint
    assert "Traceback" not in result.stderr
    assert "Traceback" in forge("plan", "--debug", "recipe.yaml").stderr


def test_a_rank_leaves_its_error_to_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from trainforge.rank_process import REPORTS, read_reports

    monkeypatch.setenv(REPORTS, str(tmp_path))
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = forge("run", "none.yaml")
    assert result.exit_code == 2
    assert "none.yaml" not in result.output
    report = read_reports(tmp_path)[0]
    assert (report.exit_code, report.error) == (2, "ConfigError")
    assert "none.yaml cannot be read" in report.text


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("@hookimpl\ndef forge_step_ended(run, stap): pass\n", ["forge_step_ended", "stap", "run, step"]),
        ("@hookimpl\ndef forge_memroy(): pass\n", ["forge_memroy", "did you mean forge_memory?"]),
    ],
)
def test_a_wrong_hook_ends_before_data_and_model(source: str, parts: list[str]):
    Path("mine.py").write_text("from trainforge.hookspecs import hookimpl\n" + source)
    result = forge("run", "recipe.yaml", "--plugins", "./mine.py", "--max-steps", "1")
    assert result.exit_code == 2  # x.txt does not exist: the data was not looked at
    for part in ["mine", "mine.py:2", *parts]:
        assert part in result.stderr
    assert not Path("runs").exists()
