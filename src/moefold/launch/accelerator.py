"""Detect an accelerator without importing torch."""

import sys
from pathlib import Path

from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.message_text import Names, Setting

DEVICE_NODES = ("nvidia*", "nvgpu*", "nvhost*", "nvmap", "dxg", "kfd")
"""Device nodes in /dev of the GPU drivers that torch calls "cuda": NVIDIA, Jetson, WSL, AMD."""


def device_without_torch(
    requested_device: str, world_size: int, rank_env: RankEnv | None, root: Path = Path("/")
) -> str:
    """Return "cpu" if the ranks certainly run on the CPU. Otherwise return "": `choose_device` must query torch.

    Raises:
        ConfigError: cuda is requested, and this machine has no GPU driver.
    """
    if requested_device == "cpu":
        return "cpu"
    if not has_no_gpu(root):
        return ""
    if requested_device == "cuda":
        raise ConfigError(missing_gpu_message(requested_device, world_size, rank_env, 0))
    return "cpu"


def has_no_gpu(root: Path = Path("/")) -> bool:
    """Return whether this machine certainly has no GPU: Linux without a loaded GPU driver."""
    return sys.platform == "linux" and not any(any((root / "dev").glob(node)) for node in DEVICE_NODES)


DEVICE_NAMES: Names = {"run.device": "--device", "parallel.world_size": Setting("run.device", "cuda")}
"""Names of settings in the messages of commands that start as many ranks as they need."""


def missing_gpu_message(requested_device: str, world_size: int, rank_env: RankEnv | None, num_gpus: int) -> str:
    """Return the error message for a machine with fewer GPUs than ranks."""
    if rank_env is None:
        fewer = f", or at most {num_gpus} ranks" if num_gpus else ""
        return (
            f"{Setting('parallel.world_size', world_size)} needs a GPU for each rank, and this machine shows "
            f"{num_gpus}; set {Setting('run.device', 'cpu')}{fewer}"
        )
    return (
        f"{Setting('run.device', requested_device)} needs a GPU for each rank, and local rank {rank_env.local_rank} "
        f"finds {num_gpus} on its machine; start as many ranks on each machine as it has GPUs, or set "
        f"{Setting('run.device', 'cpu')}"
    )
