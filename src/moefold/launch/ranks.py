"""Starting ranks on this machine, and joining those that a launcher started."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import Signals

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moefold.errors import ConfigError
from moefold.launch.place import Place

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
SIGNAL_STATUS = 128

RankMain = Callable[[Place, str], int]
"""What a rank runs: given its place and its device type, returns the exit status of the job."""


def choose_device(wish: str, world_size: int, *, local: bool) -> str:
    """The device type of the ranks, "cpu" or "cuda", without touching a GPU.

    Args:
        wish: run.device.
        world_size: ranks of the job.
        local: all ranks run on this machine.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    num_gpus = torch.cuda.device_count()
    device = wish if wish != "auto" else "cuda" if num_gpus else "cpu"
    if device == "cuda" and local and num_gpus < world_size:
        raise ConfigError(
            f"parallel.world_size={world_size} needs a GPU for each rank, and this machine shows {num_gpus}; "
            "set run.device='cpu', or fewer ranks"
        )
    return device


def start_ranks(main: RankMain, world_size: int, device_type: str) -> int:
    """Run `main` on `world_size` new processes of this machine and wait for them; returns the exit status.

    CPU ranks are forked from this process, which has torch in memory already; GPU ranks must be spawned.
    """
    if world_size == 1:
        return main(Place(0, 0, 1, "127.0.0.1", _free_port()), device_type)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id="moefold",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork" if device_type == "cpu" else "spawn",
    )
    try:
        statuses = elastic_launch(config, _rank_entry)(main, device_type)
    except ChildFailedError as error:
        return _failed(error)
    except SignalException as error:
        return SIGNAL_STATUS + int(error.sigval)
    return int(max(statuses.values()))


@contextmanager
def joined(place: Place, device_type: str) -> Iterator[torch.device]:
    """Inside, this process is a member of the job's process group and has its device."""
    if device_type == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        if place.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            # Ranks that share cores and spin on each other's threads are many times slower than one thread each.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.world_size))
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    # The environment form of rendezvous knows whether an elastic agent or rank 0 keeps the store.
    os.environ.update(MASTER_ADDR=place.master_address, MASTER_PORT=str(place.master_port))
    dist.init_process_group(backend, init_method="env://", rank=place.rank, world_size=place.world_size)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _rank_entry(main: RankMain, device_type: str) -> int:
    environment = os.environ
    place = Place(
        rank=int(environment["RANK"]),
        local_rank=int(environment["LOCAL_RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        master_address=environment["MASTER_ADDR"],
        master_port=int(environment["MASTER_PORT"]),
    )
    return main(place, device_type)


def _failed(error: ChildFailedError) -> int:
    """Say which rank ended the job first; a rank that met a user error has printed it."""
    first = error.get_first_failure()[1]
    if first.exitcode == EXIT_USER_ERROR:
        return EXIT_USER_ERROR
    how = Signals(-first.exitcode).name if first.exitcode < 0 else f"exit status {first.exitcode}"
    print(f"moefold: rank {error.get_first_failure()[0]} failed ({how}); its traceback is above", flush=True)
    return EXIT_FAILED


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
