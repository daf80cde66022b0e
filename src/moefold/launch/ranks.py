"""Starting ranks on this machine, and joining those that a launcher started."""

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moefold.errors import ConfigError, RunError
from moefold.launch.departure import leave
from moefold.launch.heap import keep_freed_blocks
from moefold.launch.meeting import meet
from moefold.launch.place import Place
from moefold.launch.relay import SignalRelay
from moefold.launch.settings import choose_threads
from moefold.launch.status import EXIT_FAILED, EXIT_USER_ERROR, SIGNAL_STATUS
from moefold.launch.watchdog import record_file
from moefold.launch.who_is_late import activity
from moefold.launch.word import was_said
from moefold.parallel.flight_record import group_timeout, read_record

RankMain = Callable[[Place, str], int]
"""What a rank runs: given its place and its device type, returns the exit status of the job."""

JOIN_S = 1800.0
"""So long a rank waits for the others where no recipe says it."""

LEFT_TO_ELASTIC = "SIGQUIT"
"""The one signal that torch's agent handles: it ends the ranks at once."""

NOISY = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
"""Loggers that report, in their own words, what `start_ranks` says in one line."""


def choose_device(wish: str, world_size: int, place: Place | None) -> str:
    """The device type of the ranks, "cpu" or "cuda", without touching a GPU.

    Args:
        wish: run.device.
        world_size: ranks of the job.
        place: of this process, if a launcher started it; else all ranks run on this machine.

    Raises:
        ConfigError: there are fewer GPUs than ranks on this machine.
    """
    num_gpus = torch.cuda.device_count()
    device = wish if wish != "auto" else "cuda" if num_gpus else "cpu"
    if device != "cuda":
        return device
    if place is None and num_gpus < world_size:
        raise ConfigError(
            f"parallel.world_size={world_size} needs a GPU for each rank, and this machine shows {num_gpus}; "
            "set run.device='cpu', or fewer ranks"
        )
    if place is not None and num_gpus <= place.local_rank:
        raise ConfigError(
            f"run.device={wish!r} needs a GPU for each rank, and local rank {place.local_rank} finds {num_gpus} on its "
            "machine; start as many ranks on each machine as it has GPUs, or set run.device='cpu'"
        )
    return device


def run_ranks(main: RankMain, world_size: int, device_type: str, place: Place | None) -> int:
    """Be the rank that a launcher started, which never returns, or start all ranks on this machine and wait for them.

    Raises:
        KeyboardInterrupt: as `start_ranks`.
    """
    if place is not None:
        leave(main(place, device_type))
    return start_ranks(main, world_size, device_type)


def start_ranks(main: RankMain, world_size: int, device_type: str) -> int:
    """Run `main` on `world_size` new processes of this machine and wait for them; returns the exit status.

    CPU ranks are forked from this process, which has torch in memory already; GPU ranks must be spawned. Ctrl-C and
    SIGTERM are passed to the ranks, which end by themselves. A rank that fails ends the job: stderr names it.

    Raises:
        KeyboardInterrupt: a second Ctrl-C ended the ranks at once.
    """
    if world_size == 1:
        return main(alone(), device_type)
    _silence()
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
        signals_to_handle=LEFT_TO_ELASTIC,
    )
    with SignalRelay() as relay, TemporaryDirectory(prefix="moefold-") as records:
        try:
            all_started = get_context(config.start_method).Barrier(world_size)
            launched = _Launched(device_type, os.getpid(), records)
            statuses: dict[int, int] = elastic_launch(config, _rank_entry)(main, launched, all_started)
        except ChildFailedError as error:
            return _failed(error, relay, Path(records))
        except SignalException as error:
            return SIGNAL_STATUS + int(error.sigval)
    return max(statuses.values())


def alone() -> Place:
    """The place of the one rank of a job of one."""
    return Place(0, 0, 1, "127.0.0.1", _free_port())


@contextmanager
def joined(
    place: Place, device_type: str, limit_s: float = JOIN_S, on_meeting: Callable[[str], None] | None = None
) -> Iterator[torch.device]:
    """Inside, this process is a member of the job's process group and has its device.

    Args:
        place: of this rank.
        device_type: "cpu" or "cuda".
        limit_s: so long it waits for the others.
        on_meeting: is told the name of this start of the job when all ranks have met and have yet to connect, in which
            one that is lost leaves the others waiting for longer: `Watchdog.start` bounds it.

    Raises:
        RunError: not all ranks came in time, or they did not reach each other.
    """
    if device_type == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    choose_threads(place, device_type)
    keep_freed_blocks(device_type)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    store, session = meet(place, limit_s)
    if on_meeting is not None:
        on_meeting(session)
    timeout = group_timeout(limit_s)
    try:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        raise RunError(
            f"rank {place.rank} on {socket.gethostname()} met the others and did not connect to all of them: "
            f"{str(error).splitlines()[0]}; one may have ended meanwhile, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
            "must name the network between the hosts"
        ) from error
    try:
        yield device
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Launched:
    """What the ranks of our own launcher are told."""

    device_type: str
    launcher: int
    records: str


def _rank_entry(main: RankMain, launched: _Launched, all_started: Barrier) -> int:
    # The launcher's store looks up the name of each rank that connects, in a thread. A rank forked meanwhile would
    # inherit the lock of the C library's resolver without the thread that opens it, and hang in its own first look-up.
    all_started.wait()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    environment = os.environ
    place = Place(
        rank=int(environment["RANK"]),
        local_rank=int(environment["LOCAL_RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        master_address=environment["MASTER_ADDR"],
        master_port=int(environment["MASTER_PORT"]),
        records=launched.records,
        local_size=int(environment["LOCAL_WORLD_SIZE"]),
    )
    status = main(place, launched.device_type)
    if os.getppid() != launched.launcher:
        # torch sends ranks a SIGINT when their launcher dies. They end as on Ctrl-C; nobody waits for the status.
        os._exit(status)
    return status


def _failed(error: ChildFailedError, relay: SignalRelay, records: Path) -> int:
    """The exit status of a job that a rank ended; says which rank, unless the user did it or has been told why."""
    rank, failure = error.get_first_failure()
    if failure.exitcode == EXIT_USER_ERROR:
        return EXIT_USER_ERROR
    if relay.is_impatient:
        raise KeyboardInterrupt from None
    if relay.explains(failure.exitcode):
        return SIGNAL_STATUS + relay.received[0]
    if was_said(records):
        return EXIT_FAILED
    last = read_record(record_file(records, rank))
    doing = "" if last is None else f" on {socket.gethostname()} in {activity(last)}"
    text = f"moefold: rank {rank} {_how(failure.exitcode)}{doing}, and the others were ended"
    print(text, file=sys.stderr, flush=True)
    return EXIT_FAILED


def _how(exitcode: int) -> str:
    if exitcode == -signal.SIGKILL:
        return "was killed by SIGKILL (as happens when memory runs out)"
    if exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"failed (exit status {exitcode})"


def _silence() -> None:
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(NOISY):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
