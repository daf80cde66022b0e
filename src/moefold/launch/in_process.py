"""Ranks inside the processes of a program: workers of Ray Train, `accelerate launch`, a notebook.

The default process group of the program is used to agree on the start and on errors. A run creates its own process
groups meanwhile, so the program's groups stay unchanged.
"""

import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moefold.comm.flight_recorder import group_timeout
from moefold.comm.groups import World, current_world
from moefold.comm.private_torch import drain_backward_queue
from moefold.errors import ConfigError, RunError
from moefold.host.listen import free_port, is_loopback
from moefold.host.processes import ProcessId
from moefold.host.rank_env import RankEnv, master_host, read_rank_env
from moefold.launch.rendezvous import HOST, join_rendezvous, restrict_to_loopback

Result = TypeVar("Result")
RESTORED_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "PYTORCH_ALLOC_CONF",
)
"""Environment variables that a run sets for its process."""


@dataclass(frozen=True)
class _Process:
    """Description of a process of the program, for the other processes."""

    machine: str
    address: str
    port: int


class ProgramRanks:
    """The ranks of a program: members of its default process group, or only this process."""

    def __init__(self, world: World) -> None:
        """Find the rank of this process, and a port for the store of the run. It is collective."""
        self._world = world
        process = _Process(
            machine=ProcessId.current().machine,
            address=master_host() or socket.gethostname(),
            port=free_port() if world.is_rank0 else 0,
        )
        processes = world.all_gather_object(process)
        peers = [rank for rank, peer in enumerate(processes) if peer.machine == process.machine]
        local_rank = peers.index(world.rank)
        self.rank_env = RankEnv(
            rank=world.rank,
            local_rank=local_rank,
            world_size=world.size,
            master_address=HOST if len(peers) == world.size else processes[0].address,
            master_port=processes[0].port,
            local_world_size=len(peers),
            is_embedded=True,
            cuda_index=_cuda_index(local_rank),
        )

    def run_on_all_ranks(self, call: Callable[[], Result]) -> Result:
        """Return the result of a call, which does not communicate, or raise an error on all ranks. It is collective.

        A rank whose call failed raises its own exception. The others raise the exception of the first such rank.

        Raises:
            ConfigError: the call raised it on a rank.
            RunError: the call raised it, or an exception of another type, on a rank.
        """
        failure: Exception | None = None
        result: list[Result] = []
        try:
            result.append(call())
        except Exception as error:  # noqa: BLE001 - the other ranks would wait for this one in the exchange below
            failure = error
        failures = self._world.all_gather_object(failure and _as_known_error(failure))
        if failure is not None:
            raise failure
        for rank, error_of_rank in enumerate(failures):
            if error_of_rank is not None:
                kind, text = error_of_rank
                raise kind(f"rank {rank}: {text}")
        return result[0]

    def value_of_rank0(self, value: Result) -> Result:
        """Return the value of rank 0. It is collective."""
        result: Result = self._world.all_gather_object(value)[0]
        return result

    def check_devices(self, device_type: str) -> None:
        """Check that each rank has its own GPU. It is collective.

        Raises:
            ConfigError: two ranks have the same GPU.
        """
        if device_type != "cuda":
            return
        index = self.rank_env.cuda_device_index
        owners: dict[Any, int] = {}
        for rank, uuid in enumerate(self._world.all_gather_object(str(torch.cuda.get_device_properties(index).uuid))):
            if uuid in owners:
                raise ConfigError(
                    f"ranks {owners[uuid]} and {rank} share the GPU {uuid}; call torch.cuda.set_device(LOCAL_RANK) "
                    "in each first, or start one process for each GPU"
                )
            owners[uuid] = rank


@contextmanager
def program_ranks(timeout_s: float) -> Iterator[ProgramRanks]:
    """Join the process group of the program. Create one for the block if only a launcher's variables are set.

    Raises:
        ConfigError: the environment of a launcher is incomplete.
        RunError: a rank did not join in time.
    """
    if dist.is_initialized():
        yield ProgramRanks(current_world())
        return
    launched = read_rank_env()
    if launched is None or launched.world_size == 1:
        yield ProgramRanks(World())
        return
    if is_loopback(launched.master_address):
        restrict_to_loopback()
    store, _ = join_rendezvous(launched, timeout_s)
    excepthook = sys.excepthook
    dist.init_process_group(
        "gloo", store=store, rank=launched.rank, world_size=launched.world_size, timeout=group_timeout(timeout_s)
    )
    try:
        yield ProgramRanks(current_world())
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


@contextmanager
def restored_process_state() -> Iterator[None]:
    """Restore the process state that a run changes: random state, threads, determinism, environment. Free memory."""
    threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    variables = {name: os.environ.get(name) for name in RESTORED_VARIABLES}
    devices = [torch.cuda.current_device()] if _uses_cuda() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        except BaseException as error:
            _clear_frames(error)
            drain_backward_queue()
            raise
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
            for name, value in variables.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            # Modules and their hooks refer to each other: reference counts cannot free the model or its groups.
            gc.collect()


def _as_known_error(error: Exception) -> tuple[type[ConfigError | RunError], str]:
    """Return the type and text of the error that the other ranks raise for an error of this rank."""
    if isinstance(error, ConfigError):
        return ConfigError, str(error)
    return RunError, str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"


def _clear_frames(error: BaseException | None) -> None:
    """Clear the local variables of the functions on the traceback of an exception.

    They hold the process groups of the run. gloo closes the connections of a group when the group is freed, not when it
    is destroyed. The other ranks would wait for this rank until `faults.timeout_s`.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _uses_cuda() -> bool:
    """Return whether this process has initialised CUDA already."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _cuda_index(local_rank: int) -> int | None:
    """Return the current CUDA device of this process, or the device of its local rank, or None without GPUs."""
    if _uses_cuda():
        return torch.cuda.current_device()
    count = torch.cuda.device_count()
    if not count:
        return None
    return 0 if count == 1 else local_rank
