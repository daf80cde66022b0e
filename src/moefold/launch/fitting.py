"""Ask the machine whether the ranks that it is to run fit into its memory, before they start. Torch-free on the CPU."""

from collections.abc import Callable

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.host.memory import AvailableMemory, available_host_memory, available_process_memory
from moefold.host.rank_env import RankEnv
from moefold.launch.accelerator import device_without_torch
from moefold.topology.layout import fold
from moefold.validate.memory_need import (
    BytesByPart,
    HostCapacity,
    check_training_fits,
    find_shortage,
    inference_weight_memory,
    shortage_message,
)


def choose_checked_device(
    requested_device: str, world_size: int, rank_env: RankEnv | None, check: Callable[[str], None]
) -> str:
    """Return the device type of the ranks, after a check of what they will need there.

    Where there is no GPU for certain, the check comes before torch is imported.

    Args:
        requested_device: run.device.
        world_size: ranks of the job.
        rank_env: of this process, if a launcher started it.
        check: called with the device type; raises if it is not to start.

    Raises:
        ConfigError: there are fewer GPUs than ranks on this machine, or the check raised it.
    """
    device_type = device_without_torch(requested_device, world_size, rank_env)
    if not device_type:
        from moefold.launch.ranks import choose_device

        device_type = choose_device(requested_device, world_size, rank_env)
    check(device_type)
    return device_type


def check_training(cfg: Config, device_type: str, rank_env: RankEnv | None) -> None:
    """Refuse a training step for which this machine, or a GPU of it, has too little memory.

    Args:
        cfg: a recipe that `check_config` passed.
        device_type: "cpu" or "cuda".
        rank_env: of this process, if a launcher started it; the first of a machine asks for all of it.

    Raises:
        ConfigError: the ranks do not fit, and run.check_memory is true.
    """
    if cfg.run.check_memory and (rank_env is None or rank_env.local_rank == 0):
        check_training_fits(cfg, local_host_capacity(cfg, device_type, rank_env))


def check_inference(
    cfg: Config, device_type: str, rank_env: RankEnv | None, *, extra_bytes: dict[str, int], suggestion: str
) -> None:
    """Refuse a model that is to compute without learning, for which this machine has too little memory.

    Args:
        cfg: one that `check_config` passed.
        device_type: "cpu" or "cuda".
        rank_env: as of `check_training`.
        extra_bytes: bytes of what each rank has in memory beside the weights, by name.
        suggestion: what to ask for instead.

    Raises:
        ConfigError: weights and extra do not fit.
    """
    if rank_env is not None and rank_env.local_rank:
        return
    needs = tuple(BytesByPart(part) + BytesByPart(extra_bytes) for part in inference_weight_memory(cfg))
    if (short := find_shortage(needs, local_host_capacity(cfg, device_type, rank_env))) is not None:
        raise ConfigError(f"the model does not fit into memory: {shortage_message(short)}; {suggestion}")


def local_host_capacity(cfg: Config, device_type: str, rank_env: RankEnv | None) -> HostCapacity:
    """Return the machine of this process with the ranks of the job that run on it."""
    p = cfg.parallel
    layout = fold(
        world_size=p.world_size, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order, moe_order=p.moe_order
    )
    first, count = (
        (0, p.world_size) if rank_env is None else (rank_env.rank - rank_env.local_rank, rank_env.local_world_size)
    )
    ranks = range(first, min(first + count, p.world_size))
    pp_ranks = tuple(layout.attention.coordinate(rank, "pp") for rank in ranks)
    if device_type == "cuda":
        return HostCapacity(device_type, pp_ranks, _smallest_gpu_memory(len(pp_ranks)))
    return HostCapacity(device_type, pp_ranks, available_host_memory(), available_process_memory())


def _smallest_gpu_memory(count: int) -> AvailableMemory:
    """The least memory of the first so many GPUs, used or not."""
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(min(count, torch.cuda.device_count()))]
    return AvailableMemory(min(sizes), "on the GPU of a rank")
