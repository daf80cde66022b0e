"""Benchmarked MoE layer of megatron-core: its `MoELayer` of local modules on the CPU, with our weights.

Megatron's router GEMM needs a GPU or transformer-engine and is replaced here; scores, top-k, permutation, experts and
shared expert are Megatron's code. Its all-to-all dispatcher creates a CUDA stream, so the all-gather dispatcher is
used, which permutes in the same way on one rank.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.race.routing import softmax_kind
from moefold.comm.groups import ParallelGroups
from moefold.config.model import ModelConfig
from moefold.model.moe.layer import MoELayer
from moefold.topology.layout import fold

PROCESS_GROUPS = ("tp", "cp", "ep", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp")
"""Process groups that the layer requires."""


class _CpuRouter(TopKRouter):
    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 - parameter name of the base class
        """Compute the logits [..., E] in float32 or float64."""
        return F.linear(input.to(self.weight.dtype), self.weight)


def build(ours: MoELayer, model: ModelConfig, dtype: torch.dtype) -> nn.Module:
    """Build a layer that maps [S, B, H] to ([S, B, H], None), with a router in float32 or float64.

    Needs a process group of size 1.
    """
    spec = get_moe_module_spec(use_te=False, num_experts=model.ffn.moe.num_experts)
    # A `partial` of the layer from 0.18 on, a `ModuleSpec` before.
    is_partial = isinstance(spec, partial)
    (spec.keywords["submodules"] if is_partial else spec.submodules).router = _CpuRouter
    # A group of size 1, which does not communicate.
    group = ParallelGroups.create(fold(world_size=1), torch.device("cpu")).world.handle
    groups = ProcessGroupCollection(**dict.fromkeys(PROCESS_GROUPS, group))
    config = _config(model, dtype)
    layer: Any = (spec if is_partial else partial(build_module, spec))(config=config, pg_collection=groups)
    layer.router.to(torch.promote_types(dtype, torch.float32))
    _copy_weights(ours, layer)
    return layer.train()


def _config(model: ModelConfig, dtype: torch.dtype) -> Any:
    scale = model.ffn.moe.router.scaling_factor
    return TransformerConfig(
        num_layers=1,
        num_attention_heads=1,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn.moe.intermediate_size,
        gated_linear_unit=True,
        activation_func=F.silu,
        # Uses torch.compile: a few per cent faster than eager operations.
        bias_activation_fusion=True,
        add_bias_linear=False,
        num_moe_experts=model.ffn.moe.num_experts,
        moe_ffn_hidden_size=model.ffn.moe.intermediate_size,
        moe_shared_expert_intermediate_size=model.ffn.moe.shared_width or None,
        moe_shared_expert_gate=model.ffn.moe.shared is not None and model.ffn.moe.shared.gate,
        moe_router_topk=model.ffn.moe.top_k,
        moe_router_score_function=model.ffn.moe.router.kind,
        moe_router_pre_softmax=softmax_kind(model) == "pre",
        moe_router_topk_scaling_factor=scale if scale != 1 else None,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )


@torch.no_grad()
def _copy_weights(ours: MoELayer, theirs: Any) -> None:
    theirs.router.weight.copy_(ours.router.weight)
    weights = zip(ours.experts.w_gate, ours.experts.w_up, ours.experts.w_down, strict=True)
    for expert, (gate_HF, up_HF, down_FH) in zip(theirs.experts.local_experts, weights, strict=True):
        expert.linear_fc1.weight.copy_(torch.cat((gate_HF, up_HF), 1).t())
        expert.linear_fc2.weight.copy_(down_FH.t())
    shared: Any = ours.shared
    if shared is not None:
        theirs.shared_experts.linear_fc1.weight.copy_(torch.cat((shared.w_gate, shared.w_up)))
        theirs.shared_experts.linear_fc2.weight.copy_(shared.w_down)
    if ours.shared_gate is not None:
        theirs.shared_experts.gate_weight.copy_(ours.shared_gate)
