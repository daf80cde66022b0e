"""Attention replayed from CUDA graphs gives the losses of eager attention. Needs CUDA."""

from dataclasses import replace

import pytest
import torch

from moefold.parallel.cuda_graphs import CudaGraphPasses
from tests.gpu.runs import losses_on, small_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("compiled_parts", ["none", "blocks"])
def test_graphs_give_the_losses_of_eager_attention(compiled_parts):
    cfg = small_recipe("bfloat16", hidden_size=256, head_dim=64, moe_ffn_hidden_size=256, qk_norm=True)
    cfg = replace(cfg, run=replace(cfg.run, device="cuda", compile=compiled_parts))
    graphed = replace(cfg, run=replace(cfg.run, cuda_graphs="attention"))
    assert losses_on(graphed, "cuda", 10) == pytest.approx(losses_on(cfg, "cuda", 10), rel=1e-2)


def test_a_replay_computes_with_new_values():
    x, w = (torch.randn(64, 64, device="cuda").requires_grad_() for _ in range(2))
    passes = CudaGraphPasses(lambda x, w: torch.tanh(x @ w), (x, w))
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
            w.normal_()
        grad = torch.randn(64, 64, device="cuda")
        y = torch.tanh(x @ w)
        torch.testing.assert_close(passes.forward(), y)
        torch.testing.assert_close(tuple(passes.backward(grad)), torch.autograd.grad(y, (x, w), grad))
