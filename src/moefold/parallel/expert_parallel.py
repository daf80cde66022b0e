"""Expert parallelism: the dispatcher of all layers, and what the experts of a rank must know of the others."""

from collections.abc import Iterable
from math import ceil
from typing import Any

import torch
from torch import Tensor

from moefold.comm.groups import ParallelGroups
from moefold.comm.row_exchange import RowExchange, open_row_exchange
from moefold.config.schema import Config
from moefold.model.moe.dispatch import Dispatcher, ShardedMicroBatch, make_dispatcher
from moefold.model.moe.dispatch.deepep import open_buffer
from moefold.model.moe.dispatch.least_loaded import RebalanceRule
from moefold.model.moe.dispatch.validating import ValidatingDispatcher
from moefold.model.transformer import TORCH_DTYPES, Transformer
from moefold.parallel.tensor_parallel import local_positions
from moefold.topology.dispatchers import dispatcher_spec


def build_dispatcher(name: str, cfg: Config, groups: ParallelGroups) -> Dispatcher[Any]:
    """Create the dispatcher that all layers share: it has no per-micro-batch state, and its buffers are large."""
    rebalance_rule = RebalanceRule(cfg.moe.llep_threshold, cfg.moe.llep_capacity, cfg.moe.llep_min_tokens)
    spec = dispatcher_spec(name)
    is_spread = groups.moe.experts.size > 1
    buffer = open_buffer(groups.moe.ep, cfg.model.expert_hidden_size) if spec.needs_buffer and is_spread else None
    exchange = _open_exchange(cfg, groups) if spec.has_receive_buffer and is_spread else None
    is_fp8 = cfg.moe.dispatch_precision != "dtype"
    return make_dispatcher(
        name, groups.moe, cfg.model.num_experts, rebalance_rule, buffer, exchange, fp8_dispatch=is_fp8
    )


def _open_exchange(cfg: Config, groups: ParallelGroups) -> RowExchange:
    """Allocate symmetric memory for the routed tokens of a micro-batch; collective over ep."""
    return open_row_exchange(groups.moe.ep, *row_exchange_sizes(cfg))


def row_exchange_sizes(cfg: Config) -> tuple[int, int, int, int]:
    """Return the sizes of a `RowExchange`: experts, rows that a rank sends and receives at most, bytes of a row."""
    p = cfg.parallel
    max_rows = cfg.train.seq_len // (p.cp * p.tp) * cfg.train.micro_batch_size * cfg.model.top_k
    row_bytes = cfg.model.expert_hidden_size * TORCH_DTYPES[cfg.run.dtype].itemsize
    return cfg.model.num_experts, max_rows, ceil(max_rows * p.receive_factor), row_bytes


def largest_receive_load(dispatchers: Iterable[Dispatcher[Any]]) -> Tensor | None:
    """Return the largest `take_receive_load` of the dispatchers of this rank; None if they always have room."""
    loads = [load for dispatcher in dispatchers if (load := dispatcher.take_receive_load()) is not None]
    return torch.stack(loads).max() if loads else None


def apply_expert_parallel(
    stage: Transformer, groups: ParallelGroups, positions: Tensor, dispatcher: Dispatcher[Any]
) -> None:
    """Give the MoE layers their dispatcher, and the ranks with which they share a micro-batch."""
    attn = groups.attn
    micro_batch_group = ShardedMicroBatch(attn.sequence, attn.stage, attn.tp, local_positions(positions, attn.tp))
    width = stage.cfg.model.expert_hidden_size // groups.moe.etp.size
    bias_slice = slice(groups.moe.etp.rank * width, (groups.moe.etp.rank + 1) * width)
    is_checked = stage.cfg.faults.check_dispatch and groups.moe.experts.size > 1
    for number, layer in stage.moe_layers().items():
        layer.micro_batch_group = micro_batch_group
        layer.dispatcher = (
            ValidatingDispatcher(dispatcher, groups.moe, number, groups.device) if is_checked else dispatcher
        )
        layer.experts.bias_slice = bias_slice
