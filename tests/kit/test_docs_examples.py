"""The tutorial's code is what lies in docs/examples, and it works."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
TUTORIAL = (DOCS / "write-a-plugin.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TUTORIAL, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["my_plugin.py", "test_my_plugin.py"])
def test_the_code_shown_is_the_file(name: str):
    assert (DOCS / "examples" / name).read_text("utf-8") in blocks("python")


def test_no_other_python_is_shown():
    assert len(blocks("python")) == 2


def test_the_example_passes_its_own_tests(tmp_path: Path):
    for name in ("my_plugin.py", "test_my_plugin.py"):
        (tmp_path / name).write_bytes((DOCS / "examples" / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_plugin.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_packaging_declares_the_entry_point():
    (project,) = (tomllib.loads(block) for block in blocks("toml"))
    assert project["project"]["entry-points"]["trainforge.plugins"] == {"lion": "trainforge_lion"}


def test_the_commands_exist():
    from trainforge.cli import main

    shown = {
        line.split()[2] for block in blocks("console") for line in block.splitlines() if "forge " in line
    }
    commands = getattr(main, "commands", {})
    assert shown <= set(commands), shown - set(commands)


def test_the_kits_classes_are_all_listed():
    from trainforge import testing

    kinds = {name for name in testing.__all__ if name.endswith("Conformance")}
    assert kinds == set(re.findall(r"^\| `(\w+Conformance)`", TUTORIAL, re.MULTILINE))
