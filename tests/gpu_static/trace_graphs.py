"""Trace a model of one block on CUDA under each `run.cuda_graphs` and print its counts as JSON.

Launches are only recorded where Triton does not interpret kernels, so this runs in a process of its own.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cuda_layers import layer_config
from benchmarks.cuda_trace import CUDA, Event, Trace, trace_cuda
from moefold.comm.groups import fake_rank
from moefold.ops.quantization.weight_cache import WeightCache
from moefold.parallel.cuda_graphs import Replay, T
from moefold.parallel.graphed_micro_batch import MicroBatchGraph
from moefold.parallel.graphed_modules import apply_cuda_graphs
from moefold.parallel.kernels.select import apply_kernels, select_kernels
from moefold.parallel.parallelize import build_sharded_stages

TOKENS = 4096
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "attention": {},
    "attention_router": {},
    "attention_router, jitter": {"moe": {"input_jitter": 0.1}},
    "full": {},
    "full, padded": {"moe": {"capacity_factor": 1.0, "pad_to_capacity": True}},
    "full, dropped": {"moe": {"capacity_factor": 1.0}},
    "full, plain": {"run": {"kernels": "plain"}},
    "full, jitter": {"moe": {"input_jitter": 0.1}},
}
"""Settings of a model of one layer of Qwen3-30B-A3B."""


class CountedGraphs:
    """`GraphRecorder` that sets aside the events inside of graphs; a replay is one launch."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.captured: list[Event] = []

    def run(self, function: Callable[[], object]) -> None:
        """Run a function and set aside its events, which only a first step has."""
        self._set_aside(function)

    def record(self, function: Callable[[], T]) -> tuple[T, Replay]:
        """Set aside the events of a function."""
        result, events = self._set_aside(function)
        self.captured += events
        return result, lambda: self._trace.add("op", "graph replay")

    def _set_aside(self, function: Callable[[], T]) -> tuple[T, list[Event]]:
        start = len(self._trace.events)
        result = function()
        events = self._trace.events[start:]
        del self._trace.events[start:]
        return result, events


def counts(name: str) -> dict[str, object]:
    """Return the counts of a micro-batch after the first step."""
    mode = name.partition(",")[0]
    cfg = layer_config("qwen3-30b-a3b", TOKENS, **CASES[name])
    trace = Trace(TOKENS * cfg.model.ffn.moe.top_k, cfg.model.ffn.moe.top_k)
    with fake_rank(cfg.parallel, 0) as groups, trace_cuda(trace):
        groups = replace(groups, device=CUDA)
        (stage,) = build_sharded_stages(cfg, groups, for_training=False).stages
        apply_kernels(stage, select_kernels(cfg, CUDA))
        stage.train()
        recorder = CountedGraphs(trace)
        if mode.startswith("attention"):
            apply_cuda_graphs(stage, WeightCache(), lambda: recorder, has_router="router" in mode)
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device=CUDA)
        weights = torch.ones(1, TOKENS, device=CUDA)
        columns = {"labels": tokens, "weights": weights, "sample_ids": torch.zeros(1, dtype=torch.int64, device=CUDA)}
        graph = MicroBatchGraph(stage, tokens, columns, recorder) if mode == "full" else None
        for _ in range(2):
            trace.events.clear()
            stage.zero_grad(set_to_none=True)
            if graph is None:
                stage(tokens, **columns).sum().backward()
            else:
                graph.zero_gradients()
                graph.replay(tokens, columns)
    captured = [event for event in recorder.captured if event.name != "promote_types"]
    return {
        "launches": len(trace.of("op", "kernel")),
        "captured": sum(event.kind in ("op", "kernel") for event in captured),
        "not captured": [f"{e.kind}: {e.name} at {e.source}" for e in captured if e.kind not in ("op", "kernel")],
    }


def main() -> int:
    """Print the counts."""
    json.dump({name: counts(name) for name in CASES}, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
