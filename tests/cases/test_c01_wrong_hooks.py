"""C01: a hook implementation that does not fit its specification ends the run before data and model are looked at."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.run.runs import run, write_recipe

from trainforge.cli import main

HEAD = "from trainforge.hookspecs import hookimpl\nfrom trainforge.provider import Provider\n"
OBJECT = """
class Watch:
    @hookimpl
    def {implementation}: pass

@hookimpl
def forge_observer():
    return Provider(build=lambda ctx, config: Watch())
"""
WRONG = {
    "an argument that the hook no longer has": (
        "@hookimpl\ndef forge_metrics_logged(run, step, values): pass\n",
        ["forge_metrics_logged", "unknown argument values", "run, step, metrics"],
    ),
    "a misspelt hook": (
        "@hookimpl\ndef forge_run_start(run, plan): pass\n",
        ["forge_run_start", "did you mean forge_run_started?"],
    ),
    "an argument, in an observer that is built": (
        OBJECT.format(implementation="forge_step_ended(self, run, number)"),
        ["forge_step_ended", "unknown argument number", "run, step"],
    ),
    "a misspelt hook, in an observer that is built": (
        OBJECT.format(implementation="forge_step_end(self, run, step)"),
        ["forge_step_end", "did you mean forge_step_ended?"],
    ),
    "a stage's hook that wants something": (
        "@hookimpl\ndef forge_data(recipe): return None\n",
        ["forge_data", "unknown argument recipe", "none"],
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_one_message_before_data_and_model(tmp_path, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    # were they looked at, they would be the mistake that is told
    recipe = write_recipe(tmp_path, text={"path": "nowhere.txt"}, model={"config": {"model_type": "none"}})
    source, says = WRONG[wrong]
    Path("mine.py").write_text(HEAD + source)
    command = ["run", str(recipe), "--plugins", "./mine.py", "--max-steps", "1", "--run-dir", "run"]
    result = CliRunner().invoke(main, command, prog_name="forge")
    assert result.exit_code == 2, result.output
    for part in ["mine", str(tmp_path / "mine.py"), *says]:
        assert part in result.stderr
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.output


def test_the_traceback_is_there_for_who_asks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(HEAD + WRONG["a misspelt hook"][0])
    command = ["run", str(write_recipe(tmp_path)), "--plugins", "./mine.py", "--debug"]
    assert "Traceback" in CliRunner().invoke(main, command, prog_name="forge").output


def test_a_hook_that_takes_fewer_arguments_is_right(tmp_path):
    log = tmp_path / "steps"
    body = f"    open({str(log)!r}, 'a').write(f'{{step}} ')\n"
    (tmp_path / "mine.py").write_text(f"{HEAD}@hookimpl\ndef forge_step_ended(step):\n{body}")
    run(write_recipe(tmp_path, train={"steps": 3}), tmp_path / "run", plugins=[str(tmp_path / "mine.py")])
    assert log.read_text() == "1 2 3 "
