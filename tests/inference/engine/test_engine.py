"""The engine computes what the whole text gives: tokens and log-probabilities, under every schedule and mapping."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.inference.engine.draw import Draw, UniformStream, choose_tokens
from moefold.inference.engine.engine import RolloutEngine
from moefold.inference.engine.requests import Completion, EngineSettings, Request
from moefold.inference.sampling import SamplingParams
from tests.inference.example import KINDS, opened, recipe_of_kind, write_checkpoint

PROMPTS = [tuple(i * i % 61 for i in range(70)), (35,), (8, 9, 7)]
"""The first one is longer than a page."""
SAMPLED = SamplingParams(temperature=1.3, top_k=30, seed=4)
REQUESTS = [
    Request(prompt=prompt, prompt_number=i, sample_number=j, max_tokens=6 + j, eos_ids=frozenset({5}))
    for i, prompt in enumerate(PROMPTS)
    for j in range(3)
]


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
    return RolloutEngine(model, settings, SAMPLED).generate(requests)


@pytest.mark.parametrize("kind", ["mixtral", *KINDS])
def test_the_engine_equals_the_whole_text(pool, mixtral, tmp_path, kind):
    path = mixtral
    if kind != "mixtral":
        path = tmp_path
        pool.run(1, write_checkpoint, recipe_of_kind(kind, tmp_path))
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
