"""Decoding with a cache gives the logits and greedy tokens of the whole sequence, and transformers' greedy tokens."""

from pathlib import Path

import pytest
import torch

from moefold.inference.sampling import SamplingParams
from tests.inference.example import KINDS, SLOW_KINDS, recipe, recipe_of_kind, row_of_ids, theirs
from tests.inference.generation import (
    GREEDY,
    NEW_TOKENS,
    PROMPTS,
    run_generation,
    run_in_pieces,
    run_whole,
    run_without_cache,
)
from tests.verify.covering import few_else_slow

pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
pytestmark = pytest.mark.parity

MAPPINGS = [
    {},
    {"world_size": 2, "tp": 2, "ep": 2},
    {"world_size": 2, "tp": 2, "etp": 2},
    {"world_size": 2, "pp": 2},
    {"world_size": 2, "pp": 2, "pipeline_layout": "E|tttL"},
    {"world_size": 4, "tp": 2, "pp": 2, "ep": 2},
    {"world_size": 4, "tp": 4, "ep": 2, "etp": 2},
]


def name(mapping: dict[str, int]) -> str:
    return "-".join(f"{key}{value}" for key, value in mapping.items())


@pytest.mark.parametrize("mapping", few_else_slow(MAPPINGS, [MAPPINGS[1], MAPPINGS[4]]), ids=name)
def test_logits_with_a_cache_equal_the_logits_of_the_whole_text(pool, mixtral, mapping):
    pieces = [5, 1, 3, 1, 1]
    tokens = torch.from_numpy(row_of_ids(2 * sum(pieces)).astype("int64")).view(2, -1)
    with torch.no_grad():
        logits = theirs(recipe("mixtral", Path("unused")), "mixtral").double()(input_ids=tokens).logits
    ends = torch.tensor(pieces).cumsum(0) - 1
    wide = {"dtype": "float64"}
    (whole,) = pool.run(1, run_whole, mixtral, sum(pieces), wide)
    for found in pool.run(mapping.get("world_size", 1), run_in_pieces, mixtral, mapping | wide, pieces):
        torch.testing.assert_close(found, whole[ends], rtol=1e-12, atol=1e-12)
        # Transformers computes norms, router and angles in float32 whatever the weights are.
        torch.testing.assert_close(found, logits[:, ends].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mapping", few_else_slow(MAPPINGS[:2], MAPPINGS[1:2]), ids=name)
def test_greedy_tokens_equal_transformers(pool, mixtral, mapping):
    model = theirs(recipe("mixtral", Path("unused")), "mixtral")
    for rank in pool.run(mapping.get("world_size", 1), run_generation, mixtral, mapping, GREEDY):
        for prompt, found in zip(PROMPTS, rank, strict=True):
            expected = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True, pad_token_id=0
            )
            assert list(found.tokens) == expected[0, len(prompt) :].tolist()
            assert found.finish_reason == "length"


def test_greedy_with_a_cache_equals_greedy_without(pool, qwen3):
    with_cache = pool.run(1, run_generation, qwen3, {}, GREEDY)[0]
    assert [list(found.tokens) for found in with_cache] == pool.run(1, run_without_cache, qwen3)[0]
    assert len({tuple(found.tokens) for found in with_cache}) == len(PROMPTS)


# Slow: sparse latent attention has the parts of latent attention, and windows are drawn from under tp below.
@pytest.mark.parametrize("kind", few_else_slow([*KINDS, *SLOW_KINDS], ["gpt-oss", "linear", "sparse_latent"]))
def test_every_kind_of_attention_decodes_with_a_cache(pool, of_kind, kind):
    path = of_kind(kind)
    pieces = [5, 1, 3, 1, 1]
    whole = pool.run(1, run_whole, path, sum(pieces))[0]
    ends = torch.tensor(pieces).cumsum(0) - 1
    # On one rank: `engine/test_engine.py`.
    for found in pool.run(2, run_in_pieces, path, {"world_size": 2, "tp": 2, "ep": 2}, pieces):
        torch.testing.assert_close(found, whole[ends], rtol=1e-9, atol=1e-9)


def test_draws_are_the_same_under_every_mapping_and_others_for_another_seed(pool, mixtral):
    drawn = [
        pool.run(
            mapping.get("world_size", 1), run_generation, mixtral, mapping, SamplingParams(temperature=2.0, seed=seed)
        )
        for mapping, seed in (({}, 1), (MAPPINGS[3], 1), ({}, 2))
    ]
    tokens = [[[found.tokens for found in rank] for rank in ranks] for ranks in drawn]
    assert tokens[1] == [tokens[0][0]] * 2
    assert tokens[2] != tokens[0]


def test_draws_from_a_vocabulary_that_tp_does_not_divide(pool, of_kind):
    path = of_kind("windows")
    assert recipe_of_kind("windows", path).model.vocab_size % 2 == 1
    sampling = SamplingParams(temperature=3.0, seed=1)
    (expected,) = pool.run(1, run_generation, path, {}, sampling)
    for rank in pool.run(2, run_generation, path, MAPPINGS[1], sampling):
        assert [found.tokens for found in rank] == [one.tokens for one in expected]
        for found, one in zip(rank, expected, strict=True):
            assert found.log_probs == pytest.approx(one.log_probs, rel=1e-9)


@pytest.mark.parametrize("mapping", [MAPPINGS[0], MAPPINGS[3]], ids=name)
def test_an_end_of_text_ends_only_its_sample(pool, mixtral, mapping):
    whole = pool.run(1, run_generation, mixtral, {}, GREEDY)[0]
    eos = whole[0].tokens[4]
    for rank in pool.run(mapping.get("world_size", 1), run_generation, mixtral, mapping, GREEDY, eos):
        for before, found in zip(whole, rank, strict=True):
            end = before.tokens.index(eos) + 1 if eos in before.tokens else NEW_TOKENS
            assert found.tokens == before.tokens[:end]
            assert found.finish_reason == ("eos" if eos in before.tokens else "length")
    assert len(whole[0].tokens) > len(rank[0].tokens)
