"""Sizes and kernels of one micro-batch on one rank."""

from dataclasses import dataclass
from functools import cached_property

from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.train import TrainConfig
from moefold.cost.saved_tensors import KernelProfile


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatchSizes:
    """Sizes and kernels of one micro-batch on one rank, on which its memory depends."""

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    moe: MoEConfig
    recompute: frozenset[str]
    """Parts that are recomputed."""
    kernels: KernelProfile
    """Kernel profile of the device."""
    kernel_choice: str
    """`run.kernels`."""
    item_bytes: int
    """Bytes of a number in the compute type."""
    imbalance: float
    """Routed tokens of the busiest rank over the mean of all ranks."""

    @cached_property
    def high_precision_bytes(self) -> int:
        """Bytes of a number in float32, or in the compute type if that is wider."""
        return max(4, self.item_bytes)

    @cached_property
    def gathered_tokens(self) -> int:
        """Tokens inside the sub-layers, N."""
        return self.train.seq_len // self.parallel.cp * self.train.micro_batch_size

    @cached_property
    def tokens(self) -> int:
        """Tokens between the sub-layers, T."""
        return self.gathered_tokens // self.parallel.tp
