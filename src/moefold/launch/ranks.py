"""Starting ranks on this machine, and joining those that a launcher started."""

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from moefold.errors import ConfigError, RunError
from moefold.launch.accelerator import missing_gpu
from moefold.launch.deadline import NoAnswerError, answer_within
from moefold.launch.departure import leave
from moefold.launch.heap import keep_freed_blocks
from moefold.launch.local_job import Ended, RankMain, run_processes
from moefold.launch.loopback import HOST, is_loopback, keep_to_loopback, loopback_store
from moefold.launch.meeting import meet
from moefold.launch.place import Place
from moefold.launch.record_files import record_files
from moefold.launch.relay import SignalRelay
from moefold.launch.settings import choose_threads
from moefold.launch.status import EXIT_FAILED, EXIT_USER_ERROR, SIGNAL_STATUS
from moefold.launch.who_is_late import activity
from moefold.launch.word import was_said
from moefold.parallel.flight_record import group_timeout, read_record
from moefold.printable import print_escaped

JOIN_S = 1800.0
"""So long a rank waits for the others where no recipe says it."""

CONNECT_GRACE_S = 10.0
"""So long after its own timeout torch may take to give up connecting."""


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
    if num_gpus < world_size if place is None else num_gpus <= place.local_rank:
        raise ConfigError(missing_gpu(wish, world_size, place, num_gpus))
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
    SIGTERM are passed to the ranks, which end by themselves. A rank that fails ends the job: stderr names it. All that
    they listen to is on the loopback interface.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the ranks, which had nothing to save, or a second one did.
    """
    if world_size == 1:
        return main(alone(), device_type)
    store = loopback_store()
    with SignalRelay() as relay, record_files(world_size) as records:
        places = [Place(rank, rank, world_size, HOST, store.port, records, world_size) for rank in range(world_size)]
        ended = run_processes(main, places, device_type)
        return ended.status if ended.failed_rank is None else _failed(ended, relay, records)


def alone() -> Place:
    """The place of the one rank of a job of one."""
    return Place(0, 0, 1, HOST, _free_port())


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
    if is_loopback(place.master_address):
        keep_to_loopback()
    keep_freed_blocks(device_type)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    store, session = meet(place, limit_s)
    if on_meeting is not None:
        on_meeting(session)
    try:
        _connect(backend, store, place, limit_s)
    except NoAnswerError:
        raise RunError(
            f"rank {place.rank} on {socket.gethostname()} met the others and was not connected to all of them within "
            f"{group_timeout(limit_s).total_seconds():g} s; one may hang, or the host that keeps the store is lost"
        ) from None
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


def _failed(ended: Ended, relay: SignalRelay, records: tuple[str, ...]) -> int:
    """The exit status of a job that a rank ended; says which rank, unless the user did it or has been told why."""
    if ended.exitcode == EXIT_USER_ERROR:
        return EXIT_USER_ERROR
    if relay.is_impatient:
        raise KeyboardInterrupt
    if relay.explains(ended.exitcode):
        if relay.received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        return SIGNAL_STATUS + relay.received[0]
    if was_said(Path(records[-1])):
        return EXIT_FAILED
    rank = ended.failed_rank or 0
    last = read_record(Path(records[rank]))
    doing = "" if last is None else f" on {socket.gethostname()} in {activity(last)}"
    text = f"moefold: rank {rank} {_how(ended.exitcode)}{doing}, and the others were ended"
    print_escaped(text, file=sys.stderr, flush=True)
    return EXIT_FAILED


def _how(exitcode: int) -> str:
    if exitcode == -signal.SIGKILL:
        return "was killed by SIGKILL (as happens when memory runs out)"
    if exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"failed (exit status {exitcode})"


def _connect(backend: str, store: dist.Store, place: Place, limit_s: float) -> None:
    """Make the job's process group.

    Raises:
        NoAnswerError: torch waits for something that never comes.
    """
    timeout = group_timeout(limit_s)

    def connect() -> None:
        if "nccl" in backend:
            # A thread has a current device of its own.
            torch.cuda.set_device(place.local_rank)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)

    answer_within(timeout.total_seconds() + CONNECT_GRACE_S, connect)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
