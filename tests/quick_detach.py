"""`Tensor.detach` of a DTensor by its shard, in the ranks of the tests.

torch propagates the sharding of an operator once for every shape and placement, which takes 2 ms. In a long run that is
nothing; a rank of a test, which takes two steps, spends a seventh of its time on `detach` alone, most of it in FSDP.
`test_preload.py` asserts that the result is torch's.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

DETACH = torch.ops.aten.detach.default


def detach_by_shard() -> None:
    """Let this process, and those forked from it, detach DTensors by their shards."""
    DTensor._op_dispatcher._custom_op_handlers[DETACH] = _detach


def _detach(op: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    (tensor,) = args
    return DTensor(tensor._local_tensor.detach(), tensor._spec, requires_grad=False)
