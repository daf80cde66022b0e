"""Completions and logits of a model folder, with and without a cache."""

from pathlib import Path

import torch

from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import Completion, EngineSettings, Request
from moefold.inference.sampling import SamplingParams
from moefold.model.layer_cache import CacheSize
from moefold.parallel.paged_decoder import PagedDecoder, forward_chain
from tests.inference.example import opened, row_of_ids
from tests.model.paged_rows import pass_rows

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = ([3, 14, 15, 9, 26, 5], [35], [8, 9, 7])
"""Prompts of different lengths: shorter ones are filled up."""
NEW_TOKENS = 9


def run_generation(path: Path, mapping: dict[str, int], sampling: SamplingParams, eos: int = -1) -> list[Completion]:
    """Continue the prompts together."""
    model = opened(path, "generate", mapping, 24, len(PROMPTS)).model
    requests = [
        Request(prompt=tuple(prompt), prompt_number=i, max_tokens=NEW_TOKENS, eos_ids=frozenset({eos}))
        for i, prompt in enumerate(PROMPTS)
    ]
    return GenerationEngine(model, EngineSettings(cache_gib=0), sampling).generate(requests)


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


def run_whole(path: Path, num_tokens: int, mapping: dict[str, str] | None = None) -> torch.Tensor:
    """Logits [S, B, V] of two given rows of ids, without a cache."""
    model = opened(path, "evaluate", mapping or {}, num_tokens, 2).model
    model.stage.set_positions(torch.arange(num_tokens))
    logits = model.forward(torch.from_numpy(row_of_ids(2 * num_tokens).astype("int64")).view(2, -1))
    assert logits is not None
    return logits
