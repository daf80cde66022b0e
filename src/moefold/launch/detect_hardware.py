"""Hardware detection: number of ranks, device and memory of this machine for the planner.

`device_without_torch` determines the device type without importing torch, which takes seconds.
"""

import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from moefold.cost.hardware import DetectedMachine, device_names, load_device
from moefold.errors import ConfigError
from moefold.host.memory import physical_bytes
from moefold.host.rank_env import RankEnv
from moefold.units import GIB

MAX_CPU_RANKS = 8


def slowest_machine(machines: Sequence[DetectedMachine]) -> DetectedMachine:
    """Return the machine to plan for: the device with the least memory, then the lowest peak, over all ranks' devices.

    Raises:
        ConfigError: only some of the ranks have GPUs.
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
    slowest = min(machines, key=lambda machine: _device_capability(machine.device))
    return replace(slowest, memory_gib=each_gib * len(machines))


def _device_capability(name: str) -> tuple[float, float]:
    device = load_device(name)
    return device.memory_gib, device.peak("bf16")


def detect_machine(requested_device: str, rank_env: RankEnv | None) -> DetectedMachine:
    """Detect the machine of this process without initialising a GPU.

    Raises:
        ConfigError: the planner has no description of the GPU.
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
    """Return the planner's name of a GPU, given the driver's name such as "NVIDIA H100 80GB HBM3".

    Raises:
        ConfigError: the planner has no description of this GPU.
    """
    words: list[str] = re.findall(r"[a-z]+[0-9]+[a-z]*", driver_name.lower())
    names = [word for word in words if word in device_names()]
    if not names:
        raise ConfigError(
            f"parallel.mapping='auto' does not support the GPU {driver_name!r}; describe it in a file, plan with "
            "`moefold plan RECIPE --gpu FILE.toml --recipe OUT.toml`, and train OUT.toml"
        )
    return names[0]
