"""Expert parallelism: the dispatcher of all layers, and what the experts of a rank must know of the others."""

from typing import Any

from torch import Tensor

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.model.moe.dispatch import Dispatcher, ShardedMicroBatch, make_dispatcher
from moefold.model.moe.dispatch.deepep import open_buffer
from moefold.model.moe.dispatch.least_loaded import RebalanceRule
from moefold.model.moe.dispatch.validating import ValidatingDispatcher
from moefold.model.transformer import Transformer
from moefold.parallel.tensor_parallel import local_positions
from moefold.topology.dispatchers import dispatcher_spec


def build_dispatcher(name: str, cfg: Config, groups: ParallelGroups) -> Dispatcher[Any]:
    """Create the dispatcher that all layers share: it has no per-micro-batch state, and its buffers are large."""
    rebalance_rule = RebalanceRule(cfg.moe.llep_threshold, cfg.moe.llep_capacity, cfg.moe.llep_min_tokens)
    needs_buffer = dispatcher_spec(name).needs_buffer and groups.moe.experts.size > 1
    buffer = open_buffer(groups.moe.ep, cfg.model.hidden_size) if needs_buffer else None
    is_fp8 = cfg.moe.dispatch_precision != "dtype"
    return make_dispatcher(name, groups.moe, cfg.model.num_experts, rebalance_rule, buffer, fp8_dispatch=is_fp8)


def apply_expert_parallel(
    stage: Transformer, groups: ParallelGroups, positions: Tensor, dispatcher: Dispatcher[Any]
) -> None:
    """Give the MoE layers their dispatcher, and the ranks with which they share a micro-batch."""
    attn = groups.attn
    micro_batch_group = ShardedMicroBatch(attn.sequence, attn.stage, local_positions(positions, attn.tp))
    width = stage.cfg.model.hidden_size // groups.moe.etp.size
    bias_slice = slice(groups.moe.etp.rank * width, (groups.moe.etp.rank + 1) * width)
    is_checked = stage.cfg.faults.check_dispatch and groups.moe.experts.size > 1
    for number, layer in stage.moe_layers().items():
        layer.micro_batch_group = micro_batch_group
        layer.dispatcher = (
            ValidatingDispatcher(dispatcher, groups.moe, number, groups.device) if is_checked else dispatcher
        )
        layer.experts.bias_slice = bias_slice
