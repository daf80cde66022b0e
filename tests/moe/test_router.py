"""The router chooses and weighs as defined, in float32 at least, and resolves ties the same way everywhere."""

import pytest
import torch

from moefold.moe.router import Router, choose_experts


def _router(softmax: str, num_experts: int = 6, top_k: int = 2, dtype: torch.dtype = torch.float64) -> Router:
    router = Router(num_experts, 5, top_k, softmax)
    generator = torch.Generator().manual_seed(0)
    router.weight.data = torch.randn(num_experts, 5, generator=generator, dtype=torch.float64).to(dtype)
    return router


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("softmax", ["pre", "post"])
def test_weights_follow_their_definition(softmax, top_k):
    router = _router(softmax, top_k=top_k)
    x = torch.randn(7, 5, dtype=torch.float64)
    routing = router(x)
    for t in range(7):
        logits = (x[t] @ router.weight.detach().T).tolist()
        chosen = sorted(range(6), key=lambda e: -logits[e])[:top_k]
        exps = torch.tensor(logits, dtype=torch.float64).exp()
        whole = exps.sum() if softmax == "pre" else exps[chosen].sum()
        assert routing.ids_TK[t].tolist() == chosen
        torch.testing.assert_close(routing.probs_TK[t], exps[chosen] / whole, rtol=1e-12, atol=0)
        torch.testing.assert_close(routing.scores_TE[t], exps / exps.sum(), rtol=1e-12, atol=0)
        torch.testing.assert_close(routing.logits_TE[t], torch.tensor(logits, dtype=torch.float64))


@pytest.mark.parametrize("softmax", ["pre", "post"])
def test_gradient_of_the_weights(softmax):
    router = _router(softmax)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)

    def probs(x, weight):
        return torch.func.functional_call(router, {"weight": weight}, (x,)).probs_TK

    assert torch.autograd.gradcheck(probs, (x, router.weight))


def test_bfloat16_tokens_are_routed_in_float32():
    router = _router("post", dtype=torch.float32)
    x = torch.randn(9, 5).bfloat16()
    routing = router(x)
    assert {routing.probs_TK.dtype, routing.scores_TE.dtype, routing.logits_TE.dtype} == {torch.float32}
    torch.testing.assert_close(routing.logits_TE, x.float() @ router.weight.t(), rtol=0, atol=0)


def test_of_equal_logits_the_lower_expert_wins():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0, 3.0], [0.0, 1.0, 0.0, 1.0, 0.0]])
    assert choose_experts(logits, 3).tolist() == [[1, 2, 3], [0, 1, 2], [1, 3, 0]]
    many = torch.randint(0, 3, (300, 64)).float()
    expected = many.sort(dim=1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(choose_experts(many, 8), expected)


def test_a_token_never_chooses_an_expert_twice():
    logits = torch.full((2, 4), float("-inf"))
    logits[1, 2] = 0.0
    assert choose_experts(logits, 4).tolist() == [[0, 1, 2, 3], [2, 0, 1, 3]]


def test_choosing_leaves_the_logits_alone():
    logits = torch.randn(3, 4)
    before = logits.clone()
    choose_experts(logits, 2)
    assert torch.equal(logits, before)
