"""What the planner must know of the machine that is to train: how many ranks, on what.

Which device the ranks will have, as far as it can be told without torch, which takes seconds to import.
"""

import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from moefold.cost.hardware import device_names, load_device
from moefold.errors import ConfigError
from moefold.host.memory import physical_bytes
from moefold.host.rank_env import RankEnv

MAX_CPU_RANKS = 8
GIB = 2**30


@dataclass(frozen=True)
class DetectedMachine:
    """Ranks and their device."""

    device_type: Literal["cpu", "cuda"]
    """cpu or cuda."""
    device: str
    """Name of the planner's device."""
    num_ranks: int
    """Of the launcher; without one, those that this machine has devices for."""
    is_launched: bool
    """Whether a launcher started that many."""
    memory_gib: float
    """Of all ranks together; 0: what each device has."""
    host: str = ""


def slowest(machines: Sequence[DetectedMachine]) -> DetectedMachine:
    """A machine on which a plan is good for every rank: the device of least memory, then speed, of those there are.

    Args:
        machines: as `detect_machine` tells them on each rank, in the order of the ranks.

    Raises:
        ConfigError: some ranks have GPUs and others have none.
    """
    first = machines[0]
    for rank, machine in enumerate(machines):
        if machine.device_type != first.device_type:
            raise ConfigError(
                f"parallel.mapping='auto' plans for devices of one type: rank 0 on {first.host} has {first.device}, "
                f"and rank {rank} on {machine.host} has {machine.device}; set run.device='cpu', or start ranks on like "
                "machines"
            )
    num_ranks = Counter(machine.host for machine in machines)
    each_gib = min(machine.memory_gib / num_ranks[machine.host] for machine in machines)
    chosen = min(machines, key=lambda machine: _device_capability(machine.device))
    return replace(chosen, memory_gib=each_gib * len(machines))


def _device_capability(name: str) -> tuple[float, float]:
    device = load_device(name)
    return device.memory_gib, device.peak("bf16")


def detect_machine(requested_device: str, rank_env: RankEnv | None) -> DetectedMachine:
    """The machine of this process, without touching a GPU.

    Args:
        requested_device: run.device.
        rank_env: of this process, if a launcher started it.

    Raises:
        ConfigError: the planner does not know the GPU.
    """
    num_gpus = 0 if requested_device == "cpu" else torch.cuda.device_count()
    if num_gpus == 0:
        ranks = rank_env.world_size if rank_env is not None else min(MAX_CPU_RANKS, len(os.sched_getaffinity(0)))
        memory = physical_bytes() / GIB
        return DetectedMachine("cpu", "cpu", ranks, rank_env is not None, memory, socket.gethostname())
    ranks = rank_env.world_size if rank_env is not None else num_gpus
    name = planner_gpu_name(torch.cuda.get_device_name(0))
    return DetectedMachine("cuda", name, ranks, rank_env is not None, 0.0, socket.gethostname())


def planner_gpu_name(driver_name: str) -> str:
    """The planner's name of a GPU that the driver calls "NVIDIA H100 80GB HBM3".

    Raises:
        ConfigError: the planner does not know it.
    """
    words: list[str] = re.findall(r"[a-z]+[0-9]+[a-z]*", driver_name.lower())
    known = [word for word in words if word in device_names()]
    if not known:
        raise ConfigError(
            f"parallel.mapping='auto' does not know the GPU {driver_name!r}; describe it in a file, plan with `moefold "
            "plan RECIPE --gpu FILE.toml --recipe OUT.toml`, and train OUT.toml"
        )
    return known[0]


DEVICE_NODES = ("nvidia*", "nvgpu*", "nvhost*", "nvmap", "dxg", "kfd")
"""What a driver of GPUs that torch knows as cuda makes in /dev: NVIDIA's, Jetson's, that of WSL, AMD's."""


def device_without_torch(
    requested_device: str, world_size: int, rank_env: RankEnv | None, root: Path = Path("/")
) -> str:
    """Return "cpu" where the ranks run there for certain, else "": then torch must be asked (`choose_device`).

    Args:
        requested_device: run.device.
        world_size: ranks of the job.
        rank_env: of this process, if a launcher started it.
        root: where /dev is.

    Raises:
        ConfigError: the wish is cuda, and this machine has no driver of a GPU.
    """
    if requested_device == "cpu":
        return "cpu"
    if not has_no_gpu(root):
        return ""
    if requested_device == "cuda":
        raise ConfigError(missing_gpu_message(requested_device, world_size, rank_env, 0))
    return "cpu"


def has_no_gpu(root: Path = Path("/")) -> bool:
    """Return whether this machine has no GPU for certain: it runs Linux, and no driver of a GPU is loaded."""
    return sys.platform == "linux" and not any(any((root / "dev").glob(node)) for node in DEVICE_NODES)


def missing_gpu_message(requested_device: str, world_size: int, rank_env: RankEnv | None, num_gpus: int) -> str:
    """Return the message for ranks without a GPU of their own."""
    if rank_env is None:
        return (
            f"parallel.world_size={world_size} needs a GPU for each rank, and this machine shows {num_gpus}; "
            "set run.device='cpu', or fewer ranks"
        )
    return (
        f"run.device={requested_device!r} needs a GPU for each rank, and local rank {rank_env.local_rank} finds {num_gpus} on its "
        "machine; start as many ranks on each machine as it has GPUs, or set run.device='cpu'"
    )
