"""How much host RAM this process may still take: what is free, and what control groups leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limit:
    """Bytes that can still be had, and what limits them."""

    name: str
    free: int


def host_limit(wished: int | None, root: Path = Path("/")) -> Limit | None:
    """The smallest limit of host RAM; None where the system tells nothing.

    Args:
        wished: `run.host_memory`, which is believed; None takes what is free and what control groups leave.
        root: of the file system, for tests.
    """
    if wished is not None:
        return Limit("run.host_memory", wished)
    limits = [*_available(root), *_control_groups(root)]
    return min(limits, key=lambda limit: limit.free, default=None)


def _available(root: Path) -> Iterator[Limit]:
    """What the kernel could hand out without swapping."""
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield Limit("free RAM", int(value.split()[0]) * 1024)


def _control_groups(root: Path) -> Iterator[Limit]:
    """What each control group above this process leaves (its own and all parents; inside a container the root's)."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.strip("/")
        for place in (folder, *folder.parents):
            if place == base.parent:
                break
            limit, used = _read(place / names[0]).strip(), _read(place / names[1]).strip()
            if limit.isdigit() and used.isdigit():
                cached = _statistic(place / "memory.stat", names[2])
                yield Limit("the control group's limit", max(0, int(limit) - int(used) + cached))


def _statistic(path: Path, name: str) -> int:
    """Page cache that the kernel gives back before it ends anybody."""
    pairs = (line.split() for line in _read(path).splitlines())
    return next((int(pair[1]) for pair in pairs if pair[0] == name), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def resident_set(root: Path = Path("/")) -> int:
    """Bytes of RAM that this process has now: Python, PyTorch and the device's driver, before anything is loaded."""
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
