"""What an MoE layer keeps for its backward pass, with the weights on the results and inside the experts."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from moefold.config.schema import ModelConfig, MoEConfig
from moefold.moe.layer import MoELayer

MODEL = ModelConfig(hidden_size=48, num_experts=4, top_k=3, moe_ffn_hidden_size=16)
TOKENS = 32


def _layer(moe: MoEConfig) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(MODEL, moe, loss_scale=1.0).double()
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
        y = layer(x)
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
