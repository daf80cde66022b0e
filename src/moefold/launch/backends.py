"""List the communication backends that this build of torch has."""

import torch.distributed as dist


def available_backends() -> list[str]:
    """Return the names of the usable backends of torch.distributed; empty if torch was built without it."""
    if not dist.is_available():
        return []
    checks = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    return [name for name, is_available in checks.items() if is_available()]
