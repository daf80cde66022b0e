"""Ranks that meet in one store, which has keys of an earlier start of the job."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

from moefold.errors import RunError
from moefold.host.processes import CallTimeoutError, run_with_timeout
from moefold.host.rank_env import RankEnv
from moefold.launch.rank_errors import RankErrorHandler
from moefold.launch.rendezvous import join_rendezvous, listen_at
from tests.e2e.forked import PRELOAD, run_program
from tests.launch import peer

RANKS = 3
MEET = """
import sys
from moefold.launch.rendezvous import join_rendezvous
from moefold.host.rank_env import RankEnv
rank, port = int(sys.argv[1]), int(sys.argv[2])
store, session = join_rendezvous(RankEnv(rank, rank, 3, "127.0.0.1", port), 20.0)
store.set(str(rank), session)
print(session, *sorted(store.get(str(other)).decode() for other in range(3)), flush=True)
"""


@pytest.fixture
def agent_store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """A store that an elastic agent keeps over several starts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def _meet(sender: Connection, rank: int, port: int) -> None:
    """Meet the other ranks in the store of an agent, and send the sessions that all of them have read."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    store, session = join_rendezvous(RankEnv(rank, rank, RANKS, "127.0.0.1", port), 20.0)
    store.set(str(rank), session)
    sender.send({session, *(store.get(str(other)).decode() for other in range(RANKS))})


def _fork(function: Callable[..., None], *args: object) -> tuple[BaseProcess, Connection]:
    """Call a function with a connection in a process forked from the fork server of the pool, with torch in memory."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(sender, *args), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def _start(store: dist.TCPStore, rank: int) -> tuple[BaseProcess, Connection]:
    return _fork(_meet, rank, store.port)


def _said(ranks: list[tuple[BaseProcess, Connection]]) -> set[str]:
    said = set().union(*(receiver.recv() for _, receiver in ranks))
    for process, _ in ranks:
        process.join(60)
        assert process.exitcode == 0
    return said


def test_each_start_has_a_session_of_its_own_in_a_store_that_stays(agent_store):
    first = _said([_start(agent_store, rank) for rank in range(RANKS)])
    # The new rank 0 comes last: until then the others see the name of the old one.
    late = [_start(agent_store, rank) for rank in (1, 2)]
    time.sleep(1)
    assert all(process.is_alive() for process, _ in late)
    second = _said([*late, _start(agent_store, 0)])
    assert len(first) == len(second) == 1
    assert first != second


def test_ranks_of_the_start_before_do_not_stand_in_for_those_missing(agent_store):
    _said([_start(agent_store, rank) for rank in range(RANKS)])
    with pytest.raises(RunError, match="ranks 1-2 of 3 did not come to|ranks 1, 2 of 3 did not come to"):
        join_rendezvous(RankEnv(0, 0, RANKS, "127.0.0.1", agent_store.port), 1.0)
    with pytest.raises(RunError, match="rank 2 of 3 did not come to"):
        join_rendezvous(RankEnv(1, 1, RANKS, "127.0.0.1", agent_store.port), 1.0)


def _alone(rank: int) -> subprocess.CompletedProcess[str]:
    """One rank as srun starts it, the others never come."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return run_program(MEET.replace("20.0", "1.0"), str(rank), str(port), environment=environment)


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1, 2"), (1, "rank 0")])
def test_without_an_agent_those_who_never_come_are_named_and_torch_adds_nothing(rank, missing):
    done = _alone(rank)
    assert done.returncode == 1
    assert f"RunError: {missing} of 3 did not come to 127.0.0.1:" in done.stderr.splitlines()[-1]
    assert "c10d" not in done.stderr
    assert "frame #" not in done.stderr


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1, 2"), (1, "rank 0")])
def test_ranks_that_are_awaited_are_named_long_before_the_limit(monkeypatch, capfd, rank, missing):
    monkeypatch.setattr("moefold.launch.rendezvous.WAIT_NOTICE_S", 0.3)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # One line for each machine: the line of its first rank.
    with pytest.raises(RunError, match=f"{missing} of 3 did not come"):
        join_rendezvous(RankEnv(rank, 0, RANKS, "127.0.0.1", port), 1.0)
    assert capfd.readouterr().err == (
        f"moefold: rank {rank} waits for {missing} of 3 at 127.0.0.1:{port}, for 1 s (faults.timeout_s) in all\n"
    )
    with pytest.raises(RunError, match=f"{missing} of 3 did not come"):
        join_rendezvous(RankEnv(rank, 1, RANKS, "127.0.0.1", port), 1.0)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("answer", [peer.is_silent, peer.hangs_up, peer.talks_nonsense])
def test_a_port_of_another_program_is_said_within_the_limit(answer):
    with peer.listening(answer) as port, pytest.raises(RunError) as raised:
        join_rendezvous(RankEnv(1, 1, 2, "127.0.0.1", port), 1.0)
    # Torch may notice the other program by itself, or wait for it. Its warnings may come to stderr after the limit.
    heads = (
        f"rank 1 has no answer from 127.0.0.1:{port} within 1 s (faults.timeout_s): ",
        f"rank 1 cannot open the store at 127.0.0.1:{port}: ",
    )
    foreign = "the port is not the store of this job; most likely another program uses it"
    assert str(raised.value).startswith(tuple(head + foreign for head in heads))
    assert str(raised.value).endswith(f"; choose another MASTER_PORT than {port}, the same for all ranks")


def test_rank_0_names_a_port_that_is_taken():
    with peer.listening(peer.is_silent) as port, pytest.raises(RunError) as raised:
        join_rendezvous(RankEnv(0, 0, 2, "127.0.0.1", port), 5.0)
    assert str(raised.value) == (
        f"rank 0 cannot host the store of the job at 127.0.0.1:{port}: another program listens at this port; choose "
        f"another MASTER_PORT than {port}, the same for all ranks"
    )


def _wait(sender: Connection, port: int, errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    place = RankEnv(1, 1, 2, "127.0.0.1", port)
    with RankErrorHandler(place, lambda: False):
        sender.send("ready")
        join_rendezvous(place, 1000.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_a_silent_peer_obeys_signals(number, tmp_path):
    errors = tmp_path / "stderr"
    with peer.listening(peer.is_silent) as port:
        process, receiver = _fork(_wait, port, errors)
        try:
            assert receiver.recv() == "ready"
            os.kill(process.pid, number)
            process.join(60)
            assert (process.exitcode, errors.read_text()) == (128 + number, "")
        finally:
            process.kill()


def _keep_store(sender: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sender.send(store.port)
    time.sleep(600)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_dies_or_stops_while_ranks_are_missing_ends_the_wait(monkeypatch, ending):
    """A launcher that is killed, or a host that no longer answers."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    keeper, receiver = _fork(_keep_store)
    try:
        port = receiver.recv()
        place = RankEnv(1, 1, 2, "127.0.0.1", port)
        client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

        def lose() -> None:
            # Rank 1 looks for the name of rank 0; then it asks the store again and again.
            client.set("moefold/roll-call/first", "a name")
            client.wait(["moefold/roll-call/answer/a name/1"])
            os.kill(keeper.pid, ending)

        losing = threading.Thread(target=lose)
        losing.start()
        with pytest.raises(RunError, match=rf"rank 1 lost the store at 127\.0\.0\.1:{port} while it waited for"):
            join_rendezvous(place, 2.0)
        losing.join()
    finally:
        keeper.kill()
        keeper.join()


def test_a_store_is_bound_to_the_address_that_is_given_if_that_is_certain():
    with closing(listen_at("127.0.0.1", 0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    # Other ranks may use another address of the host, and an address behind NAT does not belong to this machine.
    assert listen_at(socket.gethostname(), 0) is None
    assert listen_at("192.0.2.1", 0) is None


def test_a_bounded_call_returns_raises_or_is_given_up():
    assert run_with_timeout(10, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(10, lambda: 1 / 0)
    with pytest.raises(CallTimeoutError):
        run_with_timeout(0.01, threading.Event().wait)
