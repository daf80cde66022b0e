"""The search leaves nothing out on random models, devices and networks, at several sizes of memory."""

from dataclasses import replace
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.hardware import Device, load_device
from moefold.errors import ConfigError
from moefold.planner.memory.budget import OVERHEAD_GIB
from moefold.planner.search.search import Search
from tests.models import model_of
from tests.planner.recipes import on_ranks
from tests.planner.search.exhaustive import assert_folds, every_mapping, priced, searching

MOST = 1200
"""Mappings of a world, each with every way to save activations."""
NOTHING_SAVED = {"recompute": (), "offload": ()}


class World(NamedTuple):
    """The recipe, and the limits of its search."""

    cfg: Config
    device: Device
    fixed: dict[str, object]
    imbalance: float

    def search(self, room_gib: float) -> Search:
        """On a device that has so much beside the overhead."""
        return searching(self.cfg, room_gib, self.fixed, self.device, self.imbalance)


def random_world(random: Random) -> World:
    """A world that may not be legal."""
    one_of = random.choice
    num_experts, heads = one_of([2, 4, 6, 8]), one_of([2, 4, 6])
    num_layers, kinds = one_of([1, 2, 3, 4, 5]), one_of([["moe"], ["dense", "moe"], ["moe", "moe", "dense"]])
    model = model_of(
        {
            "layers": ", ".join(kinds[i % len(kinds)] for i in range(num_layers)),
            "hidden_size": 96,
            "attention.num_heads": heads,
            "attention.num_kv_heads": one_of([groups for groups in (1, 2, 3, 4, 6) if heads % groups == 0]),
            "ffn.dense.intermediate_size": one_of([48, 96]),
            "ffn.moe.intermediate_size": one_of([8, 24, 96]),
            "vocab_size": one_of([65, 512]),
            "ffn.moe.num_experts": num_experts,
            "ffn.moe.top_k": one_of([copies for copies in (1, 2, 3, 4, 6) if copies <= num_experts]),
            "ffn.moe.router": "sigmoid",
            "ffn.moe.router.normalize": False,
            "mtp_layers": one_of([0, 0, 1]),
            "ffn.moe.shared": one_of(["none", {"intermediate_size": 16}, {"intermediate_size": 64}]),
            "tie_embeddings": one_of([False, True]),
        }
    )
    train = TrainConfig(
        seq_len=one_of([16, 24, 48, 64]),
        global_batch_size=one_of([2, 3, 4, 6, 8, 12]),
        loss_chunk=one_of([0, 0, 10]),
        optimizer=make_part("optimizer", "adamw", moment_dtype=one_of(["float32", "bfloat16"])),
        offload_min_kib=one_of([0, 1, 64]),
    )
    cfg = Config(
        run=RunConfig(device="cuda", dtype="bfloat16"),
        model=model,
        moe=MoEConfig(capacity_factor=one_of([0.0, 0.0, 0.5, 1.5])),
        train=train,
        parallel=ParallelConfig(
            pipeline_layout=one_of(["", "", "auto"]), dispatcher=make_part("dispatcher", "leastloaded", min_tokens=8)
        ),
    )
    fixed = one_of([{}, {}, {"overlap": True}, {"dispatcher": "allgather"}, {"zero": 2}, {"schedule": "zbv"}])
    return World(on_ranks(cfg, one_of([1, 2, 3, 4, 6, 8])), random_device(random), fixed, one_of([1.0, 1.3, 3.0]))


def random_device(random: Random) -> Device:
    """An H100 that is slower by far, so that no part of so small a step always is the largest."""

    def power(least: float, most: float) -> float:
        return 10 ** random.uniform(least, most)

    device, slower, farther = load_device("h100"), power(1, 6), power(2, 7)
    near, far, *others = device.links
    near = replace(
        near, gpus=random.choice([1, 2, 4, 8]), bytes_per_s=near.bytes_per_s / farther, latency_s=power(-8, -4)
    )
    far = replace(far, bytes_per_s=far.bytes_per_s / farther, latency_s=power(-8, -4))
    return replace(
        device,
        hbm_bytes_per_s=device.hbm_bytes_per_s / slower * power(-1, 1),
        peak_flops={name: rate / slower for name, rate in device.peak_flops.items()},
        attention_forward_flops=device.attention_forward_flops / slower,
        attention_backward_flops=device.attention_backward_flops / slower,
        host_launch_s=power(-10, -4),
        host_bytes_per_s=power(5, 11),
        tile_rows=random.choice([8, 128]),
        tile_columns=random.choice([8, 256]),
        links=(near, far, *others),
    )


def legal_world(seed: int) -> World:
    """The first world of a seed that has mappings, and not too many to price."""
    random = Random(seed)
    while True:
        world = random_world(random)
        try:
            search = world.search(1000.0)
        except ConfigError:
            continue
        if 0 < search.space.count() // len(search.space.strategies) <= MOST:
            return world


@pytest.mark.parametrize("seed", [0, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_a_random_world_is_searched_whole(seed):
    world = legal_world(seed)
    search = world.search(1000.0)
    mappings = every_mapping(search, world.fixed | NOTHING_SAVED).values()
    totals = np.concatenate([priced(search, m)[1] for of_fold in mappings for m in of_fold])
    for part in (0.0, 0.02, 0.3, 1.0):
        room_gib = float(np.quantile(totals, part)) * (1 + 1e-9) / 2**30 - OVERHEAD_GIB
        assert_folds(world.search(room_gib), world.fixed)
