"""Rendezvous: connect the ranks of a job to one TCPStore, hosted by the launcher or by rank 0.

Ranks of a single machine use the loopback interface, so other machines cannot reach their sockets.
"""

import errno
import ipaddress
import os
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from moefold.comm.flight_recorder import format_ranks
from moefold.errors import RunError
from moefold.host.processes import CallTimeoutError, run_with_timeout
from moefold.host.rank_env import RankEnv
from moefold.message_text import first_line

POLL_S = 0.05
"""Least polling interval. It grows with the number of ranks, as a single store serves them all."""

WAIT_NOTICE_S = 10.0
"""Time after which a rank prints the numbers of the missing ranks."""

MISSING_RANKS_GRACE_S = 5.0
"""Extra time after the timeout for a rank to find out which ranks are missing."""

STDERR_FD = 2
"""File descriptor of stderr, where C++ code writes directly."""

CONNECT_FRACTION = 1 / 3
"""Part of the timeout that torch gets to connect to an open port: it tries twice, and must fail, with its C++ trace on
stderr, before this process stops waiting."""

_NOT_OUR_STORE = "the port is not the store of this job; most likely another program uses it"

STORE_ERRORS = (dist.DistError, RuntimeError, OSError)


def join_rendezvous(rank_env: RankEnv, timeout_s: float) -> tuple[dist.Store, str]:
    """Connect to the job's store and wait until every rank has connected. It is collective over the whole job.

    The timeout holds and signals are handled even if the address belongs to another program, or the store is lost.

    Returns:
        The store, with a key prefix for this session, and the name of the session. The prefix is needed because an
        elastic agent reuses one store for all restarts (torch >= 2.13), with the addresses of the previous ranks in it.

    Raises:
        RunError: the store cannot be reached, or ranks are missing, after `timeout_s`, or the port is taken on rank 0.
    """
    deadline = time.monotonic() + timeout_s
    store: dist.Store | None = None
    try:
        notice = _WaitNotice(rank_env, timeout_s)
        with _buffer_stderr() as stderr_fd:
            store = run_with_timeout(
                timeout_s, lambda: _open_store(rank_env, deadline, lambda: notice.poll([0], stderr_fd))
            )
        session = run_with_timeout(
            max(0.0, deadline - time.monotonic()) + MISSING_RANKS_GRACE_S,
            partial(_await_all_ranks, store, rank_env, deadline, notice),
        )
    except _MissingRanksError as late:
        raise RunError(
            f"{format_ranks(late.ranks)} of {rank_env.world_size} did not come to {_store_address(rank_env)} "
            f"within {timeout_s:g} s{late.reason}; start them, or set faults.timeout_s higher"
        ) from None
    except CallTimeoutError:
        raise RunError(_timeout_message(rank_env, timeout_s, was_open=store is not None)) from None
    except STORE_ERRORS as error:
        raise RunError(_store_error_message(rank_env, error, was_open=store is not None)) from None
    return dist.PrefixStore(f"moefold/{session}", store), session


def _open_store(rank_env: RankEnv, deadline: float, on_wait: Callable[[], None]) -> dist.Store:
    """Return the store, hosted by the launcher if it has one, else by rank 0. Wait for its host only.

    Args:
        on_wait: called repeatedly while rank 0 has not opened the store.

    Raises:
        _MissingRanksError: rank 0 did not open the store in time.
    """
    limit = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    has_own_store = rank_env.is_embedded or rank_env.record_paths
    if not has_own_store and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        os.environ.update(MASTER_ADDR=rank_env.master_address, MASTER_PORT=str(rank_env.master_port))
        agent_store: dist.Store
        agent_store, _, _ = next(rendezvous("env://", rank_env.rank, rank_env.world_size, timeout=limit))
        return agent_store
    hosts_store = rank_env.rank == 0 and not rank_env.record_paths
    listener = None
    if hosts_store:
        try:
            listener = listen_at(rank_env.master_address, rank_env.master_port)
        except OSError as error:
            # Torch must bind the port, or shares a store there.
            if error.errno != errno.EADDRINUSE:
                raise
    else:
        _wait_until_open(rank_env, deadline, on_wait)
    store = dist.TCPStore(
        rank_env.master_address,
        rank_env.master_port,
        rank_env.world_size,
        hosts_store,
        timedelta(seconds=CONNECT_FRACTION * max(POLL_S, deadline - time.monotonic())),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    store.set_timeout(limit)
    return store


@contextmanager
def _buffer_stderr() -> Iterator[int]:
    """Buffer stderr inside the block, and discard the buffer if an exception ends the block. Yield the real stderr.

    torch prints a C++ stack trace for each reply that does not come from a TCPStore. The exception is enough.
    """
    sys.stderr.flush()
    saved_fd = os.dup(STDERR_FD)
    with tempfile.TemporaryFile() as buffer:
        os.dup2(buffer.fileno(), STDERR_FD)
        try:
            yield saved_fd
        finally:
            sys.stderr.flush()
            os.dup2(saved_fd, STDERR_FD)
            os.close(saved_fd)
        buffer.seek(0)
        sys.stderr.write(buffer.read().decode(errors="replace"))


def _wait_until_open(rank_env: RankEnv, deadline: float, on_wait: Callable[[], None]) -> None:
    """Wait until the port of rank 0's store is open. Torch's own wait would end with C++ stack traces on stderr."""
    while True:
        try:
            remaining_s = max(POLL_S, deadline - time.monotonic())
            with socket.create_connection((rank_env.master_address, rank_env.master_port), timeout=remaining_s):
                return
        except OSError as error:
            if time.monotonic() > deadline - POLL_S:
                raise _MissingRanksError([0], f" ({error.strerror or error})") from None
            on_wait()
            time.sleep(POLL_S)


class _WaitNotice:
    """One line on stderr about missing ranks, from the first rank of each machine.

    Ranks of moefold's own launcher print none: all of them start together on one machine.
    """

    def __init__(self, rank_env: RankEnv, timeout_s: float) -> None:
        self._rank_env = rank_env
        self._timeout_s = timeout_s
        prints = rank_env.local_rank == 0 and not rank_env.record_paths
        self._due_s = time.monotonic() + WAIT_NOTICE_S if prints else float("inf")

    @property
    def is_due(self) -> bool:
        """True from `WAIT_NOTICE_S` on, until the line is printed."""
        return time.monotonic() > self._due_s

    def poll(self, missing_ranks: Sequence[int], stderr_fd: int = STDERR_FD) -> None:
        """Print the line once, when it is due."""
        if self.is_due:
            self._due_s = float("inf")
            env = self._rank_env
            line = (
                f"moefold: rank {env.rank} waits for {format_ranks(missing_ranks)} of {env.world_size} at "
                f"{_store_address(env)}, for {self._timeout_s:g} s (faults.timeout_s) in all\n"
            )
            os.write(stderr_fd, line.encode())


def _await_all_ranks(store: dist.Store, rank_env: RankEnv, deadline: float, notice: _WaitNotice) -> str:
    """Wait until all ranks have joined and return the name of the session.

    Raises:
        _MissingRanksError: some ranks did not join before the deadline.
    """
    barrier = _StartBarrier(store, rank_env)
    while not barrier.poll():
        if time.monotonic() > deadline:
            raise _MissingRanksError(barrier.missing_ranks())
        if notice.is_due:
            notice.poll(barrier.missing_ranks())
        time.sleep(max(POLL_S, rank_env.world_size / 5000))
    return barrier.session


def _store_address(rank_env: RankEnv) -> str:
    return f"{rank_env.master_address}:{rank_env.master_port}"


def _timeout_message(rank_env: RankEnv, timeout_s: float, *, was_open: bool) -> str:
    within = f"within {timeout_s:g} s (faults.timeout_s)"
    if was_open:
        return _lost_store_message(rank_env, f"no answer {within}")
    return (
        f"rank {rank_env.rank} has no answer from {_store_address(rank_env)} {within}: {_NOT_OUR_STORE}; "
        f"{_suggest_port(rank_env)}"
    )


def _store_error_message(rank_env: RankEnv, error: BaseException, *, was_open: bool) -> str:
    reason = first_line(error)
    if "EADDRINUSE" in reason:
        return (
            f"rank {rank_env.rank} cannot host the store of the job at {_store_address(rank_env)}: another program "
            f"listens at this port; {_suggest_port(rank_env)}"
        )
    if was_open:
        return _lost_store_message(rank_env, reason)
    return (
        f"rank {rank_env.rank} cannot open the store at {_store_address(rank_env)}: {_NOT_OUR_STORE} ({reason}); "
        f"{_suggest_port(rank_env)}"
    )


def _lost_store_message(rank_env: RankEnv, reason: str) -> str:
    return (
        f"rank {rank_env.rank} lost the store at {_store_address(rank_env)} while it waited for the other "
        f"{rank_env.world_size - 1}: {reason}; check rank 0, its host and the network to it"
    )


def _suggest_port(rank_env: RankEnv) -> str:
    return f"choose another MASTER_PORT than {rank_env.master_port}, the same for all ranks"


class _MissingRanksError(Exception):
    def __init__(self, ranks: list[int], reason: str = "") -> None:
        super().__init__(ranks, reason)
        self.ranks = ranks
        self.reason = reason


class _StartBarrier:
    """Barrier over the processes of one start of the job that ignores stale keys of earlier starts in the same store.

    Every process draws a unique id. Rank 0 publishes its id as the session name. The other ranks answer the session
    name that they read with their own ids. Rank 0 releases exactly the ids that answered. Restart counters of the
    launcher are not used: elastic agents may disagree on them when nodes join or leave.
    """

    def __init__(self, store: dist.Store, rank_env: RankEnv) -> None:
        self._store = dist.PrefixStore("moefold/roll-call", store)
        self._rank = rank_env.rank
        self._peer_ranks = range(1, rank_env.world_size)
        self._own_id = uuid.uuid4().hex
        self.session = ""
        """Id of rank 0 as last read."""
        if rank_env.rank == 0:
            self.session = self._own_id
            self._store.set("first", self._own_id)

    def poll(self) -> bool:
        """Poll the store once. Return whether this rank may start: rank 0 once all answered, others once released."""
        return self._release_ranks() if self._rank == 0 else self._is_released()

    def missing_ranks(self) -> list[int]:
        """Return the ranks that did not answer the current session, or [0] if all did: rank 0 did not release them."""
        awaited = [rank for rank in self._peer_ranks if rank != self._rank] if self.session else []
        return [rank for rank in awaited if not self._store.check([self._answer_key(rank)])] or [0]

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
        session = self._store.get("first").decode()
        if session != self.session:
            self.session = session
            self._store.set(self._answer_key(self._rank), self._own_id)
        return self._store.check([f"begin/{session}/{self._own_id}"])

    def _answer_key(self, rank: int) -> str:
        return f"answer/{self.session}/{rank}"


HOST = "127.0.0.1"
BACKLOG = 2048
INTERFACES = ("lo", "lo0")
"""Names of the loopback interface on Linux and macOS."""


def loopback_store() -> dist.TCPStore:
    """Host a TCPStore in this process, on a free port of the loopback address.

    torch's own listener binds all interfaces, for any address.
    """
    listener = _bind_and_listen(socket.AF_INET, (HOST, 0))
    port = int(listener.getsockname()[1])
    # detach(): the store takes ownership of the descriptor.
    return dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def listen_at(address: str, port: int) -> socket.socket | None:
    """Listen at this address only, if the ranks certainly connect to it, or None if torch must bind all interfaces.

    This holds for IP addresses and "localhost". A host name may resolve to different interfaces on different hosts,
    and an address mapped by NAT is not local: then the caller must listen on all interfaces.

    Raises:
        OSError: another program listens at the port.
    """
    if address != "localhost" and not _is_ip_address(address):
        return None
    family, _, _, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    try:
        return _bind_and_listen(family, socket_address)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise


def restrict_to_loopback(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the loopback interface, unless the user has set them.

    By default gloo uses the interface of the host's name, which may be a network interface.
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
        # Allow ports with connections in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
