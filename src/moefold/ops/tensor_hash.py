"""Hashes of tensors, for comparing tensors between ranks without sending them."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

CHUNK_WORDS = 1 << 18
"""Number of integers that are multiplied at a time."""
_WORD_BYTES = 8
_SEED = 0
_STRIDE = 0x2545F4914F6CDD1C


class TensorHasher:
    """Hashes of tensors, for comparing tensors between ranks, without communication or a host sync.

    The bytes are read as 64-bit integers x_i. The two hashes are the sums of x_i, and of y_i = x_i xor (x_i >> 31)
    times an odd random number drawn for i, modulo 2**64. Integer sums do not depend on the order, so equal bytes give
    equal hashes on any device. A change of one integer always changes both sums, a swap of two integers the second. An
    odd factor leaves the highest bit (the sign of a weight) in place, so two changed signs would cancel. Therefore y_i,
    which determines x_i, has that bit in a lower position as well.
    """

    def __init__(self, device: torch.device) -> None:
        factors = torch.randint(-(2**63), 2**63 - 1, (CHUNK_WORDS,), generator=torch.Generator().manual_seed(_SEED))
        self._factors = factors.bitwise_or_(1).to(device)

    def digest(self, tensor: Tensor) -> Tensor:
        """Return the two hashes of this rank's shard of a tensor, int64 [2]."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Offloaded moments are on the host.
        words = _as_int64(local.to(self._factors.device))
        chunks = words.split(CHUNK_WORDS)
        # The same index in another chunk has another factor: the product of two odd numbers below 2**63, which is odd.
        weighted = [self._weighted_sum(chunk) * ((i * _STRIDE | 1) % 2**63) for i, chunk in enumerate(chunks)]
        return torch.stack([words.sum(), torch.stack(weighted).sum()])

    def _weighted_sum(self, integers: Tensor) -> Tensor:
        mixed = integers >> 31
        mixed ^= integers
        mixed *= self._factors[: len(integers)]
        return mixed.sum()


def _as_int64(local: Tensor) -> Tensor:
    """Return the bytes of a tensor in the order of its values, as int64. Copy if not contiguous or aligned."""
    flat = local.detach().contiguous().flatten()
    num_bytes = flat.numel() * flat.element_size()
    if num_bytes % _WORD_BYTES == 0 and flat.data_ptr() % _WORD_BYTES == 0:
        return flat.view(torch.int64)
    return nn.functional.pad(flat.view(torch.uint8), (0, -num_bytes % _WORD_BYTES)).view(torch.int64)
