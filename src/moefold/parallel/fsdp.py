"""Which rank holds which part of a parameter: tensor and expert shards are DTensors, data-parallel ones FSDP2's.

Parameters that stay gathered for a whole step, for stages that work on two micro-batches at a time.

FSDP hooks into modules, and follows one micro-batch through each: forward, then backward. With the forward pass of one
and the backward pass of another in a stage, it would take them for the same. So here it has no hooks: parameters are
gathered when a step begins, and what FSDP does behind a backward pass is called behind each.

What FSDP sends, watched: the time that a rank waits in it, and scalar products of gradients before they add up.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from moefold.config.schema import Config, ModelConfig
from moefold.model.moe.experts import Experts
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.router import RoutingDecision
from moefold.model.transformer import TORCH_DTYPES, Transformer

DENSE_SHARDED_DIM = {
    "wq": 0,
    "bq": 0,
    "sinks": 0,
    "wq_up": 0,
    "wkv_up": 0,
    "wo": 1,
    "w_gate": 0,
    "w_up": 0,
    "w_down": 1,
}
"""Dim of each dense parameter that tensor parallelism cuts, by the last part of its name."""

KEY_VALUE_PARAMS = ("wk", "wv", "bk", "bv")
FULL_WIDTH_QK_NORMS = ("attention.query_norm.weight", "attention.key_norm.weight")
"""Where they span all heads they are cut as a bias of these heads."""
VOCAB_PARAMS = ("embedding.weight", "head.weight")
EXPERT_PLACEMENTS: dict[str, tuple[Placement, Placement]] = {
    "w_gate": (Shard(0), Shard(2)),
    "w_up": (Shard(0), Shard(2)),
    "w_down": (Shard(0), Shard(1)),
    "b_gate": (Shard(0), Shard(1)),
    "b_up": (Shard(0), Shard(1)),
    "b_down": (Shard(0), Shard(1)),
}
"""Placement of [E, H, F], [E, H, F], [E, F, H], [E, F], [E, F] and [E, H] over (ep, etp)."""

# FSDP gathers parameters for the backward pass when a gradient of the module's output arrives: it must find the tensors
# in what the router returns. torch 2.13 looks into every dataclass for them, 2.11 only into registered ones.
register_dataclass(RoutingDecision)


def shard_model_parallel(stage: Transformer, groups: ParallelGroups) -> None:
    """Replace every parameter of a stage on the meta device by its tp, or (ep, etp), DTensor; no communication."""
    tp_mesh = groups.dense_mesh["tp"]
    expert_mesh = groups.expert_mesh["ep", "etp"]
    for module_name, module in stage.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            name = f"{module_name}.{leaf}"
            if ".experts." in name:
                sharded = _meta_shard(parameter, expert_mesh, EXPERT_PLACEMENTS[leaf])
            else:
                sharded = _meta_shard(
                    parameter, tp_mesh, (_dense_placement(name, leaf, stage.cfg.model, groups.layout.tp),)
                )
            module.register_parameter(leaf, nn.Parameter(sharded))


def shard_data_parallel(stage: Transformer, groups: ParallelGroups, cfg: Config) -> None:
    """Apply FSDP2: dense parameters over dp x cp, experts over edp, gradients summed (never averaged).

    zero 0 replicates (an all-reduce of gradients); 1 and 2 keep the gathered parameters between forward and backward;
    3 frees them after each use.
    """
    replicates = cfg.parallel.zero == 0
    dense = groups.dense_mesh["dp_cp", "one"] if replicates else groups.dense_mesh["dp_cp"]
    experts = groups.expert_mesh["edp", "one"] if replicates else groups.expert_mesh["edp"]
    compute = TORCH_DTYPES[cfg.run.dtype]
    master = master_weight_dtype(cfg)
    reshard = cfg.parallel.zero == 3
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute, reduce_dtype=master, cast_forward_inputs=False
    )
    full_precision = MixedPrecisionPolicy(reduce_dtype=master, cast_forward_inputs=False)
    for block in stage.layers.values():
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
        fully_shard(block, mesh=dense, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(stage, mesh=dense, mp_policy=policy, reshard_after_forward=reshard)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def master_weight_dtype(cfg: Config) -> torch.dtype:
    """Type of the master weights, gradients and moments: float32, or float64 where the maths is."""
    return TORCH_DTYPES["float64" if cfg.run.dtype == "float64" else "float32"]


def _dense_placement(name: str, leaf: str, cfg: ModelConfig, tp: int) -> Placement:
    if name in VOCAB_PARAMS:
        return Shard(0)
    if cfg.qk_norm_width == "all_heads" and name.endswith(FULL_WIDTH_QK_NORMS):
        leaf = "bq" if name.endswith(FULL_WIDTH_QK_NORMS[0]) else "bk"
    if leaf in KEY_VALUE_PARAMS and cfg.num_query_groups % tp == 0:
        return Shard(0)
    return Shard(DENSE_SHARDED_DIM[leaf]) if leaf in DENSE_SHARDED_DIM else Replicate()


def _meta_shard(parameter: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    shape = list(parameter.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            assert shape[placement.dim] % mesh.size(axis) == 0, (parameter.shape, placements, mesh)
            shape[placement.dim] //= mesh.size(axis)
    return DTensor.from_local(parameter.new_empty(shape), mesh, placements, run_check=False)


def _expert_shard_dim(edp: int) -> Callable[[nn.Parameter], Shard]:
    def placement(parameter: nn.Parameter) -> Shard:
        """Cut experts apart over edp, or, where there are too few, each expert's rows."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.shape[0] % edp and local.shape[1] % edp == 0:
            return Shard(1)
        return Shard(0)

    return placement


class UnshardedParams:
    """Those of the stages of a rank, under zero 0 to 2.

    Args:
        stages: FSDP modules; they lose their hooks.
        zero: with 2, gradients are reduced with each micro-batch, else at the end of a step.
    """

    def __init__(self, stages: Sequence[nn.Module], zero: int) -> None:
        self._stages = stages
        self._reduces_each_micro_batch = zero == 2
        for part in self._fsdp_modules():
            state = fully_shard.state(part)  # type: ignore[attr-defined]
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Inside, the stages can compute. Collective over the data-parallel ranks, like all here."""
        for stage in self._stages:
            # Parts must learn from the stage who they are before they do anything.
            fully_shard.state(stage)._lazy_init()  # type: ignore[attr-defined]
        for part in self._fsdp_modules():
            part.unshard()
        yield
        for part in self._fsdp_modules():
            part.reshard()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, micro-batches go forward and backward; behind it their gradients are reduced."""
        with self.unsharded():
            for part in self._fsdp_modules():
                part.set_reshard_after_backward(False, recurse=False)
                part.set_requires_gradient_sync(self._reduces_each_micro_batch, recurse=False)
            yield
            if not self._reduces_each_micro_batch:
                for part in self._fsdp_modules():
                    part.set_requires_gradient_sync(True, recurse=False)
                for stage in self._stages:
                    self.finish_backward(stage)

    def finish_backward(self, stage: nn.Module) -> None:
        """A backward pass of a stage is over: its gradients are added up in the type of reduction, or reduced."""
        # torch calls it in the same way where a pipeline schedule reduces gradients.
        fully_shard.state(stage)._root_post_backward_final_callback()  # type: ignore[attr-defined]

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        for stage in self._stages:
            for part in stage.modules():
                if isinstance(part, FSDPModule):
                    yield part


class PerRankGradDots:
    """The matrix <g_i, g_j> over the members i, j of a data-parallel group, g_i what member i brings to the reduction.

    Member k gets the k-th part of every g_i by an all-to-all of the bytes that the reduction sends anyway, and adds
    the products of these parts to its matrix; the sum of the matrices of all members is exact. Nothing is sent unless
    `is_enabled`. On a checked step each member holds one more copy of the gradient of one FSDP module at a time.

    With ZeRO 2 and 3 the gradients of each micro-batch are reduced by themselves: the products are then those of the
    micro-batches, added up.

    It is what FSDP calls a custom reduce-scatter (`FSDPModule.set_custom_reduce_scatter`), and under ZeRO 0, where
    nothing is scattered, it looks at the buffer that FSDP allocates through it once that has been all-reduced.
    """

    def __init__(self, group: Group, *, replicates: bool) -> None:
        self.is_enabled = False
        self._group = group
        self._replicates = replicates
        self._buffers: list[Tensor] = []
        self._gram_matrix: Tensor | None = None
        self._all_reduce_start: Timestamp | None = None

    def attach(self, module: FSDPModule) -> None:
        """Look at all that the module reduces from now on, and time it."""
        module.set_custom_all_gather(TimedAllGather(self._group.comm_timer))  # type: ignore[arg-type]  # as below
        module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]  # the class to inherit from is private
        if self._replicates:
            module.set_all_reduce_hook(self._after_all_reduce)

    def pop(self, device: torch.device) -> Tensor:
        """My part of the matrix since the last call, float64 [group.size, group.size]; disarms."""
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
        """Whether what I brought to the reductions since I was armed is finite; disarms. Collective over the group."""
        squares = all_reduce_sum(self.pop(device).diagonal(), self._group)
        return bool(torch.isfinite(squares[self._group.rank]))

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffers of a reduction, what goes in before what comes out."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        if self._replicates:
            self._buffers.append(buffer)
            if len(self._buffers) == 2:
                # What comes out is allocated right before it is all-reduced.
                self._all_reduce_start = self._group.comm_timer.enter(is_waiting=True)
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce-scatter, as FSDP would by itself."""
        if self.is_enabled and not self._replicates:
            self._accumulate_dots(input_tensor)
        with self._group.comm_timer.waiting():
            return reduce_scatter_into(output_tensor, input_tensor, group, op, async_op=async_op)

    def _after_all_reduce(self, output: Tensor) -> None:
        self._group.comm_timer.leave(self._all_reduce_start)
        if self.is_enabled:
            sent = self._buffers[0]
            if sent.is_cuda:
                # FSDP frees it once its reduce-scatter is over, which is before this stream, the one of the all-reduce,
                # has read it: without the note the stream it was allocated on might write other gradients into it.
                sent.record_stream(torch.cuda.current_stream())
            self._accumulate_dots(sent)
        self._buffers.clear()

    @torch.no_grad()
    def _accumulate_dots(self, gradient: Tensor) -> None:
        size = self._group.size
        if size == 1:
            return
        padded = nn.functional.pad(gradient, (0, -gradient.numel() % size)).view(size, -1)
        parts = all_to_all(padded, self._group, [1] * size, [1] * size).double()
        products = parts @ parts.T
        self._gram_matrix = products if self._gram_matrix is None else self._gram_matrix + products


class TimedAllGather:
    """What FSDP gathers parameters with, as it would by itself, on the clock of waiting."""

    def __init__(self, comm_timer: CommTimer) -> None:
        self._comm_timer = comm_timer

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """All-gather along dim 0."""
        with self._comm_timer.waiting():
            return all_gather_into(output_tensor, input_tensor, group, async_op=async_op)


@dataclass(frozen=True)
class FSDPCommHooks:
    """The watches over both kinds of parameters."""

    dense: PerRankGradDots
    experts: PerRankGradDots

    def enable(self) -> None:
        """Look at the gradients of the backward passes that follow, until they are asked for."""
        self.dense.is_enabled = self.experts.is_enabled = True

    def are_local_grads_finite(self, device: torch.device) -> bool:
        """Whether my gradients were finite before they were added to those of others; collective."""
        found = [products.is_local_grad_finite(device) for products in (self.dense, self.experts)]
        return all(found)


def install_comm_hooks(stages: Sequence[nn.Module], groups: ParallelGroups, zero: int) -> FSDPCommHooks:
    """Let all that the FSDP modules of the stages send go through watches."""
    dense = PerRankGradDots(groups.attn.dp_cp, replicates=zero == 0)
    experts = PerRankGradDots(groups.moe.edp, replicates=zero == 0)
    for stage in stages:
        for module in stage.modules():
            products = experts if isinstance(module, Experts) else dense
            if isinstance(module, FSDPModule):
                products.attach(module)
    return FSDPCommHooks(dense, experts)
