"""What this process may still take: free RAM, control groups, page-locked memory, the device."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainforge.context import Context
from trainforge.units import format_bytes
from trainforge_megatrain.stream import StreamSection

_FREE_SHARE = 0.94
"""Of the device's free memory that `auto` takes; the rest is for what others allocate beside PyTorch."""


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


def locking_note(locked: int) -> str | None:
    """A line when the limit of page-locked memory is below what is to be locked.

    It is not a refusal: drivers that lock pages in the kernel do not count them, and one that does fails before
    anything is loaded, with an error that says so.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or locked <= soft:
        return None
    return (
        f"stream page-locks {format_bytes(locked)} and the limit is {format_bytes(soft)}: if the start fails for that, "
        "raise it (`ulimit -l unlimited`, or --ulimit memlock=-1 for a container), or set stream.pin to false"
    )


def budget_of(ctx: Context, section: StreamSection) -> int | None:
    """Bytes that the run may take on the device: what was asked for, else most of what is free; None on a CPU."""
    if section.gpu_budget != "auto":
        return section.gpu_budget
    if ctx.device.type == "cpu":
        return None
    free, _ = torch.get_device_module(ctx.device).mem_get_info(ctx.device)
    return round(free * _FREE_SHARE)


def resident_set(root: Path = Path("/")) -> int:
    """Bytes of RAM that this process has now: Python, PyTorch and the device's driver, before anything is loaded."""
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def refusal(needs: Mapping[str, int], there: int, limit: str, tier: str, ways: str) -> str | None:
    """Why it cannot start: the number missing and the breakdown; None when it fits.

    Args:
        needs: bytes by what holds them.
        there: bytes that can be had.
        limit: what limits them.
        tier: where that is, as the beginning of the sentence.
        ways: what to do, as the end of it.
    """
    whole = sum(needs.values())
    if whole <= there:
        return None
    largest = sorted(needs.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    return (
        f"{tier} needs {format_bytes(whole)} ({listed}) and {limit} leaves {format_bytes(there)}: "
        f"{format_bytes(whole - there)} are missing. {ways}; stream.oversubscribe: true starts anyway"
    )
