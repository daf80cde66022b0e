"""The private names of torch that the package uses.

They are checked on torch 2.11, 2.12 and 2.13. No other module may use a name of torch that begins with an underscore
(tests/architecture). Before the upper limit of torch in pyproject.toml is raised, check each name against the new
version.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "FakeStore",
    "StorageInfo",
    "TorchDispatchMode",
    "TreeSpec",
    "tree_flatten",
    "tree_iter",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

CHECKED_TORCH_VERSIONS = ("2.11", "2.12", "2.13")

foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_
foreach_zero_ = torch._foreach_zero_
CAST_OP = torch.ops.aten._to_copy.default
"""The operator of `Tensor.to(dtype)`."""


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage object, which differs from the addresses of all other storages alive."""
    return storage._cdata


def tensor_version(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor and its views."""
    return tensor._version


def import_compiler() -> None:
    """Import torch's compiler before ranks are forked. Otherwise the first step of each rank does, in a second."""
    torch.compiler.disable(lambda: None)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, without a node in the autograd graph, and other tensors unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shard_in_graph(tensor: DTensor) -> Tensor:
    """Return the local shard of a DTensor as a node of the autograd graph, like `DTensor.to_local`."""
    return _LocalShard.apply(tensor)


def dtensor_like(like: DTensor, shard: Tensor) -> DTensor:
    """Return a DTensor of another shard with the same shape and type. Torch's operators take 2 ms for it."""
    return DTensor(shard, like._spec, requires_grad=False)  # type: ignore[call-arg]


def zeros_like_shard(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros of a type with the shape and placements of a tensor or DTensor."""
    if isinstance(like, DTensor) and like.dtype == dtype:
        return dtensor_like(like, torch.zeros_like(like._local_tensor))
    return torch.zeros_like(like, dtype=dtype)


def as_parameter(tensor: DTensor) -> DTensor:
    """Make a parameter of a DTensor that nothing else holds, without the detach of `nn.Parameter`, which takes 2 ms."""
    tensor._is_param = True
    tensor.requires_grad_()
    return tensor


def allocate(module: nn.Module, device: torch.device) -> None:
    """Replace meta parameters and buffers by uninitialised memory like `to_empty`, but shard by shard."""

    def empty(tensor: Tensor) -> Tensor:
        shard = torch.empty_like(local_tensor(tensor), device=device)
        return dtensor_like(tensor, shard) if isinstance(tensor, DTensor) else shard

    module._apply(empty)


class _LocalShard(torch.autograd.Function):
    """`DTensor.to_local` without a copy and checks of the placements: 0.2 ms less for each use of a parameter."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec = tensor._spec
        shard = tensor._local_tensor
        ctx.stride = shard.stride()
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        if grad is None:
            return None
        if grad.stride() == ctx.stride:
            return DTensor(grad, ctx.spec, requires_grad=False)  # type: ignore[call-arg]
        spec = ctx.spec
        return DTensor.from_local(grad, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)


def sharded_axes(tensor: DTensor) -> list[tuple[int, int]]:
    """Return the mesh axes that shard a DTensor with the dims that they shard, in the order of the cuts.

    Axes cut from left to right, except that FSDP, whose axis comes first, cuts the shards of tensor or expert
    parallelism (`_StridedShard`).
    """
    axes = [(axis, placement) for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    axes.sort(key=lambda entry: isinstance(entry[1], _StridedShard))
    return [(axis, placement.dim) for axis, placement in axes]  # type: ignore[attr-defined]  # no partial ones


# Autograd.


def innermost_saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the pack and unpack hooks that are active for saved tensors, or None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def is_in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def drain_backward_queue() -> None:
    """Free the graph of a backward pass that ended with an exception in this thread.

    The nodes that were ready to run stay in the thread's queue and hold the graph, and the objects of its hooks. The
    engine drops them when a later backward pass reaches them. It runs nodes that were created later first, and counts
    the nodes of each thread from 0: the only node of another thread comes after all other nodes.
    """
    leaves: list[Tensor] = []
    thread = threading.Thread(target=lambda: leaves.append(torch.ones((), requires_grad=True).clone()))
    thread.start()
    thread.join()
    leaves[0].backward()  # type: ignore[no-untyped-call]


# Kernels of the CPU and of CUDA that torch chooses by itself and does not export.


def has_amx_tiles() -> bool:
    """Return whether torch sees a processor with AMX tiles."""
    is_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return is_supported is not None and bool(is_supported())


def has_onednn_linear() -> bool:
    """Return whether torch was built with oneDNN's linear operator."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """Return x @ w.T, [M, N], by oneDNN's linear operator."""
    return torch.ops.mkldnn._linear_pointwise(x_MK, w_NK, None, "none", [], "")


def cpu_flash_attention() -> Any:
    """Return the operator of flash attention on the CPU: out and log-sum-exp."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def cpu_flash_attention_backward() -> Any:
    """Return the operator of the backward pass of flash attention on the CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cuda_flash_attention() -> Any:
    """Return the operator of flash attention on CUDA, with windows: out, log-sum-exp, and the state of dropout."""
    return torch.ops.aten._flash_attention_forward


def cuda_flash_attention_reads_pages() -> bool:
    """Return whether flash attention on CUDA takes a block table, and so reads the pages of a cache."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    return {"seqused_k", "block_table", "num_splits"} <= {argument.name for argument in schema.arguments}


def cuda_flash_attention_backward() -> Any:
    """Return the operator of the backward pass of flash attention on CUDA."""
    return torch.ops.aten._flash_attention_backward


def cudnn_attention() -> Any:
    """Return the operator of cuDNN attention: out, log-sum-exp [B, heads, Sq, 1], and seven unused outputs."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention


def cudnn_attention_backward() -> Any:
    """Return the operator of the backward pass of cuDNN attention."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward


# Assertions.


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail on the device with a message if a scalar bool tensor is False. The host does not wait for it."""
    torch._assert_async(condition, message)


# Process groups.


def nccl_options(timeout: timedelta, *, is_high_priority: bool) -> Any:
    """Return the options of a NCCL group.

    Args:
        timeout: the group's timeout. torch warns if its options have another timeout.
        is_high_priority: whether its kernels run on a stream of high priority: a waiting block of theirs is scheduled
            before blocks of GEMMs.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_high_priority)
    options._timeout = timeout
    return options


def gloo_backend(handle: dist.ProcessGroup | None) -> Any:
    """Return the gloo backend of a process group that has no other, or None for other groups."""
    if handle is None or dist.get_backend(handle) not in ("gloo", _SHARED_LOOP):
        return None
    backend = handle._get_backend(torch.device("cpu"))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL it is wrapped.
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def register_shared_loop() -> str:
    """Return the name of a back-end whose groups are gloo groups on the connections of the default group's device.

    Each group of the back-end "gloo" has a device with a thread of its own, which wakes up 100 times a second.
    """

    def create(options: Any, _: Any) -> Any:
        shared = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        shared._devices = gloo_backend(dist.group.WORLD).options._devices
        shared._threads = 2 * len(shared._devices)
        shared._timeout = options.timeout
        shared.global_ranks_in_group = options.global_ranks_in_group
        shared.group_name = options.group_id
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, shared)

    if _SHARED_LOOP.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_SHARED_LOOP, create, extended_api=True, devices=["cpu"])
    return _SHARED_LOOP


_SHARED_LOOP = "gloo_of_world"


def release_mesh_groups(mesh: DeviceMesh) -> None:
    """Drop the process groups that a mesh holds, which must not be used any more.

    The dispatch of DTensors keeps meshes until the process ends, and torch 2.11 keeps their groups in them.
    """
    getattr(mesh, "_pg_registry", {}).clear()


_GROUP_TABLES = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
)
"""torch.distributed's tables of the process groups of this process."""


@contextmanager
def without_process_groups() -> Iterator[None]:
    """Run the block as in a process without process groups. Restore the existing groups after it.

    A default process group can be created and destroyed in the block without destroying a group from outside. The
    outside groups must not be used meanwhile. Caches that hold device meshes are emptied, as these keep groups that are
    destroyed.
    """
    c10d = torch.distributed.distributed_c10d
    world = c10d._world
    tables = [getattr(c10d, name) for name in _GROUP_TABLES] + [world._pg_coalesce_state]
    contents = [dict(table) for table in tables]
    communicators = list(world._comms)
    count = c10d._group_count
    default = world.default_pg
    init_method = c10d._default_pg_init_method
    excepthook = sys.excepthook
    forget_process_groups()
    try:
        yield
    finally:
        forget_process_groups()
        for table, content in zip(tables, contents, strict=True):
            table.update(content)
        world._comms.extend(communicators)
        c10d._group_count = count
        c10d._default_pg_init_method = init_method
        c10d._update_default_pg(default)
        for group, name in c10d._pg_names.items():
            torch._C._distributed_c10d._register_process_group(name, group)
        # torch.distributed prefixes tracebacks with the rank, once for each default process group.
        sys.excepthook = excepthook


def abort_process_groups() -> None:
    """Abort all process groups of this process, from any thread.

    Pending collectives of NCCL end with an error (ncclCommAbort). gloo has nothing to abort: its connections close when
    the groups are freed. The NCCL path has not run on a GPU.
    """
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        group.abort()


def forget_process_groups() -> None:
    """Empty torch's tables and caches of process groups. It destroys none.

    A group is freed, and the connections of gloo close, once no module, mesh or stack frame holds it.
    """
    c10d = torch.distributed.distributed_c10d
    for name in _GROUP_TABLES:
        getattr(c10d, name).clear()
    c10d._world._pg_coalesce_state.clear()
    c10d._world._comms.clear()
    c10d._group_count = 0
    c10d._default_pg_init_method = None
    c10d._update_default_pg(None)
    torch._C._distributed_c10d._unregister_all_process_groups()
    # torch.distributed.tensor.debug does the same, but its import also imports torch's compiler.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def gloo_group(store: dist.Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    """Connect a gloo process group on a store, independent of the default group. Block until all members are connected.

    Args:
        rank: member of the group that this process is.
        host: address of this machine that the other members can reach.
        timeout: limit of the connection and of each collective.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a hook runs before or after the forward pass of a module."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def remove_fsdp_forward_hooks(module: FSDPModule) -> None:
    """Remove the hooks that gather parameters before a forward pass and free them after it."""
    state = _fsdp_state(module)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


@contextmanager
def suspended_fsdp_hooks(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Run forward passes inside this context without the hooks that gather parameters before them and free them after.

    Other hooks stay in their order.
    """
    restored = []
    for module in modules:
        state = _fsdp_state(module)
        assert isinstance(module, nn.Module)
        hooks = module._forward_pre_hooks, module._forward_hooks
        handles = state._pre_forward_hook_handle, state._post_forward_hook_handle
        restored += [(registered, registered.copy()) for registered in hooks]
        for registered, handle in zip(hooks, handles, strict=True):
            registered.pop(handle.id, None)
    try:
        yield
    finally:
        for registered, before in restored:
            registered.clear()
            registered.update(before)


def init_fsdp_root(module: nn.Module) -> None:
    """Make a module the root of the FSDP modules inside it, as its first forward pass would."""
    _fsdp_state(module)._lazy_init()


def run_fsdp_post_backward(module: nn.Module) -> None:
    """Accumulate the gradients of all FSDP modules inside a root in the reduction type, or reduce them if due."""
    _fsdp_state(module)._root_post_backward_final_callback()


def fsdp_param_group(module: nn.Module | FSDPModule) -> Any:
    """Return the parameter group of an FSDP module, or None for other modules and for modules without parameters."""
    return module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None


def fsdp_param_groups(root: nn.Module | FSDPModule) -> Iterator[Any]:
    """Yield the parameter groups of all FSDP modules inside a root."""
    for state in _fsdp_state(root)._state_ctx.all_states:
        if state._fsdp_param_group is not None:
            yield state._fsdp_param_group


def replace_fsdp_gather(group: Any, outputs: Sequence[Tensor], gather: Callable[[], None]) -> None:
    """Let a parameter group gather its parameters by a function, into tensors that are never freed.

    Args:
        group: a parameter group that has not been gathered yet.
        outputs: memory of each parameter, flat, padded, in the compute type.
        gather: fills `outputs`.
    """
    for param, output in zip(group.fsdp_params, outputs, strict=True):
        assert not param.all_gather_outputs
        param.all_gather_outputs = [output]
        param.free_unsharded_param = lambda: None

    def unshard(async_op: bool = False) -> None:
        if group.is_unsharded:
            return
        assert group.is_sharded
        gather()
        for param in group.fsdp_params:
            param.init_unsharded_param()
        group._to_unsharded()

    # `wait_for_unshard` finds that nothing is in flight.
    group.unshard = unshard


def replace_fsdp_reduction(group: Any, reduce: Callable[[list[Tensor], torch.dtype, list[int]], list[Tensor]]) -> None:
    """Let a parameter group reduce the gradients of a backward pass by a function, instead of by FSDP's collectives.

    Args:
        group: a parameter group on a CPU, without offloading of its parameters.
        reduce: takes this rank's gradients of whole parameters, the type to reduce in, and the numbers of the
            parameters in the group. A gradient that is sharded along another dim than the first has its shards one
            after the other along the first. Returns the gradients of this rank's shards.
    """
    # Another replacement may be there already.
    accumulate = partial(type(group).post_backward, group)

    def post_backward(*unused: Any) -> None:
        if not group.reduce_grads:
            accumulate()
            return
        group._training_state = type(group._training_state).POST_BACKWARD
        params = []
        grads = []
        numbers = []
        for number, param in enumerate(group.fsdp_params):
            if not hasattr(param, "_unsharded_param"):
                continue
            param.accumulate_unsharded_grad_if_needed()
            if param.unsharded_accumulated_grad is not None:
                grad = param.unsharded_accumulated_grad_data
            elif param.unsharded_param.grad is not None:
                grad = param.unsharded_grad_data
            else:
                continue
            params.append(param)
            numbers.append(number)
            dim = param.fsdp_placement.dim
            grads.append(grad if dim == 0 else torch.cat(grad.chunk(fsdp_group_size(group), dim)))
            param.unsharded_accumulated_grad = param.unsharded_param.grad = None
        if group.reshard_after_backward:
            group.reshard()
        if not params:
            return
        shards = reduce(grads, group._reduce_dtype or grads[0].dtype, numbers)
        for param, shard in zip(params, shards, strict=True):
            grad = shard.view(param.sharded_size).to(group._orig_dtype)
            if param.sharded_param.grad is None:
                param.sharded_param.grad = param.to_sharded_dtensor(grad)
            else:
                local_tensor(param.sharded_param.grad).add_(grad)

    group.post_backward = post_backward


def fsdp_shard(param: Any) -> Tensor:
    """Return the padded shard of a member of a parameter group, flat."""
    return param._sharded_param_data


def fsdp_group_size(group: Any) -> int:
    """Return over how many ranks a parameter group is sharded."""
    return group._all_gather_process_group.size()


def fsdp_reduction_group(group: Any, *, replicates: bool) -> dist.ProcessGroup:
    """Return the process group over which FSDP reduces the gradients of a parameter group."""
    handle = group._all_reduce_process_group if replicates else group._reduce_scatter_process_group
    assert isinstance(handle, dist.ProcessGroup)
    return handle


def fsdp_parameters(param: Any) -> Sequence[nn.Parameter]:
    """Return the sharded parameter of a member of a group, and the gathered parameter if there is one."""
    unsharded = getattr(param, "_unsharded_param", None)
    return [p for p in (param.sharded_param, unsharded) if p is not None]


def _fsdp_state(module: nn.Module | FSDPModule) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]


def is_nvshmem_available() -> bool:
    """Return whether this torch was built with NVSHMEM and finds its library."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    return bool(symmetric_memory.is_nvshmem_available())


class NvshmemOps:
    """Symmetric memory of a group over NVSHMEM. See `comm.row_exchange.SymmetricMemoryOps`.

    Args:
        group: group on CUDA. The allocations of all groups of a process use the same backend.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._memory = symmetric_memory
        symmetric_memory.set_backend("NVSHMEM")
        self._name = group.group_name
        self._device = torch.device("cuda", torch.cuda.current_device())

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor and exchange its addresses."""
        tensor = self._memory.empty(num_elements, dtype=dtype, device=self._device)
        self._memory.rendezvous(tensor, self._name)
        return tensor

    def dispatch(self, rows: Tensor, out: Tensor, splits_E: Tensor, out_splits_offsets: Tensor) -> None:
        """Run the all-to-all from rank-major to expert-major order."""
        torch.ops.symm_mem.all_to_all_vdev_2d(rows, out, splits_E, out_splits_offsets, self._name)

    def combine(self, rows: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor) -> None:
        """Run the all-to-all from expert-major to rank-major order."""
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(rows, out, splits_offsets, out_splits_offsets, self._name)
