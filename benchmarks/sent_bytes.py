"""Bytes that a rank sends to others in the collectives and messages of c10d."""

from typing import Any

from torch import Tensor

from benchmarks.torch_operators import operator_name, process_group_rank, process_group_size
from moefold.comm.private_torch import TorchDispatchMode, tree_leaves


class SentBytesCounter(TorchDispatchMode):
    """Dispatch mode that sums the bytes that this process sends to others in collectives and messages.

    Attributes:
        sent_bytes: bytes sent so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count its bytes if it is of c10d."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.sent_bytes += self._sent_bytes(operator_name(func), args)
        return result

    def _sent_bytes(self, name: str, args: tuple[Any, ...]) -> float:
        if name.startswith(("recv", "barrier", "monitored_barrier")):
            return 0.0
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if name == "send":
            return float(sum(x.nbytes for x in tensors))
        size = process_group_size(args)
        if name == "alltoall_base_" and args[4]:
            rows = tensors[1]
            local_rows = args[4][process_group_rank(args)]
            return float(rows.nbytes - local_rows * rows[:1].nbytes)
        return sent_bytes(name, args, size)


def sent_bytes(name: str, args: tuple[Any, ...], size: int) -> float:
    """Return the bytes that a rank sends to other ranks in a collective of c10d."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    others = (size - 1) / size
    if "alltoall" in name:
        return tensors[1].nbytes * others
    if "allgather" in name:
        return tensors[1].nbytes * (size - 1)
    if "reduce_scatter" in name:
        return tensors[1].nbytes * others
    return 2 * tensors[0].nbytes * others
