"""Regrouping: the survivors of a lost rank agree through the job's store on a smaller job, in the same processes.

A generation is a set of ranks that train together. Ranks of the job keep their first number, the job rank. The members
of a generation have the ranks 0, 1, ... of its process group, in the order of their job ranks. A generation ends when
one of its members is lost. Each survivor then frees its process groups, which closes the connections that other
survivors wait on, and reports its arrival at the next generation. Once every rank of the old generation has arrived or
is lost, the first survivor that sees it publishes the next generation, and all survivors accept it.

A process counts as lost in three cases. It is gone without an exit status, which the launcher and the ranks of its
machine see. Or a collective has failed, and it reports nothing any more, like the other processes of its machine. Or it
does not arrive within `faults.timeout_s`. A rank that ended with its own error message is not lost: the job ends as it
does without regrouping.

Keys of the store, below `moefold/regroup/`: ranks append to the lists `lost` and `arrived/N`, and `generation/N` is
written once. `ended/N` is the exit status of the training of generation N, and `left` lists the ranks that have read
it.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moefold.comm.flight_recorder import format_ranks
from moefold.errors import RunError
from moefold.host.rank_env import RankEnv

PREFIX = "moefold/regroup"
LOST_KEY = "lost"
POLL_S = 0.02
"""Shortest interval between two requests to the store. It grows with the number of ranks."""
LOOK_S = 0.5
"""Interval between two checks of this machine's processes by a rank that waits for the others."""
CONNECT_POLL_S = 0.005
"""Shortest interval while process groups connect, which request several keys one after another."""
LOSS_WAIT_S = 5.0
"""Limit of the wait for the lost rank that explains a failed collective."""
LEAVE_WAIT_S = 20.0
"""Limit of the wait of the rank that hosts the store for the others, when the training has ended."""
STORE_TIMEOUT_S = 60.0
"""Limit of the wait for one answer of the store."""


class LostRankError(Exception):
    """A rank of this generation was lost while its process groups were being connected."""


class CannotChooseError(Exception):
    """This rank does not know enough to choose the members. Another survivor does."""


class NoRankLostError(Exception):
    """No rank was lost: another error ended the generation."""


@dataclass(frozen=True)
class RankMembership:
    """The ranks of a generation: they train together until one of them is lost."""

    number: int
    """0 for the ranks that were started."""
    members: tuple[int, ...]
    """Job ranks that train, ascending. Member i has rank i."""
    spares: tuple[int, ...] = ()
    """Job ranks that wait, as the recipe does not fit a number of ranks with them."""
    lost: tuple[int, ...] = ()
    """Job ranks that the change to this generation has lost."""
    plan: Any = None
    """Data from the function that chose the members, as JSON."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Members and spares, ascending."""
        return tuple(sorted((*self.members, *self.spares)))


Facts = Mapping[int, Any]
"""Facts that each survivor reported at its arrival, by job rank, as JSON."""
ChooseMembers = Callable[[Facts, Sequence[int]], tuple[Sequence[int], Any]]
"""Choose the members of the next generation and a plan from the facts of the survivors and the lost ranks. It raises
RunError if the survivors cannot go on, and CannotChooseError if another rank has to choose."""


def report_lost(store: dist.Store, rank: int, how: str = "") -> None:
    """Record in the store of a job, without a prefix, that the process of a rank is gone."""
    if how:
        store.set(f"{PREFIX}/how/{rank}", how)
    store.append(f"{PREFIX}/{LOST_KEY}", f"{rank}\n")  # type: ignore[attr-defined]


def lost_ranks(store: dist.Store) -> set[int]:
    """Return the job ranks that are lost so far, by the store of the job, without a prefix."""
    return set(map(int, read_if_set(store, f"{PREFIX}/{LOST_KEY}").split()))


def read_if_set(store: dist.Store, key: str) -> str:
    """Return the text of a key of a store, or "" if no rank has set it."""
    return store.get(key).decode() if store.check([key]) else ""


class Regroup:
    """Connection of one rank to the agreement of the survivors, used by the training thread.

    Args:
        rank_env: environment of this rank. The launcher or rank 0 hosts the store.
        timeout_s: a rank that does not arrive within this time counts as lost.
        find_gone: returns the job ranks of this machine whose processes are gone without an exit status.
        find_silent: returns the job ranks that report nothing any more, after a wait of some periods of reports.
        kill: kills the process of a job rank, if it is on this machine.
    """

    def __init__(
        self,
        rank_env: RankEnv,
        device_type: str,
        timeout_s: float,
        find_gone: Callable[[], Sequence[int]],
        find_silent: Callable[[], Sequence[int]],
        kill: Callable[[int], None],
        note_progress: Callable[[], None],
    ) -> None:
        self._rank_env = rank_env
        self._rank = rank_env.rank
        self._device_type = device_type
        self._timeout_s = timeout_s
        self._find_gone = find_gone
        self._find_silent = find_silent
        self._kill = kill
        self._note_progress = note_progress
        self._poll_s = max(POLL_S, rank_env.world_size / 5000)
        self._connection: dist.Store | None = None
        self._group_stores: list[_GenerationStore] = []
        self.current = RankMembership(0, tuple(range(rank_env.world_size)))

    def open_first_store(self) -> dist.Store:
        """Connect to the job's store after the rendezvous, and return the store of the first generation's groups."""
        self._connection = dist.TCPStore(
            self._rank_env.master_address,
            self._rank_env.master_port,
            is_master=False,
            timeout=timedelta(seconds=max(STORE_TIMEOUT_S, self._timeout_s)),
            wait_for_workers=False,
        )
        return self.group_store()

    @property
    def _base(self) -> dist.Store:
        assert self._connection is not None, "open_first_store() comes first"
        return self._connection

    @property
    def _store(self) -> dist.Store:
        return dist.PrefixStore(PREFIX, self._base)

    @property
    def rank(self) -> int:
        """Rank of this process in the current generation.

        Raises:
            ValueError: this process is a spare.
        """
        return self.current.members.index(self._rank)

    @property
    def is_spare(self) -> bool:
        """Return whether this process waits in the current generation."""
        return self._rank not in self.current.members

    def group_store(self) -> dist.Store:
        """Return the store that connects the process groups of the current generation.

        A wait in it ends with LostRankError when a member is lost. A process of an older generation uses other keys.
        On GPUs it is torch's own store, as threads of NCCL use it too, and a rank that is lost while the others
        connect ends the job after the timeout.
        """
        keys = dist.PrefixStore(f"groups/{self.current.number}", self._store)
        if self._device_type == "cuda":
            return keys
        store = _GenerationStore(keys, self._raise_if_lost)
        # torch keeps only the C++ half of the object.
        self._group_stores.append(store)
        return store

    def lost(self) -> set[int]:
        """Return the job ranks that are lost so far."""
        return lost_ranks(self._base)

    def exit_description(self, rank: int) -> str:
        """Return how the process of a lost rank ended, as its launcher saw it, or "" if that is not known."""
        return read_if_set(self._store, f"how/{rank}")

    def is_broken(self) -> bool:
        """Return whether a member of the current generation is lost."""
        return not self.lost().isdisjoint(self.current.members)

    def agree_on_next(self, facts: Any, choose: ChooseMembers) -> RankMembership:
        """Agree with the other survivors on the next generation. It becomes the current one.

        The process groups of this rank must be free: other ranks may wait on their connections.

        Raises:
            NoRankLostError: no member is lost, or the training has ended.
            RunError: the survivors cannot go on, or count this rank as lost.
        """
        number = self.current.number + 1
        self._store.append(f"arrived/{number}", json.dumps([self._rank, facts]) + "\n")  # type: ignore[attr-defined]
        key = f"generation/{number}"
        started_s = time.monotonic()
        next_look_s = started_s
        while not self._store.check([key]):
            now_s = time.monotonic()
            if now_s >= next_look_s:
                if self.ended_status() is not None:
                    raise NoRankLostError
                self._report_gone(waited_s=now_s - started_s, number=number)
                if (survivors := self._survivors(number)) is not None:
                    self._publish(key, survivors, choose)
                # One store serves all ranks: the first to arrive looks often, the others rarely, in case it is lost.
                next_look_s = now_s + (self._poll_s if self._is_first(number) else LOOK_S)
            self._note_progress()
            time.sleep(self._poll_s)
        proposal = json.loads(self._store.get(key))
        if "refused" in proposal:
            raise RunError(proposal["refused"])
        args: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in proposal.items()}
        self.current = RankMembership(**args)
        if self._rank not in self.current.ranks:
            raise RunError(
                f"rank {self._rank} did not arrive in time when the ranks regrouped, and the others went on without it"
            )
        return self.current

    def wait_as_spare(self) -> int | None:
        """Wait as a spare. Return the exit status once the training has ended, or None once a member is lost.

        Raises:
            RunError: a rank that trains has failed.
        """
        next_look_s = time.monotonic()
        while True:
            if (status := self.ended_status()) is not None:
                return status
            if time.monotonic() >= next_look_s:
                self._report_gone(waited_s=0.0, number=self.current.number)
                next_look_s = time.monotonic() + LOOK_S
            # The others train on without a lost spare.
            if self.is_broken():
                return None
            if self._store.check([f"failed/{self.current.number}"]):
                raise RunError("a rank that trains has failed; its message says why")
            self._note_progress()
            time.sleep(self._poll_s)

    def end(self, status: int) -> None:
        """Record that the training of the current generation has ended. The first status counts."""
        self._store.compare_set(f"ended/{self.current.number}", "", str(status))

    def leave(self) -> None:
        """Leave the store at the end of the training. Rank 0, if it hosts the store, waits until all others have left.

        Without this wait, a spare or a late rank would ask a store that is gone.
        """
        if self._rank_env.record_paths:
            # The launcher hosts it.
            return
        with suppress(dist.DistError, RuntimeError):
            self._store.append("left", f"{self._rank}\n")  # type: ignore[attr-defined]
            deadline_s = time.monotonic() + LEAVE_WAIT_S
            while self._rank == 0 and time.monotonic() < deadline_s:
                away = self.lost().union(map(int, self._lines("left")), self._find_gone())
                if away.issuperset(self.current.ranks):
                    return
                self._note_progress()
                time.sleep(self._poll_s)

    def fail(self) -> None:
        """Record that a member of the current generation has failed, so that spares end too."""
        self._store.set(f"failed/{self.current.number}", "1")

    def ended_status(self) -> int | None:
        """Return the exit status of the training of the current generation, or None while it trains."""
        status = read_if_set(self._store, f"ended/{self.current.number}")
        return int(status) if status else None

    def _raise_if_lost(self) -> None:
        # No progress is noted: the watchdog kills a stopped rank that the others wait for here.
        for rank in set(self._find_gone()) - self.lost():
            report_lost(self._base, rank)
        if self.is_broken():
            raise LostRankError(f"{format_ranks(sorted(self.lost()))} lost while the process groups connected")

    def _report_gone(self, *, waited_s: float, number: int) -> None:
        """Record lost ranks: ranks whose processes are gone, and ranks that did not arrive in time.

        Raises:
            NoRankLostError: no member is lost at the end of the wait.
        """
        lost_ranks = self.lost()
        gone_ranks = set(self._find_gone()) - lost_ranks
        if (lost_ranks | gone_ranks).isdisjoint(self.current.members) and waited_s > min(LOSS_WAIT_S, self._timeout_s):
            # No process on the machine of a lost node is left to report it.
            gone_ranks |= set(self._find_silent()) - set(self._arrived(number))
            # Another survivor may have recorded them meanwhile.
            lost_ranks = self.lost()
            gone_ranks -= lost_ranks
            if (lost_ranks | gone_ranks).isdisjoint(self.current.members):
                raise NoRankLostError
        is_loss = not (lost_ranks | gone_ranks).isdisjoint(self.current.members)
        if is_loss and waited_s > self._timeout_s:
            silent = set(self.current.ranks) - set(self._arrived(number)) - lost_ranks - gone_ranks
            for rank in silent:
                # It must not write further files of the run.
                self._kill(rank)
            gone_ranks |= silent
        for rank in gone_ranks:
            report_lost(self._base, rank)

    def _survivors(self, number: int) -> dict[int, Any] | None:
        """Return the facts of the survivors, by job rank, or None until every rank has arrived or is lost."""
        arrived = self._arrived(number)
        # Read after the arrivals: a loss that was reported before the last of them is known here.
        lost_ranks = self.lost()
        if lost_ranks.isdisjoint(self.current.members) or not set(self.current.ranks) <= lost_ranks | set(arrived):
            return None
        return {rank: facts for rank, facts in sorted(arrived.items()) if rank not in lost_ranks}

    def _is_first(self, number: int) -> bool:
        """Return whether this rank was the first to arrive."""
        lost_ranks = self.lost()
        return next((rank for rank in self._arrived(number) if rank not in lost_ranks), self._rank) == self._rank

    def _publish(self, key: str, survivors: dict[int, Any], choose: ChooseMembers) -> None:
        lost_ranks = tuple(sorted(set(self.current.ranks) - set(survivors)))
        try:
            members, plan = choose(survivors, lost_ranks)
        except CannotChooseError:
            return
        except RunError as error:
            self._store.compare_set(key, "", json.dumps({"refused": str(error)}))
            return
        spares = tuple(rank for rank in survivors if rank not in members)
        generation = RankMembership(self.current.number + 1, tuple(members), spares, lost_ranks, plan)
        self._store.compare_set(key, "", json.dumps(asdict(generation)))

    def _arrived(self, number: int) -> dict[int, Any]:
        return dict(map(json.loads, self._lines(f"arrived/{number}")))

    def _lines(self, key: str) -> list[str]:
        return read_if_set(self._store, key).splitlines()


class _GenerationStore(dist.Store):
    """Store of torch whose waits end with an exception once a member of the generation is lost.

    torch's own wait blocks in C++ until its timeout, also in members that connect to a lost member.
    """

    def __init__(self, store: dist.Store, raise_if_lost: Callable[[], None]) -> None:
        super().__init__()
        self._inner = store
        self._raise_if_lost = raise_if_lost

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._inner.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            LostRankError: a member is lost.
            DistStoreError: the timeout is over.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout.total_seconds()
        pause_s = CONNECT_POLL_S
        while not self._inner.check(keys):
            self._raise_if_lost()
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise dist.DistStoreError(f"wait timeout for {', '.join(keys)}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)
