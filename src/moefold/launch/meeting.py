"""Where the ranks of a job find each other: the store that a launcher or rank 0 keeps."""

import errno
import os
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from moefold.errors import RunError
from moefold.launch.deadline import NoAnswerError, answer_within
from moefold.launch.loopback import listener_at
from moefold.launch.place import Place
from moefold.parallel.flight_record import rank_list

LOOK_S = 0.05
"""How often a rank of few looks for the others; thousands look less often, as one store answers them all."""

NAMING_S = 5.0
"""So much longer than its limit a rank waits until it can name those who are missing."""

STDERR = 2
"""The descriptor that C++ writes to."""

MOST_OF_A_REASON = 160
"""Characters of torch's own words in a message."""

CONNECT_SHARE = 1 / 3
"""Part of the limit that torch gets to connect to a port that is open: it tries twice, and must end, with the page that
it writes to stderr, before this process stops to wait for it."""

_FOREIGN = "what listens there is no store of this job, most likely another program that has the port"

STORE_ERRORS = (dist.DistError, RuntimeError, OSError)


def meet(place: Place, limit_s: float) -> tuple[dist.Store, str]:
    """Open the job's store and wait until every rank has.

    What listens at the address may be no store, or one that is lost later: the wait ends at its limit all the same,
    and signals are obeyed meanwhile.

    Returns:
        The store, with keys of its own for this start of the job, and the name of this start. An elastic agent keeps
        one store over all restarts (torch >= 2.13), in which the ranks of the start before left their addresses.

    Raises:
        RunError: the store cannot be reached, or ranks are missing, after `limit_s`; or rank 0 finds the port taken.
    """
    deadline = time.monotonic() + limit_s
    store: dist.Store | None = None
    try:
        with _errors_held_back():
            store = answer_within(limit_s, lambda: _open_store(place, deadline))
        session = answer_within(
            max(0.0, deadline - time.monotonic()) + NAMING_S, partial(_call_roll, store, place, deadline)
        )
    except _Late as late:
        raise RunError(
            f"{rank_list(late.ranks)} of {place.world_size} did not come to {_address(place)} within {limit_s:g} s"
            f"{late.why}; start them, or set faults.timeout_s higher"
        ) from None
    except NoAnswerError:
        raise RunError(_silence_text(place, limit_s, was_open=store is not None)) from None
    except STORE_ERRORS as error:
        raise RunError(_error_text(place, error, was_open=store is not None)) from None
    return dist.PrefixStore(f"moefold/{session}", store), session


def _open_store(place: Place, deadline: float) -> dist.Store:
    """The store that a launcher keeps, or else rank 0; it does not wait for others than the one who keeps it.

    Raises:
        _Late: rank 0 has not come.
    """
    limit = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    if not place.records and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        os.environ.update(MASTER_ADDR=place.master_address, MASTER_PORT=str(place.master_port))
        kept: dist.Store
        kept, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=limit))
        return kept
    keeps_it = place.rank == 0 and not place.records
    listener = None
    if keeps_it:
        listener = _listener(place)
    else:
        _wait_until_open(place, deadline)
    store = dist.TCPStore(
        place.master_address,
        place.master_port,
        place.world_size,
        keeps_it,
        timedelta(seconds=CONNECT_SHARE * max(LOOK_S, deadline - time.monotonic())),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    store.set_timeout(limit)
    return store


@contextmanager
def _errors_held_back() -> Iterator[None]:
    """Inside, what is written to stderr waits, and is dropped if an exception ends the block.

    torch writes a page of C++ for each answer that is none of a store's. The exception tells what is to be known.
    """
    sys.stderr.flush()
    kept = os.dup(STDERR)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, STDERR)
            os.close(kept)
        held.seek(0)
        sys.stderr.write(held.read().decode(errors="replace"))


def _listener(place: Place) -> socket.socket | None:
    """Where rank 0 keeps the store; None leaves it to torch, also where this process keeps one at this port already."""
    try:
        return listener_at(place.master_address, place.master_port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    return None


def _wait_until_open(place: Place, deadline: float) -> None:
    """Wait until something listens where rank 0 keeps the store: torch waits too, and ends with pages of C++."""
    while True:
        try:
            left_s = max(LOOK_S, deadline - time.monotonic())
            with socket.create_connection((place.master_address, place.master_port), timeout=left_s):
                return
        except OSError as error:
            if time.monotonic() > deadline - LOOK_S:
                raise _Late([0], f" ({error.strerror or error})") from None
            time.sleep(LOOK_S)


def _call_roll(store: dist.Store, place: Place, deadline: float) -> str:
    """Wait until all ranks have come; returns the name of this start.

    Raises:
        _Late: some have not.
    """
    roll_call = _RollCall(store, place)
    while not roll_call.is_complete():
        if time.monotonic() > deadline:
            raise _Late(roll_call.missing())
        time.sleep(max(LOOK_S, place.world_size / 5000))
    return roll_call.session


def _address(place: Place) -> str:
    return f"{place.master_address}:{place.master_port}"


def _silence_text(place: Place, limit_s: float, *, was_open: bool) -> str:
    within = f"within {limit_s:g} s (faults.timeout_s)"
    if was_open:
        return (
            f"rank {place.rank} lost the store at {_address(place)} while it waited for the other "
            f"{place.world_size - 1}: no answer {within}; see what became of rank 0, its host and the way there"
        )
    return f"rank {place.rank} has no answer from {_address(place)} {within}: {_FOREIGN}; {_way_out(place)}"


def _error_text(place: Place, error: BaseException, *, was_open: bool) -> str:
    reason = str(error).splitlines()[0][:MOST_OF_A_REASON]
    if "EADDRINUSE" in reason:
        return (
            f"rank {place.rank} cannot keep the store of the job at {_address(place)}: another program listens at this "
            f"port; {_way_out(place)}"
        )
    if was_open:
        return (
            f"rank {place.rank} lost the store at {_address(place)} while it waited for the other "
            f"{place.world_size - 1}: {reason}; see what became of rank 0, its host and the way there"
        )
    return f"rank {place.rank} cannot open the store at {_address(place)}: {_FOREIGN} ({reason}); {_way_out(place)}"


def _way_out(place: Place) -> str:
    return f"choose another MASTER_PORT than {place.master_port}, the same for all ranks"


class _Late(Exception):  # noqa: N818 - says who, and ends here
    def __init__(self, ranks: list[int], why: str = "") -> None:
        super().__init__(ranks, why)
        self.ranks, self.why = ranks, why


class _RollCall:
    """All processes of this start, and none of an earlier one, agree on the name that rank 0 gives it.

    A process can tell its own keys from old ones, and no others: it has made up a name that nobody had before. Rank 0
    shows its name, the others answer to the name that they see with their own, and rank 0 lets exactly those begin who
    did. Nothing is taken from counters of a launcher, which agents may not agree on when nodes come and go.
    """

    def __init__(self, store: dist.Store, place: Place) -> None:
        self._store = dist.PrefixStore("moefold/roll-call", store)
        self._rank = place.rank
        self._others = range(1, place.world_size)
        self._own = uuid.uuid4().hex
        self.session = ""
        """The name of rank 0 as last seen."""
        if place.rank == 0:
            self.session = self._own
            self._store.set("first", self._own)

    def is_complete(self) -> bool:
        """Look once; whether all have come, and know it."""
        return self._let_begin() if self._rank == 0 else self._may_begin()

    def missing(self) -> list[int]:
        """Those who did not answer to the name that was seen; rank 0 if they all did, as it then left them alone."""
        waited_for = [rank for rank in self._others if rank != self._rank] if self.session else []
        return [rank for rank in waited_for if not self._store.check([self._answer(rank)])] or [0]

    def _let_begin(self) -> bool:
        answers = [self._answer(rank) for rank in self._others]
        if answers and not self._store.check(answers):
            return False
        for answer in answers:
            self._store.set(f"begin/{self._own}/{self._store.get(answer).decode()}", "1")
        return True

    def _may_begin(self) -> bool:
        if not self._store.check(["first"]):
            return False
        seen = self._store.get("first").decode()
        if seen != self.session:
            self.session = seen
            self._store.set(self._answer(self._rank), self._own)
        return self._store.check([f"begin/{seen}/{self._own}"])

    def _answer(self, rank: int) -> str:
        return f"answer/{self.session}/{rank}"
