"""Tensors that an MoE layer keeps for its backward pass, with the weights on the results and inside the experts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from moefold.config.sections.moe import MoEConfig
from moefold.model.moe.layer import MoELayer
from moefold.ops import gemm
from tests.model.moe.layers import moe_layer
from tests.models import model_of

MODEL = model_of({"hidden_size": 48, "ffn.moe.num_experts": 4, "ffn.moe.top_k": 3, "ffn.moe.intermediate_size": 16})
TOKENS = 32


def _layer(moe: MoEConfig) -> MoELayer:
    torch.manual_seed(0)
    layer = moe_layer(MODEL, moe, loss_scale=1.0).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def _run(moe: MoEConfig) -> tuple[dict[str, Tensor], int]:
    """Output and gradients, and the numbers kept in tensors of [R, H]."""
    layer, kept = _layer(moe), {}
    x = torch.randn(TOKENS, 1, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x).y
    y.square().sum().backward()
    found = {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
    num_rows = TOKENS * 3
    return found, sum(tensor.shape == (num_rows, 48) for tensor in kept.values())


def test_the_results_of_the_experts_are_not_kept():
    plain, plain_kept = _run(MoEConfig())
    saving, saving_kept = _run(replace(MoEConfig(), weight_in_expert=True))
    assert (plain_kept, saving_kept) == (2, 1)
    for name, value in plain.items():
        torch.testing.assert_close(saving[name], value, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("is_emulated", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
def test_narrow_rows_with_wide_weights_on_every_kind_of_processor(monkeypatch, is_emulated, is_padded):
    """The type of rows decides their padding, and weights of another type are padded as the rows are."""
    monkeypatch.setattr(gemm, "_EMULATES_BFLOAT16", is_emulated)
    monkeypatch.setattr(gemm, "_USES_ONEDNN_FP32", is_padded)
    moe = MoEConfig(weight_in_expert=True)
    layers = {dtype: _layer(moe).to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    x_TBH = torch.randn(TOKENS, 1, 48, generator=torch.Generator().manual_seed(1))
    found = {}
    for dtype, layer in layers.items():
        x = x_TBH.to(dtype, copy=True).requires_grad_()
        y = layer(x).y
        y.float().square().sum().backward()
        found[dtype] = {"y": y, "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
    for name, exact in found[torch.float32].items():
        error = (found[torch.bfloat16][name].float() - exact).norm() / exact.norm()
        assert error < 0.05, name
