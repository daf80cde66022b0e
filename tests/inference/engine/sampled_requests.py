"""Requests of the tests of the generation engine, and their shares of data-parallel ranks."""

from typing import Any

from moefold.comm.groups import ParallelGroups
from moefold.inference.engine.requests import Request
from moefold.inference.sampling import SamplingParams

PROMPTS = [tuple(i * i % 61 for i in range(70)), (35,), (8, 9, 7)]
"""The first one is longer than a page."""
SAMPLED = SamplingParams(temperature=1.3, top_k=30, seed=4)
REQUESTS = [
    Request(prompt=prompt, prompt_number=i, sample_number=j, max_tokens=6 + j, eos_ids=frozenset({5}))
    for i, prompt in enumerate(PROMPTS)
    for j in range(3)
]


def name(mapping: dict[str, Any]) -> str:
    return "-".join(f"{key}{value}" for key, value in mapping.items()) or "one"


def own_requests(groups: ParallelGroups) -> list[int]:
    """Indices of the requests of this data-parallel rank: uneven shares, and none on the last of three or more."""
    ranks = groups.attn.dp_cp.size
    shares = [list(range(len(REQUESTS)))[i::ranks] for i in range(ranks)]
    if ranks > 1:
        shares[0] += shares.pop()
        shares.append([])
    return shares[groups.attn.dp_cp.rank]
