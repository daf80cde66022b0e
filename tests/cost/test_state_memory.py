"""Bytes of weights and optimizer state by formula equal the real sharded model's, on any rank, to the byte."""

import math
import random
import time
from dataclasses import replace

import pytest

from moefold.config.parallel import ParallelConfig
from moefold.config.part import Part, make_part
from moefold.config.run import RunConfig
from moefold.config.schema import Config
from moefold.config.sites import SitesConfig
from moefold.config.train import TrainConfig
from moefold.cost.peak_memory import compute_rank_memory
from moefold.cost.state_memory import StateMemory
from moefold.errors import ConfigError
from moefold.topology.layout import fold
from moefold.train.memory_profile import sharded_state_bytes
from moefold.validate.config import check_config
from tests.models import model_of
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("forks_without_threads")

WORLDS = (1, 2, 3, 4, 6, 8, 12, 24, 64, 96, 256, 1024)


def random_config(seed: int, method: str | Part = "mean") -> Config:
    """Any legal mapping of a small model with odd sizes."""
    pick, world = random.Random(seed), WORLDS[seed % len(WORLDS)]
    while True:
        degrees = {axis: pick.choice([d for d in (1, 2, 3, 4, 8, 16) if world % d == 0]) for axis in ("tp", "cp", "pp")}
        degrees |= {axis: pick.choice([d for d in (1, 2, 3, 4, 8, 16) if world % d == 0]) for axis in ("ep", "etp")}
        latent = pick.random() < 0.3
        groups = pick.choice((1, 2, 6))
        attention = {"attention.num_heads": 12, "attention.num_kv_heads": groups, "attention.head_dim": 6} | {
            f"attention.{key}": pick.random() < 0.3 for key in ("qkv_bias", "output_bias", "sinks")
        }
        if latent:
            attention = {"attention": "mla", "attention.num_heads": 12, "attention.q_lora_rank": pick.choice((0, 10))}
            attention |= {"attention.kv_lora_rank": 7, "attention.qk_nope_head_dim": 4, "attention.v_head_dim": 5}
            attention["attention.qk_rope_head_dim"] = 2
        elif pick.random() < 0.4:
            attention["attention.qk_norm.over"] = pick.choice(("head", "all_heads"))
        shared = {"ffn.moe.shared.intermediate_size": 24, "ffn.moe.shared.gate": pick.random() < 0.3}
        model = model_of(
            {
                "num_layers": pick.choice((2, 3, 5)), "layer_pattern": pick.choice(("M", "DM", "D")),
                "hidden_size": pick.choice((24, 40)), "vocab_size": 240 - seed % 2, "mtp_layers": pick.choice((0, 2)),
                "ffn.dense.intermediate_size": 48, "ffn.moe.num_experts": 12, "ffn.moe.intermediate_size": 20,
                "ffn.moe.bias": pick.random() < 0.3, "ffn.moe.router.bias": pick.random() < 0.3,
                "ffn.moe.router.expert_bias": pick.random() < 0.5, "tie_embeddings": pick.random() < 0.3,
            } | attention | pick.choice(({}, shared))
        )  # fmt: skip
        muon = pick.random() < 0.4
        groups = {"groups": ("attention", "experts")} if muon else {}
        schedule = pick.choice(("1f1b", "zbv")) if degrees["pp"] > 1 else "1f1b"
        dtype = pick.choice(("bfloat16", "float32", "float64"))
        zero = pick.choice((0, 1, 2, 3))
        moment_dtype = pick.choice(("float32", "bfloat16"))
        optimizer = make_part("optimizer", "muon" if muon else "adamw", moment_dtype=moment_dtype, **groups)
        cfg = Config(
            run=RunConfig(dtype=dtype),
            model=model,
            parallel=ParallelConfig(
                world_size=world, **degrees, zero=zero, schedule=schedule,
                virtual_stages=2 if schedule == "zbv" else 1, dispatcher="alltoall",
            ),
            train=TrainConfig(
                seq_len=192, global_batch_size=world * 8, optimizer=optimizer,
            ),
            sites=SitesConfig(
                count=1 + seed % 2, momentum=seed % 4 / 4, residual=float(seed % 3 == 1),
                method=method,
            ),
        )  # fmt: skip
        try:
            check_config(cfg)
        except ConfigError:
            continue
        return cfg


@pytest.mark.parametrize("seed", [*range(10), *slow((seed,) for seed in range(10, 24))])
def test_every_byte_of_weights_and_moments_of_a_random_mapping(seed):
    check_every_byte(seed, random_config(seed))


def check_every_byte(seed: int, cfg: Config) -> None:
    p = cfg.parallel
    layout = fold(world_size=p.world_size, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp)
    # The formula is for the first data-parallel rank, and the tp rank with the most rows of the vocabulary.
    firsts = [
        rank
        for rank in range(p.world_size)
        if rank == min(layout.attention.group(rank, "dp", "cp")) == min(layout.moe.group(rank, "edp"))
        and (cfg.model.vocab_size % p.tp == 0 or layout.attention.coordinate(rank, "tp") == 0)
    ]
    rank = random.Random(seed).choice(firsts)
    found = StateMemory(cfg).max_by_pp_rank[layout.attention.coordinate(rank, "pp")]
    real = sharded_state_bytes(cfg, rank)
    assert (found.weights, found.optimizer, found.buffers) == (real.weights, real.optimizer, real.buffers), cfg
    if p.zero < 3:
        assert found.gathered == real.gathered, cfg
    other = random.Random(seed).randrange(p.world_size)
    most = StateMemory(cfg).max_by_pp_rank[layout.attention.coordinate(other, "pp")]
    assert sharded_state_bytes(cfg, other).optimizer <= most.optimizer, cfg


@pytest.mark.parametrize("factor", [1.0, 1.7])
@pytest.mark.parametrize("pp", [1, 2])
def test_every_byte_of_symmetric_memory_which_is_one_for_all_stages_of_a_rank(factor, pp):
    # Rows of 66 bytes, which are aligned to 80; two stages on each rank of a pipeline.
    model = model_of(
        {
            "num_layers": 4,
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
        added = StateMemory(cfg).max_by_pp_rank[pp_rank].buffers - StateMemory(plain).max_by_pp_rank[pp_rank].buffers
        assert added == expected
        assert StateMemory(cfg).max_by_pp_rank[pp_rank].buffers == sharded_state_bytes(cfg, 4 * pp_rank).buffers


@pytest.mark.parametrize(("num_layers", "ep", "prefetched"), [(1, 1, 0), (5, 1, 1), (5, 2, "dense")])
def test_zero_3_gathers_a_layer_and_the_next_one(num_layers, ep, prefetched):
    """Experts that one rank has alone, as with ep = dp, are not gathered, and so not ahead."""
    model = model_of(
        {
            "num_layers": num_layers,
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
    assert StateMemory(cfg).max_by_pp_rank[0].gathered == expected


@pytest.mark.parametrize("seed", [*range(6), *slow((seed,) for seed in range(6, 12))])
def test_every_byte_of_moments_that_stay_when_large_ones_are_outside(seed):
    cfg = random_config(seed)
    one = replace(cfg, train=replace(cfg.train, offload_optimizer="ssd", offload_dir="/nowhere", offload_min_kib=1))
    stays = [rank.states.optimizer for rank in compute_rank_memory(one)]
    everything = [rank.states.optimizer for rank in compute_rank_memory(cfg)]
    first = [rank * cfg.parallel.world_size // cfg.parallel.pp for rank in range(cfg.parallel.pp)]
    assert stays == [sharded_state_bytes(one, rank).optimizer for rank in first], cfg
    away = StateMemory(one).offloaded_moments
    assert [left + moments.offloaded for left, moments in zip(stays, away, strict=True)] == everything
    assert all(moments.in_transit <= moments.offloaded for moments in away)


def test_an_update_that_needs_more_than_the_passes_counts():
    model = model_of(
        {
            "num_layers": 1,
            "layer_pattern": "D",
            "hidden_size": 64,
            "ffn.dense.intermediate_size": 4096,
            "vocab_size": 4096,
        }
    )
    train = TrainConfig(seq_len=16, offload_optimizer="ssd", offload_dir="/nowhere", offload_min_kib=1)
    cfg = Config(run=RunConfig(dtype="float32"), model=model, train=train)
    (rank,) = compute_rank_memory(cfg)
    # Both moments of three parameters as large as the embedding.
    assert StateMemory(cfg).offloaded_moments[0].in_transit == 3 * 2 * 4 * 64 * 4096
    assert rank.optimizer_in_transit == 3 * 2 * 4 * 64 * 4096 - rank.activations.total > 0
    without = replace(cfg, train=replace(train, offload_optimizer="none", offload_dir=""))
    assert compute_rank_memory(without)[0].optimizer_in_transit == 0


def test_a_thousand_ranks_cost_milliseconds():
    cfg = Config(
        model=model_of({"preset": "", "num_layers": 64, "ffn.moe.num_experts": 128}),
        parallel=ParallelConfig(world_size=1024, tp=4, pp=16, ep=64),
        train=TrainConfig(global_batch_size=1024),
    )
    check_config(cfg)
    started_s = time.process_time()
    for _ in range(10):
        assert len(StateMemory(cfg).max_by_pp_rank) == 16
    assert (time.process_time() - started_s) / 10 < 0.01
