"""Addresses on which the processes of a job on one machine listen."""

import os
import pickle
import socket
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moefold.host.listen import is_loopback
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import init_distributed, spawn_ranks
from moefold.launch.rendezvous import restrict_to_loopback

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def listening_addresses(process: int) -> set[str]:
    """The local addresses of the listening sockets of a process, as /proc writes them."""
    open_files = [os.readlink(file) for file in Path(f"/proc/{process}/fd").iterdir() if file.is_symlink()]
    inodes = {name.removeprefix("socket:[").rstrip("]") for name in open_files if name.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTENS and columns[9] in inodes:
                found.add(columns[1].split(":")[0])
    return found


def _is_on_loopback(address: str) -> bool:
    if len(address) == 8:
        return address.endswith("7F")
    return address in ("00000000000000000000000001000000",) or address.startswith("0000000000000000FFFF0000")


def _write_down(folder: Path, place: RankEnv, device_type: str) -> int:
    with init_distributed(place, device_type):
        dist.all_reduce(torch.ones(1))
        own = listening_addresses(os.getpid())
        (folder / f"rank-{place.rank}").write_text("\n".join(sorted(own)))
        if place.rank == 0:
            (folder / "parent").write_text("\n".join(sorted(listening_addresses(os.getppid()))))
        dist.barrier()
    return 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_of_one_machine_listens_only_on_loopback(tmp_path, monkeypatch, ranks):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert spawn_ranks(partial(_write_down, tmp_path), ranks, "cpu") == 0
    found = {file.name: set(file.read_text().split()) for file in tmp_path.iterdir()}
    # The store, and the connections of the ranks to each other.
    assert set().union(*found.values())
    foreign = {name: [a for a in addresses if not _is_on_loopback(a)] for name, addresses in found.items()}
    assert foreign == dict.fromkeys(found, [])


def test_the_check_sees_a_socket_on_all_interfaces():
    with socket.socket() as everywhere:
        everywhere.bind(("", 0))
        everywhere.listen()
        assert not all(map(_is_on_loopback, listening_addresses(os.getpid())))


class _Touch:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._file,)


def _plant(file: Path, place: RankEnv, device_type: str) -> int:
    if place.rank == 0:
        store = dist.TCPStore(place.master_address, place.master_port, is_master=False, wait_for_workers=False)
        for key in ("torch.rendezvous.moefold", "/torch.rendezvous.moefold"):
            store.set(key, pickle.dumps(_Touch(file)))
    with init_distributed(place, device_type):
        dist.barrier()
    return 0


def test_nothing_that_is_put_into_the_store_is_unpickled(tmp_path):
    assert spawn_ranks(partial(_plant, tmp_path / "ran"), 2, "cpu") == 0
    assert not (tmp_path / "ran").exists()


def test_the_pool_of_verify_listens_only_on_loopback(pool):
    everything = pool.run(2, _own_addresses)
    assert set().union(*everything)
    assert all(_is_on_loopback(address) for addresses in everything for address in addresses)


def _own_addresses() -> set[str]:
    dist.all_reduce(torch.ones(1))
    return listening_addresses(os.getpid())


def test_an_interface_that_the_user_chose_stays():
    chosen = {"GLOO_SOCKET_IFNAME": "eth7"}
    restrict_to_loopback(chosen)
    assert chosen["GLOO_SOCKET_IFNAME"] == "eth7"
    assert chosen["NCCL_SOCKET_IFNAME"] in ("lo", "lo0")


@pytest.mark.parametrize(
    ("address", "is_one"),
    [
        *((address, True) for address in ("127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", "localhost")),
        *((address, False) for address in ("10.0.0.1", "n", "127.example.org", "", "::", "::ffff:10.0.0.1")),
    ],
)
def test_addresses_of_only_this_machine(address, is_one):
    assert is_loopback(address) == is_one
