"""Core names no plugin, and plugins keep to core's public names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "src" / "trainforge"
PLUGIN_SOURCES = [ROOT / folder / "src" for folder in ("plugins", "loongforge_plugins", "megatrain_plugins")]

# Names that mean nothing but the plugin: no string and no identifier of core may hold them as a word.
TELLING = {"hf", "ddp", "fsdp", "adamw", "dcp", "nexus", "sculptor", "dali", "cpu_adam"}
# Names that are also plain words (a CUDA stream, the text of a message): no string of core may
# be exactly that, alone, in a list like "a,b", or after --plugins.
PLAIN = {"text", "resident", "progress", "jsonl", "tensorboard", "stream", "vault", "shm"}
LIST = re.compile(r"\s*[\w-]+(\s*,\s*[\w-]+)*\s*")
# file: {name: why it may stand there}
ALLOWED: dict[str, dict[str, str]] = {}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def docstrings(tree: ast.Module) -> set[int]:
    """Returns the ids of the string nodes that stand alone as statements."""
    return {
        id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    }


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    skip = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip:
            yield node.lineno, node.value


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield line, node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.alias):
            yield line, node.name


def words(value: str) -> str:
    """Returns the value with snake_case, kebab-case and CamelCase taken apart."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", value)
    return f" {' '.join(re.findall(r'[a-z0-9]+', apart.lower()))} "


def plugin_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, value in [*strings(tree), *identifiers(tree)]:
        for name in TELLING:
            if words(name) in words(value):
                yield line, name
    for line, value in strings(tree):
        lists = [value] if LIST.fullmatch(value) else re.findall(r"--plugins[ =](\S+)", value)
        for item in (item.strip() for items in lists for item in items.split(",")):
            if item in PLAIN:
                yield line, item


def test_core_names_no_plugin():
    found = []
    for path in sorted(CORE.rglob("*.py")):
        where = str(path.relative_to(CORE))
        for line, name in plugin_names(parse(path)):
            if name not in ALLOWED.get(where, {}):
                found.append(f"{where}:{line} {name}")
    assert not found, "\n".join(["core holds plugin names:", *found])


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("x = 'ddp'", ["ddp"]),
        ("def use_fsdp(): pass", ["fsdp"]),
        ("class DaliReader: pass", ["dali"]),
        ("x = 'try --plugins stream,vault'", ["stream", "vault"]),
        ("x = 'no document, text or line'", []),
        ("x = 'stream, vault'", ["stream", "vault"]),
        ("x = torch.cuda.stream(s)", []),
        ("'a docstring about ddp'", []),
        ("# ddp", []),
        ("x = f'{y} with cpu_adam'", ["cpu_adam"]),
    ],
)
def test_the_search_finds_what_it_should(code: str, names: list[str]):
    assert [name for _, name in plugin_names(ast.parse(code))] == names


def private_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *rest = name.split(".")
            if package == "trainforge" and any(r.startswith("_") and not r.startswith("__") for r in rest):
                yield node.lineno, name


def test_plugins_use_public_names_only():
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for source in PLUGIN_SOURCES
        for path in sorted(source.rglob("*.py"))
        for line, name in private_imports(parse(path))
    ]
    assert not found, "\n".join(["plugins import private names of core:", *found])


def test_private_imports_are_seen():
    assert list(private_imports(ast.parse("from trainforge._plan import x"))) == [(1, "trainforge._plan.x")]
    assert list(private_imports(ast.parse("from trainforge.stages import _x"))) == [
        (1, "trainforge.stages._x")
    ]
    assert not list(private_imports(ast.parse("from trainforge import __version__, stages")))
