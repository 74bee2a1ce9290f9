"""The kernel's library: compiled once, kept, checked, and done without where nothing can be compiled."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.cpu_adam.slots import bits, do, make, make_slots
from tests.cpu_adam.test_threads import started
from tests.support.context import make_context

from trainforge.errors import ConfigError
from trainforge_megatrain.cpu_adam import building, forge_optimizer, optimizer


@pytest.fixture
def cache(tmp_path: Path, kernel_cache: Path) -> Path:
    """A cache with the compiled kernel in it."""
    building.load_kernel(kernel_cache)
    shutil.copytree(kernel_cache, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The libraries that are compiled."""
    found: list[Path] = []
    compile_kernel = building._compile

    def watched(library: Path, *arguments) -> None:
        found.append(library)
        compile_kernel(library, *arguments)

    monkeypatch.setattr(building, "_compile", watched)
    return found


def library_in(cache: Path) -> Path:
    (library,) = (cache / "cpu_adam").glob("*.so")
    return library


def test_it_is_compiled_once(cache, compiled):
    assert isinstance(building.load_kernel(cache), ctypes.CDLL)
    assert compiled == []
    assert sorted(path.suffix for path in (cache / "cpu_adam").iterdir()) == ["", ".sha256", ".so"]


@pytest.mark.parametrize("damage", ["half", "garbage", "empty", "no digest"])
def test_a_damaged_library_is_compiled_anew(cache, compiled, damage):
    library = library_in(cache)
    content = library.read_bytes()
    if damage == "no digest":
        library.with_suffix(".sha256").unlink()
    else:
        damaged = {"half": content[: len(content) // 2], "garbage": b"\0" * 9000, "empty": b""}
        library.write_bytes(damaged[damage])
    assert building.load_kernel(cache).pool_update
    assert compiled == [library]
    assert building._is_whole(library)


def test_another_processor_or_source_is_another_library(monkeypatch):
    compiler = building.find_compiler()
    key = building._key(b"source", compiler)
    assert key == building._key(b"source", compiler)
    assert key != building._key(b"source2", compiler)
    monkeypatch.setattr(building, "_processor", lambda: "flags: avx")
    assert key != building._key(b"source", compiler)


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path, compiled):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert building.load_kernel(tmp_path / "cache").pool_update
    assert len(compiled) == 1


BUILD = (
    "import sys; from pathlib import Path; from trainforge_megatrain.cpu_adam import building; "
    "building.load_kernel(Path(sys.argv[1])).pool_open"
)


def test_processes_that_build_at_once_all_get_it(tmp_path):
    for process in [started(BUILD, str(tmp_path)) for _ in range(3)]:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert building._is_whole(library_in(tmp_path))
    assert not list((tmp_path / "cpu_adam").glob("build-*"))


def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(optimizer, "load_kernel", building.load_kernel)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


def test_without_a_compiler_torch_does_it_and_one_warning_says_what_to_install(monkeypatch, tmp_path):
    without_compiler(monkeypatch, tmp_path)
    ctx, provider = make_context(run_dir=tmp_path, weight_decay=0.1), forge_optimizer()
    fallback = provider.build(ctx, provider.config())
    (warning, report) = ctx.console.lines
    assert "install g++" in warning
    assert report.startswith("cpu_adam: torch update")
    wanted = make({"backend": "torch"}, weight_decay=0.1)
    ours, theirs = make_slots(fallback), make_slots(wanted)
    fallback.update(ours, do())
    wanted.update(theirs, do())
    assert bits(ours) == bits(theirs)


def test_without_a_compiler_native_is_refused(monkeypatch, tmp_path):
    without_compiler(monkeypatch, tmp_path)
    with pytest.raises(
        ConfigError, match=r"cpu_adam.backend: native cannot be had: there is no C\+\+ compiler"
    ):
        make({"backend": "native"})


def stand_in(folder: Path, script: str) -> str:
    """The path of a program that takes the compiler's place."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\ncase "$1" in --version) echo 1.0; exit 0;; esac\n{script}\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ('echo "kernel.cpp:1: error: no such thing" >&2; exit 1', "no such thing"),
        ("exit 3", "exit code 3"),
        ('for last; do :; done; echo hello > "$last"', "cannot be loaded"),
    ],
)
def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path, script, says):
    monkeypatch.setenv("CXX", stand_in(tmp_path, script))
    with pytest.raises(building.NoKernel, match=says):
        building.load_kernel(tmp_path / "cache")


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="looks for x86 instructions")
def test_the_kernel_is_vectorised(cache):
    """Every root, division, product and sum is on whole vectors; no scalar form is left, not even for the tails."""
    done = subprocess.run(
        ["objdump", "-d", str(library_in(cache))], capture_output=True, text=True, check=True
    )
    found = re.findall(r"\tv?((?:sqrt|div|mul|add|sub)[ps]s)\s+([^\n]*)", done.stdout)
    assert {name for name, _ in found if name.endswith("ss")} == set()
    flags = set(building._processor().split())
    wide = "zmm" if {"avx512f", "avx512bw"} <= flags else "ymm" if "avx2" in flags else "xmm"
    for wanted in ("sqrtps", "divps"):
        registers = [operands for name, operands in found if name == wanted]
        assert len(registers) >= 8, f"one {wanted} in each of the eight forms"
        assert all(wide in operands for operands in registers)
