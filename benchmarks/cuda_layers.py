"""Traces of one MoE layer, of its block or of a model of one block, forward and backward, under any mapping."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cuda_trace import CUDA, H200, Device, Event, Trace, trace_cuda
from moefold.comm import row_exchange
from moefold.comm.groups import Group, fake_rank
from moefold.comm.row_exchange import MetaSymmetricMemory, RowExchange
from moefold.config.base.part_registry import find_part
from moefold.config.chosen import chosen
from moefold.config.groups.dispatcher import DispatcherPart, WirePart
from moefold.config.load import config_from_dict
from moefold.config.presets import load_preset
from moefold.config.schema import Config
from moefold.cost.state_bytes import dispatch_sizes
from moefold.model.block import LayerInputs
from moefold.model.moe.token_group import TokenColumns
from moefold.parallel import expert_parallel
from moefold.parallel.kernels import low_precision
from moefold.parallel.kernels.select import apply_kernels, select_kernels
from moefold.parallel.parallelize import build_sharded_stages

LayerPart = Literal["layer", "block", "model"]


class _RecordedExchange(MetaSymmetricMemory):
    """Symmetric memory on the meta device, whose exchanges are recorded."""

    def __init__(self, ep: Group, trace: Trace) -> None:
        self._others = (ep.size - 1) / ep.size
        self._trace = trace

    def dispatch(self, rows: Tensor, out: Tensor, splits_E: Tensor, out_splits_offsets: Tensor) -> None:
        self._trace.add("collective", "all_to_all_vdev_2d", moved_bytes=rows.nbytes * self._others)

    def combine(self, rows: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor) -> None:
        self._trace.add("collective", "all_to_all_vdev_2d_offset", moved_bytes=out.nbytes * self._others)


@contextmanager
def _symmetric_memory(trace: Trace) -> Iterator[None]:
    """Replace NVSHMEM, which does not work with meta tensors."""

    def open_exchange(ep: Group, *sizes: int) -> RowExchange:
        return RowExchange(_RecordedExchange(ep, trace), *sizes)

    with (
        mock.patch.object(find_part("dispatcher", "symm_mem"), "unsupported_here", return_value=iter(())),
        mock.patch.object(row_exchange, "open_row_exchange", open_exchange),
    ):
        yield


def layer_config(preset: str, tokens: int, **sections: dict[str, Any]) -> Config:
    """Build the recipe of one MoE layer of a model, with one sample of `tokens` tokens for each data-parallel rank."""
    model = dict(load_preset(preset)) | {"layers": 1, "mtp_layers": 0, "vocab_size": 256}
    parallel = sections.get("parallel", {})
    data_parallel = parallel.get("world_size", 1) // (parallel.get("tp", 1) * parallel.get("cp", 1))
    train = {"seq_len": tokens, "micro_batch_size": 1, "global_batch_size": data_parallel}
    return config_from_dict(
        {
            "run": {"dtype": "bfloat16", "device": "cuda", "deterministic": True} | sections.get("run", {}),
            "model": model | sections.get("model", {}),
            "parallel": parallel,
            "moe": sections.get("moe", {}),
            "train": train | sections.get("train", {}),
            "data": {"kind": "synthetic"},
        }
    )


def trace_layer(
    cfg: Config,
    part: LayerPart = "layer",
    device: Device = H200,
    *,
    runs_all_candidates: bool = False,
    event_seconds: Callable[[Event], float] | None = None,
) -> Trace:
    """Trace the second forward and backward pass of the layer on rank 0, without gradients from before.

    The launches, unlike the events, are recorded in both passes: the first fills caches.

    Args:
        cfg: a recipe of one layer, as of `layer_config`.
        part: only the MoE layer, or also attention and norms, or also embedding, head and loss.
        device: properties of the GPU.
        runs_all_candidates: run every candidate of the autotuner.
        event_seconds: estimated time of an event; the autotuner chooses by it. None: it takes the first candidate.
    """
    tokens = cfg.train.seq_len // (cfg.parallel.cp * cfg.parallel.tp)
    top_k = cfg.model.ffn.moe.top_k
    trace = Trace(tokens * top_k, top_k, runs_all_candidates=runs_all_candidates, event_seconds=event_seconds)
    with fake_rank(cfg.parallel, 0) as groups, trace_cuda(trace, device):
        groups = replace(groups, device=CUDA)
        with _symmetric_memory(trace):
            (stage,) = build_sharded_stages(cfg, groups, for_training=False).stages
        # Values on the meta device pass no self-test.
        with mock.patch.object(low_precision, "scaled_mm_unsupported_reason", return_value=""):
            kernels = select_kernels(cfg, CUDA)
        block: Any = stage.layers["0"]
        if chosen(cfg, WirePart).rounds:
            dispatcher = chosen(cfg, DispatcherPart)
            p = cfg.parallel
            sizes = dispatch_sizes(cfg.model, cfg.train, cfg.moe, p.cp * p.tp, stage.dtype.itemsize)
            block.ffn.dispatcher = expert_parallel.build_dispatcher(dispatcher, groups.moe, sizes)
        # Stages that are not for training have no low-precision GEMMs and no low-precision dispatch.
        apply_kernels(stage, kernels)
        stage.train()
        columns = TokenColumns(torch.zeros(1, dtype=torch.int64, device=CUDA))
        shape = (tokens, 1, cfg.model.hidden_size)
        with kernels.weight_cache.step():
            for _ in range(2):
                stage.zero_grad(set_to_none=True)
                x = torch.empty(shape, dtype=stage.dtype, device=CUDA, requires_grad=True)
                trace.events.clear()
                if part == "model":
                    ids = torch.zeros(1, cfg.train.seq_len // cfg.parallel.cp, dtype=torch.int64, device=CUDA)
                    y = stage(ids, labels=ids, sample_ids=columns.sample_ids)
                else:
                    is_ffn = part == "layer"
                    y = (block.ffn(x, columns) if is_ffn else block(x, LayerInputs(stage.rope, columns))).y
                y.backward(torch.empty_like(y))
    return trace
