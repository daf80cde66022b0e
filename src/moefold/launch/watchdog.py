"""Watchdog: end a job that hangs, with one message that names the blocking ranks and the cause of the wait.

Each rank runs two threads next to its training thread. The store reporter publishes the flight-recorder snapshot in the
job's store every second and detects dead ranks of its machine. The watchdog thread monitors the rank's own flight
recorder. After a timeout without progress it lets the store reporter run the diagnosis over all ranks, and prints a
local message if the store does not respond.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

from moefold.comm.flight_recorder import FlightRecorder, read_snapshot
from moefold.errors import EXIT_FAILED
from moefold.host.processes import ALIVE, GONE
from moefold.host.rank_env import RankEnv
from moefold.launch.exit import SingleReporter, hard_exit
from moefold.launch.hang_diagnosis import describe_activity
from moefold.launch.rendezvous import STORE_ERRORS
from moefold.launch.store_reporter import PRINT_WAIT_S, REPORT_PERIOD_S, REPORT_WAIT_S, StoreReporter, wait_until
from moefold.message_text import first_line


def _flight_record_file(rank_env: RankEnv) -> tuple[Path | None, int]:
    """Return the file of this rank's flight record and its descriptor, or -1 without a file.

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
        regroups: a lost rank does not end the job. It is recorded for `launch.regroup`.
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
        self._store_reporter: StoreReporter | None = None

    @property
    def _store(self) -> StoreReporter:
        """The store reporter, once `start` was called."""
        assert self._store_reporter is not None, "start() comes first, after the rendezvous"
        return self._store_reporter

    def start(self, session: str) -> None:
        """Start both threads and return once the ranks of this machine are known from the store.

        Args:
            session: session name of `join_rendezvous`, used as key prefix in a store that may outlive the ranks.
        """
        self.flight_recorder.clock.start()
        self.flight_recorder.set_phase("connecting to the other ranks")
        self._store_reporter = StoreReporter(
            self._rank_env,
            self.flight_recorder,
            self._file,
            self.reporter,
            session,
            regroups=self._regroups,
            # The host thread of a GPU rank may block anywhere on a collective: its stack is not evidence.
            stack_shows_comm=self._device_type == "cpu",
        )
        self._store.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        self._store.peers_known.wait()
        self.flight_recorder.set_phase("connecting to the other ranks")

    def __enter__(self) -> Self:
        assert self._store
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
        """Deregister this rank, so that the others do not report it as lost. It does nothing before `start`."""
        self._stopped.set()
        self.flight_recorder.clock.end()
        if self._store_reporter is not None:
            self._store_reporter.deregister(status)

    def claim_first(self, topic: str) -> bool:
        """Return whether this is the first rank to claim `topic`. True before `start`."""
        return self._store_reporter is None or self._store_reporter.claim_first(topic)

    def gone_ranks(self) -> list[int]:
        """Return the ranks of this machine whose processes are gone without an exit status."""
        with suppress(*STORE_ERRORS):
            return [] if self._store_reporter is None else self._store_reporter.lost_peers()
        return []

    def silent_ranks(self) -> list[int]:
        """Return the ranks that report nothing any more and have no exit status. It takes some periods of reports."""
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

    def diagnose_lost_peer_and_exit(self, error: BaseException) -> None:
        """Diagnose over all ranks why the connection to another rank was lost, and exit. Return if not started.

        Waits first, so that a rank on the machine of the lost rank, which can see its process, diagnoses first.
        """
        if self._store_reporter is None:
            return
        self._stopped.set()
        time.sleep(2.5 * self._store.period_s)
        reason = f"rank {self._rank_env.rank} lost its connection to another rank: {first_line(error)}"
        self._request_diagnosis(reason, is_lost_peer=True)
        # The store may be gone because the rank that hosted it failed with its own message. Then its launcher ends the
        # other ranks, and a rank of the same machine finds the message marked as printed.
        wait_until(
            lambda: self.reporter.was_reported() or self._store.local_peer_states().get(0) == GONE,
            self._store.store_timeout_s,
        )
        self._report_without_store(reason)

    def _watch(self) -> None:
        limit_s = self.flight_recorder.hang_timeout_s
        while not self._stopped.wait(min(REPORT_PERIOD_S, limit_s / 5)):
            if self.flight_recorder.stalled_s() > limit_s:
                if self._regroups and self._awaits_regroup():
                    continue
                reason = f"no progress for {limit_s:g} s (faults.timeout_s)"
                self._request_diagnosis(reason, is_lost_peer=False)
                self._report_without_store(reason)

    def _awaits_regroup(self) -> bool:
        """Return whether this rank has time to regroup after a loss, which another rank may have recorded.

        The survivors get errors from a loss on. A second timeout in the same generation without a new loss ends the
        job.
        """
        silent = self._store.drop_silent_ranks()
        if self.flight_recorder.stalled_s() <= self.flight_recorder.hang_timeout_s:
            return True
        members = self.flight_recorder.members
        new = silent - self._timed_losses if members is None else silent.intersection(members) - self._timed_losses
        self._timed_losses |= new
        if new:
            self.flight_recorder.note_progress()
        return bool(new)

    def _request_diagnosis(self, reason: str, *, is_lost_peer: bool) -> None:
        """Let the store reporter run the diagnosis, which ends the process. Return if the store does not respond."""
        self._store.request_diagnosis(reason, is_lost_peer=is_lost_peer)
        deadline = time.monotonic() + REPORT_WAIT_S + PRINT_WAIT_S
        while self._store.is_store_responding() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _report_without_store(self, reason: str) -> NoReturn:
        """Print a message with local knowledge only, as the store does not respond, and exit."""
        env = self._rank_env
        states = self._store.local_peer_states()
        store = f"the store at {env.master_address}:{env.master_port}"
        host = "rank 0, the launcher, or the first torchrun agent, whichever hosts it"
        snapshot = self.flight_recorder.snapshot()
        lines = [
            f"moefold: {store} does not answer rank {env.rank} on {self._store.own_process.host}, last heard "
            f"{self._store.since_contact_s():.1f} s ago: its process ({host}), its host, or the network is down",
            f"  rank {env.rank}: {describe_activity(snapshot)}, {time.time() - snapshot.moved_s:.1f} s ago",
        ]
        lines += [f"  rank {rank} of this machine is {state}" for rank, state in states.items() if state != ALIVE]
        lines.append(f"  the run ends: {reason}; see docs/failures.md")
        self.reporter.report_once("\n".join(lines))
        self._store.exit_failed()
