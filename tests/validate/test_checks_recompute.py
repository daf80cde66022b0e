"""Every recomputed part is accepted alone, and `auto` with overlapped exchanges."""

import pytest

from moefold.cost.recompute_parts import recompute_parts
from moefold.recipe import load_config
from moefold.validate.config import check_config


@pytest.mark.parametrize("part", recompute_parts())
def test_every_part_may_stand_by_itself(part):
    words = ["model.attention=mla", "model.layers=2 x (dense, moe)", "model.ffn.moe.shared.intermediate_size=8"]
    check_config(load_config(None, [f'train.recompute=["{part}"]', *words]))


def test_auto_is_compatible_with_hidden_exchanges():
    pairs = ["parallel.world_size=4", "parallel.pp=2", "parallel.ep=2", "parallel.overlap_experts=true"]
    check_config(
        load_config(None, ['train.recompute=["auto"]', "train.memory_budget_gib=100", "run.device=cpu", *pairs])
    )
