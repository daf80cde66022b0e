"""Two hundred random recipes with overlapped experts end, within a hard limit, with the very losses without overlap.

pytest -m slow tests/verify/test_overlap_sweep.py
"""

import random
from dataclasses import replace

import pytest

from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.errors import ConfigError
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.verify.distributed_run import create_groups
from tests.slow import slow
from tests.verify.recipes import LATENT, tiny

pytestmark = pytest.mark.parity

BATCH = 10
"""Recipes that the same processes run one after another."""
LIMIT_S = 240.0
PARTS = ("norms", "core_attention", "expert_activation", "moe", "layer", "dense_mlp", "shared_experts")
MOE = (
    {},
    {"capacity_factor": 1.0},
    {"weight_in_expert": True},
    {"aux_kind": "global_batch"},
    {"capacity_factor": 1.0, "pad_to_capacity": True, "drop_scope": "sub_sequence"},
)
LOAN = {"choice": "skewed", "llep_min_tokens": 1, "llep_threshold": 1.0, "llep_capacity": 1.0, "aux_loss": 0.0}


def _layout(draw: random.Random, num_layers: int, num_further: int, num_stages: int) -> str:
    """Layers cut into stages anywhere: uneven, and some of them empty."""
    cuts = sorted(draw.randint(0, num_layers) for _ in range(num_stages - 1))
    bounds = [0, *cuts, num_layers]
    stages = ["t" * (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    return "E" + "|".join(stages) + "m" * num_further + "L"


def _parallel(draw: random.Random, world_size: int) -> dict[str, object]:
    pp = draw.choice([1, 1, 2, 2] if world_size < 8 else [2, 4, 4])
    pp = 1 if world_size == 2 else pp
    rest = world_size // pp
    tp = draw.choice([d for d in (1, 2, 4) if rest % d == 0])
    cp = draw.choice([d for d in (1, 2) if rest // tp % d == 0])
    etp = draw.choice([d for d in (1, 1, 2) if rest % d == 0])
    ep = draw.choice([d for d in (1, 2, 2, 4) if rest // etp % d == 0])
    schedule = draw.choice(["1f1b", "interleaved", "interleaved", "dualpipev"]) if pp > 1 else "1f1b"
    chunks = {"1f1b": 1, "interleaved": draw.choice([2, 3]), "dualpipev": 2}[schedule]
    return {
        "world_size": world_size,
        "pp": pp,
        "tp": tp,
        "cp": cp,
        "ep": ep,
        "etp": etp,
        "schedule": schedule,
        "virtual_stages": chunks,
        "zero": draw.choice([0, 1, 2]),
        "dispatcher": draw.choice(["alltoall", "alltoall", "allgather", "leastloaded"]),
        "context": draw.choice(["ring", "allgather"]),
        "overlap_experts": True,
    }


def _draw(draw: random.Random, world_size: int) -> Config:
    """The next recipe that passes the checks."""
    while True:
        parallel = _parallel(draw, world_size)
        num_stages = int(parallel["pp"]) * int(parallel["virtual_stages"])
        num_layers, further = draw.randint(max(2, num_stages - 2), num_stages + 2), draw.choice([0, 0, 1])
        if num_stages > 1 and draw.random() < 0.7:
            parallel["pipeline_layout"] = _layout(draw, num_layers, further, num_stages)
        elif num_layers < num_stages:
            continue
        model = {
            "layers": num_layers,
            "mtp_layers": further,
            "layers.ffn": draw.choice(["moe", "dense, moe", "moe, dense", *["2 moe, dense"] * (num_layers > 2)]),
        }
        if draw.random() < 0.5:
            model |= {"ffn.moe.shared.intermediate_size": 16}
        if draw.random() < 0.2:
            model |= LATENT
        moe = LOAN if parallel["dispatcher"] == "leastloaded" else draw.choice(MOE)
        train = {
            "global_batch_size": draw.randint(2, 14),
            "recompute": tuple(draw.sample(PARTS, draw.choice([0, 1, 2]))),
        }
        try:
            return tiny(model=model, moe=moe, train=train, **parallel)
        except ConfigError:
            continue


def _numbers(cfg: Config) -> list[float]:
    """Losses and gradient norm of one step."""
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    data = DataRequest.of(cfg).open()
    loader, training = (
        BatchSharder(data.train, cfg.batch_shape, groups, model.positions),
        TrainingStep(model, cfg),
    )
    step = training.run(loader.batch(0), 1)
    return [step.loss, step.aux_loss, step.z_loss, step.mtp_loss, step.grad_norm]


def _both(recipes: list[Config]) -> list[tuple[list[float], list[float]]]:
    """On a rank: the numbers of each recipe, without overlap and with it."""
    plain = [replace(cfg, parallel=replace(cfg.parallel, overlap_experts=False)) for cfg in recipes]
    return [(_numbers(its), _numbers(cfg)) for its, cfg in zip(plain, recipes, strict=True)]


def _run(pool, seed: int, world_size: int, count: int) -> None:
    draw = random.Random(seed)
    recipes = [_draw(draw, world_size) for _ in range(count)]
    for found in pool.run(world_size, _both, recipes, timeout_s=LIMIT_S):
        for cfg, (plain, overlapped) in zip(recipes, found, strict=True):
            assert overlapped == plain, cfg


@pytest.mark.parametrize(("world_size", "count"), [(2, 1), *slow([(2, 6), (4, 6)])])
def test_a_few_random_recipes_end(pool, world_size, count):
    _run(pool, 1, world_size, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "world_size"),
    [(100 + i, world_size) for world_size, batches in ((2, 4), (4, 12), (8, 4)) for i in range(batches)],
)
def test_two_hundred_random_recipes_end(pool, seed, world_size):
    _run(pool, seed, world_size, BATCH)
