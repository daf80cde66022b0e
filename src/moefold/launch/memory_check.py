"""Memory check of the local machine before its ranks start."""

from collections.abc import Callable

from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.cost.saved_tensors import BytesByPart
from moefold.errors import ConfigError
from moefold.host.memory import AvailableMemory, available_host_memory, available_process_memory
from moefold.host.rank_env import RankEnv
from moefold.launch.accelerator import device_without_torch
from moefold.topology.layout import fold_mapping
from moefold.topology.rollout_mapping import rollout_config
from moefold.validate.memory_need import (
    HostCapacity,
    check_sampling_fits,
    check_training_fits,
    find_shortage,
    inference_weight_memory,
    shortage_message,
)


def choose_device_type(requested_device: str, world_size: int, rank_env: RankEnv | None) -> str:
    """Return the device type of the ranks. On a machine that certainly has no GPU, torch is not imported.

    Raises:
        ConfigError: this machine has fewer GPUs than ranks.
    """
    if device_type := device_without_torch(requested_device, world_size, rank_env):
        return device_type
    from moefold.launch.ranks import choose_device

    return choose_device(requested_device, world_size, rank_env)


def check_training(cfg: Config, device_type: str, rank_env: RankEnv | None) -> None:
    """Check that a training step fits into the memory of this machine or of its smallest GPU.

    Args:
        rank_env: environment of this process, if a launcher started it. Only local rank 0 checks.

    Raises:
        ConfigError: the ranks do not fit, and run.check_memory is true.
    """
    if not cfg.run.check_memory or (rank_env is not None and rank_env.local_rank):
        return
    host = local_host_capacity(cfg.parallel, device_type, rank_env)
    if host.pp_ranks:
        check_training_fits(cfg, host)
    if cfg.rollout.ranks:
        sampling = local_host_capacity(rollout_config(cfg).parallel, device_type, rank_env, cfg.parallel.world_size)
        if sampling.pp_ranks:
            check_sampling_fits(cfg, sampling, host.pp_ranks)


def check_inference(
    cfg: Config,
    device_type: str,
    rank_env: RankEnv | None,
    *,
    extra_bytes: Callable[[str], dict[str, int]],
    suggestion: str,
) -> None:
    """Check that a model for inference fits into the memory of this machine.

    Args:
        extra_bytes: returns the bytes of each rank in addition to the weights, by name, on a type of device, or raises.
        suggestion: last part of the error message: smaller settings to try.

    Raises:
        ConfigError: weights and extra bytes do not fit.
    """
    extra = BytesByPart(extra_bytes(device_type))
    if rank_env is not None and rank_env.local_rank:
        return
    needs = tuple(BytesByPart(stage) + extra for stage in inference_weight_memory(cfg))
    if (shortage := find_shortage(needs, local_host_capacity(cfg.parallel, device_type, rank_env))) is not None:
        raise ConfigError(f"the model does not fit into memory: {shortage_message(shortage)}; {suggestion}")


def local_host_capacity(
    parallel: ParallelConfig, device_type: str, rank_env: RankEnv | None, first_rank: int = 0
) -> HostCapacity:
    """Return the memory of this machine and the pipeline ranks of its ranks that have a mapping.

    Args:
        first_rank: rank in the job of the first rank of the mapping.
    """
    layout = fold_mapping(parallel)
    first, count = (
        (first_rank, parallel.world_size)
        if rank_env is None
        else (rank_env.rank - rank_env.local_rank, rank_env.local_world_size)
    )
    ranks = range(max(0, first - first_rank), min(first + count - first_rank, parallel.world_size))
    pp_ranks = tuple(layout.attention.coordinate(rank, "pp") for rank in ranks)
    if device_type == "cuda":
        import torch

        num_gpus = min(len(pp_ranks), torch.cuda.device_count())
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(num_gpus)]
        return HostCapacity(device_type, pp_ranks, AvailableMemory(min(sizes), "on the GPU of a rank"))
    return HostCapacity(device_type, pp_ranks, available_host_memory(), available_process_memory())
