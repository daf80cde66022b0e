"""Watchdog: end a job that hangs, with one message that names the blocking ranks and the cause of the wait.

Each rank runs two threads next to its training thread. The store reporter publishes the flight-recorder snapshot in the
job's store every second and detects dead ranks of its machine. The watchdog thread monitors the rank's own flight
recorder; after a timeout without progress it lets the store reporter run the diagnosis over all ranks, and prints a
local message if the store does not respond.
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
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Self

import torch.distributed as dist

from moefold.comm.flight_recorder import (
    FILE_BYTES,
    FlightRecorder,
    FlightSnapshot,
    decode_snapshot,
    format_ranks,
    read_snapshot,
)
from moefold.comm.private_torch import abort_process_groups
from moefold.errors import EXIT_FAILED, EXIT_USER_ERROR, first_line
from moefold.host.processes import ALIVE, BLOCKED, GONE, STOPPED, ProcessId, run_with_timeout
from moefold.host.rank_env import RankEnv
from moefold.launch.exit import SingleReporter, hard_exit
from moefold.launch.hang_diagnosis import RankReport, describe_activity, format_diagnosis
from moefold.launch.regroup import lost_ranks, report_lost
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


def _flight_record_file(rank_env: RankEnv) -> tuple[Path | None, int]:
    """Return the file of this rank's flight record and its descriptor; -1 without a file.

    Other ranks of the machine keep the file open after this rank died.
    """
    if rank_env.record_paths:
        return Path(rank_env.record_paths[rank_env.rank]), -1
    if not hasattr(os, "memfd_create"):
        return None, -1
    # An anonymous file: nothing needs to be removed after a kill.
    descriptor = os.memfd_create("moefold-record")
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}"), descriptor


class Watchdog:
    """Context manager inside a process group: owns the flight recorder of this rank and ends the job if it hangs.

    `start` must be called after the rendezvous and before the backends connect, where ranks could block without limit.

    Args:
        timeout_s: the job ends when a rank makes no progress for this long.
        regroups: a lost rank does not end the job; it is recorded for `launch.regroup`.
    """

    def __init__(
        self, rank_env: RankEnv, timeout_s: float, device_type: str = "cpu", *, regroups: bool = False
    ) -> None:
        self._regroups = regroups
        self._rank_env = rank_env
        self._device_type = device_type
        self._file, self._descriptor = _flight_record_file(rank_env)
        self.flight_recorder = FlightRecorder(timeout_s, self._file)
        self.reporter = SingleReporter(rank_env)
        self._stopped = threading.Event()
        self._timed_losses: set[int] = set()
        """Losses after which this rank got another timeout."""
        self._store_reporter: _StoreReporter | None = None

    def start(self, session: str) -> None:
        """Start both threads and return once the ranks of this machine are known from the store.

        Args:
            session: session name of `join_rendezvous`, used as key prefix in a store that may outlive the ranks.
        """
        self.flight_recorder.clock.start()
        self.flight_recorder.set_phase("connecting to the other ranks")
        self._store_reporter = _StoreReporter(
            self._rank_env,
            self.flight_recorder,
            self._file,
            self.reporter,
            session,
            regroups=self._regroups,
            # The host thread of a GPU rank may block anywhere on a collective: its stack is not evidence.
            stack_shows_comm=self._device_type == "cpu",
        )
        self._store_reporter.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        self._store_reporter.peers_known.wait()
        self.flight_recorder.set_phase("connecting to the other ranks")

    def __enter__(self) -> Self:
        assert self._store_reporter is not None, "start() comes first, after the rendezvous"
        self.flight_recorder.set_phase("starting")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A failed rank in a larger job keeps the threads until it exits: it may have to report the first failed rank.
        if error is None or self._rank_env.world_size == 1:
            self.deregister(0)
            if self._rank_env.is_embedded or self._rank_env.world_size == 1:
                self.close()

    def close(self) -> None:
        """Close the files of this rank, in a process that continues. Call it after the rank has deregistered."""
        self.reporter.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def deregister(self, status: int) -> None:
        """Deregister this rank, so that the others do not report it as lost; does nothing before `start`."""
        self._stopped.set()
        self.flight_recorder.clock.end()
        if self._store_reporter is not None:
            self._store_reporter.deregister(status)

    def claim_first(self, topic: str) -> bool:
        """Return whether this is the first rank to claim `topic`; True before `start`."""
        return self._store_reporter is None or self._store_reporter.claim_first(topic)

    def gone_ranks(self) -> list[int]:
        """Return the ranks of this machine whose processes are gone without an exit status."""
        with suppress(*STORE_ERRORS):
            return [] if self._store_reporter is None else self._store_reporter.lost_peers()
        return []

    def silent_ranks(self) -> list[int]:
        """Return the ranks that report nothing any more and have no exit status; takes some periods of reports."""
        with suppress(*STORE_ERRORS):
            return [] if self._store_reporter is None else self._store_reporter.silent_ranks()
        return []

    def kill(self, rank: int) -> None:
        """Kill the process of another rank, if it is on this machine."""
        if self._store_reporter is not None:
            self._store_reporter.kill_peer(rank)

    def activity_of(self, rank: int) -> str:
        """Return host, step, phase and last collective of a lost rank, as far as this rank can read them."""
        host, snapshot = "", None
        if self._store_reporter is not None:
            with suppress(*STORE_ERRORS):
                host, snapshot = self._store_reporter.last_report(rank)
        if self._rank_env.record_paths:
            snapshot = read_snapshot(Path(self._rank_env.record_paths[rank])) or snapshot
        host_text = f" on {host}" if host else ""
        return f"{host_text} in {describe_activity(snapshot)}" if snapshot is not None else host_text

    def exit_failed(self) -> NoReturn:
        """Exit with `EXIT_FAILED`, and kill stopped ranks of this machine, which ignore the launcher's SIGTERM."""
        if self._store_reporter is not None:
            self._store_reporter.exit_failed()
        hard_exit(EXIT_FAILED)

    def explain_lost_peer(self, error: BaseException) -> None:
        """Diagnose over all ranks why the connection to another rank was lost, and exit; return if not started.

        Waits first, so that a rank on the machine of the lost rank, which can see its process, diagnoses first.
        """
        store_reporter = self._store_reporter
        if store_reporter is None:
            return
        self._stopped.set()
        time.sleep(2.5 * store_reporter.period_s)
        reason = f"rank {self._rank_env.rank} lost its connection to another rank: {first_line(error)}"
        self._request_diagnosis(store_reporter, reason, is_lost_peer=True)
        # The store may be gone because the rank that hosted it failed with its own message: then its launcher ends the
        # other ranks, and a rank of the same machine finds the message marked as printed.
        _wait_until(
            lambda: self.reporter.was_reported() or store_reporter.local_peer_states().get(0) == GONE,
            store_reporter.store_timeout_s,
        )
        self._report_without_store(store_reporter, reason)

    def _watch(self) -> None:
        store_reporter = self._store_reporter
        assert store_reporter is not None
        limit_s = self.flight_recorder.hang_timeout_s
        while not self._stopped.wait(min(REPORT_PERIOD_S, limit_s / 5)):
            if self.flight_recorder.stalled_s() > limit_s:
                if self._regroups and self._awaits_regroup(store_reporter):
                    continue
                reason = f"no progress for {limit_s:g} s (faults.timeout_s)"
                self._request_diagnosis(store_reporter, reason, is_lost_peer=False)
                self._report_without_store(store_reporter, reason)

    def _awaits_regroup(self, store_reporter: "_StoreReporter") -> bool:
        """Return whether this rank has time to regroup after a loss, which another rank may have recorded.

        The survivors get errors from a loss on; a second timeout in the same generation without a new loss ends the
        job.
        """
        silent = store_reporter.drop_silent_ranks()
        if self.flight_recorder.stalled_s() <= self.flight_recorder.hang_timeout_s:
            return True
        members = self.flight_recorder.members
        new = silent - self._timed_losses if members is None else silent.intersection(members) - self._timed_losses
        self._timed_losses |= new
        if new:
            self.flight_recorder.note_progress()
        return bool(new)

    def _request_diagnosis(self, store_reporter: "_StoreReporter", reason: str, *, is_lost_peer: bool) -> None:
        """Let the store reporter run the diagnosis, which ends the process; return if the store does not respond."""
        store_reporter.request_diagnosis(reason, is_lost_peer=is_lost_peer)
        deadline = time.monotonic() + REPORT_WAIT_S + PRINT_WAIT_S
        while store_reporter.is_store_responding() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _report_without_store(self, store_reporter: "_StoreReporter", reason: str) -> NoReturn:
        """Print a message with local knowledge only, as the store does not respond, and exit."""
        env = self._rank_env
        states = store_reporter.local_peer_states()
        store = f"the store at {env.master_address}:{env.master_port}"
        host = "rank 0, the launcher, or the first torchrun agent, whichever hosts it"
        snapshot = self.flight_recorder.snapshot()
        lines = [
            f"moefold: {store} does not answer rank {env.rank} on {store_reporter.own_process.host}, last heard "
            f"{store_reporter.since_contact_s():.1f} s ago: its process ({host}), its host, or the network is down",
            f"  rank {env.rank}: {describe_activity(snapshot)}, {time.time() - snapshot.moved_s:.1f} s ago",
        ]
        lines += [f"  rank {rank} of this machine is {state}" for rank, state in states.items() if state != ALIVE]
        lines.append(f"  the run ends: {reason}; see docs/failures.md")
        self.reporter.report_once("\n".join(lines))
        store_reporter.exit_failed()


class _StoreReporter(threading.Thread):
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
        """Request a diagnosis, after which this thread ends the process; `reason` is the end of the message."""
        self._is_lost_peer = is_lost_peer
        self._reason = reason
        self._wake.set()

    def deregister(self, status: int) -> None:
        """Publish the exit status and stop the thread; wait a moment for it.

        Does not return from a failure that the death of another rank explains: the thread then ends the process.
        """
        if self._exit_status is None:
            self._exit_status = status
            self._wake.set()
            self._deregistered.wait(1.0 if status == 0 else REPORT_WAIT_S + 1.0)

    def claim_first(self, topic: str) -> bool:
        """Return whether this is the first rank to claim `topic`; True if the store is lost."""
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
        self._credit_awaited_rank()
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
        store = self._connected_store
        report = json.loads(store.get(f"report/{rank}")) if store.check([f"report/{rank}"]) else None
        observed = self._local_peers[rank].describe()[1] if rank in self._local_peers else None
        snapshot = observed or (report and report["snapshot"])
        return report["host"] if report else "", FlightSnapshot.from_json(snapshot) if snapshot else None

    def drop_silent_ranks(self) -> set[int]:
        """Kill the stopped ranks of this machine, so that the others can regroup; return all ranks lost so far.

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
        self._run_for(MAX_MISSED_PERIODS * self.period_s)
        silent = [rank for rank in peers if self._last_text(rank) == before[rank]]
        return [rank for rank in silent if not self._connected_store.check([f"left/{rank}"])]

    def _run_for(self, duration_s: float) -> None:
        """Wait on the flight recorder's clock: while this process is stopped, the other ranks may be stopped too."""
        end_s = self._flight_recorder.clock() + duration_s
        while self._flight_recorder.clock() < end_s:
            time.sleep(min(self.period_s, duration_s))

    def _last_text(self, rank: int) -> bytes:
        store = self._connected_store
        return store.get(f"report/{rank}") if store.check([f"report/{rank}"]) else b""

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

    def _credit_awaited_rank(self) -> None:
        """Record progress while the rank that this rank waits for makes progress.

        Ranks that train and ranks that sample wait for each other during a round of rollouts or a training step. Times
        are compared only within the report of the other rank, whose clock may differ.
        """
        rank = self._flight_recorder.awaited_rank
        if rank is None or not self._connected_store.check([f"report/{rank}"]):
            return
        report = json.loads(self._connected_store.get(f"report/{rank}"))
        is_new = report["reported_at_s"] != self._awaited_report_s
        self._awaited_report_s = report["reported_at_s"]
        idle_s = report["reported_at_s"] - report["snapshot"]["moved_s"]
        if is_new and idle_s < self._flight_recorder.hang_timeout_s / 2:
            self._flight_recorder.credit_wait()

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
        _wait_until(lambda: store.check([PRINTED_KEY]), PRINT_WAIT_S)
        self.exit_failed()

    def _diagnose_and_exit(self, reason: str, *, is_lost_peer: bool) -> NoReturn:
        """Collect the reports of all ranks, print the diagnosis and exit; only answer if another rank diagnoses."""
        store = self._connected_store
        rank = str(self._rank_env.rank)
        if store.compare_set("diagnoser", "", rank).decode() != rank:
            self._answer_and_exit()
        self._publish_report()
        store.set(f"answer/{rank}", "1")
        num_unable = sum(state in (GONE, STOPPED) for state in self.local_peer_states().values())
        _wait_until(lambda: store.add("answers", 0) + 1 >= self._rank_env.world_size - num_unable, REPORT_WAIT_S)
        reports = self._gather_reports()
        # A rank that failed by itself has printed its own message; the lost connection is a consequence.
        if not (
            is_lost_peer and any(report.exit_status in (EXIT_FAILED, EXIT_USER_ERROR) for report in reports.values())
        ):
            self._reporter.report_once(format_diagnosis(reports, self._rank_env.world_size, reason))
        store.set(PRINTED_KEY, "1")
        self.exit_failed()

    def _gather_reports(self) -> dict[int, RankReport]:
        """Return the report of every rank that ever reported. Silent ranks are reported by their local peers."""
        store = self._connected_store
        reports: dict[int, RankReport] = {}
        observed: dict[int, tuple[str, dict[str, Any] | None]] = {}
        for rank in range(self._rank_env.world_size):
            if not store.check([f"report/{rank}"]):
                continue
            data = json.loads(store.get(f"report/{rank}"))
            has_responded = store.check([f"answer/{rank}"])
            if has_responded:
                observed |= {int(other): observation for other, observation in data["local_peers"].items()}
            reports[rank] = RankReport(
                host=data["host"],
                snapshot=FlightSnapshot.from_json(data["snapshot"]),
                reported_at_s=data["reported_at_s"],
                has_responded=has_responded,
                source_location=data["source_location"] if has_responded else "",
                is_communicating=data["is_communicating"],
                exit_status=int(store.get(f"left/{rank}")) if store.check([f"left/{rank}"]) else None,
            )
        for rank, (state, snapshot) in observed.items():
            if rank in reports and reports[rank].has_responded and state == BLOCKED:
                # BLOCKED is the state of the main thread; the store reporter still responds.
                reports[rank] = replace(reports[rank], process_state=state)
            if rank in reports and not reports[rank].has_responded:
                last = reports[rank].snapshot if snapshot is None else FlightSnapshot.from_json(snapshot)
                reports[rank] = replace(reports[rank], process_state=state, snapshot=last)
        return reports


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
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
