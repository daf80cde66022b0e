"""Draws depend on their sample alone, follow the filtered distribution, and never take what has probability 0."""

import pytest
import torch

from moefold.data.index_shuffle import draw_bits, hash_ints
from moefold.inference.engine.draw import Draw, UniformStream, choose_tokens
from moefold.inference.engine.requests import Request
from moefold.inference.sampling import SamplingParams


def stream(seed: int, prompt_number: int, sample_number: int, max_tokens: int = 300) -> UniformStream:
    request = Request(
        prompt=(1,),
        prompt_number=prompt_number,
        sample_number=sample_number,
        max_tokens=max_tokens,
        eos_ids=frozenset(),
    )
    return UniformStream(seed, request)


def test_a_draw_is_a_function_of_seed_prompt_sample_and_position():
    in_order = [stream(1, 2, 3)[t] for t in range(300)]
    whole = stream(1, 2, 3, max_tokens=1000)
    assert [whole[t] for t in reversed(range(300))] == in_order[::-1]
    words = draw_bits(hash_ints(1, 2, 3), 300)
    assert in_order == [int(word >> 11) / 2**53 for word in words.tolist()]
    others = [stream(*key)[0] for key in ((0, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 3, 2))]
    assert len({in_order[0], *others}) == 6


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draws = [Draw(SamplingParams(temperature=0.5), stream(7, 0, i)[0]) for i in range(4000)]
    counts = torch.bincount(choose_tokens(logits.expand(4000, 4), draws), minlength=4)
    expected = (logits / 0.5).softmax(0)
    # Four standard deviations.
    assert ((counts / 4000 - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt()).all()


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        (SamplingParams(temperature=0.0), {2}),
        (SamplingParams(top_k=2), {1, 2}),
        (SamplingParams(top_p=0.6), {2}),
        (SamplingParams(top_p=0.9), {1, 2}),
        (SamplingParams(), {0, 1, 2}),
    ],
)
def test_filters_leave_the_likeliest_tokens(params, possible):
    logits = torch.tensor([[0.0, 1.0, 2.0, float("-inf")]])
    uniforms = [i / 100 for i in range(100)] + [1 - 2**-53]
    found = {int(choose_tokens(logits, [Draw(params, uniform)])) for uniform in uniforms}
    assert found == possible


def test_rows_with_other_parameters_change_no_row():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    kinds = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=3)]
    draws = [Draw(kinds[i % 3], stream(1, i, 0)[0]) for i in range(6)]
    alone = [int(choose_tokens(logits[i : i + 1], draws[i : i + 1])) for i in range(6)]
    assert choose_tokens(logits, draws).tolist() == alone
