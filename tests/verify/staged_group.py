"""Process group that carries tensors through host memory and gloo, so that several ranks can share one GPU.

NCCL refuses two ranks on one device. This back-end copies the tensors of a collective to the host, runs it with gloo
and copies the results back. It is slow and exact: it shows that the code of several ranks works on CUDA tensors
(devices, dtypes, strides, streams, kernels), not how fast it is. On the CPU it copies too, and gives the results of
gloo.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

STAGED = "staged"
"""Name of the back-end."""
ProcessGroup: Any = dist.ProcessGroup
"""Base class without its annotations, whose names and overloads differ between versions of torch."""


def init_staged_group(**options: Any) -> None:
    """Initialise the default process group with the back-end, which is registered once per process."""
    if STAGED not in dist.Backend.backend_list:
        dist.Backend.register_backend(STAGED, StagedGroup, devices=["cpu", "cuda"])
    dist.init_process_group(STAGED, **options)


class StagedGroup(ProcessGroup):
    """Process group with the collectives that training uses, each through a copy on the host.

    Args:
        store: rendezvous of the members.
        rank: rank of this process in the group.
        size: number of members.
        timeout: limit of a collective.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce a tensor over all members, in place."""
        hosts = [_to_host(tensor) for tensor in tensors]
        for host in hosts:
            self._gloo.allreduce([host], opts or dist.AllreduceOptions()).wait()
        return _finish(tensors, hosts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce several tensors over all members, in place."""
        return self.allreduce(tensors, _allreduce_options(opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Overwrite a tensor with the root's tensor."""
        hosts = [_to_host(tensor) for tensor in tensors]
        self._gloo.broadcast(hosts, opts or dist.BroadcastOptions()).wait()
        return _finish(tensors, hosts)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        """Gather the tensors of all members in one tensor."""
        host = _empty_on_host(out)
        self._gloo._allgather_base(host, _to_host(x), c10d.AllgatherOptions()).wait()
        return _finish([out], [host])

    def allgather(self, outs: list[list[Tensor]], xs: list[Tensor], opts: Any = None) -> Any:
        """Gather the tensors of all members in lists."""
        hosts = [[_empty_on_host(out) for out in group] for group in outs]
        self._gloo.allgather(hosts, [_to_host(x) for x in xs], c10d.AllgatherOptions()).wait()
        return _finish_lists(outs, hosts)

    def all_gather_single_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> Any:
        """Gather several tensors of all members, each in one tensor."""
        for out, x in zip(outs, xs, strict=True):
            self.all_gather_single(out, x)
        return _completed(outs)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        """Reduce a tensor over all members and keep this member's part."""
        total = _to_host(x)
        options = _allreduce_options(opts)
        # gloo does not average.
        averages = options.reduceOp == dist.ReduceOp.AVG
        if averages:
            options.reduceOp = dist.ReduceOp.SUM
        self._gloo.allreduce([total], options).wait()
        own = total.view(self._size, -1)[self._rank].view(out.shape)
        return _finish([out], [own / self._size if averages else own])

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> Any:
        """Reduce several tensors and keep this member's part of each."""
        for out, x in zip(outs, xs, strict=True):
            self.reduce_scatter_single(out, x, opts)
        return _completed(outs)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], opts: Any = None
    ) -> Any:
        """Exchange parts of one tensor between all members."""
        host = _empty_on_host(out)
        options = dist.AllToAllOptions()
        self._gloo.alltoall_base(host, _to_host(x), list(out_splits), list(in_splits), options).wait()
        return _finish([out], [host])

    def gather(self, outs: list[list[Tensor]], xs: list[Tensor], opts: Any = None) -> Any:
        """Gather the tensors of all members on the root."""
        hosts = [[_empty_on_host(out) for out in group] for group in outs]
        self._gloo.gather(hosts, [_to_host(x) for x in xs], opts or c10d.GatherOptions()).wait()
        return _finish_lists(outs, hosts)

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> Any:
        """Send a tensor to a member."""
        (tensor,) = tensors
        host = _to_host(tensor)
        return _Message(self._gloo.send([host], destination, tag), host, None)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        """Receive a tensor from a member."""
        (out,) = tensors
        host = _empty_on_host(out)
        return _Message(self._gloo.recv([host], source, tag), host, out)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all members."""
        self._gloo.barrier().wait()
        return _completed(None)

    # The names of these collectives in torch before 2.13, and in calls by operators.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def size(self) -> int:
        """Return the number of members."""
        return self._size

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self._rank

    @property
    def group_name(self) -> str:
        """Name that torch.distributed gave the group."""
        name: str = c10d._world.pg_names[self]
        return name

    def getBackendName(self) -> str:
        """Return the name of the back-end."""
        return STAGED


class _Message:
    """Handle of a point-to-point message; `wait` copies the received bytes to its tensor."""

    def __init__(self, work: Any, host: Tensor, out: Tensor | None) -> None:
        self._work = work
        # Gloo reads or writes it until the message is complete.
        self._host = host
        self._out = out

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message."""
        self._work.wait()
        if self._out is not None:
            self._out.detach().copy_(self._host)
            self._out = None
        return True

    def is_completed(self) -> bool:
        """Return whether the message was sent or has arrived."""
        return bool(self._work.is_completed())


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _empty_on_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _allreduce_options(opts: Any) -> Any:
    options = dist.AllreduceOptions()
    if opts is not None:
        options.reduceOp = opts.reduceOp
    return options


def _finish(outs: Sequence[Tensor], hosts: Sequence[Tensor]) -> Any:
    """Copy the results to their tensors and return a completed work handle."""
    for out, host in zip(outs, hosts, strict=True):
        out.detach().copy_(host)
    return _completed(outs)


def _finish_lists(outs: list[list[Tensor]], hosts: list[list[Tensor]]) -> Any:
    """Copy lists of results to their tensors and return a completed work handle."""
    for group, group_hosts in zip(outs, hosts, strict=True):
        _finish(group, group_hosts)
    return _completed(outs)


def _completed(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)
