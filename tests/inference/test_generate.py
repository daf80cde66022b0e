"""Decoding with a cache gives the logits and greedy tokens of the whole sequence, and transformers' greedy tokens."""

from pathlib import Path

import pytest
import torch

from moefold.inference.engine.engine import RolloutEngine
from moefold.inference.engine.requests import Completion, EngineSettings, Request
from moefold.inference.sampling import SamplingParams
from moefold.model.layer_cache import CacheSize
from moefold.parallel.paged_decoder import PagedDecoder, forward_chain
from tests.inference.example import (
    KINDS,
    SLOW_KINDS,
    opened,
    recipe,
    recipe_of_kind,
    row_of_ids,
    theirs,
    write_checkpoint,
)
from tests.model.paged_rows import pass_rows
from tests.slow import slow

pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
pytestmark = pytest.mark.parity

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = ([3, 14, 15, 9, 26, 5], [35], [8, 9, 7])
"""Of different lengths: shorter ones are filled up."""
NEW_TOKENS = 9
FOUR = {"world_size": 4, "tp": 2, "pp": 2, "ep": 2}
MAPPINGS = [
    {},
    {"world_size": 2, "tp": 2, "ep": 2},
    {"world_size": 2, "tp": 2, "etp": 2},
    {"world_size": 2, "pp": 2},
    {"world_size": 2, "pp": 2, "pipeline_layout": "E|tttL"},
    FOUR,
    {"world_size": 4, "tp": 4, "ep": 2, "etp": 2},
]


def name(mapping: dict[str, int]) -> str:
    return "-".join(f"{key}{value}" for key, value in mapping.items())


def run_generation(path: Path, mapping: dict[str, int], sampling: SamplingParams, eos: int = -1) -> list[Completion]:
    """Continue the prompts together."""
    model = opened(path, "generate", mapping, 24, len(PROMPTS)).model
    requests = [
        Request(prompt=tuple(prompt), prompt_number=i, max_tokens=NEW_TOKENS, eos_ids=frozenset({eos}))
        for i, prompt in enumerate(PROMPTS)
    ]
    return RolloutEngine(model, EngineSettings(cache_gib=0), sampling).generate(requests)


def run_in_pieces(path: Path, mapping: dict[str, int], pieces: list[int]) -> torch.Tensor:
    """Logits [len(pieces), B, V] after each piece of two given rows of ids, on every rank."""
    model = opened(path, "generate", mapping, 24, 2).model
    tokens = torch.from_numpy(row_of_ids(2 * sum(pieces)).astype("int64")).view(2, -1)
    found, done = [], 0
    with forward_chain(model) as chain, PagedDecoder(chain, CacheSize(num_pages=6, page_positions=4)) as decoder:
        for size in pieces:
            rows = pass_rows([range(done, done + size)] * 2, 3)
            picked = torch.tensor([size - 1, 2 * size - 1])
            shard = decoder.forward(tokens[:, done : done + size].flatten(), rows, picked)
            dtype = torch.promote_types(model.stage.dtype, torch.float32)
            logits = torch.zeros(2, model.stage.config.vocab_size, dtype=dtype)
            found.append(logits if shard is None else model.stage.head.vocab_parallel.gather(shard))
            done += size
    return torch.stack([model.chain.broadcast_from_last_stage(logits) for logits in found])


def run_without_cache(path: Path) -> list[list[int]]:
    """Greedy tokens of each prompt by itself, the whole text through the model for each."""
    model = opened(path, "evaluate", {}, 24, 1).model
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            model.stage.set_positions(torch.arange(len(ids)))
            logits = model.forward(torch.tensor([ids]))
            ids.append(int(logits[-1, 0].argmax()))
        found.append(ids[len(prompt) :])
    return found


@pytest.mark.parametrize("mapping", [*MAPPINGS[:5], *slow((mapping,) for mapping in MAPPINGS[5:])], ids=name)
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


@pytest.mark.parametrize("mapping", MAPPINGS[:2], ids=name)
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


def run_whole(path: Path, num_tokens: int, mapping: dict[str, str] | None = None) -> torch.Tensor:
    """Logits [S, B, V] of two given rows of ids, without a cache."""
    model = opened(path, "evaluate", mapping or {}, num_tokens, 2).model
    model.stage.set_positions(torch.arange(num_tokens))
    logits = model.forward(torch.from_numpy(row_of_ids(2 * num_tokens).astype("int64")).view(2, -1))
    assert logits is not None
    return logits


@pytest.mark.parametrize("kind", [*KINDS, *slow((kind,) for kind in SLOW_KINDS)])
def test_every_kind_of_attention_decodes_with_a_cache(pool, tmp_path, kind):
    pool.run(1, write_checkpoint, recipe_of_kind(kind, tmp_path))
    pieces = [5, 1, 3, 1, 1]
    whole = pool.run(1, run_whole, tmp_path, sum(pieces))[0]
    ends = torch.tensor(pieces).cumsum(0) - 1
    # On one rank: `engine/test_engine.py`.
    for found in pool.run(2, run_in_pieces, tmp_path, {"world_size": 2, "tp": 2, "ep": 2}, pieces):
        torch.testing.assert_close(found, whole[ends], rtol=1e-9, atol=1e-9)


def test_draws_are_the_same_under_every_mapping_and_others_for_another_seed(pool, mixtral):
    drawn = [
        pool.run(
            mapping.get("world_size", 1), run_generation, mixtral, mapping, SamplingParams(temperature=2.0, seed=seed)
        )
        for mapping, seed in (({}, 1), (FOUR, 1), ({}, 2))
    ]
    tokens = [[[found.tokens for found in rank] for rank in ranks] for ranks in drawn]
    assert tokens[1] == [tokens[0][0]] * 4
    assert tokens[2] != tokens[0]


def test_draws_from_a_vocabulary_that_tp_does_not_divide(pool, tmp_path):
    cfg = recipe_of_kind("windows", tmp_path)
    assert cfg.model.vocab_size % 2 == 1
    pool.run(1, write_checkpoint, cfg)
    sampling = SamplingParams(temperature=3.0, seed=1)
    (expected,) = pool.run(1, run_generation, tmp_path, {}, sampling)
    for rank in pool.run(2, run_generation, tmp_path, MAPPINGS[1], sampling):
        assert [found.tokens for found in rank] == [one.tokens for one in expected]
        for found, one in zip(rank, expected, strict=True):
            assert found.log_probs == pytest.approx(one.log_probs, rel=1e-9)


@pytest.mark.parametrize("mapping", [MAPPINGS[0], MAPPINGS[3]], ids=name)
def test_an_end_of_text_ends_its_sample_alone(pool, mixtral, mapping):
    whole = pool.run(1, run_generation, mixtral, {}, GREEDY)[0]
    eos = whole[0].tokens[4]
    for rank in pool.run(mapping.get("world_size", 1), run_generation, mixtral, mapping, GREEDY, eos):
        for before, found in zip(whole, rank, strict=True):
            end = before.tokens.index(eos) + 1 if eos in before.tokens else NEW_TOKENS
            assert found.tokens == before.tokens[:end]
            assert found.finish_reason == ("eos" if eos in before.tokens else "length")
    assert len(whole[0].tokens) > len(rank[0].tokens)
