"""full_sequence drops the same tokens under every mapping."""

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.base.part_registry import find_part
from moefold.model.moe.dispatch import ShardedMicroBatch
from moefold.model.moe.token_drop import CapacityPolicy
from moefold.model.moe.token_group import MicroBatchGroup
from moefold.topology.layout import fold

S, B, E, K = 16, 2, 4, 2


def _policy(kind: str) -> CapacityPolicy:
    return CapacityPolicy(0.6, find_part("drop", kind)(), find_part("drop_scope", "full_sequence")())


def _routing() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(S * B)])
    probs = torch.randint(1, 4, (S * B, K), generator=generator) / 4
    return ids.view(S, B, K), probs.view(S, B, K)


def _kept(sizes: dict[str, int], policy: str) -> tuple[list[int], list[list[bool]], float]:
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    group = groups.attn.sequence
    positions = torch.randperm(S, generator=torch.Generator().manual_seed(1)).chunk(group.size)[group.rank]
    scope = ShardedMicroBatch(group, groups.attn.stage, groups.attn.tp, positions)
    ids, probs = (whole[positions].flatten(0, 1) for whole in _routing())
    keys = (positions.unsqueeze(1) * B + torch.arange(B)).flatten()
    kept = _policy(policy).keep_mask(ids, probs, keys, E, scope)
    assert scope.data_parallel_size == groups.layout.dp
    assert scope.sum_over_data_parallel(torch.tensor(1)).item() == groups.layout.world_size // groups.layout.pp
    return keys.tolist(), kept.tolist(), scope.sum(torch.tensor(float(group.rank))).item()


@pytest.mark.parity
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("sizes", [{"world_size": 2, "tp": 2}, {"world_size": 4, "cp": 2, "tp": 2}])
def test_drops_do_not_depend_on_the_mapping(pool, sizes, policy):
    ids, probs = (whole.flatten(0, 1) for whole in _routing())
    rule = _policy(policy)
    expected = rule.keep_mask(ids, probs, torch.arange(S * B), E, MicroBatchGroup()).tolist()
    assert not all(all(row) for row in expected)
    seen = {}
    ranks = pool.run(sizes["world_size"], _kept, sizes, policy)
    for keys, kept, total in ranks:
        seen |= dict(zip(keys, kept, strict=True))
        assert total == sum(range(len(ranks)))
    assert [seen[key] for key in range(S * B)] == expected
