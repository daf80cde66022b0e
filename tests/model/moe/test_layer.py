"""Test that the layer on one rank equals the textbook, with dropping, a shared expert, losses and counters."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.model.mlp import SwiGLU
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.token_group import TokenColumns
from tests.model.moe.layers import moe_layer
from tests.model.moe.reference import make_weights, moe_reference, swiglu
from tests.models import edit_model, model_of

MODEL = model_of({"hidden_size": 6, "ffn.moe.num_experts": 4, "ffn.moe.top_k": 2, "ffn.moe.intermediate_size": 8})
PLAIN = MoEConfig(aux_loss=0.0, z_loss=0.0)
S, B = 8, 3


def _layer(model: ModelConfig, moe: MoEConfig, loss_scale: float = 1.0, shared: nn.Module | None = None) -> MoELayer:
    layer = moe_layer(model, moe, loss_scale=loss_scale, shared=shared).double()
    layer.load_state_dict(make_weights(model), strict=False)
    return layer


def _tokens(seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(S, B, MODEL.hidden_size, dtype=torch.float64, generator=generator, requires_grad=True)


def _gradients(loss, x, layer):
    names = [name for name, _ in layer.named_parameters()]
    return dict(zip(["x", *names], torch.autograd.grad(loss, [x, *layer.parameters()]), strict=True))


def _assert_equals_reference(model: ModelConfig, moe: MoEConfig, loss_scale: float = 0.25) -> None:
    layer, x = _layer(model, moe, loss_scale), _tokens()
    grad = torch.randn(S, B, model.hidden_size, dtype=torch.float64)
    y = layer(x).y
    actual = _gradients((y * grad).sum(), x, layer)
    weights = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    x = _tokens()
    expected = moe_reference(x, weights, model, moe)
    torch.testing.assert_close(y, expected.y, rtol=1e-12, atol=1e-12)
    loss = (expected.y * grad).sum() + 0.25 * (moe.aux_loss * expected.aux + moe.z_loss * expected.z)
    for name, e in zip(["x", *weights], torch.autograd.grad(loss, [x, *weights.values()]), strict=True):
        message = f"{name} differs"
        torch.testing.assert_close(
            actual[name], e, rtol=1e-11, atol=1e-12, msg=lambda text, message=message: f"{message}: {text}"
        )


@pytest.mark.parametrize("softmax", ["pre", "post"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("losses", [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_the_layer_equals_the_reference(softmax, top_k, losses):
    moe = replace(PLAIN, aux_loss=losses[0], z_loss=losses[1])
    _assert_equals_reference(edit_model(MODEL, {"ffn.moe.router.softmax": softmax, "ffn.moe.top_k": top_k}), moe)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("scope", ["full_sequence", "sub_sequence"])
@pytest.mark.parametrize("factor", [0.1, 0.7, 1.0, 4.0])
def test_dropping_equals_the_reference(factor, scope, policy, pads):
    moe = MoEConfig(
        capacity_factor=factor, drop_policy=policy, drop_scope=scope, pad_to_capacity=pads, aux_loss=0.1, z_loss=0.1
    )
    _assert_equals_reference(MODEL, moe)


@pytest.mark.parametrize("losses", [(0.3, 0.0), (0.0, 0.2)])
def test_a_wrong_loss_scale_is_noticed(losses):
    moe = replace(PLAIN, aux_loss=losses[0], z_loss=losses[1])
    with pytest.raises(AssertionError, match="(x|router.weight) differs"):
        _assert_equals_reference(MODEL, moe, loss_scale=0.25 * (1 + 1e-7))


@pytest.mark.parametrize("has_gate", [False, True])
def test_shared_expert(has_gate):
    model = edit_model(MODEL, {"ffn.moe.shared.intermediate_size": 10, "ffn.moe.shared.gate": has_gate})
    shared = SwiGLU(model.hidden_size, 10)
    for parameter in shared.parameters():
        nn.init.normal_(parameter)
    layer, x = _layer(model, PLAIN, shared=shared), _tokens()
    assert ("shared_gate" in dict(layer.named_parameters())) == has_gate
    gate, up, down = (w.detach().T for w in (shared.w_gate, shared.w_up, shared.w_down))
    expected = swiglu(x, gate, up, down)
    if has_gate:
        expected = expected / (1 + torch.exp(-x @ layer.shared_gate.T))
    expected = expected + moe_reference(x, dict(layer.named_parameters()), model, PLAIN).y
    torch.testing.assert_close(layer(x).y, expected, rtol=1e-12, atol=1e-12)


def _counts(layer: MoELayer) -> list[float]:
    stats = layer.stats
    scalars = (stats.routed_tokens, stats.dropped, stats.aux, stats.z)
    return [*stats.tokens_per_expert_E.tolist(), *(x.item() for x in scalars)]


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
def test_counters_sum_over_micro_batches_and_ignore_recompute(recompute):
    moe = MoEConfig(capacity_factor=0.7, aux_loss=0.3, z_loss=0.2)
    layer = _layer(MODEL, moe, loss_scale=0.5)
    expected = torch.zeros(8, dtype=torch.float64)
    for seed in (1, 2):
        x = _tokens(seed)
        y, _ = layer(x) if recompute is None else checkpoint(layer, x, use_reentrant=recompute == "reentrant")
        y.sum().backward()
        with torch.no_grad():
            weights = dict(layer.named_parameters())
            reference = moe_reference(x, weights, MODEL, moe)
            ids = (x @ weights["router.weight"].T).topk(2).indices
        dropped = len(reference.dropped)
        parts = [S * B * 2.0, dropped, 0.5 * 0.3 * reference.aux.item(), 0.5 * 0.2 * reference.z.item()]
        expected += torch.cat([ids.flatten().bincount(minlength=4), torch.tensor(parts, dtype=torch.float64)])
    assert _counts(layer) == pytest.approx(expected.tolist(), rel=1e-12)
    assert layer.stats.dropped.item() > 0
    layer.stats.reset()
    assert _counts(layer) == [0.0] * 8


def test_evaluation_drops_the_same_and_adds_no_counts_and_no_losses():
    layer, x = _layer(MODEL, MoEConfig(capacity_factor=0.7, aux_loss=5.0, z_loss=5.0)), _tokens()
    trained = layer(x).y
    layer.eval()
    evaluated = layer(x).y
    assert torch.equal(trained, evaluated)
    router_gradient = _gradients(evaluated.sum(), x, layer)["router.weight"]
    assert not torch.allclose(router_gradient, _gradients(trained.sum(), x, layer)["router.weight"])
    layer.stats.reset()
    evaluated = layer(x).y
    evaluated.sum().backward()
    assert _counts(layer) == [0.0] * 8


ROUTERS = {
    "deepseek": (
        {
            "ffn.moe.router": "sigmoid",
            "ffn.moe.router.expert_bias": True,
            "ffn.moe.router.num_groups": 2,
            "ffn.moe.router.top_groups": 1,
        },
        {"aux_kind": "sequence"},
    ),
    "sinkhorn": ({}, {"choice": "sinkhorn"}),
    "quantile": ({"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True}, {"choice": "quantile"}),
    "jitter": ({}, {"input_jitter": 0.2}),
    "global batch": ({}, {"aux_kind": "global_batch"}),
    "last global batch": ({}, {"aux_kind": "last_global_batch"}),
    "skewed": ({}, {"choice": "skewed", "capacity_factor": 0.8}),
}


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_changes_no_values_no_gradients_and_no_counts(kind, reentrant):
    model, moe = ROUTERS[kind]
    moe = replace(PLAIN, aux_loss=0.3, z_loss=0.2, **moe)

    def train(layer_forward, layer):
        """Two micro-batches under way at once, as in a pipeline; the first comes back last."""
        inputs = [_tokens(seed) for seed in (1, 2)]
        samples = [TokenColumns(torch.arange(B)), TokenColumns(torch.arange(B, 2 * B))]
        outputs = [layer_forward(x, sample)[0] for x, sample in zip(inputs, samples, strict=True)]
        for y in reversed(outputs):
            (y * torch.arange(MODEL.hidden_size)).sum().backward()
        gradients = [p.grad for p in layer.parameters()] + [x.grad for x in inputs]
        return [y.detach() for y in outputs], gradients, [total.clone() for total in vars(layer.stats).values()]

    plain, recomputed = (
        moe_layer(edit_model(MODEL, model), moe, loss_scale=0.5, micro_batches_per_rank=2, noise_seed=3).double()
        for _ in range(2)
    )
    for layer in (plain, recomputed):
        layer.load_state_dict(make_weights(MODEL), strict=False)
    expected = train(plain, plain)
    actual = train(lambda *args: checkpoint(recomputed, *args, use_reentrant=reentrant), recomputed)
    for mine, theirs in zip(actual, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)
    assert expected[2][0].sum() == 2 * S * B * 2


def test_evaluation_has_a_capacity_of_its_own():
    moe = replace(PLAIN, capacity_factor=0.6, eval_capacity_factor=0.0)
    layer, x = _layer(MODEL, moe), _tokens()
    weights = dict(layer.named_parameters())
    torch.testing.assert_close(layer(x).y, moe_reference(x, weights, MODEL, moe).y)
    layer.eval()
    torch.testing.assert_close(layer(x).y, moe_reference(x, weights, MODEL, PLAIN).y)
    layer = _layer(MODEL, replace(moe, capacity_factor=0.0, eval_capacity_factor=0.6))
    torch.testing.assert_close(layer(x).y, moe_reference(x, weights, MODEL, PLAIN).y)
    layer.eval()
    torch.testing.assert_close(layer(x).y, moe_reference(x, weights, MODEL, moe).y)


def test_a_perfectly_even_router_has_the_entropy_of_all_experts():
    layer, x = _layer(MODEL, PLAIN), _tokens()
    layer.router.weight.data.zero_()
    layer(x).y.sum().backward()
    assert layer.stats.entropy.item() == pytest.approx(S * B * math.log(MODEL.ffn.moe.num_experts))


def test_a_bfloat16_input_gives_a_bfloat16_output():
    layer = _layer(MODEL, MoEConfig(aux_loss=0.1, z_loss=0.1)).bfloat16()
    layer.router.float()
    x = _tokens().detach().bfloat16().requires_grad_()
    y = layer(x).y
    y.float().sum().backward()
    assert (y.dtype, x.grad.dtype, layer.router.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    weights = {name: p.detach().double() for name, p in layer.named_parameters()}
    expected = moe_reference(x.double(), weights, MODEL, PLAIN).y
    assert (y.double() - expected).norm() < 2e-2 * expected.norm()


def test_float32_weights_are_read_in_the_type_of_the_tokens():
    layer = _layer(MODEL, PLAIN).float()
    assert layer(_tokens().bfloat16()).y.dtype == torch.bfloat16


def test_can_be_built_without_memory():
    with torch.device("meta"):
        layer = moe_layer(edit_model(MODEL, {"ffn.moe.shared.gate": True}), PLAIN, loss_scale=1.0, shared=SwiGLU(6, 4))
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu")
    assert layer.stats.routed_tokens.item() == 0
