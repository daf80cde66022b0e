"""Degrees that errors offer are legal, and micro-batches fit the schedule."""

import itertools
import re

import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config


def ranks(world_size: int, **degrees: object) -> list[str]:
    return [f"parallel.world_size={world_size}", *(f"parallel.{key}={value}" for key, value in degrees.items())]


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, overrides))
    return str(error.value)


def accepts(*overrides: str) -> bool:
    try:
        check_config(load_config(None, overrides))
    except ConfigError:
        return False
    return True


def test_the_width_of_dense_layers_does_not_matter_without_them():
    # The preset brings a width of 128 that 3 ranks do not divide, for layers that its pattern has not.
    overrides = [*ranks(3, tp=3), "model.preset=tiny", "model.attention.num_heads=6", "model.attention.num_kv_heads=3"]
    sizes = ["model.hidden_size=96", "model.vocab_size=258", "train.seq_len=255", "train.global_batch_size=3"]
    assert accepts(*overrides, *sizes)
    assert "model.ffn.dense.intermediate_size=128" in refused(*overrides, *sizes, "model.layers=2 x (dense, moe)")


@pytest.mark.parametrize(("pp", "count", "legal"), [(4, 10, True), (4, 3, True), (4, 9, False), (4, 8, True)])
def test_interleaved_rounds_equal_torch(pp, count, legal):
    # The first two are the examples that torch.distributed.pipelining.ScheduleInterleaved1F1B gives itself.
    overrides = ranks(pp, pp=pp, schedule="interleaved", virtual_stages=2)
    assert accepts(*overrides, "model.layers=8", f"train.global_batch_size={count}") == legal


def test_degrees_offered_in_errors_are_legal():
    offered = 0
    models = [
        ["model.attention.num_heads=12", "model.attention.num_kv_heads=6", "model.attention.head_dim=16"],
        ["model.ffn.moe.num_experts=12"],
    ]
    for model, tp, cp, ep, etp in itertools.product(models, (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), (1, 2)):
        mapping = {"tp": tp, "cp": cp, "ep": ep, "etp": etp, "context": "ulysses"}
        words = [*model, "train.global_batch_size=64"]
        try:
            check_config(load_config(None, [*words, *ranks(8, **mapping)]))
            continue
        except ConfigError as error:
            found = re.search(r", or parallel\.(\w+)=([0-9, or]+)$", str(error))
        if found is None:
            continue
        for value in re.findall(r"[0-9]+", found[2]):
            offered += 1
            assert accepts(*words, *ranks(8, **{**mapping, found[1]: value})), (mapping, found[0])
    assert offered > 50


def test_one_forward_one_backward_needs_a_micro_batch_for_each_stage():
    for pp, count in itertools.product((2, 3, 4), range(1, 14)):
        overrides = [*ranks(pp, pp=pp), "model.layers=8", f"train.global_batch_size={count}"]
        assert accepts(*overrides) == (count >= pp)
        assert accepts(*overrides, "parallel.schedule=gpipe")
