"""torch.distributed for a run: set up once per process, with timeouts, and with errors that name the rank at fault.

Gradients travel through the default group (gloo on a CPU; NCCL, or the accelerator's own, for device tensors). Host
numbers have a gloo group of their own, so that they never wait behind gradients or touch a device.

Every rank shows in the run's key-value store, about once a second, how far it has come. When a collective fails, the
others read there who is late and who is gone. (A `monitored_barrier` could not tell: it only knows who joins after the
failure, and ranks fail at different times.)
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainforge.errors import RanksError, UserError
from trainforge.ranks import Ranks
from trainforge.units import format_seconds

_BEAT_S = 1.0
_stores: dict[str, Store] = {}  # one per address: a second server on the same port is impossible
_generation = 0


class Place(Protocol):
    """What is asked of a `Context`: this process among all, and its device."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""

    @property
    def doing(self) -> tuple[str, str]:
        """(stage, what it is doing) at this moment, for the messages of other ranks."""


class ProcessGroup:
    """The ranks of a run, once they have met.

    Attributes:
        rank, world: this process among all.
        host: the gloo group for host numbers.
        step: the step this rank is in, for messages; whoever steps keeps it up to date.
    """

    def __init__(self, place: Place, store: Store, timeout_s: float) -> None:
        self.rank, self.world, self.timeout_s = place.rank, place.world, timeout_s
        self.host = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.step = 1
        self.failed = False
        self._calls = 0
        self._pulse = _Pulse(place, store, min(_BEAT_S, timeout_s / 10))

    @contextlib.contextmanager
    def collective(self, doing: str) -> Iterator[None]:
        """Count a collective that the host waits for; what goes wrong in it becomes an error naming the rank.

        Raises:
            RanksError: a rank was late, ended, or the collective failed for another reason.
        """
        self._calls += 1
        self._pulse.show(self._calls, self.step)
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises derives from it
            self.failed = True
            raise RanksError(self._what_happened(doing, time.monotonic() - begun, error)) from error

    def sum(self, values: Sequence[float], doing: str = "agreeing on the step's numbers") -> list[float]:
        """Sums of host numbers over all ranks, in float64."""
        packed = torch.tensor(values, dtype=torch.float64)
        with self.collective(doing):
            dist.all_reduce(packed, group=self.host)
        total: list[float] = packed.tolist()
        return total

    def any(self, flags: torch.Tensor, doing: str) -> torch.Tensor:
        """Element-wise maximum of a uint8 CPU tensor over all ranks, in place."""
        with self.collective(doing):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.host)
        return flags

    def gather(self, value: Any, doing: str = "exchanging facts about the run") -> list[Any]:
        """Every rank's JSON-able value, by rank."""
        text = json.dumps(value).encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        with self.collective(doing):
            dist.all_gather(lengths, torch.tensor([len(text)]), group=self.host)
            room = int(max(length.item() for length in lengths))
            mine = torch.zeros(room, dtype=torch.uint8)
            mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            texts = [torch.zeros(room, dtype=torch.uint8) for _ in range(self.world)]
            dist.all_gather(texts, mine, group=self.host)
        pairs = zip(texts, lengths, strict=True)
        return [json.loads(bytes(got[: int(length.item())].tolist())) for got, length in pairs]

    def close(self) -> None:
        """Leave the group, telling the others so. After a failure no further collective is attempted."""
        self._pulse.stop()
        if not self.failed and dist.is_initialized():
            dist.destroy_process_group()

    def _what_happened(self, doing: str, waited_s: float, error: RuntimeError) -> str:
        left, silent, late = self._pulse.missing()
        where = f"while rank {self.rank} was {doing} in step {self.step}"
        if left:
            return f"{_ranks(left)} left the run {where}; what went wrong there is said there"
        if silent:
            return f"{_ranks(silent)} ended or hangs {where}{self._pulse.last_signs_of(silent)}"
        if late:
            steps = ", ".join(f"step {self._pulse.seen[rank]['step']}" for rank in late)
            return (
                f"{_ranks(late)} did not reach step {self.step} ({doing}) within {format_seconds(waited_s)}, being "
                f"still at {steps}{self._pulse.last_signs_of(late)}. If that can be, raise the timeout of the comm "
                "plugin"
            )
        return f"the ranks lost each other {where}: {str(error).splitlines()[0]}"


class _Pulse:
    """A thread that shows how far this rank has come, and what it can see of the others.

    `seen` holds the latest beat of every rank: `beat` counts up while the process lives, `calls` counts collectives.
    """

    def __init__(self, place: Place, store: Store, every_s: float) -> None:
        self.rank, self.every_s = place.rank, every_s
        self.seen: dict[int, dict[str, Any]] = {}
        self._others = [other for other in range(place.world) if other != place.rank]
        self._store, self._place = store, place
        self._mine: dict[str, Any] = {"beat": 0, "calls": 0, "step": 1, "left": False}
        self._ended = threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def show(self, calls: int, step: int) -> None:
        """Note how far this rank is; cheap, the thread publishes it."""
        self._mine["calls"], self._mine["step"] = calls, step

    def stop(self) -> None:
        """Say that this rank has left."""
        self._ended.set()
        self._thread.join(5.0)
        self._mine["left"] = True
        with contextlib.suppress(RuntimeError):  # the store went away with the rank that served it
            self._publish()

    def missing(self) -> tuple[list[int], list[int], list[int]]:
        """Ranks that have left, ranks that show no sign of life, and ranks that are behind this one.

        Takes up to three beats: an ended process is known by the beat that does not come.
        """
        try:
            first = self._look()
            end = time.monotonic() + 3 * self.every_s
            while time.monotonic() < end and not any(beat["left"] for beat in self.seen.values()):
                time.sleep(self.every_s / 4)
                self._look()
        except RuntimeError:
            return [], [0], []  # rank 0 serves the store, unless the launcher does, which ends all ranks
        left = [rank for rank, beat in self.seen.items() if beat["left"]]
        silent = [rank for rank, beat in self.seen.items() if beat["beat"] == first[rank]["beat"]]
        late = [rank for rank, beat in self.seen.items() if beat["calls"] < self._mine["calls"]]
        return left, silent, late

    def last_signs_of(self, ranks: Sequence[int]) -> str:
        """What ranks were doing when last seen, as the end of a sentence."""
        signs = {rank: self.seen[rank]["doing"] for rank in ranks if rank in self.seen}
        return "".join(
            f"; rank {rank} was last seen {doing} (stage {stage})" for rank, (stage, doing) in signs.items()
        )

    def _look(self) -> dict[int, dict[str, Any]]:
        self.seen = {rank: json.loads(self._store.get(f"pulse/{rank}")) for rank in self._others}
        return self.seen

    def _publish(self) -> None:
        self._mine["beat"] += 1
        self._mine["doing"] = self._place.doing
        self._store.set(f"pulse/{self.rank}", json.dumps(self._mine))

    def _run(self) -> None:
        while not self._ended.wait(self.every_s):
            try:
                self._publish()
            except RuntimeError:
                return


def start_process_group(place: Place, timeout_s: float) -> ProcessGroup:
    """Meet the other ranks and set up torch.distributed.

    Args:
        place: this rank and its device (a `Context`).
        timeout_s: how long to wait for another rank, now and in every collective.

    Raises:
        RanksError: a rank did not come; it is named.
        UserError: the port where ranks are to meet is busy.
    """
    global _generation
    _generation += 1
    ranks = Ranks.from_environment()
    patience = timedelta(seconds=timeout_s)
    store = PrefixStore(f"run-{_generation}", _root_store(ranks, patience))
    _meet(place, store, timeout_s)
    if ranks.world == ranks.local_world and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no name look-up, no firewall
    device = None if place.device.type == "cpu" else place.device
    if device is not None:
        torch.accelerator.set_device_index(device.index or 0)
        # A late rank is found by the host's collectives, which can name it; the device's watchdog, which can only
        # abort the process, comes after them.
        patience *= 2
    dist.init_process_group(
        _backend(place.device),
        store=PrefixStore("torch", store),
        rank=place.rank,
        world_size=place.world,
        timeout=patience,
        device_id=device,
    )
    return ProcessGroup(place, store, timeout_s)


def _backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def _root_store(ranks: Ranks, patience: timedelta) -> Store:
    """The key-value store: that of the launcher's agent when there is one, else served by rank 0."""
    address = f"{ranks.master_addr}:{ranks.master_port}"
    if address not in _stores:
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            _stores[address] = TCPStore(
                ranks.master_addr,
                ranks.master_port,
                is_master=ranks.rank == 0 and not served,
                timeout=patience,
                wait_for_workers=False,
            )
        except RuntimeError as error:
            if "EADDRINUSE" in str(error) or "in use" in str(error):
                raise UserError(
                    f"port {ranks.master_port} of {ranks.master_addr}, where the ranks are to meet, is busy: "
                    "set MASTER_PORT to a free one"
                ) from None
            raise RanksError(
                f"rank {ranks.rank} found nobody at {address} within {format_seconds(patience.total_seconds())}: "
                "rank 0 has not started, or its host cannot be reached"
            ) from error
    return _stores[address]


def _meet(place: Place, store: Store, timeout_s: float) -> None:
    store.set(f"here/{place.rank}", "yes")
    everybody = [f"here/{rank}" for rank in range(place.world)]
    try:
        store.wait(everybody, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        absent = [rank for rank, key in enumerate(everybody) if not store.check([key])]
        raise RanksError(f"{_ranks(absent)} did not start within {format_seconds(timeout_s)}") from error


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
