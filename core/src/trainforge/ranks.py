"""Which process of the run this is, and what of the host belongs to it: its card and its share of the cores.

Ranks are started by `forge run --nproc`, by torchrun or by Slurm's srun; all of them say so in environment variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainforge.errors import ConfigError, UserError
from trainforge.rank_process import started_by_launcher

if TYPE_CHECKING:
    import torch

    from trainforge.sections import RunSection

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process among all of the run (`rank` of `world`) and among those of its host.

    Attributes:
        master_addr, master_port: where the ranks meet; empty and 0 when there is only one.
        launcher: who started it: `"alone"`, `"torchrun"` (our own launcher too) or `"slurm"`.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    master_addr: str = ""
    master_port: int = 0
    launcher: Literal["alone", "torchrun", "slurm"] = "alone"

    def __post_init__(self) -> None:
        inside = 0 <= self.rank < self.world and 0 <= self.local_rank < self.local_world <= self.world
        if not inside:
            raise UserError(
                f"the environment contradicts itself: rank {self.rank} of {self.world}, on this host "
                f"{self.local_rank} of {self.local_world}; unset the variables of an earlier launch "
                f"({_names(self.launcher)}) or start the ranks anew"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Ranks:
        """Read the variables of torchrun, else those of srun; without either it is a run of one process.

        Raises:
            UserError: some variables are missing, are no numbers, or contradict each other.
        """
        env = os.environ if environ is None else environ
        if any(name in env for name in _TORCHRUN[:4]):
            return _from_torchrun(env)
        if "SLURM_STEP_ID" in env and _tasks(env) > 1:  # srun sets it, the batch script itself has none
            return _from_slurm(env)
        return cls()


def pick_device(run: RunSection, ranks: Ranks) -> torch.device:
    """The device of this rank: `run.devices` in their order, else card number `local_rank`, else the CPU.

    Raises:
        ConfigError: that device does not exist; the message names those that do.
    """
    import torch

    kind, index = _device_parts(run.device)
    if kind == "cpu":
        if run.devices is not None:
            raise ConfigError("run.devices picks cards but run.device is cpu: remove one of the two")
        return torch.device("cpu")
    existing, count = _cards()
    if kind == "auto" and not count:
        if run.devices is not None:
            raise ConfigError(f"run.devices asks for cards {list(run.devices)}, but {_what_exists()}")
        return torch.device("cpu")
    if kind not in ("auto", existing) or not count:
        raise ConfigError(f"run.device is {run.device}, but {_what_exists()}")
    card = _card_index(run, ranks, index, count)
    if not 0 <= card < count:
        raise ConfigError(f"rank {ranks.rank} wants {existing}:{card}, but {_what_exists()}")
    return torch.device(existing, card)


def device_note(run: RunSection, ranks: Ranks) -> str | None:
    """A line for the start report when cards lie idle because nobody asked for them, else None."""
    kind, index = _device_parts(run.device)
    existing, count = _cards()
    if kind == "cpu" or index is not None or run.devices is not None or ranks.local_world > 1 or count < 2:
        return None
    return (
        f"using {existing}:0, one of {count} cards; --devices 0,1 picks cards, one rank each, "
        f"and --nproc {count} uses all of them"
    )


def default_threads(run: RunSection, ranks: Ranks) -> int:
    """Set PyTorch's CPU threads to this rank's share of the cores and return it.

    The share is the affinity mask divided by the ranks of this host, so that the sum is never above the cores;
    `run.threads`, or an OMP_NUM_THREADS of the user's own, lowers it. The torchrun command sets OMP_NUM_THREADS=1 for
    everybody, which would leave host-side work on one thread: there that variable is not taken as a wish.
    """
    import torch

    threads = _share_of_cores(ranks)
    if run.threads is not None:
        threads = min(threads, run.threads)
    elif ranks.launcher != "torchrun" or started_by_launcher():
        wish = os.environ.get("OMP_NUM_THREADS", "")
        threads = min(threads, int(wish)) if wish.isdigit() and int(wish) > 0 else threads
    torch.set_num_threads(threads)
    return threads


def limit_spinning() -> None:
    """Let OpenMP threads that wait for each other give up the core sooner. Call it before torch is imported.

    GNU's OpenMP, which PyTorch's CPU build brings, spins for milliseconds at every barrier. When anything else runs on
    the same cores, the thread that is waited for cannot run meanwhile: the quickstart beside two busy processes on two
    cores did 240 tokens/s with the default and 4,900 with this; on idle cores they are equal. A wish of the user's own
    (GOMP_SPINCOUNT, OMP_WAIT_POLICY) is respected.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def _share_of_cores(ranks: Ranks) -> int:
    cores = len(os.sched_getaffinity(0))
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if ranks.launcher == "slurm" and per_task.isdigit() and cores <= int(per_task):
        return cores  # srun has already bound each task to cores of its own
    return max(1, cores // ranks.local_world)


def _device_parts(text: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"([a-z]+)(?::(\d+))?", text.strip().lower())
    if match is None:
        raise ConfigError(f"run.device is {text!r}; it must be auto, cpu, or a device such as cuda or cuda:1")
    return match[1], None if match[2] is None else int(match[2])


def _cards() -> tuple[str, int]:
    import torch

    if not torch.accelerator.is_available():
        return "", 0
    device = torch.accelerator.current_accelerator()
    return (device.type, torch.accelerator.device_count()) if device is not None else ("", 0)


def _what_exists() -> str:
    kind, count = _cards()
    cards = ", ".join(f"{kind}:{index}" for index in range(count))
    return (
        f"this host has {cards} and the CPU" if cards else "this host has only the CPU (as PyTorch sees it)"
    )


def _card_index(run: RunSection, ranks: Ranks, index: int | None, count: int) -> int:
    if run.devices is not None:
        return _picked(run.devices, index, ranks)
    if index is not None:
        if ranks.local_world > 1:
            raise ConfigError(
                f"run.device names one card ({run.device}) for {ranks.local_world} ranks: use run.devices, one each"
            )
        return index
    if ranks.launcher == "slurm" and count == 1:
        return 0  # srun --gpus-per-task shows each task only its own card
    if ranks.local_world > count:
        raise ConfigError(
            f"{ranks.local_world} ranks on this host need as many cards, but {_what_exists()}: "
            f"lower --nproc to {count}, or use --set run.device=cpu"
        )
    return ranks.local_rank


def _picked(devices: tuple[int, ...], index: int | None, ranks: Ranks) -> int:
    if index is not None:
        raise ConfigError("run.device names one card and run.devices lists cards: remove one of the two")
    if len(set(devices)) != len(devices):
        raise ConfigError(f"run.devices lists a card twice: {list(devices)}")
    if len(devices) != ranks.local_world:
        raise ConfigError(
            f"run.devices lists {len(devices)} cards for {ranks.local_world} ranks on this host: "
            f"one rank each, so start with --nproc {len(devices)} or list {ranks.local_world}"
        )
    return devices[ranks.local_rank]


def _from_torchrun(env: Mapping[str, str]) -> Ranks:
    alone = env.get("WORLD_SIZE") == "1"
    needed = _TORCHRUN[:4] if alone else _TORCHRUN
    missing = [name for name in needed if not env.get(name)]
    if missing:
        raise UserError(
            f"{', '.join(missing)} missing beside {', '.join(n for n in _TORCHRUN if env.get(n))}: start ranks with "
            "forge run --nproc, torchrun or srun, which set them all, or unset them for a run of one process"
        )
    rank, world, local_rank, local_world = (_number(env, name) for name in _TORCHRUN[:4])
    port = 0 if alone else _number(env, "MASTER_PORT")
    return Ranks(rank, world, local_rank, local_world, env.get("MASTER_ADDR", ""), port, "torchrun")


def _from_slurm(env: Mapping[str, str]) -> Ranks:
    missing = [name for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID") if not env.get(name)]
    if missing:
        raise UserError(
            f"{', '.join(missing)} missing in a Slurm step of {_tasks(env)} tasks: start it with srun"
        )
    address = env.get("MASTER_ADDR") or _first_host(env)
    if not address:
        raise UserError("Slurm says no node list: set MASTER_ADDR to the host of task 0")
    given = env.get("MASTER_PORT")
    # The same on every task and unlikely to be taken: above the registered services, below Linux's own choices.
    port = _number(env, "MASTER_PORT") if given else 20000 + _number(env, "SLURM_JOB_ID") % 12000
    world, local_world = _tasks(env), _slurm_local_world(env)
    rank, local_rank = _number(env, "SLURM_PROCID"), _number(env, "SLURM_LOCALID")
    return Ranks(rank, world, local_rank, local_world, address, port, "slurm")


def _tasks(env: Mapping[str, str]) -> int:
    name = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return _number(env, name) if env.get(name) else 1


def _slurm_local_world(env: Mapping[str, str]) -> int:
    """Tasks on this node: `SLURM_STEP_TASKS_PER_NODE` is a list over nodes such as `2(x3),1`."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if not text:
        return _number(env, "SLURM_NTASKS_PER_NODE") if env.get("SLURM_NTASKS_PER_NODE") else _tasks(env)
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise UserError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}, not a list such as 2(x3),1: start with srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(env, "SLURM_NODEID") if env.get("SLURM_NODEID") else 0
    if node >= len(counts):
        raise UserError(
            f"SLURM_NODEID is {node}, but tasks are listed for {len(counts)} nodes: start with srun"
        )
    return counts[node]


def _first_host(env: Mapping[str, str]) -> str:
    """The host of task 0. srun may have been called on a login node, so its own address comes last."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    if match is None:
        return env.get("SLURM_LAUNCH_NODE_IPADDR", "")
    return f"{match[1]}{match[2] or ''}{match[3]}"


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not text.isdigit():
        raise UserError(f"{name} is {text!r}, which is not a number: unset it or start the ranks anew")
    return int(text)


def _names(launcher: str) -> str:
    return "SLURM_PROCID, SLURM_NTASKS, ..." if launcher == "slurm" else ", ".join(_TORCHRUN[:4])
