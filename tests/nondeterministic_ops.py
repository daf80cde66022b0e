"""Operators without a deterministic implementation on CUDA, found on any device."""

from typing import Any

from torch import Tensor

from benchmarks.torch_operators import operator_name
from moefold.comm.private_torch import TorchDispatchMode, tree_leaves

ALWAYS = {
    "_ctc_loss_backward", "_histc", "bincount", "cummax", "cumprod", "grid_sampler_2d_backward", "histc", "kthvalue",
    "logcumsumexp", "median", "nanmedian", "nll_loss_backward", "nll_loss_forward", "nll_loss2d_backward",
    "nll_loss2d_forward", "put", "put_",
}  # fmt: skip
"""Operators that raise under `torch.use_deterministic_algorithms(True)`, by the documentation of that function in torch
2.11 and 2.13, as far as a language model could use them; some of these raise for a part of their arguments only."""
FLOATING = {"cumsum", "cumsum_"}
"""Operators that raise for floating-point numbers."""


class NondeterministicOps(TorchDispatchMode):
    """Dispatch mode that collects the names of such operators, whichever device they run on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = operator_name(func)
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        if name in ALWAYS or (name in FLOATING and any(x.is_floating_point() for x in tensors)):
            self.found.add(name)
        return result
