"""Prices of many layers at once, as arrays, equal the prices of each layer."""

from itertools import product
from random import Random

import numpy as np
import pytest

from moefold.config.base.part import make_part
from moefold.config.base.part_registry import built_in_kinds
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.cost.hardware import load_device
from moefold.planner.cost_model.layer import LayerCostModel
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import load_model_spec

WORKLOADS = {
    "bf16": {},
    "dropped": {"capacity_factor": 1.25, "imbalance": 1.4},
    "fp8": {"precision": "fp8-blockwise", "expert_spread": 1.2},
    "coupled": {"is_coupled": True},
}
DISPATCHERS = [
    part
    for part in (make_part(DispatcherPart.group, kind) for kind in built_in_kinds(DispatcherPart.group))
    if not part.resolves_to
]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("model", ["mixtral-8x22b", "deepseek-v3", "gpt-oss-120b", "qwen3-next-80b-a3b"])
def test_networks_as_an_array_have_the_prices_of_each_network(model, workload):
    random = Random(f"{model} {workload}")
    work = TrainingWorkload(seq_len=4096, global_batch_size=256, **WORKLOADS[workload])
    spec = load_model_spec(model)
    device = load_device("h100")
    many = LayerCostModel(spec, device, work)
    mappings = {}
    while len(mappings) < 12:
        m = ParallelMapping(tp=2 ** random.randrange(4), cp=2 ** random.randrange(4), mbs=2 ** random.randrange(4))
        mappings.setdefault(many.token_key(m), m)
    degrees = [(ep, etp, random.sample(DISPATCHERS, 3)) for ep in (1, 2, 8) for etp in (1, 4)]
    for kind in range(len(spec.kinds)):
        sums = many.network_sums(kind, list(mappings.values()), degrees)
        places = product(enumerate(degrees), enumerate(mappings.values()))
        for (i, (ep, etp, dispatchers)), (j, m) in places:
            for part in dispatchers:
                one = ParallelMapping(tp=m.tp, cp=m.cp, mbs=m.mbs, ep=ep, etp=etp, dispatcher=part)
                alone = LayerCostModel(spec, device, work).feed_forward(kind, one)
                np.testing.assert_allclose(sums[part][:, i, j], alone.sums, rtol=1e-12)
                assert_equal_items(many.feed_forward(kind, one), alone)


def assert_equal_items(taken, alone):
    """Compare a block that is taken out of an array with the block that is priced alone."""
    for name in ("forward", "backward", "recompute"):
        parts, seconds = zip(*getattr(alone, name), strict=True)
        assert tuple(part for part, _ in getattr(taken, name)) == parts
        assert [own for _, own in getattr(taken, name)] == pytest.approx(seconds, rel=1e-12, abs=0)
