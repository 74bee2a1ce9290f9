"""The distributions agree with each other, and what they ship is complete."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.run.runs import run, write_recipe

from trainforge.errors import TrainForgeError
from trainforge.provider import STAGES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "core": "trainforge",
    "plugins": "trainforge_plugins",
    "loongforge_plugins": "trainforge_loongforge",
    "megatrain_plugins": "trainforge_megatrain",
}
FOLDERS = [".", *PACKAGES]
HEAVY = [
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "safetensors",
    "peft",
    "deepspeed",
    "pyarrow",
    "zstandard",
]
HEAVY += ["blake3", "kvikio", "tensorboard"]
SIBLING = re.compile(r"^trainforge(?:-\w+)?\b")


def project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]


def entry_points() -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in PACKAGES:
        found |= project(folder).get("entry-points", {}).get("trainforge.plugins", {})
    return found


def test_one_version_everywhere():
    versions = {folder: project(folder)["version"] for folder in FOLDERS}
    for folder, package in PACKAGES.items():
        init = (ROOT / folder / "src" / package / "__init__.py").read_text("utf-8")
        match = re.search(r'^__version__ = "([^"]+)"$', init, re.MULTILINE)
        assert match, f"{folder}: no __version__"
        versions[package] = match[1]
    assert len(set(versions.values())) == 1, versions


def test_siblings_are_pinned_to_that_version():
    version = project(".")["version"]
    for folder in FOLDERS:
        extras = project(folder).get("optional-dependencies", {}).values()
        everything = project(folder)["dependencies"] + [d for extra in extras for d in extra]
        siblings = [d for d in everything if SIBLING.match(d)]
        assert siblings or folder == "core", f"{folder} does not depend on core"
        for dependency in siblings:
            assert dependency.endswith(f"=={version}"), f"{folder}: {dependency}"


def test_the_metapackage_names_all_four():
    names = {d.split("==")[0] for d in project(".")["dependencies"]}
    assert names == {project(folder)["name"] for folder in PACKAGES}


def test_metadata_leaves_torch_free_and_constraints_pin_it():
    for folder in FOLDERS:
        for dependency in project(folder)["dependencies"]:
            if re.match(r"torch\b", dependency):
                assert "==" not in dependency, f"{folder}: {dependency}"
                assert "<" not in dependency, f"{folder}: {dependency}"
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    assert re.search(r"^torch==[\d.]+$", constraints, re.MULTILINE)
    assert "trainforge" not in constraints


@pytest.mark.parametrize("folder", FOLDERS)
def test_readme_and_licence_exist(folder: str):
    about = project(folder)
    assert len((ROOT / folder / about["readme"]).read_text("utf-8")) > 100
    assert (ROOT / folder / "LICENSE").read_text("utf-8") == (ROOT / "LICENSE").read_text("utf-8")
    assert about["license"].startswith("Apache-2.0")
    assert about["requires-python"] == ">=3.11,<3.14"


def test_installed_entry_points_are_the_declared_ones():
    installed = {p.name: p.value for p in importlib.metadata.entry_points(group="trainforge.plugins")}
    assert entry_points().items() <= installed.items()


@pytest.mark.parametrize("name", sorted(entry_points()))
def test_importing_a_plugin_imports_nothing_heavy(name: str):
    module = entry_points()[name]
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imports {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(entry_points()))
def test_a_plugin_gives_its_provider_without_its_heavy_libraries(name: str):
    module = entry_points()[name]
    code = (
        "import importlib, sys\n"
        "from trainforge.provider import Section\n"
        f"sys.modules |= dict.fromkeys({HEAVY})  # an import of any of these fails from now on\n"
        f"module = importlib.import_module({module!r})\n"
        f"hooks = [f'forge_{{stage}}' for stage in {[*STAGES, 'observer']}]\n"
        "providers = [getattr(module, hook)() for hook in hooks if hasattr(module, hook)]\n"
        "sys.exit(0 if providers and all(issubclass(p.config, Section) for p in providers) else 'no provider')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_vault_runs_without_its_extras_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for extra in ("kvikio", "zstandard"):
        monkeypatch.setitem(sys.modules, extra, None)
    recipe = write_recipe(tmp_path, train={"steps": 1})
    assert run(recipe, tmp_path / "run", plugins=["vault"]).code == 0
    for key, value, extra in (("compress", True, "zstd"), ("storage", "gds", "gds")):
        recipe = write_recipe(tmp_path, train={"steps": 1}, vault={key: value})
        with pytest.raises(TrainForgeError, match=re.escape(f"pip install 'trainforge-loongforge[{extra}]'")):
            run(recipe, tmp_path / key, plugins=["vault"])


@pytest.mark.slow
@pytest.mark.parametrize("folder", list(PACKAGES))
def test_the_wheel_is_complete(folder: str, tmp_path: Path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    command += ["-w", str(tmp_path), str(ROOT / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())

    source = ROOT / folder / "src"
    files = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()}
    missing = {f for f in files if "__pycache__" not in f and f not in inside}
    assert not missing
    assert f"{PACKAGES[folder]}/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    if folder == "plugins":
        assert any(name.endswith("/quickstart.yaml") for name in inside)
        assert "trainforge_plugins/text/demo/moby_dick.txt" in inside
        assert any(name.endswith("LICENSE-moby_dick.md") for name in inside)
