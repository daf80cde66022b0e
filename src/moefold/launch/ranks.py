"""Launching: spawn ranks on this machine, or join the process group of ranks that a launcher started."""

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moefold.comm.flight_recorder import WATCHED_TIMEOUT, group_timeout, read_snapshot
from moefold.comm.private_torch import import_compiler
from moefold.comm.trainer_sampler_link import JobLink, JobSplit
from moefold.errors import EXIT_FAILED, EXIT_USER_ERROR, SIGNAL_STATUS, ConfigError, RunError
from moefold.host.listen import free_port, is_loopback
from moefold.host.processes import CallTimeoutError, run_with_timeout
from moefold.host.rank_env import RankEnv
from moefold.launch.accelerator import missing_gpu_message
from moefold.launch.exit import hard_exit, has_report
from moefold.launch.hang_diagnosis import describe_activity
from moefold.launch.local_job import JobResult, RankMain, SignalForwarder, record_files, run_processes
from moefold.launch.regroup import LostRankError, report_lost
from moefold.launch.rendezvous import HOST, join_rendezvous, loopback_store, restrict_to_loopback
from moefold.launch.threads_and_malloc import choose_threads, expand_segments, keep_freed_blocks
from moefold.message_text import first_line
from moefold.terminal import print_escaped

DEFAULT_JOIN_TIMEOUT_S = 1800.0
"""Timeout of the rendezvous if no recipe sets it."""

CONNECT_GRACE_S = 10.0
"""Extra time after the limit of connecting for torch to stop by itself."""


def choose_device(requested_device: str, world_size: int, rank_env: RankEnv | None) -> str:
    """Return the device type of the ranks, "cpu" or "cuda", without initialising a GPU.

    For "cuda" it also configures the allocator of this process and its child processes, see `expand_segments`.

    Args:
        rank_env: environment of this process, if a launcher started it. Otherwise all ranks run on this machine.

    Raises:
        ConfigError: this machine has fewer GPUs than ranks.
    """
    num_gpus = torch.cuda.device_count()
    device = requested_device
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    if device != "cuda":
        return device
    if num_gpus < world_size if rank_env is None else num_gpus <= rank_env.cuda_device_index:
        raise ConfigError(missing_gpu_message(requested_device, world_size, rank_env, num_gpus))
    expand_segments()
    return device


def run_ranks(
    main: RankMain, world_size: int, device_type: str, rank_env: RankEnv | None, *, regroups: bool = False
) -> int:
    """Run `main` as the rank that a launcher started and exit, or spawn all ranks on this machine and wait for them.

    Raises:
        KeyboardInterrupt: see `spawn_ranks`.
    """
    if rank_env is not None:
        hard_exit(main(rank_env, device_type))
    return spawn_ranks(main, world_size, device_type, regroups=regroups)


def spawn_ranks(main: RankMain, world_size: int, device_type: str, *, regroups: bool = False) -> int:
    """Run `main` on `world_size` new processes of this machine, wait for them and return the exit status.

    CPU ranks are forked from this process, which has imported torch already. GPU ranks must be spawned. Ctrl-C and
    SIGTERM are forwarded to the ranks, which exit by themselves. A failed rank ends the job and is named on stderr. All
    sockets are bound to the loopback interface.

    Args:
        regroups: a rank ended by a signal is recorded in the store, and the other ranks go on, see `launch.regroup`.

    Raises:
        KeyboardInterrupt: the ranks ended on Ctrl-C, or a second Ctrl-C killed them.
    """
    if world_size == 1:
        return main(single_rank_env(), device_type)
    if device_type == "cpu":
        import_compiler()
    store = loopback_store()
    with SignalForwarder() as forwarder, record_files(world_size) as paths:
        rank_envs = [RankEnv(rank, rank, world_size, HOST, store.port, paths, world_size) for rank in range(world_size)]
        on_loss = (lambda rank, exitcode: report_lost(store, rank, _describe_exit(exitcode))) if regroups else None
        result = run_processes(main, rank_envs, device_type, on_loss)
        return result.status if result.failed_rank is None else _failed_job_status(result, forwarder, paths)


def single_rank_env() -> RankEnv:
    """Return the rank environment of a single-rank job."""
    return RankEnv(0, 0, 1, HOST, free_port(HOST))


@contextmanager
def init_distributed(
    rank_env: RankEnv,
    device_type: str,
    timeout_s: float = DEFAULT_JOIN_TIMEOUT_S,
    on_rendezvous: Callable[[str], None] | None = None,
) -> Iterator[torch.device]:
    """Initialise the default process group and yield the device of this rank. Destroy the group at the end.

    Args:
        on_rendezvous: called with the session name after the rendezvous and before the backends connect. A rank lost
            while connecting would block the others beyond `timeout_s`: `Watchdog.start` detects it.

    Raises:
        RunError: a rank did not join in time, or the ranks could not connect to each other.
    """
    split = JobSplit(rank_env.world_size, 0)
    with init_split_job(rank_env, split, device_type, timeout_s, on_rendezvous) as (device, _):
        yield device


@contextmanager
def init_split_job(
    rank_env: RankEnv,
    split: JobSplit,
    device_type: str,
    timeout_s: float = DEFAULT_JOIN_TIMEOUT_S,
    on_rendezvous: Callable[[str], None] | None = None,
    open_group_store: Callable[[], dist.Store] | None = None,
) -> Iterator[tuple[torch.device, JobLink | None]]:
    """Initialise a default process group of the ranks with the same work, and connect all ranks of the job.

    Yields the device and the connection of all ranks, None if all of them train.

    Args:
        split: the ranks that train and the ranks that sample.
        open_group_store: called after the rendezvous. It returns the store for the process groups. None means the store
            of the rendezvous.

    Raises:
        RunError: a rank did not join in time, or the ranks could not connect to each other.
    """
    if device_type == "cuda":
        device = torch.device("cuda", rank_env.cuda_device_index)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    choose_threads(rank_env, device_type)
    if is_loopback(rank_env.master_address):
        restrict_to_loopback()
    keep_freed_blocks(device_type)
    store, session = join_rendezvous(rank_env, timeout_s)
    if on_rendezvous is not None:
        on_rendezvous(session)
    # `store` stays in use: rank 0 may host it.
    group_store = store if open_group_store is None else open_group_store()
    link: JobLink | None = None
    limit = group_timeout(timeout_s)
    timeout = limit if on_rendezvous is None else WATCHED_TIMEOUT
    try:
        link = run_with_timeout(
            limit.total_seconds() + CONNECT_GRACE_S,
            lambda: _init_process_groups(group_store, rank_env, split, device, timeout),
        )
    except CallTimeoutError:
        raise RunError(
            f"rank {rank_env.rank} on {socket.gethostname()} met the others and was not connected to all of them "
            f"within {limit.total_seconds():g} s; one may hang, or the host of the store is lost"
        ) from None
    except (dist.DistError, RuntimeError, LostRankError) as error:
        raise RunError(
            f"rank {rank_env.rank} on {socket.gethostname()} met the others and did not connect to all of them: "
            f"{first_line(error)}; one may have ended meanwhile, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
            "must name the network between the hosts"
        ) from error
    try:
        yield device, link
    finally:
        # A rank that regrouped may have ended without a group.
        if dist.is_initialized():
            dist.destroy_process_group()


def _failed_job_status(result: JobResult, forwarder: SignalForwarder, record_paths: tuple[str, ...]) -> int:
    """Return the exit status of a failed job. Print the failed rank unless a signal or an earlier message explains it.

    Raises:
        KeyboardInterrupt: the user's Ctrl-C ended the job.
    """
    if result.exitcode == EXIT_USER_ERROR:
        return EXIT_USER_ERROR
    if forwarder.got_second_interrupt:
        raise KeyboardInterrupt
    if forwarder.explains_exit_code(result.exitcode):
        if forwarder.received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        return SIGNAL_STATUS + forwarder.received[0]
    if has_report(Path(record_paths[-1])):
        return EXIT_FAILED
    rank = result.failed_rank or 0
    snapshot = read_snapshot(Path(record_paths[rank]))
    activity = "" if snapshot is None else f" on {socket.gethostname()} in {describe_activity(snapshot)}"
    text = f"moefold: rank {rank} {_describe_exit(result.exitcode)}{activity}, and the others were ended"
    print_escaped(text, file=sys.stderr, flush=True)
    return EXIT_FAILED


def _describe_exit(exitcode: int) -> str:
    if exitcode == -signal.SIGKILL:
        return "was killed by SIGKILL (as happens when memory runs out)"
    if exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"failed (exit status {exitcode})"


def _init_process_groups(
    store: dist.Store, rank_env: RankEnv, split: JobSplit, device: torch.device, timeout: timedelta
) -> JobLink | None:
    """Initialise the default process group, and connect the ranks that train with the ranks that sample.

    NCCL is bound to the device, so it connects here and not in the first step. The groups of a rank are then split from
    the communicator of the world, and every rank takes part: see `topology.communicators`.
    """
    ranks = split.ranks_like(rank_env.rank)
    own_store = dist.PrefixStore(f"ranks from {ranks.start}", store) if split.num_sampling else store
    init_process_group(own_store, rank_env.rank - ranks.start, len(ranks), device, timeout)
    return JobLink.connect(split, rank_env.rank, store) if split.num_sampling else None


def init_process_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
    """Initialise the default process group of a rank. It blocks until all ranks are connected."""
    if device.type == "cuda":
        # The current device is per thread.
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
