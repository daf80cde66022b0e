"""Ends a job that stands still, with one message for all ranks: who holds it up, and what the others wait in.

Each rank has two threads beside the one that trains. The messenger tells the job's store every second what the rank is
doing, and looks for ranks of its machine that died. The other thread watches the rank's own record; when it has stood
still for too long it lets the messenger ask all ranks, and speaks itself if the messenger hangs: the store may be gone.
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
from types import TracebackType
from typing import Any, NoReturn, Self

import torch.distributed as dist

from moefold.comm.flight_recorder import FILE_BYTES, FlightRecorder, FlightSnapshot, decode_snapshot, format_ranks
from moefold.host.processes import ALIVE, BLOCKED, GONE, STOPPED, ProcessId, run_with_timeout
from moefold.host.rank_env import RankEnv
from moefold.launch.exit import EXIT_FAILED, EXIT_USER_ERROR, hard_exit
from moefold.launch.hang_diagnosis import RankReport, describe_activity, format_diagnosis
from moefold.launch.rendezvous import STORE_ERRORS
from moefold.launch.single_reporter import SingleReporter

REPORT_PERIOD_S = 1.0
"""How often a rank reports, at most."""
REPORT_WAIT_S = 3.0
"""So long the one who speaks waits for the last reports of the others."""
PRINT_WAIT_S = 10.0
"""So long the others wait for the one who speaks."""
MAX_MISSED_PERIODS = 8
"""A store that has not answered for so many periods is not asked."""
POLL_S = 0.05
"""How often a rank of few looks whether it can know all others; thousands look less often."""
WAITING_FRAMES = 4
"""The innermost calls of a thread that waits for another one, in `run_with_timeout`."""
PRINTED_KEY = "told"
"""A key of the store, once the message is out."""


def _flight_record_file(rank_env: RankEnv) -> Path | None:
    """What this rank's record is written into: other ranks of the machine hold it open, also when this one is gone."""
    if rank_env.record_paths:
        return Path(rank_env.record_paths[rank_env.rank])
    if not hasattr(os, "memfd_create"):
        return None
    # A file without a name leaves nothing behind.
    return Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('moefold-record')}")


class Watchdog:
    """Context manager inside a process group: keeps the record of this rank and watches over it.

    It starts before, when the ranks have met: they may wait for each other for ever while they connect.

    Args:
        rank_env: of this rank.
        timeout_s: the job ends when a rank's record has stood still for so long.
        device_type: "cpu" or "cuda".
    """

    def __init__(self, rank_env: RankEnv, timeout_s: float, device_type: str = "cpu") -> None:
        self._rank_env = rank_env
        self._device_type = device_type
        self._file = _flight_record_file(rank_env)
        self.flight_recorder = FlightRecorder(timeout_s, self._file)
        self.reporter = SingleReporter(rank_env)
        self._stopped = threading.Event()
        self._store_reporter: _StoreReporter | None = None

    def start(self, session: str) -> None:
        """Begin to watch; returns when this rank knows those of its machine, as nobody can ask once the store is gone.

        Args:
            session: the name of this start of the job: keys of one before may lie in a store that outlives the ranks.
        """
        self.flight_recorder.set_phase("connecting to the other ranks")
        self._store_reporter = _StoreReporter(self._rank_env, self.flight_recorder, self._file, self.reporter, session)
        # Of a GPU's ranks the host may wait anywhere for a collective: where it is tells nothing.
        self._store_reporter.stack_shows_comm = self._device_type == "cpu"
        self._store_reporter.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        self._store_reporter.peers_known.wait()
        self.flight_recorder.set_phase("connecting to the other ranks")

    def __enter__(self) -> Self:
        assert self._store_reporter is not None, "it starts when the ranks have met"
        self.flight_recorder.set_phase("starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A rank of many that failed goes on watching until it leaves: it may have to say who failed first.
        if error is None or self._rank_env.world_size == 1:
            self.deregister(0)

    def deregister(self, status: int) -> None:
        """Say good-bye to the other ranks, which then do not miss this one; may be called when nothing runs."""
        self._stopped.set()
        if self._store_reporter is not None:
            self._store_reporter.deregister(status)

    def claim_first(self, topic: str) -> bool:
        """Whether no rank has asked this before; true where the ranks have not met."""
        return self._store_reporter is None or self._store_reporter.claim_first(topic)

    def exit_failed(self) -> NoReturn:
        """End this process as one that failed, and stopped ranks of its machine, which no signal of a launcher ends."""
        if self._store_reporter is not None:
            self._store_reporter.exit_failed()
        hard_exit(EXIT_FAILED)

    def explain_lost_peer(self, error: BaseException) -> None:
        """Ask all ranks why this one lost another, and end the process with the answer; returns before any rank met.

        A rank on the machine of the lost one knows best and speaks first.
        """
        messenger = self._store_reporter
        if messenger is None:
            return
        self._stopped.set()
        time.sleep(2.5 * messenger.period_s)
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = f"rank {self._rank_env.rank} lost its connection to another rank: {first_line[:160]}"
        self._request_diagnosis(messenger, why, is_lost_peer=True)
        # The store may be gone because the rank that kept it failed, and said so: what started it ends the others. If
        # that is one of this machine, the word tells.
        _wait_until(
            lambda: self.reporter.was_reported() or messenger.local_peer_states().get(0) == GONE,
            messenger.store_timeout_s,
        )
        self._report_without_store(messenger, why)

    def _watch(self) -> None:
        messenger = self._store_reporter
        assert messenger is not None
        limit_s = self.flight_recorder.hang_timeout_s
        while not self._stopped.wait(min(REPORT_PERIOD_S, limit_s / 5)):
            if self.flight_recorder.idle_s() > limit_s:
                why = f"no progress for {limit_s:g} s (faults.timeout_s)"
                self._request_diagnosis(messenger, why, is_lost_peer=False)
                self._report_without_store(messenger, why)

    def _request_diagnosis(self, store_reporter: "_StoreReporter", reason: str, *, is_lost_peer: bool) -> None:
        """Let the messenger find out; it ends the process unless it cannot reach the store."""
        store_reporter.request_diagnosis(reason, is_lost_peer=is_lost_peer)
        deadline = time.monotonic() + REPORT_WAIT_S + PRINT_WAIT_S
        while store_reporter.is_store_responding() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _report_without_store(self, store_reporter: "_StoreReporter", reason: str) -> NoReturn:
        """Say what this rank knows; the store cannot be asked."""
        place = self._rank_env
        states = store_reporter.local_peer_states()
        store = f"the store at {place.master_address}:{place.master_port}"
        keeper = "rank 0, the launcher, or the first torchrun agent, whichever keeps it"
        sighting = self.flight_recorder.snapshot()
        lines = [
            f"moefold: {store} does not answer rank {place.rank} on {store_reporter.own_process.host}, last heard "
            f"{store_reporter.since_contact_s():.1f} s ago: its process ({keeper}), its host, or the way there is down",
            f"  rank {place.rank}: {describe_activity(sighting)}, {time.time() - sighting.moved_s:.1f} s ago",
        ]
        lines += [f"  rank {rank} of this machine is {state}" for rank, state in states.items() if state != ALIVE]
        lines.append(f"  the run ends: {reason}; docs/failures.md says what to do")
        self.reporter.report_once("\n".join(lines))
        store_reporter.exit_failed()


class _StoreReporter(threading.Thread):
    """Talks to the store on a connection of its own: one that trains or waits must not share it."""

    def __init__(
        self,
        rank_env: RankEnv,
        flight_recorder: FlightRecorder,
        file: Path | None,
        reporter: SingleReporter,
        session: str,
    ) -> None:
        super().__init__(name="messenger", daemon=True)
        self.own_process = ProcessId.current()
        self.peers_known = threading.Event()
        """Set once the other ranks of this machine are known, or will never be."""
        self._file = file
        self._reporter = reporter
        self.period_s = min(REPORT_PERIOD_S, flight_recorder.hang_timeout_s / 5)
        self.store_timeout_s = MAX_MISSED_PERIODS * self.period_s
        self.stack_shows_comm = True
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
        self._local_peers: dict[int, _LocalPeer] = {}
        self._store: dist.Store | None = None

    def run(self) -> None:
        """Report until the rank parts, or the store is gone."""
        try:
            self._connect()
            while self._exit_status is None:
                self._poll_store()
                is_new = not self.peers_known.is_set()
                self._wake.wait(max(POLL_S, self._rank_env.world_size / 5000) if is_new else self.period_s)
                self._wake.clear()
            if self._exit_status != 0 and (lost := self._lost_peers()):
                self._report_lost_peers(lost)
            self._connected_store.set(f"left/{self._rank_env.rank}", str(self._exit_status))
        except STORE_ERRORS:
            self._last_contact_s = -float("inf")
        finally:
            self.peers_known.set()
            self._deregistered.set()

    def request_diagnosis(self, reason: str, *, is_lost_peer: bool) -> None:
        """Find out who is late, say so, and end the process; `reason` ends the message."""
        self._is_lost_peer = is_lost_peer
        self._reason = reason
        self._wake.set()

    def deregister(self, status: int) -> None:
        """Leave word and stop; waits a moment for it. Of a failure that another rank's end explains nothing returns."""
        if self._exit_status is None:
            self._exit_status = status
            self._wake.set()
            self._deregistered.wait(1.0 if status == 0 else REPORT_WAIT_S + 1.0)

    def claim_first(self, topic: str) -> bool:
        """Whether no rank has asked this before, as far as the store can tell."""
        rank = str(self._rank_env.rank)
        with suppress(*STORE_ERRORS):
            return self._store is None or self._store.compare_set(f"first/{topic}", "", rank).decode() == rank
        return True

    def is_store_responding(self) -> bool:
        """Whether the store has answered lately."""
        return self.is_alive() and self.since_contact_s() < self.store_timeout_s

    def since_contact_s(self) -> float:
        """How long ago the store last answered."""
        since_s = time.monotonic() - self._last_contact_s
        return since_s if since_s < float("inf") else self._flight_recorder.idle_s()

    def local_peer_states(self) -> dict[int, str]:
        """The other ranks of this machine, as the kernel sees them."""
        return {rank: neighbour.process.state() for rank, neighbour in self._local_peers.items()}

    def exit_failed(self) -> NoReturn:
        """Leave, and take along what could not leave by itself: a stopped process obeys no other signal."""
        for neighbour in self._local_peers.values():
            if neighbour.process.state() == STOPPED:
                os.kill(neighbour.process.number, signal.SIGKILL)
        hard_exit(EXIT_FAILED)

    @property
    def _connected_store(self) -> dist.Store:
        assert self._store is not None, "the messenger opens it first"
        return self._store

    def _connect(self) -> None:
        place = self._rank_env
        timeout = timedelta(seconds=max(self._flight_recorder.hang_timeout_s, MAX_MISSED_PERIODS * REPORT_PERIOD_S))
        store = dist.TCPStore(
            place.master_address, place.master_port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        self._store = dist.PrefixStore(f"moefold/{self._session}", store)
        own = self.own_process
        number = self._store.add(f"machine/{own.machine}", 1)
        card: dict[str, Any] = {"rank": place.rank, "host": own.host, "number": own.number, "started": own.started}
        card |= {"file": str(self._file or ""), "word": self._reporter.shared_path}
        self._store.set(f"card/{own.machine}/{number}", json.dumps(card))
        self._store.add("cards", 1)

    def _poll_store(self) -> None:
        store = self._connected_store
        self._publish_report()
        asked = store.check(["speaker"])
        self._last_contact_s = time.monotonic()
        if asked:
            self._answer_and_exit()
        if not self.peers_known.is_set():
            self._discover_local_peers()
        if lost := self._lost_peers():
            self._report_lost_peers(lost)
        if self._reason:
            self._diagnose_and_exit(self._reason, is_lost_peer=self._is_lost_peer)

    def _lost_peers(self) -> list[int]:
        """The other ranks of this machine that are gone and did not say good-bye."""
        gone = [rank for rank, state in self.local_peer_states().items() if state == GONE]
        return [rank for rank in gone if not self._connected_store.check([f"left/{rank}"])]

    def _report_lost_peers(self, lost: list[int]) -> NoReturn:
        if self._rank_env.record_paths:
            # The launcher names them, and ends the others: not one that NCCL holds.
            time.sleep(2 * self.period_s)
            self.exit_failed()
        self._diagnose_and_exit(f"{format_ranks(lost)} can no longer take part", is_lost_peer=False)

    def _publish_report(self) -> None:
        place, communicates = _source_location(self._main_thread_id)
        report = {
            "host": self.own_process.host,
            "sighting": self._flight_recorder.snapshot().to_json(),
            "heard_s": time.time(),
            "place": place,
            "communicates": communicates or not self.stack_shows_comm,
            "neighbours": {rank: neighbour.describe() for rank, neighbour in self._local_peers.items()},
        }
        self._connected_store.set(f"report/{self._rank_env.rank}", json.dumps(report))

    def _discover_local_peers(self) -> None:
        """Learn of the ranks of this machine once all ranks have come, and which of them keeps the word."""
        store = self._connected_store
        machine = self.own_process.machine
        if store.add("cards", 0) < self._rank_env.world_size:
            return
        words = {}
        neighbours = {}
        for number in range(1, store.add(f"machine/{machine}", 0) + 1):
            card = json.loads(store.get(f"card/{machine}/{number}"))
            rank = card.pop("rank")
            file = card.pop("file")
            words[rank] = card.pop("word")
            if rank != self._rank_env.rank:
                neighbours[rank] = _LocalPeer(ProcessId(machine=machine, **card), file)
        if first := words[min(words)]:
            self._reporter.use_file(first)
        # At once: another thread may be looking through them.
        self._local_peers = neighbours
        self.peers_known.set()

    def _answer_and_exit(self) -> NoReturn:
        """Report once more to the one who speaks, and leave when it has."""
        store = self._connected_store
        self._publish_report()
        store.set(f"answer/{self._rank_env.rank}", "1")
        store.add("answers", 1)
        _wait_until(lambda: store.check([PRINTED_KEY]), PRINT_WAIT_S)
        self.exit_failed()

    def _diagnose_and_exit(self, reason: str, *, is_lost_peer: bool) -> NoReturn:
        """Gather what all ranks know, print it, and leave; unless another rank does."""
        store = self._connected_store
        rank = str(self._rank_env.rank)
        if store.compare_set("speaker", "", rank).decode() != rank:
            self._answer_and_exit()
        self._publish_report()
        store.set(f"answer/{rank}", "1")
        mute = sum(state in (GONE, STOPPED) for state in self.local_peer_states().values())
        _wait_until(lambda: store.add("answers", 0) + 1 >= self._rank_env.world_size - mute, REPORT_WAIT_S)
        reports = self._gather_reports()
        # A rank that failed by itself has said so, and those around it only lost it.
        if not (
            is_lost_peer and any(report.exit_status in (EXIT_FAILED, EXIT_USER_ERROR) for report in reports.values())
        ):
            self._reporter.report_once(format_diagnosis(reports, self._rank_env.world_size, reason))
        store.set(PRINTED_KEY, "1")
        self.exit_failed()

    def _gather_reports(self) -> dict[int, RankReport]:
        """What every rank that ever reported was doing; of one that does not answer, what its neighbours see."""
        store = self._connected_store
        reports: dict[int, RankReport] = {}
        seen: dict[int, tuple[str, dict[str, Any] | None]] = {}
        for rank in range(self._rank_env.world_size):
            if not store.check([f"report/{rank}"]):
                continue
            data = json.loads(store.get(f"report/{rank}"))
            answers = store.check([f"answer/{rank}"])
            if answers:
                seen |= {int(other): described for other, described in data["neighbours"].items()}
            reports[rank] = RankReport(
                host=data["host"],
                snapshot=FlightSnapshot.from_json(data["sighting"]),
                reported_at_s=data["heard_s"],
                has_responded=answers,
                source_location=data["place"] if answers else "",
                is_communicating=data["communicates"],
                exit_status=int(store.get(f"left/{rank}")) if store.check([f"left/{rank}"]) else None,
            )
        for rank, (state, sighting) in seen.items():
            if rank in reports and reports[rank].has_responded and state == BLOCKED:
                # Its main thread: the one that answers is another.
                reports[rank] = replace(reports[rank], process_state=state)
            if rank in reports and not reports[rank].has_responded:
                last = reports[rank].snapshot if sighting is None else FlightSnapshot.from_json(sighting)
                reports[rank] = replace(reports[rank], process_state=state, snapshot=last)
        return reports


class _LocalPeer:
    """Another rank of this machine, and its record, which stays open when it is gone."""

    def __init__(self, process: ProcessId, file: str) -> None:
        self.process = process
        self._record_file = None
        with suppress(OSError):
            self._record_file = Path(file).open("rb", buffering=0) if file else None  # noqa: SIM115 - for good

    def describe(self) -> tuple[str, dict[str, Any] | None]:
        """Its state, and what it was doing if it can no longer tell itself."""
        state = self.process.state()
        if state == ALIVE or self._record_file is None:
            return state, None
        self._record_file.seek(0)
        sighting = decode_snapshot(self._record_file.read(FILE_BYTES))
        return state, None if sighting is None else sighting.to_json()


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _source_location(thread_id: int | None) -> tuple[str, bool]:
    """Where in the source a thread is, and whether that is inside communication."""
    frame = sys._current_frames().get(thread_id or 0)
    if frame is None:
        return "", False
    stack = traceback.extract_stack(frame, limit=WAITING_FRAMES)
    innermost = stack[-1]
    path = Path(innermost.filename)
    waits = "distributed" in path.parts or (path.parent.name == "comm" and innermost.name.lstrip("_") == "wait")
    waits = waits or any(caller.name == run_with_timeout.__name__ for caller in stack)
    return f"{'/'.join(path.parts[-2:])}:{innermost.lineno} {innermost.name}", waits
