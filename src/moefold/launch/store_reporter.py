"""Store reporter: thread that reports the state of a rank to the job's store, and diagnoses a hang over all ranks.

Every second it reports the flight-recorder snapshot of the rank and the states of the processes of its machine. So the
ranks of the same machine notice a rank that died.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from moefold.comm.flight_recorder import FILE_BYTES, FlightRecorder, FlightSnapshot, decode_snapshot, format_ranks
from moefold.comm.private_torch import abort_process_groups
from moefold.errors import EXIT_FAILED, EXIT_USER_ERROR
from moefold.host.processes import ALIVE, GONE, STOPPED, ProcessId, run_with_timeout
from moefold.host.rank_env import RankEnv
from moefold.launch.exit import SingleReporter, hard_exit
from moefold.launch.hang_diagnosis import format_diagnosis, gather_reports
from moefold.launch.regroup import lost_ranks, read_if_set, report_lost
from moefold.launch.rendezvous import STORE_ERRORS

REPORT_PERIOD_S = 1.0
"""Longest interval between two reports of a rank."""
REPORT_WAIT_S = 3.0
"""Limit of the diagnosing rank's wait for the last reports of the others."""
PRINT_WAIT_S = 10.0
"""Limit of the other ranks' wait for the diagnosing rank."""
MAX_MISSED_PERIODS = 8
"""The store counts as lost after this many report periods without a response."""
POLL_S = 0.05
"""Least interval of the polling for the other ranks' registration. It grows with the number of ranks."""
WAITING_FRAMES = 4
"""Number of innermost frames that are searched for `run_with_timeout`, where a thread waits for another thread."""
PRINTED_KEY = "printed"
"""Store key that is set once the message is printed."""


class LocalPeer:
    """Another rank of this machine and its flight record, which stays open after the rank died."""

    def __init__(self, process: ProcessId, file: str) -> None:
        self.process = process
        self._record_file = None
        with suppress(OSError):
            self._record_file = Path(file).open("rb", buffering=0) if file else None  # noqa: SIM115 - open until exit

    def describe(self) -> tuple[str, dict[str, Any] | None]:
        """Return the process state and, unless the rank is alive, its last flight-recorder snapshot."""
        state = self.process.state()
        if state == ALIVE or self._record_file is None:
            return state, None
        self._record_file.seek(0)
        snapshot = decode_snapshot(self._record_file.read(FILE_BYTES))
        return state, None if snapshot is None else snapshot.to_json()


class StoreReporter(threading.Thread):
    """Thread that reports to the store on its own connection: the training thread may block on a shared connection."""

    def __init__(
        self,
        rank_env: RankEnv,
        flight_recorder: FlightRecorder,
        file: Path | None,
        reporter: SingleReporter,
        session: str,
        *,
        regroups: bool,
        stack_shows_comm: bool,
    ) -> None:
        super().__init__(name="store reporter", daemon=True)
        self.own_process = ProcessId.current()
        self.peers_known = threading.Event()
        """Set once the other ranks of this machine are known, or the store is lost."""
        self._file = file
        self._reporter = reporter
        self.period_s = min(REPORT_PERIOD_S, flight_recorder.hang_timeout_s / 5)
        self.store_timeout_s = MAX_MISSED_PERIODS * self.period_s
        self._stack_shows_comm = stack_shows_comm
        self._rank_env = rank_env
        self._flight_recorder = flight_recorder
        self._session = session
        self._main_thread_id = threading.current_thread().ident
        self._last_contact_s = time.monotonic()
        self._wake = threading.Event()
        self._deregistered = threading.Event()
        self._exit_status: int | None = None
        self._reason = ""
        self._is_lost_peer = False
        self._local_peers: dict[int, LocalPeer] = {}
        self._recorded_losses: set[int] = set()
        self._awaited_report_s = 0.0
        self._store: dist.Store | None = None
        self._base_store: dist.Store | None = None
        self._regroups = regroups

    def run(self) -> None:
        """Report until the rank deregisters or the store is lost."""
        try:
            self._connect()
            while self._exit_status is None:
                self._poll_store()
                is_new = not self.peers_known.is_set()
                self._wake.wait(max(POLL_S, self._rank_env.world_size / 5000) if is_new else self.period_s)
                self._wake.clear()
            if self._exit_status != 0 and not self._regroups and (lost_ranks := self.lost_peers()):
                self._report_lost_peers(lost_ranks)
            self._connected_store.set(f"left/{self._rank_env.rank}", str(self._exit_status))
        except STORE_ERRORS:
            self._last_contact_s = -float("inf")
        finally:
            self.peers_known.set()
            self._deregistered.set()

    def request_diagnosis(self, reason: str, *, is_lost_peer: bool) -> None:
        """Request a diagnosis, after which this thread ends the process. `reason` is the end of the message."""
        self._is_lost_peer = is_lost_peer
        self._reason = reason
        self._wake.set()

    def deregister(self, status: int) -> None:
        """Publish the exit status and stop the thread. Wait a moment for it.

        Does not return from a failure that the death of another rank explains: the thread then ends the process.
        """
        if self._exit_status is None:
            self._exit_status = status
            self._wake.set()
            self._deregistered.wait(1.0 if status == 0 else REPORT_WAIT_S + 1.0)

    def claim_first(self, topic: str) -> bool:
        """Return whether this is the first rank to claim `topic`. True if the store is lost."""
        rank = str(self._rank_env.rank)
        with suppress(*STORE_ERRORS):
            return self._store is None or self._store.compare_set(f"first/{topic}", "", rank).decode() == rank
        return True

    def is_store_responding(self) -> bool:
        """Return whether the store has responded within `store_timeout_s`."""
        return self.is_alive() and self.since_contact_s() < self.store_timeout_s

    def since_contact_s(self) -> float:
        """Return the seconds since the last response of the store."""
        since_s = time.monotonic() - self._last_contact_s
        return since_s if since_s < float("inf") else self._flight_recorder.idle_s()

    def local_peer_states(self) -> dict[int, str]:
        """Return the process states of the other ranks of this machine."""
        return {rank: peer.process.state() for rank, peer in self._local_peers.items()}

    def exit_failed(self) -> NoReturn:
        """Exit, and SIGKILL stopped ranks of this machine: a stopped process handles no other signal."""
        for peer in self._local_peers.values():
            if peer.process.state() == STOPPED:
                os.kill(peer.process.number, signal.SIGKILL)
        hard_exit(EXIT_FAILED)

    @property
    def _connected_store(self) -> dist.Store:
        assert self._store is not None, "run() connects first"
        return self._store

    def _connect(self) -> None:
        env = self._rank_env
        timeout = timedelta(seconds=max(self._flight_recorder.hang_timeout_s, MAX_MISSED_PERIODS * REPORT_PERIOD_S))
        store = dist.TCPStore(
            env.master_address, env.master_port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        self._base_store = store
        self._store = dist.PrefixStore(f"moefold/{self._session}", store)
        this = self.own_process
        number = self._store.add(f"machine/{this.machine}", 1)
        entry: dict[str, Any] = {"rank": env.rank, "host": this.host, "number": this.number, "started": this.started}
        entry |= {"file": str(self._file or ""), "report_file": self._reporter.shared_path}
        self._store.set(f"member/{this.machine}/{number}", json.dumps(entry))
        self._store.add("members", 1)

    def _poll_store(self) -> None:
        store = self._connected_store
        self._publish_report()
        is_diagnosing = store.check(["diagnoser"])
        self._last_contact_s = time.monotonic()
        if is_diagnosing:
            self._answer_and_exit()
        if not self.peers_known.is_set():
            self._discover_local_peers()
        self._note_progress_of_awaited_rank()
        if self._regroups:
            self._record_losses()
        elif lost_ranks := self.lost_peers():
            self._report_lost_peers(lost_ranks)
        if self._reason:
            self._diagnose_and_exit(self._reason, is_lost_peer=self._is_lost_peer)

    def lost_peers(self) -> list[int]:
        """Return the other ranks of this machine that are gone without having deregistered."""
        gone_ranks = [rank for rank, state in self.local_peer_states().items() if state == GONE]
        return [rank for rank in gone_ranks if not self._connected_store.check([f"left/{rank}"])]

    def kill_peer(self, rank: int) -> None:
        """Kill the process of another rank of this machine, unless it is gone."""
        peer = self._local_peers.get(rank)
        if peer is not None and peer.process.state() != GONE:
            with suppress(ProcessLookupError):
                os.kill(peer.process.number, signal.SIGKILL)

    def last_report(self, rank: int) -> tuple[str, FlightSnapshot | None]:
        """Return host and last flight-recorder snapshot of another rank."""
        text = self._last_text(rank)
        report = json.loads(text) if text else None
        observed = self._local_peers[rank].describe()[1] if rank in self._local_peers else None
        snapshot = observed or (report and report["snapshot"])
        return report["host"] if report else "", FlightSnapshot.from_json(snapshot) if snapshot else None

    def drop_silent_ranks(self) -> set[int]:
        """Kill the stopped ranks of this machine, so that the others can regroup, and return all ranks lost so far.

        Called by the watchdog after the timeout. On GPUs, ranks that report nothing are recorded as lost too. With gloo
        the others would still wait on the connections to an unreachable host, so the job ends.
        """
        try:
            base = self._base_store
            if base is None:
                return set()
            for rank, peer in self._local_peers.items():
                if peer.process.state() == STOPPED:
                    self.kill_peer(rank)
                    report_lost(base, rank)
            silent = self.silent_ranks()
            if not self._stack_shows_comm:
                for rank in silent:
                    report_lost(base, rank)
            return lost_ranks(base)
        except STORE_ERRORS:
            return set()

    def silent_ranks(self) -> list[int]:
        """Return the other ranks that have not left and whose reports did not change for `MAX_MISSED_PERIODS`."""
        peers = [rank for rank in range(self._rank_env.world_size) if rank != self._rank_env.rank]
        before = {rank: self._last_text(rank) for rank in peers}
        self._wait_while_running(MAX_MISSED_PERIODS * self.period_s)
        silent = [rank for rank in peers if self._last_text(rank) == before[rank]]
        return [rank for rank in silent if not self._connected_store.check([f"left/{rank}"])]

    def _wait_while_running(self, duration_s: float) -> None:
        """Wait on the flight recorder's clock: while this process is stopped, the other ranks may be stopped too."""
        end_s = self._flight_recorder.clock() + duration_s
        while self._flight_recorder.clock() < end_s:
            time.sleep(min(self.period_s, duration_s))

    def _last_text(self, rank: int) -> str:
        return read_if_set(self._connected_store, f"report/{rank}")

    def _record_losses(self) -> None:
        """Record new losses for the survivors, and interrupt collectives of NCCL, which do not fail by themselves."""
        assert self._base_store is not None, "run() connects first"
        for rank in self.lost_peers():
            report_lost(self._base_store, rank)
        new = lost_ranks(self._base_store) - self._recorded_losses
        for rank in new:
            # From now on every diagnosis counts it as a rank that has left.
            self._connected_store.set(f"left/{rank}", str(-signal.SIGKILL))
        self._recorded_losses |= new
        if new and not self._stack_shows_comm:
            abort_process_groups()

    def _report_lost_peers(self, lost_ranks: list[int]) -> NoReturn:
        if self._rank_env.record_paths:
            # The launcher names the lost ranks and ends the others, except a rank that is blocked inside NCCL.
            time.sleep(2 * self.period_s)
            self.exit_failed()
        self._diagnose_and_exit(f"{format_ranks(lost_ranks)} can no longer take part", is_lost_peer=False)

    def _note_progress_of_awaited_rank(self) -> None:
        """Record progress while the rank that this rank waits for makes progress.

        Ranks that train and ranks that sample wait for each other during a round of rollouts or a training step. Times
        are compared only within the report of the other rank, whose clock may differ.
        """
        rank = self._flight_recorder.awaited_rank
        text = "" if rank is None else self._last_text(rank)
        if not text:
            return
        report = json.loads(text)
        is_new = report["reported_at_s"] != self._awaited_report_s
        self._awaited_report_s = report["reported_at_s"]
        idle_s = report["reported_at_s"] - report["snapshot"]["moved_s"]
        if is_new and idle_s < self._flight_recorder.hang_timeout_s / 2:
            self._flight_recorder.note_awaited_progress()

    def _publish_report(self) -> None:
        location, is_communicating = _source_location(self._main_thread_id)
        report = {
            "host": self.own_process.host,
            "snapshot": self._flight_recorder.snapshot().to_json(),
            "reported_at_s": time.time(),
            "source_location": location,
            "is_communicating": is_communicating or not self._stack_shows_comm,
            "local_peers": {rank: peer.describe() for rank, peer in self._local_peers.items()},
        }
        self._connected_store.set(f"report/{self._rank_env.rank}", json.dumps(report))

    def _discover_local_peers(self) -> None:
        """Read the ranks of this machine once all ranks have registered, and share the lowest rank's report file."""
        store = self._connected_store
        machine = self.own_process.machine
        if store.add("members", 0) < self._rank_env.world_size:
            return
        report_files = {}
        peers = {}
        for number in range(1, store.add(f"machine/{machine}", 0) + 1):
            entry = json.loads(store.get(f"member/{machine}/{number}"))
            rank = entry.pop("rank")
            file = entry.pop("file")
            report_files[rank] = entry.pop("report_file")
            if rank != self._rank_env.rank:
                peers[rank] = LocalPeer(ProcessId(machine=machine, **entry), file)
        if shared_file := report_files[min(report_files)]:
            self._reporter.use_file(shared_file)
        # One assignment: another thread may be iterating over the dictionary.
        self._local_peers = peers
        self.peers_known.set()

    def _answer_and_exit(self) -> NoReturn:
        """Publish a last report for the diagnosing rank, and exit once it has printed its message."""
        store = self._connected_store
        self._publish_report()
        store.set(f"answer/{self._rank_env.rank}", "1")
        store.add("answers", 1)
        wait_until(lambda: store.check([PRINTED_KEY]), PRINT_WAIT_S)
        self.exit_failed()

    def _diagnose_and_exit(self, reason: str, *, is_lost_peer: bool) -> NoReturn:
        """Collect the reports of all ranks, print the diagnosis and exit. Only answer if another rank diagnoses."""
        store = self._connected_store
        rank = str(self._rank_env.rank)
        if store.compare_set("diagnoser", "", rank).decode() != rank:
            self._answer_and_exit()
        self._publish_report()
        store.set(f"answer/{rank}", "1")
        num_unable = sum(state in (GONE, STOPPED) for state in self.local_peer_states().values())
        wait_until(lambda: store.add("answers", 0) + 1 >= self._rank_env.world_size - num_unable, REPORT_WAIT_S)
        reports = gather_reports(store, self._rank_env.world_size)
        # A rank that failed by itself has printed its own message. The lost connection is a consequence.
        if not (
            is_lost_peer and any(report.exit_status in (EXIT_FAILED, EXIT_USER_ERROR) for report in reports.values())
        ):
            self._reporter.report_once(format_diagnosis(reports, self._rank_env.world_size, reason))
        store.set(PRINTED_KEY, "1")
        self.exit_failed()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for a condition, at most for a time."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _source_location(thread_id: int | None) -> tuple[str, bool]:
    """Return the source line that a thread executes, and whether it is inside communication."""
    frame = sys._current_frames().get(thread_id or 0)
    if frame is None:
        return "", False
    stack = traceback.extract_stack(frame, limit=WAITING_FRAMES)
    innermost = stack[-1]
    path = Path(innermost.filename)
    is_waiting = "distributed" in path.parts or (path.parent.name == "comm" and innermost.name.lstrip("_") == "wait")
    is_waiting = is_waiting or any(caller.name == run_with_timeout.__name__ for caller in stack)
    return f"{'/'.join(path.parts[-2:])}:{innermost.lineno} {innermost.name}", is_waiting
