"""The table of cases names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = Path(__file__).with_name("README.md").read_text()
CASES = [1, 3, 4, 5, 7, 9, 10, 11, 16, 17, 18, 19, 23, 25, 28, 29, 31, 32, 34, 35, 37, 39, 41, 42, 44, 45]


def test_every_test_it_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", README)
    assert len(named) > 40
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not name or name in functions, f"{file} has no {name}"


def test_every_case_has_a_line_and_every_file_here_a_case():
    assert [int(number) for number in re.findall(r"^\| C(\d+) ", README, re.MULTILINE)] == CASES
    for path in Path(__file__).parent.glob("test_c*.py"):
        assert f"tests/cases/{path.name}" in README
