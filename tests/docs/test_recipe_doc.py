import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainforge.provider import STAGES

ROOT = Path(__file__).parents[2]
GROUP = "trainforge.plugins"


def plugins() -> dict[str, str]:
    """Name and module of every plugin that a distribution of this repository declares."""
    declared = [tomllib.loads(path.read_text())["project"] for path in ROOT.glob("*/pyproject.toml")]
    return {n: module for one in declared for n, module in one.get("entry-points", {}).get(GROUP, {}).items()}


def test_recipe_md_is_what_the_models_say():
    result = subprocess.run(
        [sys.executable, ROOT / "docs/generate_recipe.py", "--check"], capture_output=True
    )
    assert result.returncode == 0, "run: python docs/generate_recipe.py"


@pytest.mark.parametrize("name", plugins())
def test_every_key_of_every_plugin_here_is_in_recipe_md(name: str):
    module = importlib.import_module(plugins()[name])
    hooks = [f"forge_{stage}" for stage in (*STAGES, "observer") if hasattr(module, f"forge_{stage}")]
    (provider,) = [getattr(module, hook)() for hook in hooks]
    text = (ROOT / "docs/recipe.md").read_text()
    section = "model" if hasattr(module, "forge_model") else name
    assert [key for key in provider.config.model_fields if f"| `{section}.{key}` |" not in text] == []
