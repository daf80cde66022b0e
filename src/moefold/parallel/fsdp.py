"""FSDP2 and DTensor sharding of parameters, and unsharded parameters for overlapped steps.

Tensor and expert shards are DTensors. FSDP2 makes the data-parallel shards.

`UnshardedParams`: FSDP's module hooks assume that one micro-batch passes a module forward and then backward. This does
not hold if a stage overlaps two micro-batches. So the hooks are removed, parameters are gathered at the start of a
step, and FSDP's post-backward is called after each backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.export import register_dataclass

from moefold.comm.groups import ParallelGroups
from moefold.comm.private_torch import (
    as_parameter,
    init_fsdp_root,
    remove_fsdp_forward_hooks,
    run_fsdp_post_backward,
    suspended_fsdp_hooks,
)
from moefold.config.base.param_spec import expert_dp_dim, shard_rows
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.cost.adapter_spec import is_adapter, training_weights
from moefold.model.block import Block, MTPBlock
from moefold.model.moe.dispatch.base import ExpertInput
from moefold.model.moe.layer import MoELayer
from moefold.model.transformer import TORCH_DTYPES, Transformer

# FSDP gathers parameters for the backward pass when a gradient of the module's output arrives. It frees them when the
# gradients of its inputs are computed. So it must find the tensors in the output of the router (registered there) and
# in the input of the experts. torch 2.13 searches every dataclass for them, torch 2.11 only registered classes: with
# 2.11 all experts would stay gathered.
register_dataclass(ExpertInput)


def shard_model_parallel(stage: Transformer, groups: ParallelGroups) -> None:
    """Replace every meta parameter of a stage by its DTensor shard over tp or (ep, etp), without communication."""
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

    zero 0 replicates, by an all-reduce of gradients. 1 and 2 keep the gathered parameters between forward and backward,
    and 3 frees them after each use.
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
    for fsdp_module in fsdp_modules(stage):
        fsdp_module.set_gradient_divide_factor(1.0)
        fsdp_module.set_force_sum_reduction_for_comms(True)
    prefetch_next_block(stage)


def prefetch_next_block(stage: Transformer) -> None:
    """Start the all-gathers of a block, its experts included, when the block before it starts, in both passes.

    By default FSDP starts them when the host reaches a module: in an MoE layer after the wait for the counts of the
    all-to-all, too late to overlap with attention. A list replaces FSDP's own choice for the backward pass, so it has
    every group of the block. The layers of multi-token prediction do not run in evaluation, where nothing would free
    their gathered parameters: the forward pass does not prefetch them.
    """
    blocks = list(stage.layers.values())
    forward = [stage, *(block for block in blocks if not isinstance(block, MTPBlock))]
    for module, next_block in pairwise(forward):
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(fsdp_modules(next_block))
    for module, next_block in pairwise([stage, *reversed(blocks)]):
        assert isinstance(module, FSDPModule)
        module.set_modules_to_backward_prefetch(fsdp_modules(next_block))


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Return the FSDP modules in a module, itself included."""
    return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]


def reshard_parameters(stages: Sequence[nn.Module]) -> None:
    """Free the parameters that passes without gradients gathered, so that the next pass sees changed weights."""
    for stage in stages:
        for module in fsdp_modules(stage):
            module.reshard()


@contextmanager
def gathered_parameters(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Gather the parameters once for all forward passes without gradients inside this context, then free them.

    It is collective over the data-parallel ranks when it is entered. Inside, the ranks may run different numbers of
    passes. The parameters must not change inside. The layers of multi-token prediction, which run in training only, are
    not gathered.
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
    return [module for module in fsdp_modules(stage) if id(module) not in skipped]


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
        zero: with 2, gradients are reduced with each micro-batch, otherwise at the end of a step.
    """

    def __init__(self, stages: Sequence[nn.Module], zero: int) -> None:
        self._stages = stages
        self._modules = [module for stage in stages for module in fsdp_modules(stage)]
        self._reduces_each_micro_batch = zero == 2
        for module in self._modules:
            remove_fsdp_forward_hooks(module)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Gather all parameters inside this context. It is collective over the data-parallel ranks, as is `step`."""
        for stage in self._stages:
            # Lazily initialise the FSDP root before its children.
            init_fsdp_root(stage)
        for module in self._modules:
            module.unshard()
        yield
        for module in self._modules:
            module.reshard()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the micro-batches of a step inside this context. Reduce their gradients at its end.

        `run_fsdp_post_backward` must follow each backward pass of a stage: it accumulates or reduces the gradients.
        """
        with self.unsharded():
            for module in self._modules:
                module.set_reshard_after_backward(False, recurse=False)
                module.set_requires_gradient_sync(self._reduces_each_micro_batch, recurse=False)
            yield
            if not self._reduces_each_micro_batch:
                for module in self._modules:
                    module.set_requires_gradient_sync(True, recurse=False)
                for stage in self._stages:
                    run_fsdp_post_backward(stage)
