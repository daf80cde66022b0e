"""The engine gives the results of the whole text: tokens and log-probabilities, under every schedule and mapping."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moefold.comm.groups import ParallelGroups
from moefold.cost.kv_cache import PAGE_POSITIONS
from moefold.errors import ConfigError
from moefold.inference.engine.draw import Draw, UniformStream, choose_tokens
from moefold.inference.engine.engine import GenerationEngine, model_cache_sizes
from moefold.inference.engine.requests import Completion, EngineSettings, Request
from moefold.parallel.parallelize import parallelize
from moefold.validate.config import check_config
from tests.inference.engine.sampled_requests import PROMPTS, REQUESTS, SAMPLED, name, own_requests
from tests.inference.example import CPU, KINDS, SLOW_KINDS, opened, write_checkpoint
from tests.model.transformers_families import FAMILIES, SIZES
from tests.models import config_of
from tests.verify.covering import few_else_slow

FAST_KINDS = ["gpt-oss", "deepseek-v3", "linear", "sparse_latent"]


def without_cache(path: Path, mapping: dict[str, Any], requests: list[Request]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each request by itself, the whole text through the model for each token."""
    model = opened(path, "evaluate", mapping, 96, 1).model
    found = []
    for request in requests:
        ids = list(request.prompt)
        log_probs: list[float] = []
        uniforms = UniformStream(SAMPLED.seed, request)
        for step in range(request.max_tokens):
            model.stage.set_positions(torch.arange(len(ids)))
            logits = model.forward(torch.tensor([ids]))[-1]
            token = int(choose_tokens(logits, [Draw(SAMPLED, uniforms[step])]))
            log_probs.append(float((logits[0] / SAMPLED.temperature).log_softmax(-1)[token]))
            ids.append(token)
            if token in request.eos_ids:
                break
        found.append((ids[len(request.prompt) :], log_probs))
    return found


def run_engine(
    path: Path, mapping: dict[str, Any], requests: list[Request], settings: EngineSettings
) -> list[Completion]:
    """The completions of an inference model."""
    model = opened(path, "generate", mapping, 96, 1).model
    return GenerationEngine(model, settings, SAMPLED).generate(requests)


# Slow: gpt-oss has windows too, and the hybrid model has the full layers of Mixtral.
@pytest.mark.parametrize("kind", few_else_slow(["mixtral", *KINDS, *SLOW_KINDS], FAST_KINDS))
def test_the_engine_equals_the_whole_text(pool, of_kind, kind):
    path = of_kind(kind)
    wide = {"dtype": "float64"}
    (expected,) = pool.run(1, without_cache, path, wide, REQUESTS)
    caches = ("latents", "heads") if kind == "deepseek-v3" else ("latents",)
    for cache in caches:
        settings = EngineSettings(slots=4, pass_tokens=32, cache=cache)
        (found,) = pool.run(1, run_engine, path, wide, REQUESTS, settings)
        assert [list(completion.tokens) for completion in found] == [tokens for tokens, _ in expected]
        for completion, (tokens, log_probs) in zip(found, expected, strict=True):
            assert completion.log_probs == pytest.approx(log_probs, abs=1e-10)
            assert completion.finish_reason == ("eos" if tokens[-1] == 5 else "length")


MAPPINGS: list[dict[str, Any]] = [
    {"world_size": 2, "tp": 2, "etp": 2},
    {"world_size": 2, "ep": 2},
    {"world_size": 2, "pp": 2, "pipeline_layout": "E|tttL"},
    {"world_size": 4, "tp": 2, "ep": 4},
    {"world_size": 4, "pp": 2, "ep": 2},
    {"world_size": 4, "tp": 2, "pp": 2, "ep": 2},
    {"world_size": 3},
]
"""Under dp, ranks pass requests of their own; with three ranks they share no experts."""
FAST_MAPPINGS = (5,)
FAST_TRAINING_MAPPINGS = (5, 6)
"""Indices of the mappings of the fast tests. Together they have every axis, and ranks with requests of their own."""


def marked(mappings: Sequence[dict[str, Any]], fast: Sequence[int]) -> list[Any]:
    """The mappings as parameters, the others than the fast ones marked as slow."""
    return [
        pytest.param(mapping, marks=[] if i in fast else pytest.mark.slow, id=name(mapping))
        for i, mapping in enumerate(mappings)
    ]


def run_on_mapping(path: Path, mapping: dict[str, Any]) -> dict[int, Completion]:
    """The completions of this rank's requests by their index, from an inference model."""
    loaded = opened(path, "generate", mapping | {"dtype": "float64"}, 96, 1)
    mine = own_requests(loaded.model.groups)
    engine = GenerationEngine(loaded.model, EngineSettings(slots=2, pass_tokens=32), SAMPLED)
    return dict(zip(mine, engine.generate([REQUESTS[i] for i in mine]), strict=True))


def assert_equal_completions(ranks: Sequence[dict[int, Completion]], expected: Sequence[Completion]) -> None:
    assert set().union(*ranks) == set(range(len(REQUESTS)))
    for found in ranks:
        for i, completion in found.items():
            assert completion.tokens == expected[i].tokens
            assert completion.finish_reason == expected[i].finish_reason
            assert completion.log_probs == pytest.approx(expected[i].log_probs, abs=1e-10)


@pytest.mark.parity
@pytest.mark.parametrize("mapping", marked(MAPPINGS, FAST_MAPPINGS))
def test_every_mapping_gives_the_completions_of_one_rank(pool, mixtral, mapping):
    wide = {"dtype": "float64"}
    (expected,) = pool.run(1, run_engine, mixtral, wide, REQUESTS, EngineSettings(slots=4, pass_tokens=32))
    assert_equal_completions(pool.run(mapping["world_size"], run_on_mapping, mixtral, mapping), expected)


def refusal(path: Path, mapping: dict[str, Any]) -> str:
    """The error of a request that only the last data-parallel rank has, and that its cache does not hold."""
    loaded = opened(path, "generate", mapping, 96, 1)
    settings = EngineSettings(cache_gib=1.5 * model_cache_sizes(loaded.model).kv_bytes(PAGE_POSITIONS) / 2**30)
    requests = [Request(prompt=(1,), max_tokens=2)]
    if loaded.model.groups.attn.dp_cp.rank == loaded.model.groups.attn.dp_cp.size - 1:
        requests.append(Request(prompt=(1,) * PAGE_POSITIONS, max_tokens=3))
    with pytest.raises(ConfigError) as error:
        GenerationEngine(loaded.model, settings, SAMPLED).generate(requests)
    return str(error.value)


def test_a_request_that_the_cache_does_not_hold_is_refused_on_all_ranks(pool, mixtral):
    (expected,) = pool.run(1, refusal, mixtral, {})
    assert f"holds no sample of {PAGE_POSITIONS + 2} (" in expected
    assert pool.run(2, refusal, mixtral, {"world_size": 2}) == [expected] * 2


TRAINING_MAPPINGS: list[dict[str, Any]] = [
    {},
    {"world_size": 2, "ep": 2},
    {"world_size": 2, "tp": 2, "ep": 2, "overlap_tp": True},
    {"world_size": 2, "pp": 2},
    {"world_size": 2, "zero": 3},
    {"world_size": 2, "cp": 2, "zero": 3, "ep": 2},
    {"world_size": 2, "pp": 2, "virtual_stages": 2, "schedule": "interleaved"},
    {"world_size": 2, "ep": 2, "dispatcher": "allgather"},
    {"world_size": 2, "ep": 2, "overlap_experts": True, "dispatcher": "leastloaded"},
]


def training_config(mapping: dict[str, Any], run_dir: Path, family: str = "mixtral") -> Any:
    """A recipe whose training drops tokens, which sampling must not."""
    return config_of(
        {
            "run": {"dtype": "float64", "seed": 5, "dir": str(run_dir)},
            "model": SIZES | FAMILIES[family][0] | {"layers": 4},
            "parallel": mapping,
            "moe": {"capacity_factor": 0.5},
            "train": {"seq_len": 16, "global_batch_size": 8, "micro_batch_size": 2},
            "data": {"kind": "synthetic"},
        }
    )


def sample_in_training(run_dir: Path, mapping: dict[str, Any]) -> tuple[dict[int, Completion], dict[int, Completion]]:
    """The completions of a model in training, twice."""
    cfg = training_config(mapping, run_dir)
    model = parallelize(cfg, ParallelGroups.create(check_config(cfg), CPU))
    model.train()
    mine = own_requests(model.groups)
    engine = GenerationEngine(model, EngineSettings(slots=2, pass_tokens=32), SAMPLED)
    found = [dict(zip(mine, engine.generate([REQUESTS[i] for i in mine]), strict=True)) for _ in range(2)]
    assert all(stage.training for stage in model.stages)
    return found[0], found[1]


@pytest.fixture(scope="module")
def completions_of_a_checkpoint(pool, tmp_path_factory) -> list[Completion]:
    """The completions of the model that `training_config` begins with, from its checkpoint on one rank."""
    path = tmp_path_factory.mktemp("begun")
    pool.run(1, write_checkpoint, training_config({}, path))
    return pool.run(1, run_engine, path, {}, REQUESTS, EngineSettings(slots=4, pass_tokens=32))[0]


@pytest.mark.parity
@pytest.mark.parametrize("mapping", marked(TRAINING_MAPPINGS, FAST_TRAINING_MAPPINGS))
def test_a_model_in_training_samples_as_its_checkpoint(pool, tmp_path, completions_of_a_checkpoint, mapping):
    expected = completions_of_a_checkpoint
    for ranks in zip(*pool.run(mapping.get("world_size", 1), sample_in_training, tmp_path, mapping), strict=True):
        assert_equal_completions(ranks, expected)


def assert_schedules(path: Path, dtype: str, tolerance: float) -> int:
    """Compare completions under random schedules with each request by itself and return the preemptions seen."""
    model = opened(path, "generate", {"dtype": dtype}, 96, 1).model
    alone = GenerationEngine(model, EngineSettings(slots=1, cache_gib=0, share_prompts=False), SAMPLED)
    requests = [
        Request(prompt=PROMPTS[i % 3], prompt_number=i, sample_number=i // 3, max_tokens=3 + 4 * (i % 4))
        for i in range(8)
    ]
    expected = [alone.generate([request])[0] for request in requests]
    page_gib = model_cache_sizes(model).kv_bytes(PAGE_POSITIONS) / 2**30
    num_preemptions = 0

    @given(
        st.permutations(range(8)), st.integers(1, 8), st.integers(0, 90), st.integers(2, 6), st.booleans(), st.data()
    )
    @settings(max_examples=4, derandomize=True, database=None, phases=[Phase.generate])
    def check(order: list[int], slots: int, more: int, num_pages: int, shares: bool, data: st.DataObject) -> None:
        nonlocal num_preemptions
        engine_settings = EngineSettings(
            slots=slots, pass_tokens=slots + more, cache_gib=num_pages * page_gib, share_prompts=shares
        )
        engine = GenerationEngine(model, engine_settings, SAMPLED)
        late = data.draw(st.integers(0, 7))
        found: dict[int, Completion] = {}
        with engine.open(num_pages) as generation:
            for place, i in enumerate(order[: 8 - late]):
                generation.add(place, requests[i])
            steps = 0
            while generation.has_work or steps == 0:
                steps += 1
                if steps == 3:
                    for place, i in enumerate(order[8 - late :], 8 - late):
                        generation.add(place, requests[i])
                for new in generation.step():
                    if new.finish_reason is not None:
                        found[order[new.request_id]] = generation.pop(new.request_id, new.finish_reason)
            num_preemptions += generation.num_preemptions
        assert len(found) >= 8 - late
        for i, completion in found.items():
            assert completion.tokens == expected[i].tokens
            if tolerance:
                assert completion.log_probs == pytest.approx(expected[i].log_probs, abs=tolerance)
            else:
                assert completion.log_probs == expected[i].log_probs

    check()
    return num_preemptions


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param("float64", 1e-11, marks=pytest.mark.slow),
        ("float32", 0.0),
        pytest.param("bfloat16", 0.0, marks=pytest.mark.slow),
    ],
)
def test_no_schedule_changes_a_completion(pool, mixtral, dtype, tolerance):
    (num_preemptions,) = pool.run(1, assert_schedules, mixtral, dtype, tolerance)
    assert num_preemptions > 0
