"""SparseMixer: choices, weights and gradients of transformers for the same random numbers; their distribution."""

import math

import pytest
import torch

from moefold.config.sections.moe import MoEConfig
from moefold.model.moe.router import Router
from moefold.model.moe.token_group import MicroBatchGroup, TokenPositions
from moefold.parts.router_softmax.sparsemixer.module import mixer_weights, sample_experts
from tests.model.moe.layers import moe_router
from tests.models import model_of

TOKENS = 200
EXPERTS = 6


def _logits(scale: float) -> torch.Tensor:
    logits_TE = torch.randn(TOKENS, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * scale
    logits_TE[0] = 0.0
    logits_TE[1] = -1.0
    return logits_TE.requires_grad_()


def _noise(seed: int, top_k: int, tokens: int = TOKENS, experts: int = EXPERTS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, top_k * (experts + 1), dtype=torch.float64, generator=generator)


def _theirs(logits: torch.Tensor, jitter: float, noise: torch.Tensor | None, monkeypatch) -> tuple[torch.Tensor, ...]:
    """Return choices and weights of transformers, whose random numbers are taken from `noise`."""
    phimoe = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    if noise is not None:
        per_choice = noise.unflatten(1, (2, -1))
        exponentials = [-per_choice[:, k, :-1].log() for k in range(2)]
        steps = [per_choice[:, k, -1:] for k in range(2)]
        monkeypatch.setattr(torch.Tensor, "exponential_", lambda self: exponentials.pop(0).clone())
        monkeypatch.setattr(torch, "rand_like", lambda x: steps.pop(0))
        monkeypatch.setattr(torch.Tensor, "uniform_", lambda self: self)
    weights, ids = phimoe.sparsemixer(logits, jitter, training=noise is not None)
    return ids, weights


@pytest.mark.parametrize("jitter", [0.01, 0.2, 0.6])
@pytest.mark.parametrize("is_training", [False, True])
def test_choices_weights_and_gradients_equal_transformers(monkeypatch, jitter, is_training):
    noise_TN = _noise(1, 2) if is_training else None
    ours, theirs = _logits(1.0), _logits(1.0)
    ids_TK = sample_experts(ours, 2, jitter, noise_TN)
    weights_TK = mixer_weights(ours, ids_TK, jitter, noise_TN)
    expected_ids, expected = _theirs(theirs, jitter, noise_TN, monkeypatch)
    # Equal logits have no order in transformers.
    assert torch.equal(ids_TK[2:], expected_ids[2:])
    # transformers rounds the third to 0.3333, in float32.
    tolerance = 2e-4 if is_training else 1e-12
    torch.testing.assert_close(weights_TK[2:], expected[2:], rtol=tolerance, atol=1e-15)
    share = torch.randn(TOKENS, 2, dtype=torch.float64)
    (weights_TK * share)[2:].sum().backward()
    (expected * share)[2:].sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


def test_equal_logits_choose_the_lowest_expert_and_weigh_all_the_same():
    logits_TE = torch.zeros(3, 4)
    ids_TK = sample_experts(logits_TE, 3, 0.01, None)
    assert ids_TK.tolist() == [[0, 1, 2]] * 3
    expected = torch.tensor([1 / 4, 1 / 3, 1 / 2]).expand(3, 3)
    torch.testing.assert_close(mixer_weights(logits_TE, ids_TK, 0.01, None), expected)


def test_samples_follow_the_softmax_of_the_close_experts():
    """The first logit is too far. The others have the probabilities of their softmax."""
    logits = torch.tensor([0.1, 1.0, 1.3, 1.5])
    logits_TE = logits.expand(40_000, 4)
    noise_TN = _noise(5, 2, 40_000, 4)
    ids_TK = sample_experts(logits_TE, 2, 0.4, noise_TN)
    assert (ids_TK[:, 0] != ids_TK[:, 1]).all()
    shares = torch.bincount(ids_TK[:, 0], minlength=4) / 40_000
    expected = torch.cat((torch.zeros(1), logits[1:].softmax(0)))
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.01)
    weights_TK = mixer_weights(logits_TE, ids_TK, 0.4, noise_TN)
    is_best = ids_TK[:, 0] == 3
    torch.testing.assert_close(weights_TK[is_best, 0], expected[3].expand(int(is_best.sum())))
    is_full = weights_TK[~is_best, 0] == expected[ids_TK[~is_best, 0]]
    assert is_full.float().mean().item() == pytest.approx(0.25, abs=0.02)


def test_a_choice_far_below_the_best_one_has_weight_0_and_no_gradient():
    """As a replayed choice may be."""
    logits_TE = torch.tensor([[0.0, 5.0, 4.99]], requires_grad=True)
    weights_TK = mixer_weights(logits_TE, torch.tensor([[0, 1]]), 0.01, None)
    assert weights_TK[0, 0].item() == 0
    weights_TK.sum().backward()
    assert logits_TE.grad[0, 0].item() == 0
    assert logits_TE.grad.isfinite().all()


def _router(*, samples: bool = True) -> Router:
    model = model_of(
        {
            "hidden_size": 8,
            "ffn.moe.num_experts": EXPERTS,
            "ffn.moe.top_k": 2,
            "ffn.moe.router.softmax": "sparsemixer",
            "ffn.moe.router.softmax.jitter": 1,
            "ffn.moe.router.softmax.samples": samples,
        }
    )
    router = moe_router(model, MoEConfig(), noise_seed=7)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    return router


def _positions(step_positions: torch.Tensor) -> TokenPositions:
    group = MicroBatchGroup()
    group.positions = step_positions
    return TokenPositions(group, len(step_positions), torch.tensor([3]))


def test_samples_depend_only_on_step_and_token():
    x_TH = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    router = _router()
    whole = router(x_TH, _positions(torch.arange(64)))
    part = router(x_TH[40:50], _positions(torch.arange(40, 50)))
    assert torch.equal(part.ids_TK, whole.ids_TK[40:50])
    assert torch.equal(part.probs_TK, whole.probs_TK[40:50])
    router.step = 2
    assert not torch.equal(router(x_TH, _positions(torch.arange(64))).ids_TK, whole.ids_TK)


def test_evaluation_and_training_without_samples_choose_the_best():
    x_TH = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    positions = _positions(torch.arange(64))
    sampled, plain, evaluated = _router(), _router(samples=False), _router().eval()
    expected = evaluated(x_TH, positions)
    found = plain(x_TH, positions)
    assert torch.equal(found.ids_TK, expected.ids_TK)
    assert torch.equal(found.probs_TK, expected.probs_TK)
    assert torch.equal(expected.ids_TK, expected.logits_TE.topk(2).indices)
    assert not torch.equal(sampled(x_TH, positions).ids_TK, expected.ids_TK)


def test_extreme_noise_stays_finite():
    noise_TN = torch.tensor([2.0**-53, 1 - 2.0**-53]).double().repeat(1, 7)
    ids_TK = sample_experts(torch.zeros(1, EXPERTS), 2, 0.01, noise_TN)
    assert len(set(ids_TK[0].tolist())) == 2
    assert math.isfinite(mixer_weights(torch.zeros(1, EXPERTS), ids_TK, 0.01, noise_TN).sum().item())
