"""Test that log-probabilities of prompts and changes of logits act on their own sample, and only on the draw."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moefold.inference.engine.engine import GenerationEngine, change_logits
from moefold.inference.engine.requests import EngineSettings, LogitRules, NewToken, Request
from moefold.inference.sampling import SamplingParams
from tests.inference.example import opened

GREEDY = SamplingParams(temperature=0)
PROMPT = tuple(i * i % 61 for i in range(70))
"""Longer than a page."""


@pytest.fixture(scope="module")
def model(mixtral, single_rank) -> Any:
    return opened(mixtral, "generate", {"dtype": "float64"}, 96, 1).model


def generated(model: Any, requests: Sequence[Request], constrain: Any = None, **settings: Any) -> list[list[NewToken]]:
    """The new tokens of each request."""
    found: list[list[NewToken]] = [[] for _ in requests]
    engine = GenerationEngine(model, EngineSettings(**settings), GREEDY)
    with engine.open(40, constrain) as generation:
        for number, request in enumerate(requests):
            generation.add(number, request)
        while generation.has_work:
            for new in generation.step():
                found[new.request_id].append(new)
                if new.finish_reason is not None:
                    generation.pop(new.request_id, new.finish_reason)
    return found


def expected_scores(model: Any) -> torch.Tensor:
    """Log-probabilities after each token of the prompt but the last, [tokens - 1, V], by one pass without a cache."""
    model.stage.set_positions(torch.arange(len(PROMPT)))
    return model.forward(torch.tensor([PROMPT]))[:-1, 0].log_softmax(-1)


@pytest.mark.parametrize("settings", [{}, {"slots": 2, "pass_tokens": 16}], ids=["one pass", "chunks"])
def test_a_prompt_is_scored_as_the_whole_text_gives(mixtral, model, settings):
    whole = opened(mixtral, "evaluate", {"dtype": "float64"}, 96, 1).model
    expected = expected_scores(whole)
    request = Request(prompt=PROMPT, max_tokens=2, prompt_alternatives=3)
    # Samples of the same prompt that share its pages do not take the scores away.
    others = [replace(request, sample_number=1, prompt_alternatives=None), replace(request, sample_number=2)]
    first, other, last = generated(model, [request, *others], **settings)
    assert not other[0].prompt_scores
    assert not first[1].prompt_scores
    assert [new.token for new in first] == [new.token for new in other]
    assert len(first[0].prompt_scores) == len(last[0].prompt_scores) == len(PROMPT) - 1
    for number, score in enumerate((*first[0].prompt_scores, *last[0].prompt_scores)):
        position = number % (len(PROMPT) - 1)
        row = expected[position]
        assert score.log_prob == pytest.approx(row[PROMPT[position + 1]].item(), abs=1e-6)
        best = row.topk(3)
        assert [token for token, _ in score.alternatives] == best.indices.tolist()
        np.testing.assert_allclose([value for _, value in score.alternatives], best.values, atol=1e-6)


def test_rules_change_their_own_sample_and_no_log_probability(model):
    plain = Request(prompt=PROMPT, max_tokens=8, num_alternatives=2)
    banned = generated(model, [plain])[0][0].token
    rules = LogitRules(bias=((banned, -100.0),))
    alone = generated(model, [plain])[0]
    beside, biased = generated(model, [plain, replace(plain, sample_number=1, rules=rules)])
    assert [new.token for new in beside] == [new.token for new in alone]
    assert [new.log_prob for new in beside] == pytest.approx([new.log_prob for new in alone], abs=1e-12)
    assert banned not in [new.token for new in biased]
    # The most likely token under the model's own distribution is the token that the bias kept from being drawn.
    assert biased[0].alternatives[0][0] == banned
    assert biased[0].log_prob == biased[0].alternatives[1][1]


def test_penalties_and_a_least_length_follow_their_definitions():
    request = Request(prompt=(1, 2), max_tokens=9, eos_ids=frozenset({5}))
    start = torch.tensor([1.0, -2.0, 3.0, 4.0, 5.0, 6.0])
    tokens = [3, 3, 4]
    rules = LogitRules(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, min_tokens=4)
    logits = start.clone()
    change_logits(logits, request, rules, tokens, None)
    expected = start.clone()
    for token in {1, 2, 3, 4}:
        expected[token] = expected[token] / 2 if expected[token] > 0 else expected[token] * 2
    for token, count in Counter(tokens).items():
        expected[token] -= count * 0.5 + 0.25
    expected[5] = -torch.inf
    assert torch.equal(logits, expected)
    change_logits(logits := start.clone(), request, LogitRules(min_tokens=3), tokens, None)
    assert torch.equal(logits, start)


class Countdown:
    """A grammar of one fixed sequence."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = list(tokens)

    def allowed(self) -> np.ndarray:
        allowed = np.zeros(64, dtype=np.bool_)
        allowed[self._left[0]] = True
        return allowed

    def push(self, token: int) -> None:
        assert token == self._left.pop(0)


@pytest.mark.parametrize("pages", [{}, {"slots": 2, "pass_tokens": 8}], ids=["together", "in turns"])
def test_each_sample_follows_its_own_grammar(model, pages):
    grammars = {"up": [7, 8, 9, 5], "down": [9, 8, 7, 5]}
    requests = [
        Request(prompt=(3, i), max_tokens=9, eos_ids=frozenset({5}), rules=LogitRules(grammar=name))
        for i in range(3)
        for name in grammars
    ]
    found = generated(model, requests, lambda request: Countdown(grammars[request.rules.grammar]), **pages)
    assert [[new.token for new in sample] for sample in found] == [*grammars.values()] * 3
    assert all(sample[-1].finish_reason == "eos" for sample in found)
