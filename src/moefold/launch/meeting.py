"""Where the ranks of a job find each other: the store that a launcher or rank 0 keeps."""

import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from moefold.errors import RunError
from moefold.launch.place import Place
from moefold.parallel.flight_record import rank_list

LOOK_S = 0.05
"""How often a rank of few looks for the others; thousands look less often, as one store answers them all."""

STORE_ERRORS = (dist.DistError, RuntimeError, OSError)


def meet(place: Place, limit_s: float) -> tuple[dist.Store, str]:
    """Open the job's store and wait until every rank has.

    Returns:
        The store, with keys of its own for this start of the job, and the name of this start. An elastic agent keeps
        one store over all restarts (torch >= 2.13), in which the ranks of the start before left their addresses.

    Raises:
        RunError: the store cannot be reached, or ranks are missing, after `limit_s`.
    """
    at = f"{place.master_address}:{place.master_port}"
    started_s = time.monotonic()
    try:
        store = _open_store(place, limit_s)
        roll_call = _RollCall(store, place)
        while not roll_call.is_complete():
            if time.monotonic() - started_s > limit_s:
                raise _Late(roll_call.missing())
            time.sleep(max(LOOK_S, place.world_size / 5000))
    except _Late as late:
        raise RunError(
            f"{rank_list(late.ranks)} of {place.world_size} did not come to {at} within {limit_s:g} s{late.why}; "
            "start them, or set faults.timeout_s higher"
        ) from None
    except STORE_ERRORS as error:
        raise RunError(
            f"rank {place.rank} did not meet the other {place.world_size - 1} at {at} within {limit_s:g} s: "
            f"{str(error).splitlines()[0]}; start all ranks where they reach it, or set faults.timeout_s higher"
        ) from None
    return dist.PrefixStore(f"moefold/{roll_call.session}", store), roll_call.session


def _open_store(place: Place, limit_s: float) -> dist.Store:
    """The store that an elastic agent keeps, or else rank 0; it does not wait for others than the one who keeps it.

    Raises:
        _Late: rank 0 has not come.
    """
    timeout = timedelta(seconds=limit_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        os.environ.update(MASTER_ADDR=place.master_address, MASTER_PORT=str(place.master_port))
        kept: dist.Store
        kept, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=timeout))
        return kept
    keeps_it = place.rank == 0
    if not keeps_it:
        _wait_until_open(place, limit_s)
    return dist.TCPStore(
        place.master_address,
        place.master_port,
        place.world_size,
        keeps_it,
        timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _wait_until_open(place: Place, limit_s: float) -> None:
    """Wait until something listens where rank 0 keeps the store: torch waits too, and ends with pages of C++."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with socket.create_connection((place.master_address, place.master_port), timeout=limit_s):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise _Late([0], f" ({error.strerror or error})") from None
            time.sleep(LOOK_S)


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
