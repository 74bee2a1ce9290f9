"""`forge doctor`: facts about this machine and installation, each with what it means for a run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainforge.discovery import scan
from trainforge.units import format_bytes

COMMANDS = ("forge", "trainforge")
"""The console scripts that our distribution installs."""

_OURS = "trainforge"
_SMALL_SHM = 1024**3
_UNLIMITED = 2**60  # cgroup v1 writes a number near 2**63 for "no limit"


@dataclass(frozen=True)
class Finding:
    """A fact. `fine` is False when a person should look at it."""

    what: str
    found: str
    meaning: str
    fine: bool = True


def examine() -> list[Finding]:
    """Look at everything; imports torch. A check that fails is a finding, not an error."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        versions,
        commands,
        plugins,
        devices,
        compiler,
        shared_memory,
        locked_memory,
        host_memory,
        threads,
    )
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:
            findings.append(
                Finding(check.__name__, f"{type(error).__name__}: {error}", "could not be checked", False)
            )
    return findings


def versions() -> Iterator[Finding]:
    """Python, ours, torch and the libraries that core stands on."""
    python = sys.version_info
    supported = (3, 11) <= python[:2] < (3, 14)
    meaning = "supported" if supported else "use Python 3.11 to 3.13: others are not tested"
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})", meaning, supported)
    for name in (_OURS, "torch", "pluggy", "pydantic", "click", "rich", "PyYAML", "xxhash"):
        try:
            yield Finding(name, importlib.metadata.version(name), "installed")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", f"no run can start: pip install {name}", False)


def commands(path: str | None = None) -> Iterator[Finding]:
    """Whether the shell's `forge` is ours: other libraries install a command of that name."""
    own = Path(sys.executable).parent
    for command in COMMANDS:
        claims = _claims(command)
        others = [name for name in claims if name != _OURS]
        found = shutil.which(command, path=path)
        if others:
            yield Finding(
                command,
                f"also installed by {', '.join(others)}",
                f"whichever was installed last wins; `python -m trainforge.cli` is always ours. pip uninstall "
                f"{others[0]} and reinstall {_OURS}, or use `{COMMANDS[1]}`",
                False,
            )
        elif found is None:
            meaning = f"not on PATH: call {own / command}, or activate the environment"
            yield Finding(command, "not on PATH", meaning, (own / command).exists())
        elif Path(found).parent.resolve() != own.resolve():
            meaning = f"another one comes first on PATH: ours is {own / command}"
            yield Finding(command, found, meaning, False)
        else:
            yield Finding(command, found, "ours")


def plugins() -> Iterator[Finding]:
    """Distributions with plugins, and names that two of them claim."""
    catalog = scan()
    by_distribution: dict[str, list[str]] = {}
    for name, claims in catalog.plugins.items():
        for claim in claims:
            by_distribution.setdefault(f"{claim.distribution} {claim.version}", []).append(name)
        if len(claims) > 1:
            who = " and ".join(f"{c.distribution} ({c.path})" for c in claims)
            yield Finding(f"plugin {name}", who, "claimed twice and so refused: uninstall one", False)
    for distribution, names in sorted(by_distribution.items()):
        yield Finding(distribution, ", ".join(sorted(names)), "plugins that can be chosen")
    if not catalog.plugins:
        yield Finding("plugins", "none", "no run can start: pip install trainforge-plugins", False)


def devices() -> Iterator[Finding]:
    """Accelerators as torch sees them."""
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        found = f"cpu ({platform.machine()})"
        built = f"torch {torch.__version__} was built for CUDA {torch.version.cuda}, but finds no device"
        meaning = built if torch.version.cuda else "runs use the CPU, in fp32"
        yield Finding("devices", found, meaning, torch.version.cuda is None)
        return
    for index in range(torch.accelerator.device_count()):
        found = f"{kind.type}:{index}"
        if kind.type == "cuda":
            about = torch.cuda.get_device_properties(index)
            found += f" {about.name}, {format_bytes(about.total_memory)}"
        yield Finding("devices", found, "runs use one card unless --nproc or --devices says otherwise")


def compiler() -> Iterator[Finding]:
    """A C++ compiler, which torch.compile and own kernels need."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    found = next((where for name in names if name and (where := shutil.which(name))), None)
    if found:
        yield Finding("C++ compiler", found, "train.compile and compiled CPU kernels can be used")
    else:
        meaning = (
            "train.compile and compiled CPU kernels need one (apt install g++); everything else runs without"
        )
        yield Finding("C++ compiler", "none", meaning, False)


def shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Size of /dev/shm, which worker processes and several ranks share tensors through."""
    if not folder.is_dir():
        yield Finding(str(folder), "missing", "ranks and data workers cannot share memory", False)
        return
    space = shutil.disk_usage(folder)
    enough = space.free >= _SMALL_SHM
    meaning = (
        "enough for data workers and several ranks on one host"
        if enough
        else ("small: data workers and ranks can die with SIGBUS; in a container start it with --shm-size=8g")
    )
    yield Finding(
        str(folder), f"{format_bytes(space.free)} free of {format_bytes(space.total)}", meaning, enough
    )


def locked_memory(limit: int | None = None) -> Iterator[Finding]:
    """How much host memory may be page-locked, for fast copies to a device."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else format_bytes(soft)
    meaning = (
        "pinned buffers are limited by RAM alone"
        if unlimited
        else (
            "io_uring and RDMA cannot pin more than this (CUDA's own pinned memory is not counted); raise it with "
            "ulimit -l unlimited"
        )
    )
    yield Finding("locked memory", found, meaning)


def host_memory(
    root: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")
) -> Iterator[Finding]:
    """RAM, and the limit of the control group (container) when that is smaller."""
    facts = {line.split(":")[0]: line.split()[1] for line in meminfo.read_text().splitlines() if ":" in line}
    total, available = int(facts["MemTotal"]) * 1024, int(facts["MemAvailable"]) * 1024
    yield Finding(
        "host memory",
        f"{format_bytes(available)} available of {format_bytes(total)}",
        "masters and moments that live on the host must fit in here",
    )
    limit = cgroup_limit(root)
    if limit is not None and limit < total:
        meaning = "the real limit: a process that needs more is killed without a message (exit code 137)"
        yield Finding("control group", format_bytes(limit), meaning, limit >= 2 * 1024**3)


def cgroup_limit(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """The smallest memory limit, in bytes, of this process's control group and those above it (v2, then v1)."""
    limits: list[int] = []
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base = root if not controllers else root / "memory"
        folder = base / path.lstrip("/")
        for place in [folder, *folder.parents]:
            for name in ("memory.max", "memory.limit_in_bytes"):
                file = place / name
                text = file.read_text().strip() if file.is_file() else ""
                if text.isdigit() and int(text) < _UNLIMITED:
                    limits.append(int(text))
            if place == base:
                break
    return min(limits, default=None)


def threads(environ: Mapping[str, str] | None = None, cores: int | None = None) -> Iterator[Finding]:
    """Cores, and whether OMP_NUM_THREADS leaves most of them idle."""
    env = os.environ if environ is None else environ
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    wish = env.get("OMP_NUM_THREADS", "")
    if wish.isdigit() and 0 < int(wish) < cores:
        meaning = (
            f"host-side work (the optimizer, data) uses {wish} of {cores} cores: unset OMP_NUM_THREADS, and the "
            "cores are shared out to the ranks (run.threads sets another number)"
        )
        yield Finding("CPU threads", f"OMP_NUM_THREADS={wish}, {cores} cores", meaning, False)
    else:
        yield Finding(
            "CPU threads", f"{cores} cores", "shared out to the ranks of this host; run.threads changes it"
        )


def _claims(command: str) -> list[str]:
    """The distributions that install a console script of this name."""
    names = {
        (point.dist.name if point.dist else "unknown").lower()
        for point in importlib.metadata.entry_points(group="console_scripts", name=command)
    }
    return sorted(names)
