"""Test experts that ranks read from their peers: the bits of one rank, one copy in memory, and no waiting."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.comm.shared_memory import open_shared_memory
from moefold.config.sections.rl import RolloutConfig
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import Completion, EngineSettings, Request
from moefold.inference.load import load_model
from moefold.inference.sampling import SamplingParams
from moefold.inference.settings import InferenceRequest, inference_config
from moefold.inference.source import find_source
from moefold.model.local_param import local_tensor
from moefold.parallel.inference_model import InferenceModel
from tests.inference.example import CPU
from tests.ops.c_kernels import needs_compiler
from tests.slow import slow

pytestmark = [pytest.mark.parity, needs_compiler]

REQUESTS = [
    Request(prompt=prompt, prompt_number=i, sample_number=j, max_tokens=4 + 3 * i + j)
    for i, prompt in enumerate([tuple(i * i % 61 for i in range(70)), (35,), (8, 9, 7), (2, 3)])
    for j in range(2)
]
SAMPLED = SamplingParams(temperature=1.3, top_k=30, seed=4)


def opened(path: Path, experts: str, mapping: dict[str, Any], dtype: str) -> InferenceModel:
    """The model with the C kernels, whose sums depend on no other token."""
    source = find_source(str(path))
    overrides = tuple(f"parallel.{key}={value}" for key, value in mapping.items())
    wish = InferenceRequest(overrides=overrides, dtype=dtype, device="cpu", seq_len=96, batch_size=1)
    cfg = inference_config(source, wish, "generate")
    run = replace(cfg.run, kernels="c")
    return load_model(source, replace(cfg, run=run, rollout=RolloutConfig(experts=experts)), CPU).model


def generate(path: Path, experts: str, mapping: dict[str, Any], dtype: str) -> dict[int, Completion]:
    """The completions of this rank's requests by their index."""
    model = opened(path, experts, mapping, dtype)
    dp = model.groups.attn.dp
    mine = range(len(REQUESTS))[dp.rank :: dp.size]
    engine = GenerationEngine(model, EngineSettings(slots=2, pass_tokens=32), SAMPLED)
    return dict(zip(mine, engine.generate([REQUESTS[i] for i in mine]), strict=True))


@pytest.mark.parametrize(
    ("kind", "mapping", "dtype"),
    [
        ("mixtral", {"world_size": 4, "pp": 2, "ep": 2}, "float32"),
        *slow(
            [
                ("gpt-oss", {"world_size": 4, "pp": 2, "ep": 2}, "float32"),
                ("mixtral", {"world_size": 4, "ep": 4}, "bfloat16"),
                ("gpt-oss", {"world_size": 4, "ep": 4}, "bfloat16"),
                ("windows", {"world_size": 4, "ep": 2}, "float32"),
                ("deepseek-v3", {"world_size": 2, "ep": 2}, "bfloat16"),
            ]
        ),
    ],
)
def test_fetched_experts_give_the_bits_of_one_rank(pool, of_kind, kind, mapping, dtype):
    (expected,) = pool.run(1, generate, of_kind(kind), "exchange", {}, dtype)
    found: dict[int, Completion] = {}
    for of_rank in pool.run(mapping["world_size"], generate, of_kind(kind), "fetch", mapping, dtype):
        found |= of_rank
    assert found == expected


def _expert_memory(path: Path) -> tuple[int, int, set[int], int]:
    """Bytes of the experts' parameters, of all that a layer reads, their storages, and bytes of all experts."""
    model = opened(path, "fetch", {"world_size": 2, "ep": 2}, "float32")
    layers = model.stage.moe_layers().values()
    own = [local_tensor(weight) for layer in layers for weight in layer.experts.weights]
    read = [weight for layer in layers for weight in layer.experts.peer_weights or ()]
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*own, *read)}
    assert model.shared_names == {name for name in model.named_parameters if ".experts." in name}
    return sum(t.nbytes for t in own), sum(t.nbytes for t in read), storages, len(own)


def test_all_ranks_together_hold_the_experts_once(pool, of_kind):
    for own_bytes, read_bytes, storages, count in pool.run(2, _expert_memory, of_kind("gpt-oss")):
        assert count > 0
        assert 2 * own_bytes == read_bytes
        # The parameters are views of the tensors that the layers read, in one piece of memory that both ranks map.
        assert len(storages) == 1


def _most_ahead(path: Path, experts: str, waits: bool) -> int:
    """Passes by which rank 1 is ahead of rank 0 at most, as rank 0 sees it.

    Args:
        path: the model.
        experts: as in rollout.experts.
        waits: whether rank 0 goes on after its first token only when rank 1 has ended.
    """
    model = opened(path, experts, {"world_size": 2, "ep": 2}, "float32")
    counts = open_shared_memory(32, model.groups.moe.ep, "the test").view(torch.int64)
    rank = model.groups.rank
    ahead = 0

    def on_token(number: int, token: int) -> None:
        nonlocal ahead
        counts[rank] += 1
        while waits and rank == 0 and not counts[3]:
            time.sleep(0.001)
        ahead = max(ahead, int(counts[1] - counts[0]))

    request = Request(prompt=(5, 6), max_tokens=20)
    GenerationEngine(model, EngineSettings(slots=1), SAMPLED).generate([request], on_token)
    counts[2 + rank] = 1
    return ahead


def test_a_rank_that_waits_delays_no_other_rank(pool, of_kind):
    assert pool.run(2, _most_ahead, of_kind("gpt-oss"), "fetch", True)[0] == 19
    # Ranks that exchange tokens are in the same pass, or one has left it and the other has not.
    assert pool.run(2, _most_ahead, of_kind("gpt-oss"), "exchange", False)[0] <= 1


def _changed(path: Path) -> list[bool]:
    """Return whether each rank reads the weights that its peers write, after each of some changes."""
    model = opened(path, "fetch", {"world_size": 2, "ep": 2}, "float32")
    layer = next(iter(model.stage.moe_layers().values()))
    seen = []
    for step in range(10):
        with model.writing_weights():
            for weight in layer.experts.weights:
                local_tensor(weight).fill_(100 * step + model.groups.rank)
        expected = torch.tensor([100.0 * step + rank for rank in range(2)]).repeat_interleave(
            len(local_tensor(layer.experts.w_up))
        )
        assert layer.experts.peer_weights is not None
        seen.append(
            all(torch.equal(weight.flatten(1).amax(1), expected) for weight in layer.experts.peer_weights)
            and all(torch.equal(weight.flatten(1).amin(1), expected) for weight in layer.experts.peer_weights)
        )
    return seen


def test_a_change_is_seen_whole_by_all_ranks(pool, of_kind):
    assert pool.run(2, _changed, of_kind("gpt-oss")) == [[True] * 10] * 2


@pytest.mark.slow
def test_groups_of_ep_have_memory_of_their_own(pool, of_kind):
    found = pool.run(4, _inodes, of_kind("gpt-oss"))
    assert len(found) == 4
    assert found[0] == found[1] != found[2] == found[3]


def _inodes(path: Path) -> set[str]:
    model = opened(path, "fetch", {"world_size": 4, "ep": 2}, "float32")
    assert isinstance(model.groups, ParallelGroups)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:moefold-shared" in line}
