"""Starting ranks on this machine, and joining those that a launcher started."""

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from moefold.comm.flight_recorder import group_timeout, read_snapshot
from moefold.errors import ConfigError, RunError
from moefold.host.processes import CallTimeoutError, run_with_timeout
from moefold.host.rank_env import RankEnv
from moefold.launch.accelerator import missing_gpu_message
from moefold.launch.exit import EXIT_FAILED, EXIT_USER_ERROR, SIGNAL_STATUS, hard_exit
from moefold.launch.hang_diagnosis import describe_activity
from moefold.launch.local_job import JobResult, RankMain, record_files, run_processes
from moefold.launch.malloc import keep_freed_blocks
from moefold.launch.rendezvous import HOST, is_loopback, join_rendezvous, loopback_store, restrict_to_loopback
from moefold.launch.runtime_env import choose_threads
from moefold.launch.signal_forwarder import SignalForwarder
from moefold.launch.single_reporter import has_report
from moefold.terminal import print_escaped

DEFAULT_JOIN_TIMEOUT_S = 1800.0
"""So long a rank waits for the others where no recipe says it."""

CONNECT_GRACE_S = 10.0
"""So long after its own timeout torch may take to give up connecting."""


def choose_device(requested_device: str, world_size: int, rank_env: RankEnv | None) -> str:
    """The device type of the ranks, "cpu" or "cuda", without touching a GPU.

    Args:
        requested_device: run.device.
        world_size: ranks of the job.
        rank_env: of this process, if a launcher started it; else all ranks run on this machine.

    Raises:
        ConfigError: there are fewer GPUs than ranks on this machine.
    """
    num_gpus = torch.cuda.device_count()
    device = requested_device if requested_device != "auto" else "cuda" if num_gpus else "cpu"
    if device != "cuda":
        return device
    if num_gpus < world_size if rank_env is None else num_gpus <= rank_env.local_rank:
        raise ConfigError(missing_gpu_message(requested_device, world_size, rank_env, num_gpus))
    return device


def run_ranks(main: RankMain, world_size: int, device_type: str, rank_env: RankEnv | None) -> int:
    """Be the rank that a launcher started, which never returns, or start all ranks on this machine and wait for them.

    Raises:
        KeyboardInterrupt: as `spawn_ranks`.
    """
    if rank_env is not None:
        hard_exit(main(rank_env, device_type))
    return spawn_ranks(main, world_size, device_type)


def spawn_ranks(main: RankMain, world_size: int, device_type: str) -> int:
    """Run `main` on `world_size` new processes of this machine and wait for them; returns the exit status.

    CPU ranks are forked from this process, which has torch in memory already; GPU ranks must be spawned. Ctrl-C and
    SIGTERM are passed to the ranks, which end by themselves. A rank that fails ends the job: stderr names it. All that
    they listen to is on the loopback interface.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the ranks, which had nothing to save, or a second one did.
    """
    if world_size == 1:
        return main(single_rank(), device_type)
    store = loopback_store()
    with SignalForwarder() as relay, record_files(world_size) as records:
        places = [RankEnv(rank, rank, world_size, HOST, store.port, records, world_size) for rank in range(world_size)]
        ended = run_processes(main, places, device_type)
        return ended.status if ended.failed_rank is None else _failed_job_status(ended, relay, records)


def single_rank() -> RankEnv:
    """The place of the one rank of a job of one."""
    return RankEnv(0, 0, 1, HOST, _free_port())


@contextmanager
def init_distributed(
    rank_env: RankEnv,
    device_type: str,
    timeout_s: float = DEFAULT_JOIN_TIMEOUT_S,
    on_rendezvous: Callable[[str], None] | None = None,
) -> Iterator[torch.device]:
    """Inside, this process is a member of the job's process group and has its device.

    Args:
        rank_env: of this rank.
        device_type: "cpu" or "cuda".
        timeout_s: so long it waits for the others.
        on_rendezvous: is told the name of this start of the job when all ranks have met and have yet to connect, in which
            one that is lost leaves the others waiting for longer: `Watchdog.start` bounds it.

    Raises:
        RunError: not all ranks came in time, or they did not reach each other.
    """
    if device_type == "cuda":
        device = torch.device("cuda", rank_env.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    choose_threads(rank_env, device_type)
    if is_loopback(rank_env.master_address):
        restrict_to_loopback()
    keep_freed_blocks(device_type)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    store, session = join_rendezvous(rank_env, timeout_s)
    if on_rendezvous is not None:
        on_rendezvous(session)
    try:
        _init_process_group(backend, store, rank_env, timeout_s)
    except CallTimeoutError:
        raise RunError(
            f"rank {rank_env.rank} on {socket.gethostname()} met the others and was not connected to all of them within "
            f"{group_timeout(timeout_s).total_seconds():g} s; one may hang, or the host that keeps the store is lost"
        ) from None
    except (dist.DistError, RuntimeError) as error:
        raise RunError(
            f"rank {rank_env.rank} on {socket.gethostname()} met the others and did not connect to all of them: "
            f"{str(error).splitlines()[0]}; one may have ended meanwhile, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
            "must name the network between the hosts"
        ) from error
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _failed_job_status(result: JobResult, forwarder: SignalForwarder, record_paths: tuple[str, ...]) -> int:
    """The exit status of a job that a rank ended; says which rank, unless the user did it or has been told why."""
    if result.exitcode == EXIT_USER_ERROR:
        return EXIT_USER_ERROR
    if forwarder.got_second_interrupt:
        raise KeyboardInterrupt
    if forwarder.explains(result.exitcode):
        if forwarder.received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        return SIGNAL_STATUS + forwarder.received[0]
    if has_report(Path(record_paths[-1])):
        return EXIT_FAILED
    rank = result.failed_rank or 0
    last = read_snapshot(Path(record_paths[rank]))
    doing = "" if last is None else f" on {socket.gethostname()} in {describe_activity(last)}"
    text = f"moefold: rank {rank} {_describe_exit(result.exitcode)}{doing}, and the others were ended"
    print_escaped(text, file=sys.stderr, flush=True)
    return EXIT_FAILED


def _describe_exit(exitcode: int) -> str:
    if exitcode == -signal.SIGKILL:
        return "was killed by SIGKILL (as happens when memory runs out)"
    if exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"failed (exit status {exitcode})"


def _init_process_group(backend: str, store: dist.Store, rank_env: RankEnv, timeout_s: float) -> None:
    """Make the job's process group.

    Raises:
        NoAnswerError: torch waits for something that never comes.
    """
    timeout = group_timeout(timeout_s)

    def connect() -> None:
        if "nccl" in backend:
            # A thread has a current device of its own.
            torch.cuda.set_device(rank_env.local_rank)
        dist.init_process_group(
            backend, store=store, rank=rank_env.rank, world_size=rank_env.world_size, timeout=timeout
        )

    run_with_timeout(timeout.total_seconds() + CONNECT_GRACE_S, connect)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
