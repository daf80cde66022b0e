"""A shrunk recipe keeps what is to be proved."""

import pytest

from moefold.config.load import config_from_dict
from moefold.verify.shrink import shrink


@pytest.mark.parametrize(("ep", "num_experts"), [(1, 16), (4, 16), (32, 64)])
def test_groups_of_experts_survive(ep, num_experts):
    """The routing of DeepSeek-V3: 256 experts in 8 groups, 8 chosen out of 4 groups."""
    routing = {"num_experts": 256, "top_k": 8, "num_groups": 8, "top_groups": 4, "router_score": "sigmoid"}
    cfg = config_from_dict(
        {"model": routing, "parallel": {"world_size": 32, "ep": ep}, "train": {"global_batch_size": 32}}
    )
    small = shrink(cfg).model
    assert (small.num_experts, small.num_groups, small.top_groups, small.top_k) == (num_experts, 8, 4, 8)
