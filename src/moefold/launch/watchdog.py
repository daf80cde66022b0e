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

from moefold.launch.deadline import answer_within
from moefold.launch.departure import leave
from moefold.launch.meeting import STORE_ERRORS
from moefold.launch.place import Place
from moefold.launch.process_state import ALIVE, BLOCKED, GONE, STOPPED, ProcessId
from moefold.launch.status import EXIT_FAILED, EXIT_USER_ERROR
from moefold.launch.who_is_late import Report, activity, explain
from moefold.launch.word import Word
from moefold.parallel.flight_record import FILE_BYTES, FlightRecord, Sighting, decode_record, rank_list

PERIOD_S = 1.0
"""How often a rank reports, at most."""
MUSTER_S = 3.0
"""So long the one who speaks waits for the last reports of the others."""
TELL_S = 10.0
"""So long the others wait for the one who speaks."""
OUT_OF_REACH = 8
"""A store that has not answered for so many periods is not asked."""
LOOK_S = 0.05
"""How often a rank of few looks whether it can know all others; thousands look less often."""
WAITING_FRAMES = 4
"""The innermost calls of a thread that waits for another one, in `answer_within`."""
TOLD = "told"
"""A key of the store, once the message is out."""


def _own_file(place: Place) -> Path | None:
    """What this rank's record is written into: other ranks of the machine hold it open, also when this one is gone."""
    if place.records:
        return Path(place.records[place.rank])
    if not hasattr(os, "memfd_create"):
        return None
    # A file without a name leaves nothing behind.
    return Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('moefold-record')}")


class Watchdog:
    """Context manager inside a process group: keeps the record of this rank and watches over it.

    It starts before, when the ranks have met: they may wait for each other for ever while they connect.

    Args:
        place: of this rank.
        limit_s: the job ends when a rank's record has stood still for so long.
        device_type: "cpu" or "cuda".
    """

    def __init__(self, place: Place, limit_s: float, device_type: str = "cpu") -> None:
        self._place = place
        self._device_type = device_type
        self._file = _own_file(place)
        self.record = FlightRecord(limit_s, self._file)
        self.word = Word(place)
        self._stopped = threading.Event()
        self._messenger: _Messenger | None = None

    def start(self, session: str) -> None:
        """Begin to watch; returns when this rank knows those of its machine, as nobody can ask once the store is gone.

        Args:
            session: the name of this start of the job: keys of one before may lie in a store that outlives the ranks.
        """
        self.record.enter("connecting to the other ranks")
        self._messenger = _Messenger(self._place, self.record, self._file, self.word, session)
        # Of a GPU's ranks the host may wait anywhere for a collective: where it is tells nothing.
        self._messenger.place_tells = self._device_type == "cpu"
        self._messenger.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        self._messenger.is_acquainted.wait()
        self.record.enter("connecting to the other ranks")

    def __enter__(self) -> Self:
        assert self._messenger is not None, "it starts when the ranks have met"
        self.record.enter("starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A rank of many that failed goes on watching until it leaves: it may have to say who failed first.
        if error is None or self._place.world_size == 1:
            self.part(0)

    def part(self, status: int) -> None:
        """Say good-bye to the other ranks, which then do not miss this one; may be called when nothing runs."""
        self._stopped.set()
        if self._messenger is not None:
            self._messenger.part(status)

    def is_first(self, matter: str) -> bool:
        """Whether no rank has asked this before; true where the ranks have not met."""
        return self._messenger is None or self._messenger.is_first(matter)

    def end(self) -> NoReturn:
        """End this process as one that failed, and stopped ranks of its machine, which no signal of a launcher ends."""
        if self._messenger is not None:
            self._messenger.end()
        leave(EXIT_FAILED)

    def explain_loss(self, error: BaseException) -> None:
        """Ask all ranks why this one lost another, and end the process with the answer; returns before any rank met.

        A rank on the machine of the lost one knows best and speaks first.
        """
        messenger = self._messenger
        if messenger is None:
            return
        self._stopped.set()
        time.sleep(2.5 * messenger.period_s)
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = f"rank {self._place.rank} lost its connection to another rank: {first_line[:160]}"
        self._ask(messenger, why, is_loss=True)
        # The store may be gone because the rank that kept it failed, and said so: what started it ends the others. If
        # that is one of this machine, the word tells.
        _wait_until(lambda: self.word.is_said() or messenger.neighbour_states().get(0) == GONE, messenger.patience_s)
        self._speak_alone(messenger, why)

    def _watch(self) -> None:
        messenger = self._messenger
        assert messenger is not None
        limit_s = self.record.limit_s
        while not self._stopped.wait(min(PERIOD_S, limit_s / 5)):
            if self.record.still_s() > limit_s:
                why = f"no progress for {limit_s:g} s (faults.timeout_s)"
                self._ask(messenger, why, is_loss=False)
                self._speak_alone(messenger, why)

    def _ask(self, messenger: "_Messenger", why: str, *, is_loss: bool) -> None:
        """Let the messenger find out; it ends the process unless it cannot reach the store."""
        messenger.ask(why, is_loss=is_loss)
        deadline = time.monotonic() + MUSTER_S + TELL_S
        while messenger.is_in_touch() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _speak_alone(self, messenger: "_Messenger", why: str) -> NoReturn:
        """Say what this rank knows; the store cannot be asked."""
        place = self._place
        states = messenger.neighbour_states()
        store = f"the store at {place.master_address}:{place.master_port}"
        keeper = "rank 0, the launcher, or the first torchrun agent, whichever keeps it"
        sighting = self.record.look()
        lines = [
            f"moefold: {store} does not answer rank {place.rank} on {messenger.own.host}, last heard "
            f"{messenger.silent_s():.1f} s ago: its process ({keeper}), its host, or the way there is down",
            f"  rank {place.rank}: {activity(sighting)}, {time.time() - sighting.moved_s:.1f} s ago",
        ]
        lines += [f"  rank {rank} of this machine is {state}" for rank, state in states.items() if state != ALIVE]
        lines.append(f"  the run ends: {why}; docs/failures.md says what to do")
        self.word.say("\n".join(lines))
        messenger.end()


class _Messenger(threading.Thread):
    """Talks to the store on a connection of its own: one that trains or waits must not share it."""

    def __init__(self, place: Place, record: FlightRecord, file: Path | None, word: Word, session: str) -> None:
        super().__init__(name="messenger", daemon=True)
        self.own = ProcessId.own()
        self.is_acquainted = threading.Event()
        """Set once the other ranks of this machine are known, or will never be."""
        self._file = file
        self._word = word
        self.period_s = min(PERIOD_S, record.limit_s / 5)
        self.patience_s = OUT_OF_REACH * self.period_s
        self.place_tells = True
        self._place = place
        self._record = record
        self._session = session
        self._main = threading.current_thread().ident
        self._contact_s = time.monotonic()
        self._wake = threading.Event()
        self._parted = threading.Event()
        self._status: int | None = None
        self._why = ""
        self._is_loss = False
        self._neighbours: dict[int, _Neighbour] = {}
        self._store: dist.Store | None = None

    def run(self) -> None:
        """Report until the rank parts, or the store is gone."""
        try:
            self._open()
            while self._status is None:
                self._round()
                is_new = not self.is_acquainted.is_set()
                self._wake.wait(max(LOOK_S, self._place.world_size / 5000) if is_new else self.period_s)
                self._wake.clear()
            if self._status != 0 and (lost := self._lost()):
                self._tell_of(lost)
            self._the_store.set(f"left/{self._place.rank}", str(self._status))
        except STORE_ERRORS:
            self._contact_s = -float("inf")
        finally:
            self.is_acquainted.set()
            self._parted.set()

    def ask(self, why: str, *, is_loss: bool) -> None:
        """Find out who is late, say so, and end the process; `why` ends the message."""
        self._is_loss = is_loss
        self._why = why
        self._wake.set()

    def part(self, status: int) -> None:
        """Leave word and stop; waits a moment for it. Of a failure that another rank's end explains nothing returns."""
        if self._status is None:
            self._status = status
            self._wake.set()
            self._parted.wait(1.0 if status == 0 else MUSTER_S + 1.0)

    def is_first(self, matter: str) -> bool:
        """Whether no rank has asked this before, as far as the store can tell."""
        rank = str(self._place.rank)
        with suppress(*STORE_ERRORS):
            return self._store is None or self._store.compare_set(f"first/{matter}", "", rank).decode() == rank
        return True

    def is_in_touch(self) -> bool:
        """Whether the store has answered lately."""
        return self.is_alive() and self.silent_s() < self.patience_s

    def silent_s(self) -> float:
        """How long ago the store last answered."""
        since_s = time.monotonic() - self._contact_s
        return since_s if since_s < float("inf") else self._record.still_s()

    def neighbour_states(self) -> dict[int, str]:
        """The other ranks of this machine, as the kernel sees them."""
        return {rank: neighbour.process.state() for rank, neighbour in self._neighbours.items()}

    def end(self) -> NoReturn:
        """Leave, and take along what could not leave by itself: a stopped process obeys no other signal."""
        for neighbour in self._neighbours.values():
            if neighbour.process.state() == STOPPED:
                os.kill(neighbour.process.number, signal.SIGKILL)
        leave(EXIT_FAILED)

    @property
    def _the_store(self) -> dist.Store:
        assert self._store is not None, "the messenger opens it first"
        return self._store

    def _open(self) -> None:
        place = self._place
        timeout = timedelta(seconds=max(self._record.limit_s, OUT_OF_REACH * PERIOD_S))
        store = dist.TCPStore(
            place.master_address, place.master_port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        self._store = dist.PrefixStore(f"moefold/{self._session}", store)
        own = self.own
        number = self._store.add(f"machine/{own.machine}", 1)
        card: dict[str, Any] = {"rank": place.rank, "host": own.host, "number": own.number, "started": own.started}
        card |= {"file": str(self._file or ""), "word": self._word.address}
        self._store.set(f"card/{own.machine}/{number}", json.dumps(card))
        self._store.add("cards", 1)

    def _round(self) -> None:
        store = self._the_store
        self._report()
        asked = store.check(["speaker"])
        self._contact_s = time.monotonic()
        if asked:
            self._follow()
        if not self.is_acquainted.is_set():
            self._meet_neighbours()
        if lost := self._lost():
            self._tell_of(lost)
        if self._why:
            self._speak(self._why, is_loss=self._is_loss)

    def _lost(self) -> list[int]:
        """The other ranks of this machine that are gone and did not say good-bye."""
        gone = [rank for rank, state in self.neighbour_states().items() if state == GONE]
        return [rank for rank in gone if not self._the_store.check([f"left/{rank}"])]

    def _tell_of(self, lost: list[int]) -> NoReturn:
        if self._place.records:
            # The launcher names them, and ends the others: not one that NCCL holds.
            time.sleep(2 * self.period_s)
            self.end()
        self._speak(f"{rank_list(lost)} can no longer take part", is_loss=False)

    def _report(self) -> None:
        place, communicates = _position(self._main)
        report = {
            "host": self.own.host,
            "sighting": self._record.look().to_json(),
            "heard_s": time.time(),
            "place": place,
            "communicates": communicates or not self.place_tells,
            "neighbours": {rank: neighbour.describe() for rank, neighbour in self._neighbours.items()},
        }
        self._the_store.set(f"report/{self._place.rank}", json.dumps(report))

    def _meet_neighbours(self) -> None:
        """Learn of the ranks of this machine once all ranks have come, and which of them keeps the word."""
        store, machine = self._the_store, self.own.machine
        if store.add("cards", 0) < self._place.world_size:
            return
        words, neighbours = {}, {}
        for number in range(1, store.add(f"machine/{machine}", 0) + 1):
            card = json.loads(store.get(f"card/{machine}/{number}"))
            rank, file = card.pop("rank"), card.pop("file")
            words[rank] = card.pop("word")
            if rank != self._place.rank:
                neighbours[rank] = _Neighbour(ProcessId(machine=machine, **card), file)
        if first := words[min(words)]:
            self._word.use(first)
        # At once: another thread may be looking through them.
        self._neighbours = neighbours
        self.is_acquainted.set()

    def _follow(self) -> NoReturn:
        """Report once more to the one who speaks, and leave when it has."""
        store = self._the_store
        self._report()
        store.set(f"answer/{self._place.rank}", "1")
        store.add("answers", 1)
        _wait_until(lambda: store.check([TOLD]), TELL_S)
        self.end()

    def _speak(self, why: str, *, is_loss: bool) -> NoReturn:
        """Gather what all ranks know, print it, and leave; unless another rank does."""
        store, rank = self._the_store, str(self._place.rank)
        if store.compare_set("speaker", "", rank).decode() != rank:
            self._follow()
        self._report()
        store.set(f"answer/{rank}", "1")
        mute = sum(state in (GONE, STOPPED) for state in self.neighbour_states().values())
        _wait_until(lambda: store.add("answers", 0) + 1 >= self._place.world_size - mute, MUSTER_S)
        reports = self._gather()
        # A rank that failed by itself has said so, and those around it only lost it.
        if not (is_loss and any(report.left in (EXIT_FAILED, EXIT_USER_ERROR) for report in reports.values())):
            self._word.say(explain(reports, self._place.world_size, why))
        store.set(TOLD, "1")
        self.end()

    def _gather(self) -> dict[int, Report]:
        """What every rank that ever reported was doing; of one that does not answer, what its neighbours see."""
        store = self._the_store
        reports: dict[int, Report] = {}
        seen: dict[int, tuple[str, dict[str, Any] | None]] = {}
        for rank in range(self._place.world_size):
            if not store.check([f"report/{rank}"]):
                continue
            data = json.loads(store.get(f"report/{rank}"))
            answers = store.check([f"answer/{rank}"])
            if answers:
                seen |= {int(other): described for other, described in data["neighbours"].items()}
            reports[rank] = Report(
                host=data["host"],
                sighting=Sighting.from_json(data["sighting"]),
                heard_s=data["heard_s"],
                answers=answers,
                place=data["place"] if answers else "",
                communicates=data["communicates"],
                left=int(store.get(f"left/{rank}")) if store.check([f"left/{rank}"]) else None,
            )
        for rank, (state, sighting) in seen.items():
            if rank in reports and reports[rank].answers and state == BLOCKED:
                # Its main thread: the one that answers is another.
                reports[rank] = replace(reports[rank], state=state)
            if rank in reports and not reports[rank].answers:
                last = reports[rank].sighting if sighting is None else Sighting.from_json(sighting)
                reports[rank] = replace(reports[rank], state=state, sighting=last)
        return reports


class _Neighbour:
    """Another rank of this machine, and its record, which stays open when it is gone."""

    def __init__(self, process: ProcessId, file: str) -> None:
        self.process = process
        self._record = None
        with suppress(OSError):
            self._record = Path(file).open("rb", buffering=0) if file else None  # noqa: SIM115 - for good

    def describe(self) -> tuple[str, dict[str, Any] | None]:
        """Its state, and what it was doing if it can no longer tell itself."""
        state = self.process.state()
        if state == ALIVE or self._record is None:
            return state, None
        self._record.seek(0)
        sighting = decode_record(self._record.read(FILE_BYTES))
        return state, None if sighting is None else sighting.to_json()


def _wait_until(is_so: Callable[[], bool], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)


def _position(thread: int | None) -> tuple[str, bool]:
    """Where in the source a thread is, and whether that is inside communication."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "", False
    stack = traceback.extract_stack(frame, limit=WAITING_FRAMES)
    innermost = stack[-1]
    path = Path(innermost.filename)
    waits = "distributed" in path.parts or (path.parent.name == "parallel" and innermost.name.lstrip("_") == "wait")
    waits = waits or any(caller.name == answer_within.__name__ for caller in stack)
    return f"{'/'.join(path.parts[-2:])}:{innermost.lineno} {innermost.name}", waits
