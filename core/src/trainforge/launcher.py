"""Starts the ranks of this host through PyTorch's elastic agent, passes signals on and says how it all ended.

The agent does rendezvous, ranks and processes. It runs in a thread of its own: in the main thread it would take over
the signal handlers, and its reaction to a signal, ending all ranks, is not ours, which is to let them save. A failed
rank is never restarted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from trainforge.errors import UserError
from trainforge.rank_process import LAUNCHER_PID, REPORTS, STOPPED, RankReport, read_reports
from trainforge.signals import STOPPING, Handler, handle_stopping, restore

_DYING_S = 5.0  # what the other ranks get to end by themselves once one has failed
_LOG_TAIL = 40  # lines of a rank's log that are shown when it left no report
_LOG_TAIL_BYTES = 2**16  # and no more than that: a log may be of any size
_DEFAULT_PORT = 29400  # of the rendezvous, as torchrun has it


def launch(
    argv: Sequence[str],
    nproc: int,
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    rdzv: str | None = None,
    grace_s: float = 600.0,
    meet_s: float = 600.0,
    module: str = "trainforge.cli",
    log_dir: Path | None = None,
) -> int:
    """Run `python -m MODULE ARGV...` as `nproc` ranks on this host and wait until all have ended.

    Local rank 0 writes to this terminal; the others write to files below `log_dir`. Of several errors the first is
    shown, once. SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed on to the ranks.

    Args:
        argv: the command line without the program (`["run", "recipe.yaml"]`).
        nnodes: hosts that take part; each calls this with the same `rdzv`.
        node_rank: 0 on the host that `rdzv` names, which serves the rendezvous.
        rdzv: `host:port` where hosts meet; one host alone needs none and takes a free port.
        grace_s: how long ranks may take to save after a stop signal before they are killed.
        meet_s: how long to wait for the other hosts.
        module: what each rank runs.
        log_dir: where the output of the other ranks goes; by default a temporary folder, kept when what is shown
            names it.

    Returns:
        0 when every rank is done; 2 when the user must change something; 3 when stopped by a signal after
        saving, or before there was anything to save; else 1.

    Raises:
        UserError: the rendezvous cannot be set up (no address, or a busy port).
    """
    if nproc < 1 or nnodes < 1 or not 0 <= node_rank < nnodes:
        raise UserError("--nproc and --nnodes must be at least 1, and --node-rank below --nnodes")
    host, port = _rendezvous_address(nnodes, node_rank, rdzv)
    logs = Path(tempfile.mkdtemp(prefix="trainforge-ranks-")) if log_dir is None else log_dir
    reports = Path(tempfile.mkdtemp(prefix="trainforge-reports-"))
    logs.mkdir(parents=True, exist_ok=True)
    try:
        with _environment({REPORTS: str(reports), LAUNCHER_PID: str(os.getpid())}):
            agent = _Agent(nproc, nnodes, node_rank == 0, f"{host}:{port}", meet_s, (module, *argv), logs)
            watch = _Watch(agent, reports, grace_s)
            watch.until_ended()
        text, code = _how_it_ended(watch, agent, read_reports(reports), logs)
    finally:
        shutil.rmtree(reports, ignore_errors=True)
    if log_dir is None and str(logs) not in text:
        shutil.rmtree(logs, ignore_errors=True)
    if text:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    return code


class _Agent:
    """PyTorch's agent in a thread, quiet, with the process ids that it started."""

    def __init__(
        self,
        nproc: int,
        nnodes: int,
        serves: bool,
        endpoint: str,
        meet_s: float,
        command: tuple[str, ...],
        logs: Path,
    ) -> None:
        self._nproc, self._nnodes, self._serves = nproc, nnodes, serves
        self._endpoint, self._meet_s = endpoint, int(meet_s)
        self._command, self._logs = command, logs
        self._agent: Any = None
        self.error: BaseException | None = None
        self.exit_codes: dict[int, int] = {}
        self.thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def _run(self) -> None:
        try:
            self._agent, meeting = self._make()
            try:
                result = self._agent.run()
            finally:
                meeting.shutdown()
            self.exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        except BaseException as error:
            self.error = error

    def _make(self) -> tuple[Any, Any]:
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        for name in ("torch.distributed", "torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        # On one host no name is looked up: that can take seconds without a network.
        local = "127.0.0.1" if self._nnodes == 1 else None
        meeting = get_rendezvous_handler(
            RendezvousParameters(
                backend="c10d",
                endpoint=self._endpoint,
                run_id="trainforge" if self._nnodes > 1 else uuid.uuid4().hex,
                min_nodes=self._nnodes,
                max_nodes=self._nnodes,
                local_addr=local,
                is_host=self._serves,
                read_timeout=self._meet_s,
                join_timeout=self._meet_s,
            )
        )
        spec = WorkerSpec(
            role="rank",
            local_world_size=self._nproc,
            rdzv_handler=meeting,
            entrypoint=sys.executable,
            args=("-m", "trainforge.rank_process", *self._command),
            max_restarts=0,
            monitor_interval=0.1,
            local_addr=local,
        )
        to_files = dict.fromkeys(range(1, self._nproc), Std.ALL)
        logs = DefaultLogsSpecs(log_dir=str(self._logs), redirects=to_files or Std.NONE)
        return LocalElasticAgent(spec=spec, logs_specs=logs), meeting

    def pids(self) -> dict[int, int]:
        """Process ids of the ranks of this host, by global rank; empty before they are started."""
        if self._agent is None:
            return {}
        workers = self._agent.get_worker_group().workers
        return {worker.global_rank: worker.id for worker in workers if isinstance(worker.id, int)}

    def log(self, rank: int) -> Path | None:
        """The file with standard error of a rank, if it has one."""
        local = {worker.global_rank: worker.local_rank for worker in self._agent.get_worker_group().workers}
        found = self._logs.glob(f"*/attempt_0/{local[rank]}/stderr.log")
        return max(found, key=lambda path: path.stat().st_mtime, default=None)


class _Watch:
    """The main thread's part: signals go to the ranks, and what does not end in time is killed.

    Attributes:
        died: ranks that had ended without a word when the first failure was noticed: nobody had ended them by then.
    """

    def __init__(self, agent: _Agent, reports: Path, grace_s: float) -> None:
        self.agent, self.reports, self.grace_s = agent, reports, grace_s
        self.stopped_by: str | None = None
        self.killed: str | None = None
        self.died: frozenset[int] = frozenset()
        self._failed = self._passed_on = False
        self._pending: list[int] = []
        self._deadline: tuple[float, str] | None = None

    def until_ended(self) -> None:
        """Start the ranks; come back when all of them and whatever they started have ended."""
        with _handlers(self._on_signal):
            self.agent.thread.start()
            while self.agent.thread.is_alive():
                self.agent.thread.join(0.1)
                pids = self.agent.pids()
                self._pass_on(pids)
                if not self._failed and self._one_has_failed(pids):
                    self._failed = True
                    if self._deadline is None:
                        self._arm(_DYING_S, "")
                if self._deadline is not None and time.monotonic() > self._deadline[0]:
                    self.killed = self.killed or self._deadline[1]
                    if not pids:
                        return  # still waiting for the other hosts: there is nothing to end
                    _kill(pids.values())
            _kill(self.agent.pids().values())  # orphans of a rank that died: it led their process group

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(number)

    def _pass_on(self, pids: dict[int, int]) -> None:
        if self._pending and self.stopped_by is None:
            self.stopped_by = signal.Signals(self._pending[0]).name
            if not pids:
                self._arm(_DYING_S, "had not started")
        if self._pending and pids and not self._passed_on:
            self._passed_on = True
            if not self._failed:  # else they have no more time than to die
                self._arm(self.grace_s, f"did not finish saving within {self.grace_s:.0f} s and were killed")
        while self._pending and pids:
            number = self._pending.pop(0)
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _arm(self, seconds: float, why: str) -> None:
        self._deadline = (time.monotonic() + seconds, why)

    def _one_has_failed(self, pids: dict[int, int]) -> bool:
        ended = [
            rank for rank, pid in pids.items() if _has_ended(pid)
        ]  # before the reports, which come first
        reports = read_reports(self.reports)
        self.died = frozenset(rank for rank in ended if rank not in reports)
        return bool(self.died) or any(report.exit_code not in (0, STOPPED) for report in reports.values())


def _how_it_ended(
    watch: _Watch, agent: _Agent, reports: dict[int, RankReport], logs: Path
) -> tuple[str, int]:
    """What a person reads, and the exit code."""
    too_early = f"{watch.stopped_by}: stopped before the ranks had met, so nothing had to be saved"
    if agent.error is not None or watch.killed == "had not started":
        if watch.stopped_by and not agent.pids():
            return too_early, STOPPED
        return _rendezvous_trouble(agent), 1 if agent.pids() else 2
    failed = [report for report in reports.values() if report.exit_code not in (0, STOPPED)]
    crashed = [rank for rank in agent.exit_codes if rank not in reports]
    own = [report for report in failed if report.error != "RanksError"]
    if watch.killed:
        return f"The ranks {watch.killed}.", 1
    if own:
        # Every rank meets the same user's mistake; the lowest of the first ones speaks for all.
        first = min(own, key=lambda report: (report.exit_code != 2, report.at, report.rank))
        return _own_words(first, agent), 2 if first.exit_code == 2 else 1
    if crashed and watch.stopped_by and all(agent.exit_codes[rank] in _deaths_by_stop() for rank in crashed):
        return "" if reports else too_early, STOPPED
    by_us = (-signal.SIGTERM, -signal.SIGKILL)
    by_themselves = [rank for rank in crashed if rank in watch.died or agent.exit_codes[rank] not in by_us]
    if by_themselves or (crashed and not failed):
        return _crash([*by_themselves, *crashed][0], agent, logs), 1
    if failed:  # what has not reported was stuck, and ended by us: those that waited for it name it
        return min(failed, key=lambda report: report.at).text, 1
    return "", STOPPED if any(report.exit_code == STOPPED for report in reports.values()) else 0


def _own_words(report: RankReport, agent: _Agent) -> str:
    """What a rank reported; a rank that only gave an exit code has said why in its log."""
    if report.text or report.rank == min(agent.pids(), default=0):
        return report.text
    return _log_tail(report.rank, agent)


def _crash(rank: int, agent: _Agent, logs: Path) -> str:
    code = agent.exit_codes[rank]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    hint = " (often the host ran out of memory: see dmesg)" if code == -signal.SIGKILL else ""
    tail = _log_tail(rank, agent)
    return f"{tail}\nRank {rank} {how}{hint}; the run has ended. Logs of the ranks: {logs}".lstrip()


def _log_tail(rank: int, agent: _Agent) -> str:
    log = agent.log(rank)
    if log is None:
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-_LOG_TAIL:])


def _rendezvous_trouble(agent: _Agent) -> str:
    if agent.pids():
        return f"The launcher failed: {type(agent.error).__name__}: {agent.error}"
    return (
        f"The hosts did not meet: {agent.error}; check --rdzv, --nnodes and that every host can reach host 0"
    )


def _deaths_by_stop() -> set[int]:
    return {-number for number in STOPPING}


def _kill(pids: Iterable[int]) -> None:
    """End ranks and everything in their process groups (the agent starts each rank as the leader of one)."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def _rendezvous_address(nnodes: int, node_rank: int, rdzv: str | None) -> tuple[str, int]:
    if nnodes == 1 and rdzv is None:
        return "127.0.0.1", 0  # the agent takes a free port
    if rdzv is None:
        raise UserError("several hosts need --rdzv HOST:PORT, the address of the host with --node-rank 0")
    host, _, port = rdzv.rpartition(":") if ":" in rdzv else (rdzv, "", str(_DEFAULT_PORT))
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--rdzv is {rdzv!r}; it must be HOST:PORT")
    if node_rank == 0 and not _can_bind(int(port)):
        raise UserError(
            f"port {port} of --rdzv {rdzv} is busy on this host: end what uses it or choose another port"
        )
    return host, int(port)


def _can_bind(port: int) -> bool:
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _handlers(handler: Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = handle_stopping(handler)
    try:
        yield
    finally:
        restore(before)
