"""Random legal mappings, and the bytes of their weights, gradients and moments."""

import random

from moefold.config.base.part import Part, make_part
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.rank_state_memory import RankStateMemory
from moefold.errors import ConfigError
from moefold.topology.layout import fold
from moefold.train.memory_profile import sharded_state_bytes
from moefold.validate.config import check_config
from tests.models import model_of

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
                "layers": pick.choice((2, 3, 5)), "layers.ffn": pick.choice(("moe", "dense, moe", "dense")),
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


def assert_every_byte(seed: int, cfg: Config) -> None:
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
    found = RankStateMemory(cfg).max_by_pp_rank[layout.attention.coordinate(rank, "pp")]
    real = sharded_state_bytes(cfg, rank)
    assert (found.weights, found.optimizer, found.buffers) == (real.weights, real.optimizer, real.buffers), cfg
    if p.zero < 3:
        assert found.gathered == real.gathered, cfg
    other = random.Random(seed).randrange(p.world_size)
    most = RankStateMemory(cfg).max_by_pp_rank[layout.attention.coordinate(other, "pp")]
    assert sharded_state_bytes(cfg, other).optimizer <= most.optimizer, cfg
