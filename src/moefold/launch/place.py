"""Which rank this process is, if torchrun or SLURM started it: the only reader of their environment. Torch-free."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from moefold.errors import ConfigError

_FIRST_SLURM_PORT = 20000
_SLURM_PORTS = 20000


@dataclass(frozen=True)
class Place:
    """One process of a job."""

    rank: int
    local_rank: int
    world_size: int
    master_address: str
    master_port: int


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that a launcher gave this process, or None if the user started it.

    torchrun says RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. `srun` says SLURM_PROCID, SLURM_LOCALID and
    SLURM_NTASKS; the first node of the job is the master, on a port that follows from the job's number.

    Raises:
        ConfigError: a launcher's variables are incomplete.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _from(environment, "RANK", "LOCAL_RANK", "WORLD_SIZE", environment)
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _from(environment, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", _slurm_master(environment))
    return None


def check_world_size(place: Place, world_size: int) -> None:
    """Refuse a job with another number of processes than the recipe folds.

    Raises:
        ConfigError: they differ.
    """
    if place.world_size != world_size:
        raise ConfigError(
            f"parallel.world_size={world_size} must equal the {place.world_size} processes that the launcher started; "
            f"set parallel.world_size={place.world_size}, or start {world_size}"
        )


def _from(
    environment: Mapping[str, str], rank: str, local_rank: str, world_size: str, master: Mapping[str, str]
) -> Place:
    try:
        return Place(
            rank=int(environment[rank]),
            local_rank=int(environment[local_rank]),
            world_size=int(environment[world_size]),
            master_address=master["MASTER_ADDR"],
            master_port=int(master["MASTER_PORT"]),
        )
    except KeyError as error:
        raise ConfigError(
            f"the environment has {rank} but not {error.args[0]}; start ranks with torchrun or srun, "
            f"or unset {rank} to let moefold start them"
        ) from None
    except ValueError as error:
        raise ConfigError(f"a launcher's variable is no number: {error}") from None


def _slurm_master(environment: Mapping[str, str]) -> dict[str, str]:
    job = int(environment.get("SLURM_JOB_ID", "0"))
    port = environment.get("MASTER_PORT", str(_FIRST_SLURM_PORT + job % _SLURM_PORTS))
    address = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    return {"MASTER_ADDR": address or _first_slurm_node(environment), "MASTER_PORT": port}


def _first_slurm_node(environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if "[" not in nodes:
        return nodes.split(",")[0] or "127.0.0.1"
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(f"cannot list the nodes {nodes!r} with scontrol; set MASTER_ADDR to the first node") from None
    return listed.stdout.split()[0]
