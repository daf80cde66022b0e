"""The communicators of a layout reach exactly the ranks that the layout names."""

import sys

import pytest
import torch
import torch.distributed as dist

from moefold.comm.groups import Group, ParallelGroups
from moefold.topology.layout import fold

LAYOUTS = [
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4},
    {"world_size": 8, "tp": 2, "cp": 2, "ep": 8},
    {"world_size": 4, "tp": 2, "ep": 2, "etp": 2, "order": "dp-tp-cp-pp", "moe_order": "ep-edp-etp-pp"},
    {"world_size": 4, "pp": 4},
]


def _fingerprints(sizes: dict[str, object]) -> dict[str, tuple[tuple[int, ...], float]]:
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    members = {"pp": groups.pp, "world": groups.world}
    for part in (groups.attn, groups.moe):
        members |= {name: g for name in part.__dataclass_fields__ if isinstance(g := getattr(part, name), Group)}
    seen = {}
    for name, group in members.items():
        mark = torch.tensor(2.0 ** dist.get_rank(), dtype=torch.float64)
        dist.all_reduce(mark, group=group.handle)
        seen[name] = (group.ranks, mark.item())
    for mesh, axes in ((groups.dense_mesh, ("dp_cp", "tp")), (groups.expert_mesh, ("edp", "ep", "etp"))):
        for axis in axes:
            mark = torch.tensor(2.0 ** dist.get_rank(), dtype=torch.float64)
            dist.all_reduce(mark, group=mesh.get_group(axis))
            assert mark.item() == seen[axis][1], axis
            assert mesh.get_local_rank(axis) == members[axis].rank
    return seen


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_each_group_reduces_exactly_its_ranks(pool, sizes):
    layout = fold(**sizes)
    axes = {
        "sequence": (layout.attention, ("cp", "tp")),
        "dp_cp": (layout.attention, ("dp", "cp")),
        "experts": (layout.moe, ("ep", "etp")),
        **{axis: (layout.attention, (axis,)) for axis in ("tp", "cp", "dp", "pp")},
        **{axis: (layout.moe, (axis,)) for axis in ("etp", "ep", "edp")},
    }
    for rank, seen in enumerate(pool.run(layout.world_size, _fingerprints, sizes)):
        for name, (view, over) in axes.items():
            expected = tuple(sorted(view.group(rank, *over)))
            assert seen[name] == (expected, float(sum(2**r for r in expected))), (rank, name)


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()


def test_pool_reports_the_failing_rank_and_is_reusable(pool):
    from moefold.launch.rank_pool import WorkerError

    with pytest.raises(WorkerError, match=r"rank 1: (.|\n)*on purpose"):
        pool.run(2, _fail_on_rank_one)
    assert pool.run(2, dist.get_rank) == [0, 1]


def _held() -> list[str]:
    return list(sys.modules)


def test_pool_preloads_the_given_modules(pool):
    assert {"moefold.train.trainer", "tests.preload"} <= set(pool.run(1, _held)[0])


def _separate_handles() -> tuple[bool, ...]:
    layout = fold(world_size=4, cp=2, ep=4)
    groups = ParallelGroups.create(layout, torch.device("cpu"), separates_purposes=True)
    model = groups.attn.dp_cp.handle
    fsdp = groups.dense_mesh.get_group("dp_cp")
    experts = groups.moe.ep.handle
    mark = torch.tensor(2.0 ** dist.get_rank(), dtype=torch.float64)
    for group in (model, fsdp, experts):
        dist.all_reduce(mark, group=group)
    assert mark.item() == 15 * 4 * 4
    return (
        model is dist.group.WORLD,
        fsdp is model,
        experts is model,
        fsdp is experts,
        groups.moe.experts.handle is experts,
    )


def test_model_experts_and_fsdp_can_have_groups_of_their_own(pool):
    assert pool.run(4, _separate_handles) == [(True, False, False, False, True)] * 4
