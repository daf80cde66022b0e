"""Where the ranks of a job find each other: the store that a launcher or rank 0 keeps.

Ranks of one machine talk over its loopback interface: no other machine reaches their stores or connections.
"""

import errno
import ipaddress
import os
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from moefold.comm.flight_recorder import format_ranks
from moefold.errors import RunError
from moefold.host.processes import CallTimeoutError, run_with_timeout
from moefold.host.rank_env import RankEnv

POLL_S = 0.05
"""How often a rank of few looks for the others; thousands look less often, as one store answers them all."""

MISSING_RANKS_GRACE_S = 5.0
"""So much longer than its limit a rank waits until it can name those who are missing."""

STDERR_FD = 2
"""The descriptor that C++ writes to."""

MAX_REASON_CHARS = 160
"""Characters of torch's own words in a message."""

CONNECT_FRACTION = 1 / 3
"""Part of the limit that torch gets to connect to a port that is open: it tries twice, and must end, with the page that
it writes to stderr, before this process stops to wait for it."""

_NOT_OUR_STORE = "what listens there is no store of this job, most likely another program that has the port"

STORE_ERRORS = (dist.DistError, RuntimeError, OSError)


def join_rendezvous(rank_env: RankEnv, timeout_s: float) -> tuple[dist.Store, str]:
    """Open the job's store and wait until every rank has.

    What listens at the address may be no store, or one that is lost later: the wait ends at its limit all the same,
    and signals are obeyed meanwhile.

    Returns:
        The store, with keys of its own for this start of the job, and the name of this start. An elastic agent keeps
        one store over all restarts (torch >= 2.13), in which the ranks of the start before left their addresses.

    Raises:
        RunError: the store cannot be reached, or ranks are missing, after `timeout_s`; or rank 0 finds the port taken.
    """
    deadline = time.monotonic() + timeout_s
    store: dist.Store | None = None
    try:
        with _hold_stderr():
            store = run_with_timeout(timeout_s, lambda: _open_store(rank_env, deadline))
        session = run_with_timeout(
            max(0.0, deadline - time.monotonic()) + MISSING_RANKS_GRACE_S,
            partial(_await_all_ranks, store, rank_env, deadline),
        )
    except _MissingRanksError as late:
        raise RunError(
            f"{format_ranks(late.ranks)} of {rank_env.world_size} did not come to {_store_address(rank_env)} within {timeout_s:g} s"
            f"{late.reason}; start them, or set faults.timeout_s higher"
        ) from None
    except CallTimeoutError:
        raise RunError(_timeout_message(rank_env, timeout_s, was_open=store is not None)) from None
    except STORE_ERRORS as error:
        raise RunError(_store_error_message(rank_env, error, was_open=store is not None)) from None
    return dist.PrefixStore(f"moefold/{session}", store), session


def _open_store(rank_env: RankEnv, deadline: float) -> dist.Store:
    """The store that a launcher keeps, or else rank 0; it does not wait for others than the one who keeps it.

    Raises:
        _MissingRanksError: rank 0 has not come.
    """
    limit = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    if not rank_env.record_paths and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        os.environ.update(MASTER_ADDR=rank_env.master_address, MASTER_PORT=str(rank_env.master_port))
        kept: dist.Store
        kept, _, _ = next(rendezvous("env://", rank_env.rank, rank_env.world_size, timeout=limit))
        return kept
    keeps_it = rank_env.rank == 0 and not rank_env.record_paths
    listener = None
    if keeps_it:
        listener = _bind_store_port(rank_env)
    else:
        _wait_until_open(rank_env, deadline)
    store = dist.TCPStore(
        rank_env.master_address,
        rank_env.master_port,
        rank_env.world_size,
        keeps_it,
        timedelta(seconds=CONNECT_FRACTION * max(POLL_S, deadline - time.monotonic())),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    store.set_timeout(limit)
    return store


@contextmanager
def _hold_stderr() -> Iterator[None]:
    """Inside, what is written to stderr waits, and is dropped if an exception ends the block.

    torch writes a page of C++ for each answer that is none of a store's. The exception tells what is to be known.
    """
    sys.stderr.flush()
    kept = os.dup(STDERR_FD)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), STDERR_FD)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, STDERR_FD)
            os.close(kept)
        held.seek(0)
        sys.stderr.write(held.read().decode(errors="replace"))


def _bind_store_port(rank_env: RankEnv) -> socket.socket | None:
    """Where rank 0 keeps the store; None leaves it to torch, also where this process keeps one at this port already."""
    try:
        return listen_at(rank_env.master_address, rank_env.master_port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    return None


def _wait_until_open(rank_env: RankEnv, deadline: float) -> None:
    """Wait until something listens where rank 0 keeps the store: torch waits too, and ends with pages of C++."""
    while True:
        try:
            left_s = max(POLL_S, deadline - time.monotonic())
            with socket.create_connection((rank_env.master_address, rank_env.master_port), timeout=left_s):
                return
        except OSError as error:
            if time.monotonic() > deadline - POLL_S:
                raise _MissingRanksError([0], f" ({error.strerror or error})") from None
            time.sleep(POLL_S)


def _await_all_ranks(store: dist.Store, rank_env: RankEnv, deadline: float) -> str:
    """Wait until all ranks have come; returns the name of this start.

    Raises:
        _MissingRanksError: some have not.
    """
    roll_call = _StartBarrier(store, rank_env)
    while not roll_call.poll():
        if time.monotonic() > deadline:
            raise _MissingRanksError(roll_call.missing_ranks())
        time.sleep(max(POLL_S, rank_env.world_size / 5000))
    return roll_call.session


def _store_address(rank_env: RankEnv) -> str:
    return f"{rank_env.master_address}:{rank_env.master_port}"


def _timeout_message(rank_env: RankEnv, timeout_s: float, *, was_open: bool) -> str:
    within = f"within {timeout_s:g} s (faults.timeout_s)"
    if was_open:
        return (
            f"rank {rank_env.rank} lost the store at {_store_address(rank_env)} while it waited for the other "
            f"{rank_env.world_size - 1}: no answer {within}; see what became of rank 0, its host and the way there"
        )
    return f"rank {rank_env.rank} has no answer from {_store_address(rank_env)} {within}: {_NOT_OUR_STORE}; {_suggest_port(rank_env)}"


def _store_error_message(rank_env: RankEnv, error: BaseException, *, was_open: bool) -> str:
    reason = str(error).splitlines()[0][:MAX_REASON_CHARS]
    if "EADDRINUSE" in reason:
        return (
            f"rank {rank_env.rank} cannot keep the store of the job at {_store_address(rank_env)}: another program listens at this "
            f"port; {_suggest_port(rank_env)}"
        )
    if was_open:
        return (
            f"rank {rank_env.rank} lost the store at {_store_address(rank_env)} while it waited for the other "
            f"{rank_env.world_size - 1}: {reason}; see what became of rank 0, its host and the way there"
        )
    return f"rank {rank_env.rank} cannot open the store at {_store_address(rank_env)}: {_NOT_OUR_STORE} ({reason}); {_suggest_port(rank_env)}"


def _suggest_port(rank_env: RankEnv) -> str:
    return f"choose another MASTER_PORT than {rank_env.master_port}, the same for all ranks"


class _MissingRanksError(Exception):  # noqa: N818 - says who, and ends here
    def __init__(self, ranks: list[int], reason: str = "") -> None:
        super().__init__(ranks, reason)
        self.ranks = ranks
        self.reason = reason


class _StartBarrier:
    """All processes of this start, and none of an earlier one, agree on the name that rank 0 gives it.

    A process can tell its own keys from old ones, and no others: it has made up a name that nobody had before. Rank 0
    shows its name, the others answer to the name that they see with their own, and rank 0 lets exactly those begin who
    did. Nothing is taken from counters of a launcher, which agents may not agree on when nodes come and go.
    """

    def __init__(self, store: dist.Store, rank_env: RankEnv) -> None:
        self._store = dist.PrefixStore("moefold/roll-call", store)
        self._rank = rank_env.rank
        self._peer_ranks = range(1, rank_env.world_size)
        self._own_id = uuid.uuid4().hex
        self.session = ""
        """The name of rank 0 as last seen."""
        if rank_env.rank == 0:
            self.session = self._own_id
            self._store.set("first", self._own_id)

    def poll(self) -> bool:
        """Look once; whether all have come, and know it."""
        return self._release_ranks() if self._rank == 0 else self._is_released()

    def missing_ranks(self) -> list[int]:
        """Those who did not answer to the name that was seen; rank 0 if they all did, as it then left them alone."""
        waited_for = [rank for rank in self._peer_ranks if rank != self._rank] if self.session else []
        return [rank for rank in waited_for if not self._store.check([self._answer_key(rank)])] or [0]

    def _release_ranks(self) -> bool:
        answers = [self._answer_key(rank) for rank in self._peer_ranks]
        if answers and not self._store.check(answers):
            return False
        for answer in answers:
            self._store.set(f"begin/{self._own_id}/{self._store.get(answer).decode()}", "1")
        return True

    def _is_released(self) -> bool:
        if not self._store.check(["first"]):
            return False
        seen = self._store.get("first").decode()
        if seen != self.session:
            self.session = seen
            self._store.set(self._answer_key(self._rank), self._own_id)
        return self._store.check([f"begin/{seen}/{self._own_id}"])

    def _answer_key(self, rank: int) -> str:
        return f"answer/{self.session}/{rank}"


HOST = "127.0.0.1"
BACKLOG = 2048
INTERFACES = ("lo", "lo0")
"""Names of the loopback interface: Linux, macOS."""


def loopback_store() -> dist.TCPStore:
    """Keep a store in this process, on a free port of the loopback address.

    torch by itself listens on all interfaces, whatever address it is given.
    """
    listener = _bind_and_listen(socket.AF_INET, (HOST, 0))
    port = int(listener.getsockname()[1])
    # The store owns the descriptor from here on.
    return dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def listen_at(address: str, port: int) -> socket.socket | None:
    """Listen at the address that the ranks meet at, if it is certain to be the one that they connect to.

    A number is, and so is "localhost". The name of a host may mean one interface to itself and another to the others:
    then, and for an address that this machine only has through a translation, the caller listens on all interfaces.

    Returns:
        The socket, or None where torch has to choose.

    Raises:
        OSError: something else listens at the port.
    """
    if address != "localhost" and not _is_ip_address(address):
        return None
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    try:
        return _bind_and_listen(family, where)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise


def is_loopback(address: str) -> bool:
    """Return True for an address that only processes of this machine reach."""
    return address == "localhost" or (_is_ip_address(address) and ipaddress.ip_address(address).is_loopback)


def restrict_to_loopback(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo and NCCL connect over the loopback interface, unless the user has chosen another.

    gloo else takes the interface of the host's name, which may be one of the network.
    """
    present = {name for _, name in socket.if_nameindex()}
    interface = next((name for name in INTERFACES if name in present), None)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_SOCKET_IFNAME", interface)


def _is_ip_address(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _bind_and_listen(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last connections are in their final wait is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
