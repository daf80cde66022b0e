import pytest
import torch

from moefold.errors import ConfigError
from moefold.inference.generate import TokenSampler, apply_top_k_top_p, sample_inverse_cdf
from moefold.inference.sampling import SamplingParams

PROBS = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0, 1, 2, 3]),
        (2, 1.0, [1, 3]),
        (9, 1.0, [0, 1, 2, 3]),
        (0, 0.4, [1]),
        (0, 0.41, [1, 3]),
        (0, 0.7, [1, 3]),
        (0, 0.001, [1]),
        (3, 0.8, [1, 2, 3]),
        (3, 0.75, [1, 3]),
    ],
)
def test_the_likeliest_tokens_stay_with_their_probabilities(top_k, top_p, kept):
    found = apply_top_k_top_p(PROBS, top_k, top_p)
    assert found[0].nonzero().flatten().tolist() == kept
    torch.testing.assert_close(found[0, kept], PROBS[0, kept])


def test_a_place_on_the_line_falls_on_its_token():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25, 0.0]], dtype=torch.float64).repeat(5, 1)
    places = torch.tensor([0.0, 0.49, 0.5, 0.75, 1.0 - 1e-16], dtype=torch.float64)
    assert sample_inverse_cdf(probs, places).tolist() == [1, 1, 3, 4, 4]


def test_draws_follow_the_probabilities_and_the_temperature():
    logits = PROBS.log().repeat(4000, 1)
    for temperature in (1.0, 0.5):
        tokens = TokenSampler(SamplingParams(temperature=temperature, seed=1), 4000).choose(logits)
        expected = PROBS[0] ** (1 / temperature)
        shares = tokens.bincount(minlength=4) / 4000
        torch.testing.assert_close(shares.double(), expected / expected.sum(), rtol=0, atol=0.03)


def test_greedy_takes_the_first_of_equal_ones_and_a_sample_has_its_own_numbers():
    assert TokenSampler(SamplingParams(temperature=0.0), 2).choose(torch.tensor([[1.0, 3, 3], [5, 0, 1]])).tolist() == [
        1,
        0,
    ]
    logits = torch.zeros(3, 1000)
    three = [TokenSampler(SamplingParams(seed=4), 3).choose(logits) for _ in range(2)]
    assert three[0].tolist() == three[1].tolist()
    assert len(set(three[0].tolist())) > 1
    assert TokenSampler(SamplingParams(seed=4), 1).choose(logits[:1]).tolist() == three[0][:1].tolist()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "--temperature -1 must be at least 0"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"top_p": 0.0}, "--top-p 0 must lie in"),
        ({"top_p": 1.5}, "--top-p 1.5 must lie in"),
        ({"top_k": -1}, "--top-k -1 must be at least 0"),
        ({"seed": -1}, "--seed -1 must be at least 0"),
        ({"temperature": 0.0, "top_k": 3}, "no effect"),
    ],
)
def test_numbers_that_mean_nothing(wrong, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**wrong).check()
