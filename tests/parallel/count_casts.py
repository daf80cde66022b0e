"""A count of the casts of parameters."""

import torch

from moefold.comm.private_torch import CAST_OP, TorchDispatchMode


class CountCasts(TorchDispatchMode):
    """Counts the casts of parameters from float32 to bfloat16."""

    def __init__(self, parameters):
        super().__init__()
        self._addresses = {p.data_ptr() for p in parameters}
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is CAST_OP and result.dtype == torch.bfloat16 and args[0].data_ptr() in self._addresses:
            self.count += 1
        return result
