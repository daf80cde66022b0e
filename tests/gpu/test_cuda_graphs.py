"""Attention, routers and whole micro-batches replayed from CUDA graphs give the losses of eager ones. Needs CUDA."""

from dataclasses import replace

import pytest
import torch

from moefold.parallel.cuda_graphs import CapturedPasses, CudaGraphRecorders
from tests.gpu.runs import losses_on, small_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("compiled_parts", ["none", "blocks"])
@pytest.mark.parametrize("graphs", ["attention", "attention_router", "full"])
def test_graphs_give_the_losses_of_eager_training(graphs, compiled_parts):
    cfg = small_recipe(
        "bfloat16",
        hidden_size=256,
        **{"attention.head_dim": 64, "ffn.moe.intermediate_size": 256, "attention.qk_norm": {}},
    )
    cfg = replace(cfg, run=replace(cfg.run, device="cuda", compile=compiled_parts))
    cfg = replace(cfg, moe=replace(cfg.moe, input_jitter=0.1))
    graphed = replace(cfg, run=replace(cfg.run, cuda_graphs=graphs))
    assert losses_on(graphed, "cuda", 10) == pytest.approx(losses_on(cfg, "cuda", 10), rel=1e-2)


@pytest.mark.parametrize("graphs", ["attention_router", "full"])
def test_graphs_give_the_bits_of_eager_training_with_deterministic_kernels(graphs):
    cfg = small_recipe("bfloat16", hidden_size=256, **{"attention.head_dim": 64, "ffn.moe.intermediate_size": 256})
    cfg = replace(cfg, run=replace(cfg.run, device="cuda", deterministic=True))
    graphed = replace(cfg, run=replace(cfg.run, cuda_graphs=graphs))
    assert losses_on(graphed, "cuda", 10) == losses_on(cfg, "cuda", 10)


def test_a_replay_computes_with_new_values():
    x, w = (torch.randn(64, 64, device="cuda").requires_grad_() for _ in range(2))
    passes = CapturedPasses(lambda x, w: [torch.tanh(x @ w)], (x, w), CudaGraphRecorders()())
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
            w.normal_()
        grad = torch.randn(64, 64, device="cuda")
        y = torch.tanh(x @ w)
        torch.testing.assert_close(passes.forward()[0], y)
        torch.testing.assert_close(tuple(passes.backward([grad])), torch.autograd.grad(y, (x, w), grad))
