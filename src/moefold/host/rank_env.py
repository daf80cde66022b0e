"""Rank and rendezvous of this process from the environment of its launcher.

Launchers: torchrun, SLURM, Open MPI, Flux, PMI (MPICH, Intel MPI, PALS) and SkyPilot.

The only reader of these environment variables.
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from moefold.errors import ConfigError

_FIRST_DERIVED_PORT = 20000
_NUM_DERIVED_PORTS = 20000
_MAX_PORT = 65535


@dataclass(frozen=True)
class _ProcessManager:
    """Environment variables of a launcher that gives a process its ranks, but not the address of rank 0."""

    rank: str
    local_rank: tuple[str, ...]
    """Names used by several implementations. The first that is set counts."""
    world_size: str
    local_world_size: tuple[str, ...]
    job: tuple[str, ...]
    """Names of the job's id. The port is derived from it."""


_OPEN_MPI = _ProcessManager(
    "OMPI_COMM_WORLD_RANK",
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ("PMIX_NAMESPACE",),
)
_FLUX = _ProcessManager("FLUX_TASK_RANK", ("FLUX_TASK_LOCAL_ID",), "FLUX_JOB_SIZE", (), ("FLUX_JOB_ID",))
# MPICH's and Intel MPI's Hydra write MPI_LOCALRANKID; Cray's PALS writes PMI_LOCAL_RANK and PALS_LOCAL_RANKID.
_PMI = _ProcessManager(
    "PMI_RANK",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
    "PMI_SIZE",
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    ("PALS_APID", "PMI_JOBID"),
)


@dataclass(frozen=True)
class RankEnv:
    """Rank, world size and master address of one process of a job."""

    rank: int
    local_rank: int
    world_size: int
    master_address: str
    master_port: int
    record_paths: tuple[str, ...] = ()
    """Files of moefold's own launcher. Each rank records its progress in one, and the last is for the job's final
    message. Empty under other launchers."""
    local_world_size: int = 1
    """Number of ranks on this machine."""
    is_embedded: bool = False
    """True if the rank is part of a program that continues after the run: errors are raised, and rank 0 hosts the store
    even if the launcher has a store."""
    cuda_index: int | None = None
    """CUDA device of the rank. None means the device with the number of the local rank."""

    @property
    def cuda_device_index(self) -> int:
        """Number of the rank's CUDA device among the devices that this process sees."""
        return self.local_rank if self.cuda_index is None else self.cuda_index


def read_rank_env(environment: Mapping[str, str] = os.environ) -> RankEnv | None:
    """Read the rank environment of a launcher, or return None if the user started this process.

    torchrun sets RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. `srun` sets SLURM_PROCID,
    SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE and SLURM_NTASKS. The first node of the job is the master, on a port
    derived from the job id. Open MPI, Flux and the PMI of MPICH, Intel MPI and PALS set only ranks: on several machines
    the user sets MASTER_ADDR. SkyPilot starts one process for each node, which is a rank where nodes have at most one
    GPU. Under mpiexec or Flux inside a SLURM step, the ranks of mpiexec or Flux count.

    Raises:
        ConfigError: a launcher's variables are incomplete or invalid, or one process was started for a whole node of
            several, as by PyTorchJob, TrainJob and SkyPilot.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        _check_is_not_a_pod(environment)
        return _parse_env(environment, "RANK", "LOCAL_RANK", "WORLD_SIZE")
    for manager in (_OPEN_MPI, _FLUX):
        if manager.rank in environment and manager.world_size in environment:
            return _parse_managed_env(environment, manager)
    is_slurm_step = "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment
    # `srun --mpi=pmi2` sets PMI_RANK and no local rank. Where a local rank is set, mpiexec started this process.
    has_pmi = _PMI.rank in environment and _PMI.world_size in environment
    if has_pmi and (not is_slurm_step or any(name in environment for name in _PMI.local_rank)):
        return _parse_managed_env(environment, _PMI)
    if is_slurm_step:
        filled = {**_slurm_master(environment), **environment}
        return _parse_env(filled, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
    _check_is_not_a_pod(environment)
    return _parse_skypilot_env(environment)


def is_torchrun() -> bool:
    """Return whether an agent of torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def master_host() -> str:
    """Return the address of rank 0 as its launcher set it, or "" if it set none."""
    return os.environ.get("MASTER_ADDR", "")


def check_world_size(rank_env: RankEnv, world_size: int, sampling_ranks: int = 0) -> None:
    """Check that the launcher started as many processes as the recipe has ranks.

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
    if rank_env.is_embedded and rank_env.world_size != world_size:
        raise ConfigError(
            f"parallel.world_size={world_size} must equal the number of processes of this program, "
            f"{rank_env.world_size}; set parallel.world_size={rank_env.world_size}, start {world_size} processes in "
            "one process group, or call moefold.train_model, which starts the ranks on this machine"
        )
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

    SLURM writes "8(x2),4" for two nodes of eight and one of four. moefold has the same number on every node.
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


def _parse_managed_env(environment: Mapping[str, str], manager: _ProcessManager) -> RankEnv:
    """Parse the environment of a launcher that sets ranks. Add a port, and on one machine an address."""
    local_rank = _first_set(environment, manager.local_rank) or manager.local_rank[0]
    world_size = environment[manager.world_size]
    filled = dict(environment)
    if name := _first_set(environment, manager.local_world_size):
        filled["LOCAL_WORLD_SIZE"] = environment[name]
    elif (nodes := environment.get("FLUX_JOB_NNODES", "")).isdecimal() and int(nodes) and world_size.isdecimal():
        filled["LOCAL_WORLD_SIZE"] = str(-(-int(world_size) // int(nodes)))
    if "MASTER_ADDR" not in filled:
        if filled.get("LOCAL_WORLD_SIZE") != world_size:
            raise ConfigError(
                f"the environment has {manager.rank} but not MASTER_ADDR, and this launcher does not tell where rank 0 "
                "is; set MASTER_ADDR to the host of rank 0 for all ranks (mpirun -x MASTER_ADDR=HOST, "
                "mpiexec -genv MASTER_ADDR HOST, flux run --env=MASTER_ADDR=HOST)"
            )
        filled["MASTER_ADDR"] = "127.0.0.1"
    if "MASTER_PORT" not in filled:
        job = _first_set(environment, manager.job)
        if not job:
            raise ConfigError(
                f"the environment has {manager.rank} but not MASTER_PORT; set it to a free port of the host of rank 0, "
                "the same for all ranks"
            )
        filled["MASTER_PORT"] = _port_of_job(environment[job])
    return _parse_env(filled, manager.rank, local_rank, manager.world_size)


def _first_set(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first name that is set, or "" if no name is set."""
    return next((name for name in names if environment.get(name)), "")


def _port_of_job(job: str) -> str:
    """Return a port from 20000 to 39999 that is the same for all ranks of a job."""
    return str(_FIRST_DERIVED_PORT + zlib.crc32(job.encode()) % _NUM_DERIVED_PORTS)


_TORCHRUN_LINE = "torchrun --no-python moefold train RECIPE"


def _check_is_not_a_pod(environment: Mapping[str, str]) -> None:
    """Refuse a process that is a whole node of a PyTorchJob or TrainJob instead of one rank.

    Kubeflow's operators set PET_* variables for torchrun. RANK and WORLD_SIZE of a PyTorchJob count pods.
    """
    if "PET_NNODES" not in environment or "LOCAL_RANK" in environment:
        return
    if "RANK" in environment:
        raise ConfigError(
            "the environment has RANK but not LOCAL_RANK, as in a pod of a PyTorchJob, whose RANK counts pods; "
            f"make torchrun the command of the container, which reads the PET_ variables: {_TORCHRUN_LINE}"
        )
    if environment["PET_NNODES"] not in ("", "1", "1:1"):
        raise ConfigError(
            f"PET_NNODES={environment['PET_NNODES']!r} in the environment means one of several pods of a TrainJob, and "
            f"no rank is set; make torchrun the command of the container, which reads the PET_ variables: "
            f"{_TORCHRUN_LINE}"
        )


def _parse_skypilot_env(environment: Mapping[str, str]) -> RankEnv | None:
    """Return the rank of a SkyPilot node with one GPU or none. None means a cluster of one node, or no SkyPilot."""
    if environment.get("SKYPILOT_NUM_NODES", "1") == "1" or "SKYPILOT_NODE_RANK" not in environment:
        return None
    gpus = environment.get("SKYPILOT_NUM_GPUS_PER_NODE", "0")
    if gpus not in ("0", "1"):
        raise ConfigError(
            f"SKYPILOT_NUM_GPUS_PER_NODE={gpus} in the environment needs {gpus} processes on each node, and SkyPilot "
            f"starts one; start torchrun in `run:`, or unset SKYPILOT_NUM_NODES for a job on this node only"
        )
    filled = {
        "MASTER_ADDR": environment.get("SKYPILOT_NODE_IPS", "").split("\n")[0].strip(),
        "MASTER_PORT": _port_of_job(environment.get("SKYPILOT_TASK_ID", "")),
        **environment,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    if not filled["MASTER_ADDR"]:
        raise ConfigError("the environment has SKYPILOT_NODE_RANK but not SKYPILOT_NODE_IPS; set MASTER_ADDR")
    return _parse_env(filled, "SKYPILOT_NODE_RANK", "LOCAL_RANK", "SKYPILOT_NUM_NODES")


def _slurm_master(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the master address and port that the environment does not set."""
    master = {}
    if "MASTER_PORT" not in environment:
        job = environment.get("SLURM_JOB_ID", "0")
        master["MASTER_PORT"] = str(_FIRST_DERIVED_PORT + (int(job) if job.isdecimal() else 0) % _NUM_DERIVED_PORTS)
    if "MASTER_ADDR" not in environment:
        master["MASTER_ADDR"] = _first_slurm_node(environment)
    return master


def _first_slurm_node(environment: Mapping[str, str]) -> str:
    """Return the node of rank 0, gpu003-ib for SLURM's list "gpu[003-010,12]-ib,cpu1"."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).split(",")[0]
