"""The router scores, chooses and weighs as defined, never below float32, and balances its bias."""

import math

import pytest
import torch

from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.model.moe.router import Router
from moefold.model.moe.token_group import MicroBatchGroup, TokenPositions
from tests.model.moe.layers import moe_router
from tests.models import edit_model, model_of

MODEL = model_of({"hidden_size": 5, "ffn.moe.num_experts": 6, "ffn.moe.top_k": 2})
S = 7


def _router(model: ModelConfig, moe: MoEConfig | None = None, dtype: torch.dtype = torch.float64) -> Router:
    router = moe_router(model, moe or MoEConfig())
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(model.ffn.moe.num_experts, 5, generator=generator, dtype=torch.float64)
    router.weight.data = weight.to(dtype)
    return router


def _places(num_tokens: int = S, batch_size: int = 1) -> TokenPositions:
    return TokenPositions(MicroBatchGroup(), num_tokens // batch_size, torch.arange(batch_size))


def _score(kind: str, logits: list[float]) -> list[float]:
    if kind == "softmax":
        return [math.exp(x) / sum(math.exp(y) for y in logits) for x in logits]
    if kind == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in logits]
    return [math.sqrt(math.log(1 + math.exp(x))) for x in logits]


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize(
    ("score", "normalises"),
    [("softmax", True), ("softmax", False), *((s, n) for s in ("sigmoid", "sqrtsoftplus") for n in (True, False))],
)
def test_weights_follow_their_definition(score, normalises, top_k):
    model = edit_model(MODEL, {"ffn.moe.top_k": top_k, "ffn.moe.router": score, "ffn.moe.router.scaling_factor": 2.5})
    if score == "softmax":
        model = edit_model(model, {"ffn.moe.router.softmax": "post" if normalises else "pre"})
    else:
        model = edit_model(model, {"ffn.moe.router.normalize": normalises})
    router = _router(model)
    x = torch.randn(S, 5, dtype=torch.float64)
    routing = router(x, _places())
    for t in range(S):
        logits = (x[t] @ router.weight.detach().T).tolist()
        scores = _score(score, logits)
        chosen = sorted(range(6), key=lambda e: -logits[e])[:top_k]
        whole = sum(scores[e] for e in chosen) if normalises else 1.0
        assert routing.ids_TK[t].tolist() == chosen
        assert routing.probs_TK[t].tolist() == pytest.approx([2.5 * scores[e] / whole for e in chosen], rel=1e-12)
        assert routing.scores_TE[t].tolist() == pytest.approx([s / sum(scores) for s in scores], rel=1e-12)
        assert routing.logits_TE[t].tolist() == pytest.approx(logits)


@pytest.mark.parametrize(
    "model",
    [
        {"ffn.moe.router.softmax": "pre"},
        {"ffn.moe.router.softmax": "post"},
        {"ffn.moe.router": "sigmoid", "ffn.moe.router.scaling_factor": 3.0},
        {"ffn.moe.router": "sqrtsoftplus", "ffn.moe.router.normalize": False},
    ],
)
def test_gradient_of_the_weights(model):
    router = _router(edit_model(MODEL, model))
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)

    def probs(x, weight):
        return torch.func.functional_call(router, {"weight": weight}, (x, _places(4))).probs_TK

    assert torch.autograd.gradcheck(probs, (x, router.weight))


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_extreme_logits_have_finite_weights_and_gradients(score):
    router = _router(edit_model(MODEL, {"ffn.moe.router": score}), dtype=torch.float32)
    x = 1000.0 * torch.randn(S, 5)
    x.requires_grad_()
    routing = router(x, _places())
    assert routing.probs_TK.isfinite().all()
    (routing.probs_TK.sum() + routing.scores_TE.square().sum()).backward()
    assert x.grad.isfinite().all()
    assert router.weight.grad.isfinite().all()


def test_bfloat16_tokens_are_routed_in_float32_or_float64():
    router = _router(MODEL, dtype=torch.float32)
    x = torch.randn(9, 5).bfloat16()
    routing = router(x, _places(9))
    assert {routing.probs_TK.dtype, routing.scores_TE.dtype, routing.logits_TE.dtype} == {torch.float32}
    torch.testing.assert_close(routing.logits_TE, x.float() @ router.weight.t(), rtol=0, atol=0)
    precise = _router(MODEL, MoEConfig(router_dtype="float64"), dtype=torch.float32)(x, _places(9))
    assert (precise.logits_TE.dtype, precise.scores_TE.dtype, precise.probs_TK.dtype) == (
        torch.float64,
        torch.float64,
        torch.float32,
    )
    torch.testing.assert_close(precise.logits_TE, x.double() @ router.weight.t().double(), rtol=0, atol=0)


def test_the_bias_moves_the_choice_and_not_the_weights():
    model = edit_model(
        MODEL, {"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True, "ffn.moe.router.normalize": False}
    )
    router = _router(model)
    x = torch.randn(S, 5, dtype=torch.float64)
    router.expert_bias[3] = 10.0
    routing = router(x, _places())
    assert (routing.ids_TK[:, 0] == 3).all()
    expected = (x @ router.weight.T).sigmoid().gather(1, routing.ids_TK)
    torch.testing.assert_close(routing.probs_TK, expected)
    assert "expert_bias" in router.state_dict()
    assert "expert_bias" not in _router(MODEL).state_dict()


def test_the_bias_goes_up_for_fewer_and_down_for_more_than_the_mean():
    router = _router(
        edit_model(MODEL, {"ffn.moe.num_experts": 3, "ffn.moe.router.expert_bias": True}),
        MoEConfig(bias_update_rate=0.25),
    )
    nothing = torch.zeros(3)
    router.update_bias(torch.tensor([7.0, 1.0, 4.0]), nothing)
    assert router.expert_bias.tolist() == [-0.25, 0.25, 0.0]
    # An even load leaves it, also where the mean of the counts cannot be represented exactly.
    router.update_bias(torch.full((3,), 1e15 / 3).floor(), nothing)
    assert router.expert_bias.tolist() == [-0.25, 0.25, 0.0]
    assert router.expert_bias.dtype == torch.float32


def test_a_rate_of_zero_leaves_the_bias():
    router = _router(
        edit_model(MODEL, {"ffn.moe.num_experts": 3, "ffn.moe.router.expert_bias": True}),
        MoEConfig(bias_update_rate=0.0),
    )
    router.expert_bias.copy_(torch.tensor([0.5, -1.0, 0.0]))
    router.update_bias(torch.tensor([7.0, 1.0, 4.0]), torch.zeros(3))
    assert router.expert_bias.tolist() == [0.5, -1.0, 0.0]


def test_quantile_routing_leaves_its_thresholds_for_evaluation():
    model = edit_model(
        MODEL, {"ffn.moe.num_experts": 4, "ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True}
    )
    router = _router(model, MoEConfig(choice="quantile"))
    x = torch.randn(64, 5, dtype=torch.float64)
    x[:, 0] += 2.0
    routing = router(x, _places(64))
    plain = _router(edit_model(model, {"ffn.moe.router.expert_bias": False}))(x, _places(64))

    def counts(ids):
        return ids.flatten().bincount(minlength=4)

    assert counts(routing.ids_TK).double().std() < 0.5 * counts(plain.ids_TK).double().std()
    router.update_bias(torch.zeros(4), routing.thresholds_E)
    torch.testing.assert_close(router.expert_bias, -routing.thresholds_E.float())
    router.eval()
    evaluated = router(x, _places(64))
    assert evaluated.thresholds_E is None
    assert torch.equal(evaluated.ids_TK, routing.ids_TK)


def test_sinkhorn_is_only_for_training():
    router = _router(MODEL, MoEConfig(choice="sinkhorn"))
    x = torch.randn(64, 5, dtype=torch.float64)
    x[:, 0] += 3.0
    plain = _router(MODEL)(x, _places(64)).ids_TK
    assert not torch.equal(router(x, _places(64)).ids_TK, plain)
    router.eval()
    assert torch.equal(router(x, _places(64)).ids_TK, plain)


def test_jitter_multiplies_the_input_of_the_router_only_in_training():
    router = _router(MODEL, MoEConfig(input_jitter=0.1))
    x = torch.randn(S, 5, dtype=torch.float64)
    first, again = router(x, _places()).logits_TE, router(x, _places()).logits_TE
    assert torch.equal(first, again)
    clean = x @ router.weight.T
    assert not torch.allclose(first, clean)
    assert ((first - clean).abs() <= 0.1 * (x.abs() @ router.weight.abs().T) + 1e-12).all()
    router.step = 2
    assert not torch.allclose(router(x, _places()).logits_TE, first)
    router.eval()
    assert torch.equal(router(x, _places()).logits_TE, clean)
