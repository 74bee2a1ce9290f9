"""Verifying, resuming, exporting and sampling load no pickle: an audit hook refuses to find a class meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.run.runs import run, write_recipe

ROOT = Path(__file__).parents[2]

PROGRAM = """
import pickle, sys, _pickle
from pathlib import Path
import torch, transformers
import trainforge, trainforge_plugins.dcp.checkpoint, trainforge_plugins.hf.spec, trainforge_plugins.text.data
import trainforge_loongforge.vault.checkpoint, trainforge_loongforge.vault.gds
import trainforge_plugins.hf.export
from trainforge.checkpoints import list_checkpoints, verify_checkpoint
from trainforge.context import SilentConsole
from trainforge.exporting import export_run
from trainforge.sampling import sample_run

recipe, run_dir, out = map(Path, sys.argv[1:4])
plugins = sys.argv[4:]
found, tried = [], []

def hook(event, arguments):
    if event == "pickle.find_class":
        found.append(arguments)
        raise RuntimeError(f"a pickle asks for {arguments}")

def refuse(name):
    def refused(*arguments, **options):
        tried.append(name)
        raise RuntimeError(f"{name} was called")
    return refused

sys.addaudithook(hook)
for module, names in ((pickle, ("load", "loads", "Unpickler")), (_pickle, ("load", "loads", "Unpickler")),
                      (torch, ("load",)), (torch.serialization, ("load",))):
    for name in names:
        setattr(module, name, refuse(f"{module.__name__}.{name}"))

(info,) = list_checkpoints(run_dir / "checkpoints")
assert verify_checkpoint(info) == []
assert trainforge.run(recipe, run_dir=run_dir, plugins=plugins) == 0
digest = export_run(run_dir, out, SilentConsole())
drawn = sample_run(run_dir, "the whale", SilentConsole(), tokens=3)
print(f"exported {digest}, drew {drawn.tokens} tokens of step {drawn.step}")
assert found == tried == [], (found, tried)

# the hook does watch: an unpickler that was kept aside is noticed
try:
    KEPT(b"cos\\nsystem\\n.")
except RuntimeError as error:
    print("noticed" if found else "not noticed")
""".replace("import pickle, sys, _pickle", "import pickle, sys, _pickle\nKEPT = pickle.loads")


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["dcp", "vault"])
def test_resume_verify_export_and_sample_read_no_pickle(tmp_path: Path, plugin: str):
    recipe = write_recipe(tmp_path, train={"steps": 4})
    run(recipe, tmp_path / "run", max_steps=2, plugins=[plugin])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, recipe, tmp_path / "run", tmp_path / "out", plugin],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "resumed from step 2" in result.stdout
    digest = json.loads((tmp_path / "run/summary.json").read_text())["weights_digest"]
    assert f"exported {digest}, drew 3 tokens of step 4" in result.stdout
    assert (tmp_path / "out/model.safetensors").is_file()
    assert result.stdout.endswith("noticed\n")
    assert not result.stdout.endswith("not noticed\n")
