"""Trace the loss of a step on CUDA, with the kernels and with torch operations, and print its counts as JSON.

Launches are only recorded where Triton does not interpret kernels, so this runs in a process of its own.
"""

import json
import sys
from dataclasses import replace

import torch

from benchmarks.cuda_layers import layer_config
from benchmarks.cuda_trace import CUDA, Trace, trace_cuda
from moefold.comm.groups import fake_rank
from moefold.parallel.parallelize import build_sharded_stages

TOKENS = 16_384
VOCAB_SIZE = 151_936


def counts(kernels: str, chunk: int) -> dict[str, object]:
    """Return the counts of the loss of Qwen3-30B-A3B, forward and backward with its GEMMs."""
    sections = {"run": {"kernels": kernels}, "model": {"vocab_size": VOCAB_SIZE}, "train": {"loss_chunk": chunk}}
    cfg = layer_config("qwen3-30b-a3b", TOKENS, **sections)
    trace = Trace()
    with fake_rank(cfg.parallel, 0) as groups, trace_cuda(trace):
        groups = replace(groups, device=CUDA)
        (stage,) = build_sharded_stages(cfg, groups, for_training=False).stages
        x = torch.empty(TOKENS, 1, cfg.model.hidden_size, dtype=stage.dtype, device=CUDA, requires_grad=True)
        labels = torch.zeros(TOKENS, 1, dtype=torch.int64, device=CUDA)
        trace.events.clear()
        losses = stage.head.losses(x, None, labels, cfg.loss_chunk_tokens(CUDA.type)).loss
        losses.backward(torch.empty_like(losses))
    device = trace.of("op", "kernel")
    return {
        "waits": len(trace.of("wait")),
        "launches": len(device),
        "kernels": [event.name for event in trace.of("kernel")],
        "moved_bytes": int(sum(event.moved_bytes for event in device)),
        "gemm_bytes": int(sum(event.moved_bytes for event in device if event.flops)),
    }


def main() -> int:
    """Print the counts."""
    cases = [(kernels, chunk) for kernels in ("auto", "plain") for chunk in (0, -1)]
    json.dump({f"{kernels} {chunk}": counts(kernels, chunk) for kernels, chunk in cases}, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
