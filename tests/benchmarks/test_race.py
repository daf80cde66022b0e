"""Every kind of model can be raced, as a layer and as a stack."""

from importlib.util import find_spec

import pytest
import torch

from benchmarks.race.other_frameworks import PEERS
from benchmarks.race.step import median_ratio, race_steps
from moefold.bench.timing import time_interleaved
from moefold.recipe import load_config
from tests.bench.small_sizes import SIZES

LATENT = [
    "model.attention=mla",
    "model.attention.q_lora_rank=16",
    "model.attention.kv_lora_rank=16",
    "model.attention.qk_nope_head_dim=8",
    "model.attention.qk_rope_head_dim=8",
    "model.attention.v_head_dim=8",
    "model.rope.interleaved=true",
    "model.ffn.moe.router=sigmoid",
    "model.ffn.moe.router.normalize=true",
    "model.ffn.moe.router.num_groups=2",
    "model.ffn.moe.router.top_groups=1",
    "model.ffn.moe.router.expert_bias=true",
    "model.ffn.moe.shared.intermediate_size=24",
]


@pytest.mark.parametrize(
    ("part", "routing", "dtype"),
    [
        # In `make test` each of them once.
        pytest.param(part, routing, dtype, marks=() if i == j == k else pytest.mark.slow)
        for i, part in enumerate(("layer", "stack"))
        for j, routing in enumerate(("natural", "balanced"))
        for k, dtype in enumerate(("float32", "bfloat16"))
    ],
)
def test_layers_of_mixtral(group_of_one, part, routing, dtype):
    cfg = load_config(None, [*SIZES, f"run.dtype={dtype}"])
    found = race_steps(cfg, part, routing, torch.device("cpu"), 1)
    names = [row.name.split(",")[0] for row in found.report.rows]
    assert names[:3] == ["moefold", "plain torch", "transformers"]
    assert found.ratio_to_plain is not None
    assert (found.report.load == 1.0) == (routing == "balanced")
    assert found.report.rows[0].peak_gib > 0
    assert list(found.ratios_to_peers) == names[3:]
    said = [*names[3:], *found.absent]
    assert [sum(words.startswith(peer.name) for words in said) for peer in PEERS] == [1, 1]
    racing = {"layer": {"float32": ["megatron-core"], "bfloat16": ["megatron-core", "torchtitan"]}}
    installed = [name for name in racing.get(part, {}).get(dtype, []) if find_spec(name.replace("-core", ""))]
    assert [name.split()[0] for name in names[3:]] == installed


@pytest.mark.parametrize("part", ["layer", pytest.param("stack", marks=pytest.mark.slow)])
def test_layers_of_deepseek(group_of_one, part):
    cfg = load_config(None, [*(word for word in SIZES if "num_kv_heads" not in word), *LATENT])
    found = race_steps(cfg, part, "balanced", torch.device("cpu"), 1)
    assert [row.name.split(",")[0] for row in found.report.rows][:2] == ["moefold", "transformers"]
    assert found.ratio_to_plain is None
    assert "plain torch: its router supports only softmax and top-k" in found.absent
    assert "shared experts" in [piece.name for piece in found.pieces]


def test_contestants_take_turns_and_the_first_rounds_do_not_count():
    order = []
    times = time_interleaved({name: lambda name=name: order.append(name) for name in "ab"}, warmup=1, rounds=2)
    assert order == [*"ababab"]
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}


def test_the_ratio_is_taken_round_by_round():
    assert median_ratio([1.0, 2.0, 4.0], [2.0, 6.0, 4.0]) == 2.0
