"""FSDP2 and DTensor sharding of parameters, unsharded parameters for overlapped steps, and communication hooks.

Tensor and expert shards are DTensors; FSDP2 makes the data-parallel shards.

`UnshardedParams`: FSDP's module hooks assume that one micro-batch passes a module forward and then backward. This does
not hold if a stage overlaps two micro-batches. So the hooks are removed, parameters are gathered at the start of a
step, and FSDP's post-backward is called after each backward pass.

`FSDPCommHooks`: measure the time that a rank waits in FSDP's collectives, and the dot products of gradients of
different ranks before reduction.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.export import register_dataclass

from moefold.comm.collectives import all_gather_into, all_reduce_sum, all_to_all, reduce_scatter_into
from moefold.comm.comm_timer import CommTimer, Timestamp
from moefold.comm.groups import Group, ParallelGroups
from moefold.comm.private_torch import (
    as_parameter,
    fsdp_param_group,
    fsdp_reduction_group,
    init_fsdp_root,
    remove_fsdp_forward_hooks,
    replace_fsdp_reduction,
    run_fsdp_post_backward,
    suspended_fsdp_hooks,
)
from moefold.comm.shared_memory import SharedExchange, open_shared_exchange
from moefold.config.parallel import ParallelConfig
from moefold.config.param_spec import expert_dp_dim, shard_rows
from moefold.config.run import RunConfig
from moefold.cost.adapter_spec import is_adapter, training_weights
from moefold.model.moe.dispatch.base import ExpertInput
from moefold.model.moe.experts import Experts
from moefold.model.moe.layer import MoELayer
from moefold.model.transformer import TORCH_DTYPES, Block, MTPBlock, Transformer
from moefold.parallel.shared_gather import open_shared_gather

# FSDP gathers parameters for the backward pass when a gradient of the module's output arrives, and frees them when the
# gradients of its inputs are computed, so it must find the tensors in the output of the router (registered there) and
# in the input of the experts. torch 2.13 searches every dataclass for them, torch 2.11 only registered classes: with
# 2.11 all experts would stay gathered.
register_dataclass(ExpertInput)


def shard_model_parallel(stage: Transformer, groups: ParallelGroups) -> None:
    """Replace every meta parameter of a stage by its DTensor shard over tp, or over (ep, etp); no communication."""
    tp_mesh = groups.dense_mesh["tp"]
    expert_mesh = groups.expert_mesh["ep", "etp"]
    weights = training_weights(stage.config, stage.settings.lora)
    for module_name, module in stage.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            weight = weights[f"{module_name}.{leaf}"]
            assert weight.shape == tuple(parameter.shape), (weight, parameter.shape)
            if weight.is_expert:
                sharded = _meta_shard(parameter, expert_mesh, (Shard(0), _placement(weight.etp_dim)))
            else:
                sharded = _meta_shard(parameter, tp_mesh, (_placement(weight.tp_shard_dim(groups.layout.tp)),))
            module.register_parameter(leaf, as_parameter(sharded))


def keep_full_precision(stage: Transformer, dtype: torch.dtype) -> None:
    """Convert the meta parameters that are read in the type of the master weights to it, and all of routers."""
    for layer in stage.moe_layers().values():
        layer.router.to(dtype)
    for module, leaf in _full_precision_parameters(stage):
        module.register_parameter(leaf, nn.Parameter(getattr(module, leaf).to(dtype)))


def narrow_frozen_weights(stage: Transformer) -> None:
    """Convert the meta parameters that adapters leave frozen to the compute type, because they are read in it."""
    weights = training_weights(stage.config, stage.settings.lora)
    for module_name, module in stage.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            name = f"{module_name}.{leaf}"
            if not is_adapter(name) and not weights[name].is_full_precision:
                module.register_parameter(leaf, nn.Parameter(parameter.to(stage.dtype)))


def _full_precision_parameters(stage: Transformer) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parameters outside of routers that are read in the type of the master weights: module and name."""
    weights = training_weights(stage.config, stage.settings.lora)
    for module_name, module in stage.named_modules():
        for leaf, _ in list(module.named_parameters(recurse=False)):
            if weights[f"{module_name}.{leaf}"].in_exponent:
                yield module, leaf


def shard_data_parallel(stage: Transformer, groups: ParallelGroups, run: RunConfig, parallel: ParallelConfig) -> None:
    """Apply FSDP2: dense parameters over dp x cp, experts over edp, gradients summed (never averaged).

    zero 0 replicates (an all-reduce of gradients); 1 and 2 keep the gathered parameters between forward and backward;
    3 frees them after each use.
    """
    replicates = parallel.zero == 0
    dense = groups.dense_mesh["dp_cp", "one"] if replicates else groups.dense_mesh["dp_cp"]
    experts = groups.expert_mesh["edp", "one"] if replicates else groups.expert_mesh["edp"]
    compute = TORCH_DTYPES[run.dtype]
    master = master_weight_dtype(run)
    reshard = parallel.zero == 3
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute, reduce_dtype=master, cast_forward_inputs=False
    )
    full_precision = MixedPrecisionPolicy(reduce_dtype=master, cast_forward_inputs=False)
    exempt_names: dict[nn.Module, list[str]] = {}
    for module, leaf in _full_precision_parameters(stage):
        exempt_names.setdefault(module, []).append(leaf)
    for block in stage.layers.values():
        assert isinstance(block, Block)
        if isinstance(block.ffn, MoELayer):
            fully_shard(
                block.ffn.experts,
                mesh=experts,
                mp_policy=policy,
                reshard_after_forward=reshard,
                shard_placement_fn=_expert_shard_dim(groups.layout.edp),
            )
            if policy.param_dtype is not None:
                fully_shard(block.ffn.router, mesh=dense, mp_policy=full_precision, reshard_after_forward=False)
        exempt = exempt_names.get(block.attention, ()) if policy.param_dtype is not None else ()
        ignored = {block.attention.get_parameter(leaf) for leaf in exempt}
        fully_shard(block, mesh=dense, mp_policy=policy, reshard_after_forward=reshard, ignored_params=ignored)
        if exempt:
            # FSDP has one type for the parameters of a module: these are a separate group on the same module.
            attention_parameters = {p for name, p in block.attention.named_parameters() if name not in exempt}
            fully_shard(
                block.attention,
                mesh=dense,
                mp_policy=full_precision,
                reshard_after_forward=False,
                ignored_params=attention_parameters,
            )
    fully_shard(stage, mesh=dense, mp_policy=policy, reshard_after_forward=reshard)
    for fsdp_module in _fsdp_modules(stage):
        fsdp_module.set_gradient_divide_factor(1.0)
        fsdp_module.set_force_sum_reduction_for_comms(True)
    _prefetch_next_block(stage)


def _prefetch_next_block(stage: Transformer) -> None:
    """Start the all-gathers of a block, its experts included, when the block before it starts, in both passes.

    By default FSDP starts them when the host reaches a module: in an MoE layer after the wait for the counts of the
    all-to-all, too late to overlap with attention. A list replaces FSDP's own choice for the backward pass, so it has
    every group of the block. The layers of multi-token prediction do not run in evaluation, where nothing would free
    their gathered parameters: the forward pass does not prefetch them.
    """
    blocks = list(stage.layers.values())
    forward = [stage, *(block for block in blocks if not isinstance(block, MTPBlock))]
    for module, next_block in pairwise(forward):
        _as_fsdp(module).set_modules_to_forward_prefetch(_fsdp_modules(next_block))
    for module, next_block in pairwise([stage, *reversed(blocks)]):
        _as_fsdp(module).set_modules_to_backward_prefetch(_fsdp_modules(next_block))


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]


def reshard_parameters(stages: Sequence[nn.Module]) -> None:
    """Free the parameters that passes without gradients gathered, so that the next pass sees changed weights; local."""
    for stage in stages:
        for module in _fsdp_modules(stage):
            module.reshard()


@contextmanager
def gathered_parameters(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Gather the parameters once for all forward passes without gradients inside this context, then free them.

    Collective over the data-parallel ranks when it is entered; inside, the ranks may run different numbers of passes.
    The parameters must not change inside. The layers of multi-token prediction, which run in training only, are not
    gathered.
    """
    modules = [module for stage in stages for module in _forward_fsdp_modules(stage)]
    for stage in stages:
        if isinstance(stage, FSDPModule):
            # Initialise the FSDP root before its children.
            init_fsdp_root(stage)
    for module in modules:
        module.unshard()
    try:
        with suspended_fsdp_hooks(modules):
            yield
    finally:
        for module in modules:
            module.reshard()


def _forward_fsdp_modules(stage: nn.Module) -> list[FSDPModule]:
    """Return the FSDP modules of a stage without the modules of multi-token prediction."""
    skipped = {id(inner) for module in stage.modules() if isinstance(module, MTPBlock) for inner in module.modules()}
    return [module for module in _fsdp_modules(stage) if id(module) not in skipped]


def master_weight_dtype(run: RunConfig) -> torch.dtype:
    """Return the type of master weights, gradients and moments: float32, or float64 if the run computes in float64."""
    return TORCH_DTYPES["float64" if run.dtype == "float64" else "float32"]


def _placement(dim: int | None) -> Placement:
    return Replicate() if dim is None else Shard(dim)


def _meta_shard(parameter: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    shape = list(parameter.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            _, shape[placement.dim] = shard_rows(shape[placement.dim], mesh.size(axis), mesh.get_local_rank(axis))
    assert 0 not in shape, (parameter.shape, placements, mesh)
    return DTensor.from_local(
        parameter.new_empty(shape), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _expert_shard_dim(edp: int) -> Callable[[nn.Parameter], Shard]:
    def placement(parameter: nn.Parameter) -> Shard:
        """Shard over edp by experts, or by the rows of each expert if there are too few experts."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Shard(expert_dp_dim(local.shape, edp))

    return placement


class UnshardedParams:
    """Parameters that stay gathered for a whole step, under zero 0 to 2.

    Args:
        stages: FSDP modules, whose hooks are removed.
        zero: with 2, gradients are reduced with each micro-batch, otherwise at the end of a step.
    """

    def __init__(self, stages: Sequence[nn.Module], zero: int) -> None:
        self._stages = stages
        self._reduces_each_micro_batch = zero == 2
        for module in self._fsdp_modules():
            remove_fsdp_forward_hooks(module)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Gather all parameters inside this context; collective over the data-parallel ranks, as are all methods."""
        for stage in self._stages:
            # Lazily initialise the FSDP root before its children.
            init_fsdp_root(stage)
        for module in self._fsdp_modules():
            module.unshard()
        yield
        for module in self._fsdp_modules():
            module.reshard()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the micro-batches of a step inside this context; reduce their gradients at its end."""
        with self.unsharded():
            for module in self._fsdp_modules():
                module.set_reshard_after_backward(False, recurse=False)
                module.set_requires_gradient_sync(self._reduces_each_micro_batch, recurse=False)
            yield
            if not self._reduces_each_micro_batch:
                for module in self._fsdp_modules():
                    module.set_requires_gradient_sync(True, recurse=False)
                for stage in self._stages:
                    self.finish_backward(stage)

    def finish_backward(self, stage: nn.Module) -> None:
        """Accumulate or reduce the gradients of a stage after one of its backward passes."""
        run_fsdp_post_backward(stage)

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        for stage in self._stages:
            yield from _fsdp_modules(stage)


class PerRankGradDots:
    """Gram matrix <g_i, g_j> of the gradients that members i, j of a data-parallel group contribute to the reduction.

    In an all-to-all, which sends as many bytes as the reduction itself, member k gets the k-th part of every g_i. It
    adds the dot products of these parts to its matrix; the sum of the matrices of all members is exact. Nothing is sent
    unless `is_enabled`. On a checked step each member holds one more copy of the gradient of one FSDP module at a time.

    With ZeRO 2 and 3 the gradients of each micro-batch are reduced separately: the dot products are then summed over
    the micro-batches.

    With an exchange it reduces the gradients in memory that ranks share. Without, it is an FSDP custom reduce-scatter
    (`FSDPModule.set_custom_reduce_scatter`); under ZeRO 0, where nothing is scattered, it reads the buffer that it
    allocated for FSDP, after the all-reduce.
    """

    def __init__(self, group: Group, *, replicates: bool, exchange: SharedExchange | None) -> None:
        self.is_enabled = False
        self._group = group
        self.exchange = exchange
        self._replicates = replicates
        self._buffers: list[Tensor] = []
        self._gram_matrix: Tensor | None = None
        self._all_reduce_start: Timestamp | None = None
        self._num_modules = 0

    def attach(self, module: FSDPModule) -> None:
        """Let this object reduce the module's gradients, with a timed all-gather."""
        if self.exchange is not None:
            group = fsdp_param_group(module)
            if group is not None:
                members = fsdp_reduction_group(group, replicates=self._replicates)
                assert self.exchange.serves(members), "FSDP reduces among the members of the exchange"
                replace_fsdp_reduction(group, partial(self._reduce_by_exchange, self._num_modules))
                self._num_modules += 1
            if self._replicates:
                return
        module.set_custom_all_gather(TimedAllGather(self._group.comm_timer, self.exchange))  # type: ignore[arg-type]  # as below
        module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]  # the class to inherit from is private
        if self._replicates:
            module.set_all_reduce_hook(self._after_all_reduce)

    def pop(self, device: torch.device) -> Tensor:
        """Return this rank's summand of the Gram matrix since the last call, float64 [size, size]; disable the hook."""
        size = self._group.size
        matrix = (
            torch.zeros(size, size, dtype=torch.float64, device=device)
            if self._gram_matrix is None
            else self._gram_matrix
        )
        self.is_enabled = False
        self._gram_matrix = None
        return matrix

    def is_local_grad_finite(self, device: torch.device) -> bool:
        """Return whether this rank's gradients were finite before reduction, and disable; collective over the group."""
        squares = all_reduce_sum(self.pop(device).diagonal(), self._group)
        return bool(torch.isfinite(squares[self._group.rank]))

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer of a reduction; FSDP allocates the input first, then the output."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        if self._replicates:
            self._buffers.append(buffer)
            if len(self._buffers) == 2:
                # The output is allocated right before it is all-reduced.
                self._all_reduce_start = self._group.comm_timer.enter(is_waiting=True)
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce-scatter as FSDP's default does."""
        assert op == dist.ReduceOp.SUM, op
        if self.is_enabled and not self._replicates:
            self._accumulate_dots(input_tensor)
        with self._group.comm_timer.waiting():
            return reduce_scatter_into(output_tensor, input_tensor, group, async_op=async_op)

    @torch.no_grad()
    def _reduce_by_exchange(
        self, module: int, grads: list[Tensor], dtype: torch.dtype, numbers: list[int]
    ) -> list[Tensor]:
        """Sum gradients in memory that ranks share: to this rank's rows of them, or whole where ranks replicate.

        Args:
            module: number of the module, in the order of `attach`.
            grads: the module's gradients.
            dtype: type of the sums.
            numbers: numbers of the gradients' parameters in the module.
        """
        assert self.exchange is not None
        if self.is_enabled:
            self._accumulate_dots(torch.cat([grad.reshape(-1).to(dtype) for grad in grads]))
        with self._group.comm_timer.waiting():
            reduce = self.exchange.sum if self._replicates else self.exchange.sum_scatter
            return reduce(grads, dtype, (module, *numbers))

    def _after_all_reduce(self, output: Tensor) -> None:
        self._group.comm_timer.leave(self._all_reduce_start)
        if self.is_enabled:
            buffer = self._buffers[0]
            if buffer.is_cuda:
                # FSDP frees it after the reduce-scatter, before the all-reduce stream has read it. Without
                # record_stream, the allocating stream could overwrite it with other gradients.
                buffer.record_stream(torch.cuda.current_stream())
            self._accumulate_dots(buffer)
        self._buffers.clear()

    @torch.no_grad()
    def _accumulate_dots(self, gradient: Tensor) -> None:
        size = self._group.size
        if size == 1:
            return
        padded = nn.functional.pad(gradient, (0, -gradient.numel() % size)).view(size, -1)
        shards = all_to_all(padded, self._group, [1] * size, [1] * size).double()
        dots = shards @ shards.T
        self._gram_matrix = dots if self._gram_matrix is None else self._gram_matrix + dots


class TimedAllGather:
    """FSDP custom all-gather that counts its time as communication."""

    def __init__(self, comm_timer: CommTimer, exchange: SharedExchange | None) -> None:
        self._comm_timer = comm_timer
        self._exchange = exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the output buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather along dim 0 (all-gather)."""
        with self._comm_timer.waiting():
            if self._exchange is not None:
                assert self._exchange.serves(group), "FSDP gathers among the members of the exchange"
                self._exchange.gather_into(output_tensor, input_tensor)
                return None
            return all_gather_into(output_tensor, input_tensor, group, async_op=async_op)


@dataclass(frozen=True)
class FSDPCommHooks:
    """The communication hooks of dense and expert parameters."""

    dense: PerRankGradDots
    experts: PerRankGradDots
    gathered: Sequence[Tensor]
    """Gathered parameters in memory that ranks share."""

    def shared_memory(self) -> list[Tensor]:
        """Return the memory of exchanges, which no formula of memory counts."""
        exchanges = self.dense.exchange, self.experts.exchange
        return [exchange.memory for exchange in exchanges if exchange is not None]

    def enable(self) -> None:
        """Collect the dot products of the gradients of the next backward passes."""
        self.dense.is_enabled = self.experts.is_enabled = True

    def are_local_grads_finite(self, device: torch.device) -> bool:
        """Return whether this rank's gradients were finite before reduction; collective."""
        flags = [dots.is_local_grad_finite(device) for dots in (self.dense, self.experts)]
        return all(flags)


def install_comm_hooks(stages: Sequence[nn.Module], groups: ParallelGroups, zero: int) -> FSDPCommHooks:
    """Install the communication hooks on all FSDP modules of the stages; collective."""
    dense, experts = (
        PerRankGradDots(
            group,
            replicates=zero == 0,
            exchange=open_shared_exchange(group, groups.device),
        )
        for group in (groups.attn.dp_cp, groups.moe.edp)
    )
    gathered: list[Tensor] = []
    for dots, modules in zip((dense, experts), _modules_by_group(stages), strict=True):
        for module in modules:
            dots.attach(module)
        if dots.exchange is not None and 0 < zero < 3:
            gathered += open_shared_gather(modules, dots.exchange)
    return FSDPCommHooks(dense, experts, gathered)


def _modules_by_group(stages: Sequence[nn.Module]) -> tuple[list[FSDPModule], list[FSDPModule]]:
    """Return the FSDP modules of dense parameters and of experts."""
    modules = [module for stage in stages for module in _fsdp_modules(stage)]
    experts: list[FSDPModule] = [module for module in modules if isinstance(module, Experts)]
    return [module for module in modules if not isinstance(module, Experts)], experts
