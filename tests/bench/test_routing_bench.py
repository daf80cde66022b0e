"""The routing of a benchmark: balanced and steered loads are exact."""

import pytest
import torch

from moefold.bench.our_step import balanced_choices, balanced_states, steer_embedding
from moefold.bench.shape import bench_config, bench_shapes
from moefold.model.moe.token_group import MicroBatchGroup, TokenPositions
from moefold.model.norm import RMSNorm
from tests.model.moe.layers import moe_router


@pytest.mark.parametrize("name", ["qwen3-30b-a3b-layer", "deepseek-v3-layer", "mixtral-8x7b-layer"])
def test_balanced_states_load_all_experts_equally(name):
    cfg = bench_config(bench_shapes()[name], dtype="float32", tokens=1024)
    router = moe_router(cfg.model, cfg.moe)
    if router.expert_bias is not None:
        router.expert_bias.zero_()
    states = balanced_states(1024, [router.weight], cfg.model, torch.Generator().manual_seed(1))
    norm = RMSNorm(cfg.model.hidden_size, 1e-6)
    torch.nn.init.ones_(norm.weight)
    for x in (states, norm(states)):
        routing = router(x, TokenPositions(MicroBatchGroup(), 1024, torch.arange(1)))
        counts = routing.ids_TK.flatten().bincount(minlength=cfg.model.ffn.moe.num_experts)
        assert counts.max() - counts.min() <= 1
        assert (routing.ids_TK.sort(1).values == balanced_choices(1024, cfg.model, x.device).sort(1).values).all()


def test_steered_tokens_choose_their_experts():
    cfg = bench_config(bench_shapes()["small"], dtype="float32")
    router, embedding = moe_router(cfg.model, cfg.moe), torch.randn(cfg.model.vocab_size, cfg.model.hidden_size)
    steer_embedding(embedding, [router.weight], cfg.model)
    ids = router(embedding, TokenPositions(MicroBatchGroup(), len(embedding), torch.arange(1))).ids_TK
    counts = ids.flatten().bincount(minlength=cfg.model.ffn.moe.num_experts)
    assert counts.max() == counts.min()
