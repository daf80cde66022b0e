"""Test packed documents on CUDA: one copy of their bounds a micro-batch, no mask, and no wait of the host."""

from dataclasses import replace

import pytest
import torch

from benchmarks.cuda_layers import layer_config
from benchmarks.cuda_trace import CUDA, Trace, trace_cuda
from moefold.comm.groups import fake_rank
from moefold.ops.documents import DocumentBounds
from moefold.parallel.parallelize import build_sharded_stages

S = 4096
BOUNDS = DocumentBounds(((0, 1000, 1001, S),))


def _trace(num_layers: int, window: int, bounds: DocumentBounds | None) -> Trace:
    """Trace one micro-batch of a dense model, forward and backward."""
    model = {"layers": f"{num_layers} dense", "ffn.dense.intermediate_size": 1024}
    windows = {"layers": f"{num_layers} window/dense", "sliding_window": window} if window else {}
    cfg = layer_config("qwen3-30b-a3b", S, model=model | windows, run={"kernels": "plain"})
    trace = Trace()
    with fake_rank(cfg.parallel, 0) as groups, trace_cuda(trace):
        (stage,) = build_sharded_stages(cfg, replace(groups, device=CUDA), for_training=False).stages
        stage.train()
        tokens = torch.empty(1, S, dtype=torch.int64, device=CUDA)
        columns = {"labels": tokens, "weights": torch.empty(1, S, device=CUDA)}
        if bounds is not None:
            columns["document_starts"] = tokens
        trace.events.clear()
        stage(tokens, document_bounds=bounds, **columns).sum().backward()
    return trace


@pytest.mark.parametrize("window", [0, 512])
def test_documents_cost_one_copy_and_no_mask(window):
    without, one, two = _trace(1, window, None), _trace(1, window, BOUNDS), _trace(2, window, BOUNDS)
    assert [event.name for event in one.of("copy")] == ["copy to the device"]
    assert len(two.of("copy")) == 1
    assert two.of("wait") == without.of("wait") == []
    names = [event.name for event in two.of("op")]
    assert names.count("_flash_attention_forward") == names.count("_flash_attention_backward") == 2
    assert "sdpa" not in names
    # Nothing in memory has a number for each pair of tokens.
    greatest = max(event.moved_bytes for event in without.of("op"))
    assert max(event.moved_bytes for event in two.of("op")) <= 1.1 * greatest
    assert greatest < 2**30
