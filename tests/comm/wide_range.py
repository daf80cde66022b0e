"""A vector whose values have many magnitudes."""

import torch


def vector(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values over many magnitudes, with zeros, denormals and a block of zeros."""
    x = torch.randn(numel, dtype=dtype) * 10.0 ** torch.randint(-6, 3, (numel,))
    if numel > 600:
        x[256:512] = 0
        x[512:515] = torch.tensor([1e-42, -1e-44, 0.0])
    return x
