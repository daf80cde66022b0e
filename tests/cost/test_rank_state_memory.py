"""Test that the formula of weights and optimizer state equals the sharded model to the byte, on any rank."""

import math
from dataclasses import replace

import pytest

from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.peak_memory import compute_rank_memory
from moefold.cost.rank_state_memory import RankStateMemory
from moefold.train.memory_profile import sharded_state_bytes
from moefold.validate.config import check_config
from tests.cost.random_mappings import assert_every_byte, random_config
from tests.models import model_of
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("forks_without_threads")


@pytest.mark.parametrize("seed", [*range(8), *slow((seed,) for seed in range(8, 24))])
def test_every_byte_of_weights_and_moments_of_a_random_mapping(seed):
    assert_every_byte(seed, random_config(seed))


@pytest.mark.parametrize("factor", [1.0, 1.7])
@pytest.mark.parametrize("pp", [1, 2])
def test_every_byte_of_symmetric_memory_which_is_one_for_all_stages_of_a_rank(factor, pp):
    # Rows of 66 bytes, which are aligned to 80; two stages on each rank of a pipeline.
    model = model_of(
        {
            "layers": 4,
            "hidden_size": 33,
            "attention.head_dim": 8,
            "vocab_size": 96,
            "ffn.moe.num_experts": 4,
            "ffn.moe.intermediate_size": 32,
        }
    )
    parallel = ParallelConfig(
        world_size=4 * pp,
        ep=2,
        tp=2,
        pp=pp,
        schedule="interleaved" if pp > 1 else "1f1b",
        virtual_stages=pp,
        dispatcher=make_part("dispatcher", "symm_mem", receive_factor=factor),
    )
    train = TrainConfig(seq_len=16, micro_batch_size=3, global_batch_size=24)
    cfg = Config(run=RunConfig(dtype="bfloat16", device="cuda"), model=model, parallel=parallel, train=train)
    check_config(cfg)
    routed = 16 // 2 * 3 * model.ffn.moe.top_k
    expected = 3 * max(routed, math.ceil(routed * factor)) * 80 + 4 * 2 * 4 * 8
    plain = replace(cfg, parallel=replace(parallel, dispatcher="alltoall"))
    for pp_rank in range(pp):
        added = (
            RankStateMemory(cfg).max_by_pp_rank[pp_rank].buffers
            - RankStateMemory(plain).max_by_pp_rank[pp_rank].buffers
        )
        assert added == expected
        assert RankStateMemory(cfg).max_by_pp_rank[pp_rank].buffers == sharded_state_bytes(cfg, 4 * pp_rank).buffers


@pytest.mark.parametrize(("num_layers", "ep", "prefetched"), [(1, 1, 0), (5, 1, 1), (5, 2, "dense")])
def test_zero_3_gathers_a_layer_and_the_next_one(num_layers, ep, prefetched):
    """Experts that only one rank has, as with ep = dp, are not gathered, and so not ahead."""
    model = model_of(
        {
            "layers": num_layers,
            "hidden_size": 48,
            "vocab_size": 96,
            "ffn.moe.num_experts": 4,
            "ffn.moe.intermediate_size": 32,
        }
    )
    run = RunConfig(dtype="bfloat16")
    train = TrainConfig(seq_len=16, global_batch_size=2)
    parallel = ParallelConfig(world_size=2, ep=ep, zero=3)
    cfg = Config(run=run, model=model, parallel=parallel, train=train)
    check_config(cfg)
    experts = 3 * 48 * 32 * 4 // ep
    layer = sum(weight.numel for weight in model.decoder_layers[-1].params) - 3 * 48 * 32 * 4
    router = 48 * 4
    ends = 2 * 96 * 48 + 48
    ahead = {0: 0, 1: layer + experts, "dense": layer}[prefetched]
    # bfloat16, routers float32.
    expected = 2 * (ends + layer + experts + ahead) + 2 * router * (1 + (ahead > 0))
    assert RankStateMemory(cfg).max_by_pp_rank[0].gathered == expected


@pytest.mark.parametrize("seed", [*range(3), *slow((seed,) for seed in range(3, 12))])
def test_every_byte_of_moments_that_stay_when_large_ones_are_outside(seed):
    cfg = random_config(seed)
    one = replace(cfg, train=replace(cfg.train, offload_optimizer="ssd", offload_dir="/nowhere", offload_min_kib=1))
    stays = [rank.states.optimizer for rank in compute_rank_memory(one)]
    everything = [rank.states.optimizer for rank in compute_rank_memory(cfg)]
    first = [rank * cfg.parallel.world_size // cfg.parallel.pp for rank in range(cfg.parallel.pp)]
    assert stays == [sharded_state_bytes(one, rank).optimizer for rank in first], cfg
    away = RankStateMemory(one).offloaded_moments
    assert [left + moments.offloaded for left, moments in zip(stays, away, strict=True)] == everything
    assert all(moments.in_transit <= moments.offloaded for moments in away)


def test_an_update_that_needs_more_than_the_passes_counts():
    model = model_of(
        {
            "layers": 1,
            "layers.ffn": "dense",
            "hidden_size": 64,
            "ffn.dense.intermediate_size": 4096,
            "vocab_size": 4096,
        }
    )
    train = TrainConfig(seq_len=16, offload_optimizer="ssd", offload_dir="/nowhere", offload_min_kib=1)
    cfg = Config(run=RunConfig(dtype="float32"), model=model, train=train)
    (rank,) = compute_rank_memory(cfg)
    # Both moments of three parameters as large as the embedding.
    assert RankStateMemory(cfg).offloaded_moments[0].in_transit == 3 * 2 * 4 * 64 * 4096
    assert rank.optimizer_in_transit == 3 * 2 * 4 * 64 * 4096 - rank.activations.total > 0
    without = replace(cfg, train=replace(train, offload_optimizer="none", offload_dir=""))
    assert compute_rank_memory(without)[0].optimizer_in_transit == 0
