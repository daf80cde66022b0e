"""An overlap that nothing can hide is refused."""

import pytest

from moefold.config.chosen import part_of_kind
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.rule import apply_rule
from moefold.errors import ConfigError
from tests.verify.recipes import tiny

SOUND = {"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True}
SEVERAL = {"global_batch_size": 8}


@pytest.mark.parametrize(
    ("parallel", "train", "text"),
    [
        ({"ep": 1}, SEVERAL, "with parallel.ep=1 and parallel.etp=1 there is none; choose ep=2"),
        ({"schedule": "gpipe"}, SEVERAL, "parallel.schedule='gpipe' has none; choose schedule='1f1b'"),
        ({"schedule": "zero-bubble"}, SEVERAL, "parallel.schedule='zero-bubble' has none"),
        ({"schedule": "zbv", "virtual_stages": 2}, SEVERAL, "parallel.schedule='zbv' has none"),
        ({"zero": 3}, SEVERAL, "parallel.zero=3 frees its parameters after one; choose zero=2"),
        ({"pp": 1}, {"global_batch_size": 4}, "gives each data-parallel rank 1; choose global_batch_size=8"),
        ({"dispatcher": "deepep"}, SEVERAL, "deepep' cannot run"),
    ],
)
def test_an_overlap_that_cannot_be_hidden_is_refused(parallel, train, text):
    with pytest.raises(ConfigError) as refused:
        tiny(train=train, **SOUND | parallel)
    assert text in str(refused.value)


def test_products_of_few_bits_are_not_taken_in_parts():
    with pytest.raises(ConfigError, match="parallel.overlap_tp=true runs a GEMM for one tp rank's tokens at a time"):
        tiny(world_size=2, tp=2, overlap_tp=True, train={"precision": "fp8-blockwise"})


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"zero": 2, "etp": 2, "ep": 1},
        {"schedule": "interleaved", "virtual_stages": 3},
        {"schedule": "dualpipev", "virtual_stages": 2},
        {"dispatcher": "allgather", "pp": 1},
    ],
)
def test_an_overlap_that_can_be_hidden_is_accepted(parallel):
    tiny(train={"global_batch_size": 16, "offload": ("layer",)}, **SOUND | parallel)


def test_a_model_without_experts_has_nothing_to_hide():
    with pytest.raises(ConfigError, match=r"no layer of model.layers is 'moe'; name 'moe' in model.layers"):
        tiny(model={"layers.ffn": "dense"}, train=SEVERAL, **SOUND | {"ep": 1})


def test_auto_does_not_take_a_dispatcher_that_waits():
    cfg = tiny(train=SEVERAL, **SOUND | {"dispatcher": "auto"})
    obstacles = apply_rule(part_of_kind(cfg, DispatcherPart, "deepep").unsupported, cfg)
    assert any("overlap_experts=true" in obstacle for obstacle in obstacles)
