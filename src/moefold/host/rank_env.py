"""Rank and rendezvous of this process from the environment of torchrun or SLURM. Torch-free.

The only reader of these environment variables.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from moefold.errors import ConfigError

_FIRST_SLURM_PORT = 20000
_NUM_SLURM_PORTS = 20000
_MAX_PORT = 65535


@dataclass(frozen=True)
class RankEnv:
    """Rank, world size and master address of one process of a job."""

    rank: int
    local_rank: int
    world_size: int
    master_address: str
    master_port: int
    record_paths: tuple[str, ...] = ()
    """Files of moefold's own launcher, in which each rank records its progress, and last the file for the job's final
    message; empty under other launchers."""
    local_world_size: int = 1
    """Number of ranks on this machine."""


def read_rank_env(environment: Mapping[str, str] = os.environ) -> RankEnv | None:
    """Read the rank environment of a launcher, or return None if the user started this process.

    torchrun sets RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. `srun` sets SLURM_PROCID,
    SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE and SLURM_NTASKS; the first node of the job is the master, on a port
    derived from the job id.

    Raises:
        ConfigError: a launcher's variables are incomplete or invalid.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _parse_env(environment, "RANK", "LOCAL_RANK", "WORLD_SIZE")
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        filled = {**_slurm_master(environment), **environment}
        return _parse_env(filled, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
    return None


def check_world_size(rank_env: RankEnv, world_size: int, sampling_ranks: int = 0) -> None:
    """Check that the launcher started as many processes as the recipe has ranks.

    Args:
        rank_env: environment of this process.
        world_size: parallel.world_size.
        sampling_ranks: rollout.ranks.

    Raises:
        ConfigError: the numbers differ.
    """
    if sampling_ranks and rank_env.world_size != world_size + sampling_ranks:
        raise ConfigError(
            f"parallel.world_size={world_size} and rollout.ranks={sampling_ranks} need "
            f"{world_size + sampling_ranks} processes, and the launcher started {rank_env.world_size}; start "
            f"{world_size + sampling_ranks}, or change the recipe"
        )
    if sampling_ranks:
        return
    if rank_env.world_size != world_size:
        raise ConfigError(
            f"parallel.world_size={world_size} must equal the {rank_env.world_size} processes that the launcher "
            f"started; set parallel.world_size={rank_env.world_size}, start {world_size}, "
            "or set parallel.elastic=true to follow the launcher"
        )


def _parse_env(environment: Mapping[str, str], rank_key: str, local_rank_key: str, world_size_key: str) -> RankEnv:
    numbers = {}
    for name in (rank_key, local_rank_key, world_size_key, "MASTER_PORT"):
        text = _require_variable(environment, name, rank_key)
        if not text.isdecimal():
            raise ConfigError(f"{name}={text!r} in the environment must be a number; start ranks with torchrun or srun")
        numbers[name] = int(text)
    if numbers[rank_key] >= numbers[world_size_key]:
        raise ConfigError(
            f"{rank_key}={numbers[rank_key]} in the environment must be below "
            f"{world_size_key}={numbers[world_size_key]}; start ranks with torchrun or srun"
        )
    if not 0 < numbers["MASTER_PORT"] <= _MAX_PORT:
        raise ConfigError(
            f"MASTER_PORT={numbers['MASTER_PORT']} in the environment is not a valid port; choose 1 to "
            f"{_MAX_PORT}, or torchrun --standalone, which finds one"
        )
    return RankEnv(
        rank=numbers[rank_key],
        local_rank=numbers[local_rank_key],
        world_size=numbers[world_size_key],
        master_address=_require_variable(environment, "MASTER_ADDR", rank_key),
        master_port=numbers["MASTER_PORT"],
        local_world_size=_local_world_size(environment, numbers[world_size_key]),
    )


def _local_world_size(environment: Mapping[str, str], world_size: int) -> int:
    """Return the number of ranks on this machine: all, if the launcher does not set it.

    SLURM writes "8(x2),4" for two nodes of eight and one of four; moefold has the same number on every node.
    """
    text = environment.get("LOCAL_WORLD_SIZE") or environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    count = re.match(r"\d+", text)
    return min(int(count[0]), world_size) if count and int(count[0]) else world_size


def _require_variable(environment: Mapping[str, str], name: str, rank_key: str) -> str:
    if name not in environment:
        raise ConfigError(
            f"the environment has {rank_key} but not {name}; start ranks with torchrun or srun, "
            f"or unset {rank_key} to let moefold start them"
        )
    return environment[name]


def _slurm_master(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the master address and port as far as they are not set in the environment."""
    master = {}
    if "MASTER_PORT" not in environment:
        job = environment.get("SLURM_JOB_ID", "0")
        master["MASTER_PORT"] = str(_FIRST_SLURM_PORT + (int(job) if job.isdecimal() else 0) % _NUM_SLURM_PORTS)
    if "MASTER_ADDR" not in environment:
        master["MASTER_ADDR"] = _first_slurm_node(environment)
    return master


def _first_slurm_node(environment: Mapping[str, str]) -> str:
    """Return the node of rank 0, gpu003-ib for SLURM's list "gpu[003-010,12]-ib,cpu1"."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).split(",")[0]
