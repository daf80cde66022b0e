"""Which rank holds which part of a parameter: tensor and expert shards are DTensors, data-parallel ones FSDP2's."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.export import register_dataclass

from moefold.config.schema import Config, ModelConfig
from moefold.model.transformer import TORCH_DTYPES, Transformer
from moefold.moe.layer import MoELayer
from moefold.moe.router import RoutingDecision
from moefold.parallel.groups import ParallelGroups

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
    tp_mesh, expert_mesh = groups.dense_mesh["tp"], groups.expert_mesh["ep", "etp"]
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
