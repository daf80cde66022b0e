"""Kernels in a whole run on one GPU: the losses of plain operations, and no wait for row counts. Needs CUDA."""

from dataclasses import replace

import pytest
import torch

from moefold.model.moe.token_group import TokenColumns
from moefold.parallel.kernels.select import select_kernels
from tests.gpu.runs import losses_on, small_recipe
from tests.model.moe.layers import moe_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {"hidden_size": 256, "attention.head_dim": 64, "ffn.moe.intermediate_size": 256}


def test_kernels_on_and_off_give_the_same_losses():
    cfg = small_recipe("bfloat16", **SIZES)
    plain = replace(cfg, run=replace(cfg.run, kernels="plain"))
    assert type(select_kernels(cfg, torch.device("cuda")).expert_ops).__name__ == "TritonExpertOps"
    on, off = losses_on(cfg, "cuda", 10), losses_on(plain, "cuda", 10)
    assert on == pytest.approx(off, rel=1e-2)
    assert on[-1] < on[0]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="the GPU has no FP8"
)
def test_fp8_on_the_matrix_units_follows_the_simulation():
    cfg = small_recipe("bfloat16", **SIZES)
    cfg = replace(cfg, train=replace(cfg.train, precision="fp8-blockwise"))
    simulated = replace(cfg, run=replace(cfg.run, kernels="plain"))
    assert type(select_kernels(cfg, torch.device("cuda")).expert_ops).__name__ == "Fp8ExpertOps"
    real, plain = losses_on(cfg, "cuda", 10), losses_on(simulated, "cuda", 10)
    assert real == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("has_padding", [False, True])
def test_a_dropless_layer_waits_for_nothing(has_padding):
    cfg = small_recipe("bfloat16", **SIZES)
    device = torch.device("cuda")
    layer = moe_layer(cfg.model, cfg.moe, loss_scale=1.0).to(device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    kernels = select_kernels(replace(cfg, run=replace(cfg.run, deterministic=True)), device)
    layer.experts.ops, layer.router.kernels = kernels.expert_ops, kernels
    x = torch.randn(64, 2, SIZES["hidden_size"], device=device, dtype=torch.bfloat16, requires_grad=True)
    weights = (torch.arange(64, device=device) < 40).float().expand(2, -1) / 80
    columns = TokenColumns(torch.arange(2, device=device), weights if has_padding else None)
    grad = torch.randn_like(x)
    layer(x, columns).y.backward(grad)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, columns).y.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
