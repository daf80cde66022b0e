"""Ranks that meet in one store, in which an earlier start of the job left its keys."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from moefold.errors import RunError
from moefold.launch.meeting import meet
from moefold.launch.place import Place

RANKS = 3
MEET = """
import sys
from moefold.launch.meeting import meet
from moefold.launch.place import Place
rank, port = int(sys.argv[1]), int(sys.argv[2])
store, session = meet(Place(rank, rank, 3, "127.0.0.1", port), 20.0)
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


def _start(store: dist.TCPStore, rank: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", MEET, str(rank), str(store.port)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _said(ranks: list[subprocess.Popen[str]]) -> set[str]:
    said = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * len(ranks)
    return {word for line in said for word in line.split()}


def test_each_start_has_a_session_of_its_own_in_a_store_that_stays(agent_store):
    first = _said([_start(agent_store, rank) for rank in range(RANKS)])
    # The new rank 0 comes last: until then the others see the name of the old one.
    late = [_start(agent_store, rank) for rank in (1, 2)]
    time.sleep(3)
    assert all(process.poll() is None for process in late)
    second = _said([*late, _start(agent_store, 0)])
    assert len(first) == len(second) == 1
    assert first != second


def test_ranks_of_the_start_before_do_not_stand_in_for_those_missing(agent_store):
    _said([_start(agent_store, rank) for rank in range(RANKS)])
    with pytest.raises(RunError, match="ranks 1-2 of 3 did not come to|ranks 1, 2 of 3 did not come to"):
        meet(Place(0, 0, RANKS, "127.0.0.1", agent_store.port), 1.0)
    with pytest.raises(RunError, match="rank 2 of 3 did not come to"):
        meet(Place(1, 1, RANKS, "127.0.0.1", agent_store.port), 1.0)


def _alone(rank: int) -> subprocess.CompletedProcess[str]:
    """One rank as srun starts it, the others never come."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-c", MEET.replace("20.0", "1.0"), str(rank), str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return subprocess.run(
        words, capture_output=True, text=True, env={**environment, "OMP_NUM_THREADS": "1"}, check=False
    )


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1, 2"), (1, "rank 0")])
def test_without_an_agent_those_who_never_come_are_named_and_torch_adds_nothing(rank, missing):
    done = _alone(rank)
    assert done.returncode == 1
    assert f"RunError: {missing} of 3 did not come to 127.0.0.1:" in done.stderr.splitlines()[-1]
    assert "c10d" not in done.stderr
    assert "frame #" not in done.stderr
