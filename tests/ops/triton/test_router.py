"""The fused router against the plain one in float64: choices, weights, sums and gradients."""

import pytest
import torch

from moefold.config.sections.moe import MoEConfig
from moefold.model.moe.losses import count_tokens_per_expert
from moefold.model.moe.router import fused_router_unsupported_reason
from moefold.model.moe.token_group import MicroBatchGroup, TokenPositions
from moefold.ops.triton.router import route_forward
from tests.model.moe.layers import fused_routing, moe_router
from tests.models import edit_model
from tests.verify.recipes import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS = [
    {"ffn.moe.top_k": 2},
    {
        "ffn.moe.top_k": 3,
        "ffn.moe.router.softmax": "post",
        "ffn.moe.router.scaling_factor": 2.5,
        "ffn.moe.num_experts": 7,
    },
    {"ffn.moe.top_k": 1, "ffn.moe.router": "sigmoid", "ffn.moe.num_experts": 5},
    {
        "ffn.moe.top_k": 3,
        "ffn.moe.router": "sigmoid",
        "ffn.moe.router.normalize": True,
        "ffn.moe.router.scaling_factor": 1.5,
        "ffn.moe.router.expert_bias": True,
    },
    {
        "ffn.moe.top_k": 2,
        "ffn.moe.router": "sigmoid",
        "ffn.moe.router.normalize": True,
        "ffn.moe.router.num_groups": 4,
        "ffn.moe.router.top_groups": 2,
    },
    {"ffn.moe.top_k": 2, "ffn.moe.router.num_groups": 2, "ffn.moe.router.top_groups": 1, "ffn.moe.num_experts": 6},
    {
        "ffn.moe.top_k": 2,
        "ffn.moe.router.num_groups": 3,
        "ffn.moe.router.top_groups": 2,
        "ffn.moe.num_experts": 12,
        "ffn.moe.router.expert_bias": True,
        "ffn.moe.router": "sigmoid",
    },
]


def _model(sizes):
    return edit_model(tiny().model, sizes)


@pytest.mark.parametrize("sizes", MODELS)
@pytest.mark.parametrize("num_tokens", [6, 1, 0])
def test_the_fused_router_equals_float64(sizes, num_tokens):
    model = _model(sizes)
    assert fused_router_unsupported_reason(model, MoEConfig()) == ""
    plain = moe_router(model, MoEConfig()).double()
    torch.nn.init.normal_(plain.weight)
    if plain.expert_bias is not None:
        plain.expert_bias.copy_(torch.randn(model.ffn.moe.num_experts) * 0.1)
    x = torch.randn(num_tokens, model.hidden_size, dtype=torch.float64)
    # Both start from logits that float32 can hold.
    logits = (x @ plain.weight.detach().t()).float().to(DEVICE).requires_grad_()
    bias = None if plain.expert_bias is None else plain.expert_bias.float().to(DEVICE)
    routed = fused_routing(model)(logits, bias)

    wide = logits.detach().cpu().double().requires_grad_()
    plain.weight = torch.nn.Parameter(torch.eye(model.ffn.moe.num_experts, dtype=torch.float64))
    places = TokenPositions(MicroBatchGroup(), num_tokens, torch.arange(1))
    expected = plain(wide, places)
    assert torch.equal(routed.ids_TK.cpu(), expected.ids_TK)
    assert torch.equal(
        routed.tokens_per_expert_E.cpu(), count_tokens_per_expert(expected.ids_TK, model.ffn.moe.num_experts)[0]
    )
    z = expected.logits_TE.logsumexp(-1).square().sum()
    theirs = [expected.probs_TK, expected.scores_TE, expected.scores_TE.sum(0), z]
    ours = [routed.probs_TK, routed.scores_TE, routed.score_sums_E, routed.z_sum]
    entropy = torch.special.entr(expected.scores_TE).sum()
    for a, e in zip([*ours, routed.entropy], [*theirs, entropy], strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=1e-5, atol=1e-6)
    if not num_tokens:
        return
    factors = [torch.randn_like(e) for e in theirs]
    (wanted,) = torch.autograd.grad(theirs, wide, factors)
    (found,) = torch.autograd.grad(ours, logits, [f.float().to(DEVICE) for f in factors])
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "used"),
    [
        pytest.param(sizes, used, marks=pytest.mark.slow if (i - used) % 3 else (), id=f"{sizes}-{name}")
        for i, sizes in enumerate(MODELS)
        for used, name in enumerate(("probabilities", "scores", "sums", "z"))
    ],
)
def test_gradient_of_only_one_output(sizes, used):
    """Gradients of the others are not made, and count as zero."""
    logits = torch.randn(6, _model(sizes).ffn.moe.num_experts, device=DEVICE, requires_grad=True)
    routed = fused_routing(_model(sizes))(logits, None)
    outputs = [routed.probs_TK, routed.scores_TE, routed.score_sums_E, routed.z_sum]
    factors = [torch.randn_like(output) * (i == used) for i, output in enumerate(outputs)]
    (expected,) = torch.autograd.grad(outputs, logits, factors, retain_graph=True)
    (found,) = torch.autograd.grad(outputs[used], logits, factors[used])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_equal_values_go_to_the_lower_expert():
    logits = torch.zeros(5, 8, device=DEVICE)
    routed = fused_routing(_model({"ffn.moe.top_k": 3}))(logits, None)
    assert torch.equal(routed.ids_TK.cpu(), torch.arange(3).expand(5, 3))


def test_choices_are_experts_even_if_the_logits_are_nan():
    model = _model({"ffn.moe.top_k": 2})
    logits = torch.full((3, 8), float("nan"), device=DEVICE)
    ids = route_forward(logits, None, fused_routing(model)._options).ids_TK
    assert ids.min() >= 0
    assert ids.max() < 8


@pytest.mark.parametrize(
    ("model", "moe", "why"),
    [
        ({"ffn.moe.router": "sqrtsoftplus"}, {}, "sqrtsoftplus"),
        ({}, {"choice": "sinkhorn"}, "sinkhorn"),
        ({}, {"router_dtype": "float64"}, "float64"),
        ({}, {"trace_every": 1}, "traced"),
    ],
)
def test_cases_unknown_to_the_kernel_run_in_torch(model, moe, why):
    assert why in fused_router_unsupported_reason(_model(model), MoEConfig(**moe))
