"""What each command passes on and prints."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from tests.support.processes import cpu_seconds, python_starts

import trainforge
from trainforge.cli import main
from trainforge.options import RunOptions


def forge(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="forge")


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("x.txt").write_text("some text\n" * 100)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "train: {steps: 1}\ntext: {path: x.txt, max_len: 16}\n"
        "model: {config: {model_type: qwen2, vocab_size: 264, hidden_size: 16, num_hidden_layers: 2, "
        "num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 32, max_position_embeddings: 32}}\n"
    )
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of what carries a plan out or starts ranks; nothing is trained."""
    import trainforge.launcher
    import trainforge.runner

    made: list[Any] = []

    def run_plan(plan: Any, options: RunOptions) -> int:
        made.append((plan, options))
        return 3

    def launch(argv: Any, nproc: int, **kwargs: Any) -> int:
        made.append((tuple(argv), nproc, kwargs))
        return 3

    monkeypatch.setattr(trainforge.runner, "run_plan", run_plan)
    monkeypatch.setattr(trainforge.launcher, "launch", launch)
    return made


def test_run_passes_its_options_and_gives_back_the_exit_code(calls: list[Any]):
    result = forge(
        *[
            "run",
            "recipe.yaml",
            "--run-dir",
            "there",
            "--max-steps",
            "4",
            "--resume",
            "2",
            "--strict",
        ],
        *["--allow-change", "train.lr", "--allow-change", "run.seed", "--debug", "--set", "train.lr=1e-2"],
    )
    assert result.exit_code == 3, result.output
    ((plan, options),) = calls
    assert options == RunOptions(Path("there"), 4, 2, False, ("train.lr", "run.seed"), True)
    assert plan.recipe.train.lr == 0.01


def test_resume_and_fresh_contradict_each_other(calls: list[Any]):
    result = forge("run", "recipe.yaml", "--resume", "2", "--fresh")
    assert result.exit_code == 2
    assert "--fresh" in result.stderr
    assert not calls


def test_ctrl_c_is_one_sentence_and_exit_1(calls: list[Any], monkeypatch: pytest.MonkeyPatch):
    def interrupted(plan: Any, options: RunOptions) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainforge.runner.run_plan", interrupted)
    result = forge("run", "recipe.yaml")
    assert result.exit_code == 1
    assert "stopped at once by Ctrl-C" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("more", "nproc"),
    [
        (["--nproc", "2"], 2),
        (["--devices", "0,2,1"], 3),
        (["--set", "run.devices=[0, 1]"], 2),
        (["--nnodes", "2"], 1),
    ],
)
def test_several_ranks_are_launched_with_the_same_arguments(calls: list[Any], more: list[str], nproc: int):
    arguments = ["run", "recipe.yaml", *more, "--rdzv", "host:1"]
    assert forge(*arguments).exit_code == 3
    ((argv, asked, kwargs),) = calls
    assert (argv, asked) == (tuple(arguments), nproc)
    assert kwargs == {"nnodes": 2 if "--nnodes" in more else 1, "node_rank": 0, "rdzv": "host:1"}


def test_a_rank_does_not_launch_again(calls: list[Any], monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert forge("run", "recipe.yaml", "--nproc", "2").exit_code == 3
    assert isinstance(calls[0][1], RunOptions)


def test_from_python_it_is_the_same(calls: list[Any]):
    made = trainforge.plan("recipe.yaml", overrides=["run.seed=4"])
    assert trainforge.run(made, max_steps=2, run_dir="there") == 3
    assert trainforge.run("recipe.yaml", overrides=["run.seed=4"]) == 3
    (plan, options), (again, _) = calls
    assert options == RunOptions(Path("there"), 2)
    assert plan.hash == again.hash
    with pytest.raises(TypeError, match="overrides"):
        trainforge.run(made, overrides=["run.seed=5"])


def test_plan_shows_who_does_what_and_what_it_needs():
    result = forge("plan", "recipe.yaml", "--set", "train.global_batch=4")
    assert result.exit_code == 0, result.output
    for word in ("optimizer", "trainforge-plugins", "default", "global_batch: 4", "parameters", "together"):
        assert word in result.stdout
    data = json.loads(forge("plan", "recipe.yaml", "--json").stdout)
    assert data["recipe"]["train"]["steps"] == 1
    # embedding and head, then per block: q, k, v with bias, o, gate, up, down, and two norms; the last norm
    block = (16 * 16 + 16) + 2 * (16 * 8 + 8) + 16 * 16 + 3 * 16 * 32 + 2 * 16
    tied = data["recipe"]["model"]["config"].get("tie_word_embeddings", False)
    assert data["sizes"]["parameters"] == 264 * 16 * (1 if tied else 2) + 2 * block + 16
    elements, tensors = data["sizes"]["trainable"], 2 * 12 + 2 + (not tied)
    estimates = data["sizes"]["estimates"]
    (checkpoint,) = estimates["checkpoint"]["host"].values()
    assert (
        checkpoint == 12 * elements + 4 * tensors
    )  # a master, two moments; and a count of steps for each tensor
    assert estimates["memory"]["device"]["optimizer state"] == 8 * elements
    assert "activations (roughly, at 16 tokens per row)" in estimates["memory"]["device"]
    assert forge("plan", "recipe.yaml", "--no-sizes").exit_code == 0


def test_plugins_lists_all_and_explains_one():
    listing = forge("plugins")
    assert listing.exit_code == 0
    assert "trainforge-plugins" in listing.stdout
    one = forge("plugins", "text").stdout
    for word in ("forge_data", "max_len", "512", "tokens per row", "Recipe section text"):
        assert word in one
    assert "Recipe section model" in forge("plugins", "hf").stdout


def test_plugins_names_what_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    info = tmp_path / "sick-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sick\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trainforge.plugins]\nsickly = sick_no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = CliRunner().invoke(main, ["plugins"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "sickly" in result.stdout
    assert "unavailable:" in result.stdout


def checkpoint(run: Path, step: int, **about: Any) -> None:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    about |= {"step": step, "writer": "keeper", "format": 1, "saved_at": 1e9}
    (folder / "checkpoint.json").write_text(json.dumps(about))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run with three checkpoints of a local plugin that finds those damaged that hold a file `bad`."""
    run = tmp_path / "kept"
    for step in (1, 2, 30):
        checkpoint(run, step)
    (tmp_path / "keeper.py").write_text(
        "from trainforge.hookspecs import hookimpl\nfrom trainforge.provider import Provider\n"
        "from trainforge.stages import Checkpoint\n"
        "class Keeper(Checkpoint):\n"
        "    def save(self, step, parts): ...\n    def wait(self): ...\n    def restore(self, parts, path): ...\n"
        "    def verify(self, path): return ['bad: rotten'] if (path / 'bad').exists() else []\n"
        "@hookimpl\ndef forge_checkpoint(): return Provider(build=lambda ctx, config: Keeper())\n"
    )
    record = {"plugin": "keeper", "reference": str(tmp_path / "keeper.py")}
    (run / "plan.json").write_text(json.dumps({"stages": {"checkpoint": record}}))
    return run


def test_checkpoints_are_listed_verified_and_pruned(kept: Path):
    _, *rows, newest = forge("checkpoints", str(kept)).stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["1", "2", "30"]
    assert newest == f"the newest is {kept / 'checkpoints' / 'step-00000030'}"  # in one line, however long
    assert forge("checkpoints", str(kept), "verify").stdout.count("sound") == 3
    assert forge("checkpoints", str(kept), "verify", "--step", "2").stdout == "step 2: sound\n"
    assert "kept are 1, 2, 30" in forge("checkpoints", str(kept), "verify", "--step", "3").stderr
    pruned = forge("checkpoints", str(kept), "prune", "--keep", "2")
    assert pruned.exit_code == 0, pruned.output
    assert sorted(path.name for path in (kept / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000030",
    ]


def test_pruning_keeps_what_the_recipe_of_the_run_keeps(kept: Path):
    for step, loss in ((10, 3.0), (11, 1.0), (12, 2.0), (20, 4.0)):
        checkpoint(kept, step, metrics={"eval_loss": loss})
    train = {"steps": 40, "save_every": 1, "eval_every": 1, "keep": 1, "keep_every": 10, "best": "eval_loss"}
    (kept / "recipe.yaml").write_text(yaml.safe_dump({"train": train}))
    rules = {10: "train.keep_every", 11: "train.best", 20: "train.keep_every", 30: "train.keep_every"}
    stays = [f"kept step {step} ({rule})" for step, rule in rules.items()]

    def there() -> list[int]:
        return sorted(int(path.name[5:]) for path in (kept / "checkpoints").iterdir())

    shown = forge("checkpoints", str(kept), "prune", "--dry-run").stdout.splitlines()
    assert [line.split(" (")[0] for line in shown[:3]] == [f"would delete step {step}" for step in (1, 2, 12)]
    assert shown[3:] == stays
    assert there() == [1, 2, 10, 11, 12, 20, 30]
    done = forge("checkpoints", str(kept), "prune").stdout.splitlines()
    assert [line.split(" (")[0] for line in done[:3]] == [f"deleted step {step}" for step in (1, 2, 12)]
    assert done[3:-1] == stays
    assert re.fullmatch(r"freed \d+ B", done[-1])
    assert there() == [10, 11, 20, 30]


def test_pruning_deletes_nothing_by_a_recipe_that_cannot_be_read(kept: Path):
    for text, says in (("train: [", "not YAML"), ("train: {steps: 5, keep_every: soon}", "train.keep_every")):
        (kept / "recipe.yaml").write_text(text)
        refused = forge("checkpoints", str(kept), "prune")
        assert refused.exit_code == 2
        assert says in refused.stderr
    assert len(list((kept / "checkpoints").iterdir())) == 3


def test_a_damaged_checkpoint_is_told_and_keeps_the_older_ones(kept: Path):
    (kept / "checkpoints" / "step-00000030" / "bad").touch()
    verified = forge("checkpoints", str(kept), "verify")
    assert verified.exit_code == 1
    assert "step 30: DAMAGED\n  bad: rotten" in verified.stdout
    pruned = forge("checkpoints", str(kept), "prune")
    assert pruned.exit_code == 1
    assert "nothing was deleted" in pruned.stderr
    assert f"move {kept / 'checkpoints' / 'step-00000030'} out of the run folder" in pruned.stderr
    assert len(list((kept / "checkpoints").iterdir())) == 3


def test_the_list_fits_80_columns_and_names_what_a_run_has_set_aside(
    kept: Path, monkeypatch: pytest.MonkeyPatch
):
    said = {"bytes": 83 * 2**30, "new_bytes": 1023 * 2**20}
    checkpoint(kept, 100_000, said=said, bytes=83 * 2**30, metrics={"eval_loss": 2.5}, shares=True)
    (kept.parent / "keeper.py").write_text(SHARING)
    (kept / "checkpoints" / "abandoned-step-00100010-1").mkdir()
    monkeypatch.setenv("COLUMNS", "80")
    _, *rows, newest, aside = forge("checkpoints", str(kept)).stdout.splitlines()
    assert len(rows) == 4, "no row is folded"
    for word in ("100000", "83.0 GiB", "1023.0 MiB", "83.1", "keeper", "2.5000", "best"):
        assert word in rows[-1]
    assert newest == f"the newest is {kept / 'checkpoints' / 'step-00100000'}"
    assert aside.startswith(f"1 more set aside by a run: {kept / 'checkpoints' / 'abandoned-'}*; delete")


def test_a_checkpoint_that_cannot_be_read_hides_no_other(kept: Path):
    broken = kept / "checkpoints" / "step-00000002"
    (broken / "checkpoint.json").write_text("{")
    listed = forge("checkpoints", str(kept))
    assert listed.exit_code == 0
    assert [row.split()[0] for row in listed.stdout.splitlines()] == ["step", "1", "30", "the"]
    assert f"the checkpoint {broken} has no usable checkpoint.json" in listed.stderr
    assert "move it out of this folder" in listed.stderr
    verified = forge("checkpoints", str(kept), "verify")
    assert verified.exit_code == 1
    first, second, why, last = verified.stdout.splitlines()
    assert (first, second, last) == ("step 1: sound", "step 2: DAMAGED", "step 30: sound")
    assert "has no usable checkpoint.json" in why
    assert verified.stderr == "damaged: 1 of 3 checkpoints; a run resumes from the newest that is sound\n"
    assert forge("checkpoints", str(kept), "verify", "--step", "30").exit_code == 0
    assert forge("checkpoints", str(kept), "verify", "--step", "2").exit_code == 1
    pruned = forge("checkpoints", str(kept), "prune")  # it may be the one that is wanted
    assert pruned.exit_code == 1
    assert len(list((kept / "checkpoints").iterdir())) == 3


def test_many_problems_of_a_checkpoint_are_shown_as_a_few_and_a_number(kept: Path):
    text = (kept.parent / "keeper.py").read_text()
    (kept.parent / "keeper.py").write_text(
        text.replace("['bad: rotten']", "[f'bad: {n}' for n in range(1500)]")
    )
    (kept / "checkpoints" / "step-00000030" / "bad").touch()
    *_, damaged = forge("checkpoints", str(kept), "verify").stdout.partition("step 30: DAMAGED\n")
    assert damaged.splitlines() == [*(f"  bad: {n}" for n in range(10)), "  and 1,490 problems more"]


def test_a_checkpoint_that_a_run_deletes_meanwhile_is_not_called_damaged(kept: Path):
    """As beside a run that saves: the listing had it, and then its folder was gone."""
    text = (kept.parent / "keeper.py").read_text()
    gone = "__import__('shutil').rmtree(path) or ['gone'] if path.name.endswith('30') else []"
    (kept.parent / "keeper.py").write_text(
        text.replace("['bad: rotten'] if (path / 'bad').exists() else []", gone)
    )
    copy = shutil.copytree(kept, kept.with_name("copy"))
    verified = forge("checkpoints", str(copy), "verify")
    assert verified.exit_code == 0, verified.output
    assert verified.stdout.splitlines()[:2] == ["step 1: sound", "step 2: sound"]
    assert verified.stdout.splitlines()[2].startswith("step 30: gone meanwhile")
    pruned = forge("checkpoints", str(kept), "prune")
    assert pruned.exit_code == 1
    assert "nothing was deleted: step 30 has gone meanwhile" in pruned.stderr
    assert len(list((kept / "checkpoints").iterdir())) == 2


def test_a_checkpoint_that_a_run_deletes_meanwhile_is_not_listed(kept: Path):
    for step in (40, 50):
        checkpoint(kept, step, bytes=5)
    plugin = SHARING.replace(
        "import json", "import json, shutil\nfrom trainforge.errors import CheckpointError"
    )
    plugin += """
def describe(self, path):
    if path.name.endswith("50"):
        shutil.rmtree(path)
        raise CheckpointError("it is missing")
    return {}
Keeper.describe = describe
"""
    (kept.parent / "keeper.py").write_text(plugin)
    listed = forge("checkpoints", str(kept))
    assert listed.exit_code == 0, listed.output
    assert listed.stderr == ""
    assert [row.split()[0] for row in listed.stdout.splitlines()] == ["step", "1", "2", "30", "40", "the"]
    assert listed.stdout.endswith("step-00000040\n")


def test_pruning_says_why_a_folder_does_not_let_it(kept: Path):
    text = (kept.parent / "keeper.py").read_text()
    refusing = (
        "class Keeper(Checkpoint):\n    def remove(self, paths): raise OSError(30, 'Read-only file system')\n"
    )
    (kept.parent / "keeper.py").write_text(text.replace("class Keeper(Checkpoint):\n", refusing))
    pruned = forge("checkpoints", str(kept), "prune")
    assert pruned.exit_code == 1
    assert (
        f"{kept / 'checkpoints'} does not let checkpoints be deleted: Read-only file system" in pruned.stderr
    )
    assert len(list((kept / "checkpoints").iterdir())) == 3


SHARING = """
import json
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider
from trainforge.stages import Checkpoint

class Keeper(Checkpoint):
    def save(self, step, parts): ...
    def wait(self): ...
    def restore(self, parts, path): ...
    def verify(self, path): return []
    def describe(self, path): return json.loads((path / "checkpoint.json").read_text()).get("said", {})

@hookimpl
def forge_checkpoint(): return Provider(build=lambda ctx, config: Keeper())
"""


def test_what_a_save_added_and_what_changed_is_shown_where_the_plugin_says_so(kept: Path):
    tensors = {"memory/master/a": "1", "memory/master/b": "2", "memory/exp_avg/b": "3"}
    sizes = dict.fromkeys([*tensors, "memory/master/c"], 2**20)
    later = {**tensors, "memory/master/b": "8", "memory/master/c": "9"}
    del later["memory/exp_avg/b"]
    for step, digests, new in ((40, tensors, 3 * 2**20), (50, later, 2**20)):
        said = {"bytes": 3 * 2**20, "new_bytes": new, "tensors": digests, "tensor_bytes": sizes}
        checkpoint(kept, step, said=said, bytes=3 * 2**20)
    assert "ratio" not in forge("checkpoints", str(kept)).stdout  # this plugin does not say it
    (kept.parent / "keeper.py").write_text(SHARING)
    header, *rows = [line.split() for line in forge("checkpoints", str(kept)).stdout.splitlines()]
    assert header[:5] == ["step", "size", "new", "ratio", "writer"]
    assert ["40", "3.0", "MiB", "3.0", "MiB", "1.0", "keeper"] in [row[:7] for row in rows]
    assert ["50", "3.0", "MiB", "1.0", "MiB", "3.0", "keeper"] in [row[:7] for row in rows]
    assert ["30", "keeper"] in [[row[0], row[3]] for row in rows if len(row) > 3]
    assert forge("checkpoints", str(kept), "diff", "40", "50").stdout.splitlines() == [
        "changed  memory/master/b",
        "gone  memory/exp_avg/b",
        "added  memory/master/c",
        "step 40 to step 50: 1 (1.0 MiB) of 3 (3.0 MiB) tensors changed, 1 (1.0 MiB) gone, 1 (1.0 MiB) added, 1 are "
        "the same",
        "the save of step 50 added 1.0 MiB to the disk",
    ]
    silent = forge("checkpoints", str(kept), "diff", "1", "50")
    assert silent.exit_code == 2  # so the weights must be read, and nothing says of which model they are
    assert "holds no recipe.yaml" in silent.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["diff", "1"], "diff takes two steps: diff 10 20"),
        (["diff", "1", "two"], "two is no step"),
        (["diff", "1", "3"], "step 3: there is no such checkpoint; kept are 1, 2, 30"),
        (["merge", "30"], "merge takes a step and a folder: merge 20 OUT"),
        (["merge", "3", "out"], "there is no such checkpoint"),
        (["list", "30"], "list takes nothing but options"),
        (["prune", "--step", "30"], "--step is for verify and convert, not for prune"),
        (["verify", "--dry-run"], "--dry-run is for prune, not for verify"),
        (["--keep", "1"], "--keep is for prune, not for list"),
    ],
)
def test_what_is_missing_or_too_much_after_an_action_is_said(kept: Path, arguments: list[str], says: str):
    refused = forge("checkpoints", str(kept), *arguments)
    assert refused.exit_code == 2
    assert says in refused.stderr


def test_help_is_fast():
    """Within 0.3 s where Python itself starts in 15 ms."""
    seconds, output = cpu_seconds("-m", "trainforge.cli", "--help")
    for command in ("run", "plan", "plugins", "checkpoints", "doctor"):
        assert command in output
    assert seconds < 20 * python_starts()


def test_help_of_every_command_imports_nothing_slow():
    """`data` comes last and may plan: its commands are those of the chosen plugin. Torch is too slow for it too."""
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom trainforge.cli import main\n"
        "for name in sorted(main.commands, key=lambda name: name == 'data'):\n"
        "    slow = {'torch', 'pydantic', 'rich', 'pluggy', 'yaml'} if name != 'data' else {'torch', 'transformers'}\n"
        "    result = CliRunner().invoke(main, [name, '--help'])\n"
        "    assert result.exit_code == 0, result.output\n"
        "    assert not slow & set(sys.modules), (name, slow & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_listing_checkpoints_that_are_all_in_their_folders_loads_no_plugin(tmp_path: Path):
    for step in (1, 2):
        checkpoint(tmp_path, step)
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom trainforge.cli import main\n"
        f"result = CliRunner().invoke(main, ['checkpoints', {str(tmp_path)!r}])\n"
        "assert result.stdout.splitlines()[-2].split()[0] == '2', result.output\n"
        "slow = {'torch', 'trainforge_plugins'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "500"},
    )
    assert done.returncode == 0, done.stderr


def test_a_plan_without_sizes_is_fast(recipe: Path):
    """Within a second where Python itself starts in 15 ms."""
    seconds, _ = cpu_seconds("-m", "trainforge.cli", "plan", str(recipe), "--no-sizes")
    assert seconds < 66 * python_starts()


def test_module_and_script_say_their_version():
    done = subprocess.run(
        [sys.executable, "-m", "trainforge.cli", "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"TrainForge {trainforge.__version__}\n"
