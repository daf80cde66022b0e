"""Gathered parameters of the ranks of one machine: one copy in shared memory.

Each rank writes its shards. FSDP gathers into its own buffer and copies each parameter from there, on each rank. Under
ZeRO 1 and 2, where parameters stay gathered for a step, the ranks of one machine read the same pages instead. A rank
writes its shards, cast to the compute type, and nothing is copied out.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moefold.comm.groups import Group
from moefold.comm.private_torch import foreach_copy_, fsdp_param_group, fsdp_shard, replace_fsdp_gather
from moefold.comm.shared_memory import PipeBarrier, SharedExchange, open_shared_memory
from moefold.errors import RunError

ALIGNMENT = 64
"""Bytes of the alignment of torch's own allocations on a CPU."""


@dataclass(frozen=True)
class _Gathered:
    """A parameter in the shared memory."""

    shard: Callable[[], Tensor]
    """Returns this rank's padded shard, flat."""
    values: Tensor
    """All shards, flat, in the order of the members."""
    own_shard: Tensor
    """The part of `values` that this rank writes. It does not share the version counter of `values`."""


def open_shared_gather(modules: Sequence[FSDPModule], exchange: SharedExchange) -> list[Tensor]:
    """Let FSDP modules gather into memory that the members of an exchange share. It is collective over its group.

    Modules that have been gathered before stay unchanged. So do modules with a parameter that is cut along another dim
    than the first, because its shards are not contiguous in the gathered parameter.

    Args:
        modules: FSDP modules over the group of the exchange, in the same order on all members.

    Returns:
        The gathered parameters. They hold memory of all processes, whether they are in use or not.
    """
    groups = [group for group in map(fsdp_param_group, modules) if group is not None and _is_served(group)]
    members = exchange.group
    offsets: list[int] = []
    end = 0
    for param in (param for group in groups for param in group.fsdp_params):
        offsets.append(end)
        num_bytes = param.padded_sharded_param_size.numel() * members.size * _gathered_dtype(param).itemsize
        end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if not groups:
        return []
    try:
        memory = open_shared_memory(end, members, "the gathered parameters").numpy()
    except RunError:
        # On all members: one of them lacks the memory. FSDP continues to gather by the exchange.
        return []
    starts = iter(offsets)
    outputs = []
    for number, group in enumerate(groups):
        params = [_place(param, memory, next(starts), members) for param in group.fsdp_params]
        gather = _Gather(number, params, exchange.barrier, members.comm_timer.waiting)
        outputs += [param.values for param in params]
        replace_fsdp_gather(group, [param.values for param in params], gather)
    return outputs


class _Gather:
    """All-gather of the parameters of one FSDP module."""

    def __init__(
        self,
        number: int,
        params: Sequence[_Gathered],
        barrier: PipeBarrier,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._operation = f"the gather of module {number}"
        self._params = params
        self._barrier = barrier
        self._waiting = waiting

    @torch.no_grad()
    def __call__(self) -> None:
        """Write this rank's shards when no member reads the old values any more, and return when all have written."""
        with self._waiting():
            self._barrier.wait(self._operation)
            foreach_copy_([param.own_shard for param in self._params], [param.shard() for param in self._params])
            self._barrier.wait(self._operation)


def _is_served(group: Any) -> bool:
    for param in group.fsdp_params:
        param.init_dtype_attrs(group.mp_policy)
    return all(
        param.fsdp_placement.dim == 0 and not param.all_gather_outputs and not param.offload_to_cpu
        for param in group.fsdp_params
    )


def _gathered_dtype(param: Any) -> torch.dtype:
    return param.param_dtype or param.orig_dtype


def _place(param: Any, memory: Any, offset: int, members: Group) -> _Gathered:
    """Return a parameter at an offset of the memory, with its own storage, because caches find weights by storages."""
    dtype = _gathered_dtype(param)
    numel = param.padded_sharded_param_size.numel()
    values = torch.frombuffer(memory, dtype=dtype, count=numel * members.size, offset=offset)
    shard = torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset + members.rank * numel * dtype.itemsize)
    return _Gathered(partial(fsdp_shard, param), values, shard)
