"""Copy of a tensor whose dims are permuted, such as transposed experts."""

from torch import Tensor


def copy_permuted(target: Tensor, source: Tensor) -> None:
    """Copy values that may lie transposed in memory, in blocks that fit the cache.

    `Tensor.copy_` does so for two matrices of one dtype alone; otherwise it reads one value of each cache line.

    Args:
        target: of any strides.
        source: of the same shape up to dims of size 1; contiguous, or a permutation of a contiguous tensor.
    """
    target = target.squeeze()
    source = source.squeeze().to(target.dtype)
    if target.dim() > 2 and source.stride(-1) != 1 and source.stride(-2) == 1:
        for one, other in zip(target, source, strict=True):
            copy_permuted(one, other)
        return
    if source.dim() == 2 and source.stride(0) == 1 and not target.is_contiguous():
        source = source.contiguous()
    target.copy_(source)
