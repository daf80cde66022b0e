"""Rows without weight: an MoE layer gives the same for padded samples as for only their tokens."""

from dataclasses import replace

import pytest
import torch

from moefold.config.base.part import make_part
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.model.moe import losses as losses_module
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.losses import RouterStats
from moefold.model.moe.router import FusedRouting
from moefold.model.moe.token_group import TokenColumns
from tests.model.moe.layers import moe_layer
from tests.model.moe.reference import make_weights
from tests.models import edit_model, model_of

MODEL = model_of({"hidden_size": 6, "ffn.moe.num_experts": 4, "ffn.moe.top_k": 2, "ffn.moe.intermediate_size": 8})
SIGMOID = edit_model(MODEL, {"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True})
LOSSES = {"aux_loss": 0.3, "z_loss": 0.2}
TOKENS, S, B = 5, 8, 2
KINDS = {
    "micro batch": (MODEL, {}),
    "sequence": (SIGMOID, {"aux_kind": "sequence"}),
    "global batch": (MODEL, {"aux_kind": "global_batch"}),
    "last global batch": (SIGMOID, {"aux_kind": "last_global_batch"}),
    "sinkhorn": (
        edit_model(MODEL, {"ffn.moe.router": "sigmoid"}),
        {"choice": make_part("choice", "sinkhorn", iterations=5)},
    ),
    "quantile": (SIGMOID, {"choice": "quantile"}),
    "drop by probability": (MODEL, {"capacity_factor": 0.75}),
    "drop by position": (MODEL, {"capacity_factor": 0.75, "drop_policy": "position", "aux_kind": "sequence"}),
    "drop and pad": (MODEL, {"capacity_factor": 0.75, "drop_scope": "sub_sequence", "pad_to_capacity": True}),
    "expert weights early": (MODEL, {"weight_in_expert": True, "dispatch_precision": "dtype"}),
}


def _run(
    model: ModelConfig, moe: MoEConfig, xs: list[torch.Tensor], weights: list[torch.Tensor | None]
) -> tuple[MoELayer, list[torch.Tensor]]:
    """Train a layer on micro-batches; return it with the outputs."""
    layer = moe_layer(model, moe, loss_scale=1 / len(xs), micro_batches_per_rank=len(xs)).double()
    layer.load_state_dict(make_weights(model), strict=False)
    outputs = []
    for number, (x, weight) in enumerate(zip(xs, weights, strict=True)):
        y = layer(x, TokenColumns(torch.arange(B) + B * number, weight)).y
        (y * torch.arange(1.0, 1 + y[0].numel()).view(1, *y.shape[1:])).sum().backward()
        outputs.append(y.detach())
    return layer, outputs


def _numbers(stats: RouterStats) -> dict[str, torch.Tensor]:
    return {name: value.double() for name, value in vars(stats).items()}


def _inputs() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return tokens of two micro-batches, the same with padding before, between and after, and with the weights."""
    generator = torch.Generator().manual_seed(5)
    alone = [torch.randn(TOKENS, B, MODEL.hidden_size, dtype=torch.float64, generator=generator) for _ in range(2)]
    padded, weights = [], []
    for x, places in zip(alone, ([1, 2, 4, 5, 6], [0, 1, 2, 3, 4]), strict=True):
        # Large values: their logits would decide every choice that reads them.
        filled = 9 * torch.randn(S, B, MODEL.hidden_size, dtype=torch.float64, generator=generator)
        filled[places] = x
        weight = torch.zeros(B, S, dtype=torch.float64)
        weight[:, places] = 1 / (2 * TOKENS * B)
        padded.append(filled.requires_grad_())
        weights.append(weight)
    return [x.requires_grad_() for x in alone], padded, weights


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    model, changes = KINDS[kind]
    moe = MoEConfig(**LOSSES | changes)
    alone, padded, weights = _inputs()
    expected, ys = _run(model, moe, alone, [None, None])
    # A micro-batch of only padding adds nothing.
    empty = torch.randn(S, B, model.hidden_size, dtype=torch.float64, requires_grad=True)
    actual, padded_ys = _run(model, moe, [*padded, empty], [*weights, torch.zeros(B, S, dtype=torch.float64)])
    for x, y, filled, padded_y, weight in zip(alone, ys, padded, padded_ys, weights, strict=False):
        is_token = weight[0] > 0
        torch.testing.assert_close(padded_y[is_token], y, rtol=1e-12, atol=1e-12)
        assert not padded_y[~is_token].any()
        torch.testing.assert_close(filled.grad[is_token], x.grad, rtol=1e-11, atol=1e-12)
        assert not filled.grad[~is_token].any()
    assert not empty.grad.any()
    for name, value in _numbers(expected.stats).items():
        torch.testing.assert_close(_numbers(actual.stats)[name], value, rtol=1e-12, atol=1e-14, msg=name)
    if moe.capacity_factor:
        assert expected.stats.dropped > 0
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(actual.get_parameter(name).grad, parameter.grad, rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize("part", ["count_tokens_per_expert", "local_z_sum", "entropy_sum"])
def test_a_sum_that_takes_padding_for_tokens_is_noticed(part, monkeypatch: pytest.MonkeyPatch):
    whole = getattr(losses_module, part)
    num_arguments = {"count_tokens_per_expert": 3, "local_z_sum": 1, "entropy_sum": 1}[part]
    rest = {"entropy_sum": (None,)}.get(part, ())
    monkeypatch.setattr(losses_module, part, lambda *args: whole(*args[:num_arguments], *rest))
    with pytest.raises(AssertionError):
        test_padding_changes_nothing("micro batch")


def test_a_forward_pass_without_padding_is_that_without_weights():
    """Equal weights of 1/tokens are the mean that a batch without padding takes."""
    alone, _, _ = _inputs()
    moe = MoEConfig(**LOSSES)
    equal = torch.full((B, TOKENS), 1 / (2 * TOKENS * B), dtype=torch.float64)
    expected, ys = _run(MODEL, moe, alone, [None, None])
    gradient = expected.router.weight.grad
    actual, weighted = _run(MODEL, moe, alone, [equal, equal])
    torch.testing.assert_close(weighted, ys, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(actual.router.weight.grad, gradient, rtol=1e-12, atol=1e-14)


def test_the_fused_router_does_not_count_padding():
    model = edit_model(MODEL, {"ffn.moe.router.softmax": "pre"})
    alone, padded, weights = _inputs()
    results = []
    for xs, columns in ((alone, [None, None]), (padded, weights)):
        layer = moe_layer(model, MoEConfig(**LOSSES), loss_scale=0.5)
        layer.load_state_dict(make_weights(model), strict=False)
        layer.router.kernels = replace(layer.router.kernels, router=_torch_kernel(model))
        for x, weight in zip(xs, columns, strict=True):
            layer(x.float(), TokenColumns(torch.arange(B), weight)).y.sum().backward()
        results.append([layer.router.weight.grad, *_numbers(layer.stats).values()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def _torch_kernel(model: ModelConfig) -> FusedRouting:
    """Return the fused kernel's outputs, computed by torch and with the sums over all rows."""
    from moefold.ops.triton.router import RouterOutput

    def route(logits: torch.Tensor, bias: torch.Tensor | None) -> RouterOutput:
        scores = logits.softmax(-1)
        probs, ids = scores.topk(model.ffn.moe.top_k)
        counts = ids.flatten().bincount(minlength=model.ffn.moe.num_experts)
        z = logits.logsumexp(-1).square().sum()
        return RouterOutput(ids, probs, scores, counts, scores.sum(0), z, torch.special.entr(scores.detach()).sum())

    return route
