"""Families continued token by token over the paged cache: greedy tokens and their log-probabilities are theirs."""

import pytest
import torch

from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import EngineSettings, Request
from moefold.inference.sampling import SamplingParams
from tests.inference.example import opened

pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
from tests.convert.hf_models import NEWER_MODELS, make_model, save_model
from tests.slow import slow

FAST = ("afmoe", "granite-moe-shared", "hunyuan-moe")
TOKENS = 20
PROMPTS = ([1 + i * 7 % 37 for i in range(50)], [7])
"""The first one is continued on a second page."""
WITHIN = 2e-5


def continue_greedily(folder):
    model = opened(folder, "generate", {}, 80, 2).model
    engine = GenerationEngine(model, EngineSettings(cache_gib=0), SamplingParams(temperature=0.0))
    return engine.generate([Request(prompt=tuple(prompt), max_tokens=TOKENS) for prompt in PROMPTS])


@pytest.mark.parity
@pytest.mark.parametrize("name", [*FAST, *slow((name,) for name in NEWER_MODELS if name not in FAST)])
def test_decoding_equals_transformers(pool, tmp_path, name):
    theirs = make_model(name, max_position_embeddings=128)
    folder = save_model(theirs, tmp_path / name)
    (completions,) = pool.run(1, continue_greedily, folder)
    for prompt, found in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([prompt])
        limits = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        expected = theirs.generate(ids, **limits)
        assert list(found.tokens) == expected[0, len(prompt) :].tolist()
        with torch.no_grad():
            log_probs = theirs(input_ids=expected).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        sampled = log_probs.gather(1, expected[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.log_probs), sampled, rtol=WITHIN, atol=WITHIN)
