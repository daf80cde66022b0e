import pytest

from moefold.config.schema import RECOMPUTE_PARTS
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config

CASES = [
    ('["attention"]', [], "train.recompute has 'attention', which is no part of a layer; choose from 'norms', "),
    ('["moe", "moe"]', [], "train.recompute names 'moe' 2 times; name it once"),
    ('["mla_up"]', [], "train.recompute has 'mla_up', and model.attention is not 'mla'; leave it out"),
    ('["dense_mlp"]', [], "train.recompute has 'dense_mlp', and no layer of model.layer_pattern is D; leave it out"),
    ('["moe"]', ["model.layer_pattern=D"], "and no layer of model.layer_pattern is M; leave it out"),
    ('["shared_experts"]', [], "and model.shared_expert_ffn_hidden_size=0 means none; leave it out"),
    (
        '["expert_activation", "moe"]',
        [],
        "train.recompute has 'expert_activation' and 'moe', which recomputes it anyway; leave one of them out",
    ),
    (
        '["auto"]',
        ["train.memory_budget_gib=1", 'train.offload=["layer"]'],
        "train.recompute=['auto'] uses formulas, and how much of train.offload is offloaded at the peak",
    ),
    ('["layer", "norms"]', [], "train.recompute has 'norms' and 'layer', which recomputes it anyway"),
]


@pytest.mark.parametrize(("parts", "others", "message"), CASES, ids=[case[0] for case in CASES])
def test_parts_that_cannot_be_are_refused(parts, others, message):
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, [f"train.recompute={parts}", *others]))
    assert message in str(error.value)


@pytest.mark.parametrize("part", RECOMPUTE_PARTS)
def test_every_part_may_stand_alone(part):
    words = ["model.attention=mla", "model.layer_pattern=DM", "model.shared_expert_ffn_hidden_size=8"]
    check_config(load_config(None, [f'train.recompute=["{part}"]', *words]))


def test_auto_goes_with_hidden_exchanges():
    pairs = ["parallel.world_size=4", "parallel.pp=2", "parallel.ep=2", "parallel.overlap_experts=true"]
    check_config(
        load_config(None, ['train.recompute=["auto"]', "train.memory_budget_gib=100", "run.device=cpu", *pairs])
    )
