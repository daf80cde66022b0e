"""Check of the settings of a training step against the type of device that will run it."""

from moefold.config.schema import Config
from moefold.ops.kernel_support import check_kernel_device
from moefold.validate.cuda_graphs import check_cuda_graphs_device
from moefold.validate.memory_savings import check_memory_device, check_offload_device
from moefold.validate.moe import check_dispatch_device


def check_device(cfg: Config, device_type: str) -> None:
    """Check that a type of device supports the settings of a training step.

    Inference has neither CUDA graphs of a step nor states to offload: it calls `check_kernel_device` alone.

    Raises:
        ConfigError: the device does not support a setting.
    """
    check_dispatch_device(cfg.model, cfg.parallel, device_type)
    check_kernel_device(cfg.run, device_type)
    check_cuda_graphs_device(cfg.run, device_type)
    check_offload_device(cfg.train, device_type)
    check_memory_device(cfg, device_type)
