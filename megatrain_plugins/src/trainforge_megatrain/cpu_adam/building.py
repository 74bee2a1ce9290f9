"""The kernel as a shared library: compiled on first use, kept between runs, checked before it is loaded."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math, and no contraction to fused multiply-adds: each operation is rounded as IEEE 754 says, so the result
# is the same on every machine and for every compiler. The two -fno switches drop what nobody reads: errno and flags.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fno-exceptions", "-fno-rtti", "-fPIC", "-shared", "-pthread", "-w", "-Wl,--as-needed"),
)
_COMPILE_S = 120.0
_WAIT_S = 180.0


class NoKernel(Exception):
    """There is no usable kernel; the text says why and what to do, without a full stop."""


def load_kernel(cache: Path) -> ctypes.CDLL:
    """Load the kernel from `cache/cpu_adam`, and compile it before that when it is not there or damaged.

    Several processes may ask at once: one compiles and the others wait. A folder that cannot be written is no
    obstacle: the library is then compiled into a temporary one.

    Raises:
        NoKernel: no compiler was found, or it failed, or its library cannot be loaded.
    """
    compiler = find_compiler()
    source = files(__package__).joinpath("kernel.cpp").read_bytes()
    name = f"kernel-{_key(source, compiler)}.so"
    folder = cache / "cpu_adam"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            return _load_or_compile(folder / name, source, compiler)
    except OSError:
        with tempfile.TemporaryDirectory(prefix="trainforge-") as temporary:
            try:
                return _load_or_compile(Path(temporary) / name, source, compiler)
            except OSError as error:
                raise NoKernel(f"the compiled kernel cannot be loaded ({error})") from error


def find_compiler() -> str:
    """The path of the C++ compiler: `$CXX`, or the first one on the PATH.

    Raises:
        NoKernel: there is none.
    """
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NoKernel(
        "there is no C++ compiler on the PATH: install g++ (apt-get install g++, dnf install gcc-c++) or set CXX"
    )


def _key(source: bytes, compiler: str) -> str:
    """Changes with whatever would change the library: source, flags, compiler, and what -march=native sees."""
    digest = hashlib.sha256(source)
    for part in (*FLAGS, compiler, _run([compiler, "--version"]), platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _processor() -> str:
    wanted = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoKernel(f"{command[0]} cannot be run ({error})") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise NoKernel(
            f"{command[0]} could not compile the kernel ({said or f'exit code {done.returncode}'})"
        )
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} has been locked for {_WAIT_S:.0f} s") from None
                time.sleep(0.02)
        yield


def _load_or_compile(library: Path, source: bytes, compiler: str) -> ctypes.CDLL:
    if _is_whole(library):
        try:
            return ctypes.CDLL(str(library))
        except OSError:
            pass  # built on a system that has changed since
    _compile(library, source, compiler)
    return ctypes.CDLL(str(library))


def _is_whole(library: Path) -> bool:
    """Whether the file is what was compiled: loading a truncated library can kill the process."""
    try:
        return _digest_file(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _compile(library: Path, source: bytes, compiler: str) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as folder:
        code, built = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        code.write_bytes(source)
        _run([compiler, *FLAGS, str(code), "-o", str(built)])
        digest = Path(folder, "digest")
        digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
        built.replace(library)
        digest.replace(_digest_file(library))
