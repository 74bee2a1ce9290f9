import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_recipe_md_is_what_the_models_say():
    result = subprocess.run(
        [sys.executable, ROOT / "docs/generate_recipe.py", "--check"], capture_output=True
    )
    assert result.returncode == 0, "run: python docs/generate_recipe.py"
