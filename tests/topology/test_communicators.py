"""Communicators by ranks and purpose: which are shared, and that each can be split from the world's."""

from itertools import permutations

import pytest

from moefold.topology.communicators import GROUPS, communicator_names, communicators
from moefold.topology.layout import fold

LAYOUTS = [
    {"world_size": 8, "ep": 8},
    {"world_size": 16, "tp": 2, "cp": 2, "pp": 2, "ep": 4},
    {"world_size": 12, "tp": 3, "cp": 2, "ep": 2, "etp": 3},
    {"world_size": 24, "tp": 2, "cp": 3, "pp": 2, "ep": 3, "etp": 2},
]
ORDERS = ["-".join(axes) for axes in permutations(("dp", "cp", "tp"))]
MOE_ORDERS = ["-".join(axes) for axes in permutations(("edp", "ep", "etp"))]


@pytest.mark.parametrize("sizes", LAYOUTS)
@pytest.mark.parametrize("separates", [False, True])
def test_communicators_created_at_once_partition_the_world(sizes, separates):
    """The condition for NCCL to split them from the communicator of the world."""
    for order in ORDERS:
        for moe_order in MOE_ORDERS:
            layout = fold(**sizes, order=f"pp-{order}", moe_order=f"pp-{moe_order}")
            of_rank = [
                list(dict.fromkeys(communicators(layout, rank, separates_purposes=separates).values()))
                for rank in range(layout.world_size)
            ]
            for created in zip(*of_rank, strict=True):
                assert len({communicator.purpose for communicator in created}) == 1
                members = [rank for communicator in set(created) for rank in communicator.ranks]
                assert sorted(members) == list(range(layout.world_size))
                assert all(rank in communicator.ranks for rank, communicator in enumerate(created))


def test_the_ranks_of_experts_and_of_fsdp_have_communicators_of_their_own():
    """ep = dp x cp: the same ranks dispatch tokens and gather weights."""
    layout = fold(world_size=8, cp=2, ep=8)
    found = communicators(layout, 3, separates_purposes=True)
    same = tuple(range(8))
    assert {name for name, of in found.items() if of.ranks == same} == {
        *("dp_cp", "stage", "ep", "experts", "fsdp_dense")
    }
    assert found["dp_cp"] == found["stage"] != found["ep"] == found["experts"] != found["fsdp_dense"]
    names = communicator_names(layout, found)
    assert names[found["dp_cp"]] == "dp x cp"
    assert names[found["ep"]] == "ep"
    assert names[found["fsdp_dense"]] == "dp x cp (FSDP)"


def test_without_purposes_groups_with_the_same_ranks_share_one():
    layout = fold(world_size=8, cp=2, ep=8)
    found = communicators(layout, 3, separates_purposes=False)
    assert found["dp_cp"] == found["stage"] == found["ep"] == found["fsdp_dense"]
    assert communicator_names(layout, found)[found["ep"]] == "dp x cp / ep"


def test_a_group_of_one_rank_is_shared_by_all_purposes():
    found = communicators(fold(world_size=1), 0, separates_purposes=True)
    assert list(found) == list(GROUPS)
    assert len(set(found.values())) == 1
