"""Folded layouts equal the paper's listings, and the groups of every legal folding obey their algebra."""

import subprocess
import sys
from itertools import product

import pytest

from moefold.errors import ConfigError
from moefold.topology.layout import ATTENTION_AXES, MOE_AXES, Layout, View, divisors, fold
from tests.slow import slow

PAPER_ORDERS = {"order": "dp-pp-cp-tp", "moe_order": "edp-pp-ep-etp"}


def legal_foldings(world_size: int) -> list[dict[str, int]]:
    """Every (tp, cp, pp, ep, etp) that folds over `world_size` ranks, found by trying all of them."""
    degrees = range(1, world_size + 1)
    return [
        {"world_size": world_size, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
        for pp, tp, cp in product(degrees, repeat=3)
        if world_size % (pp * tp * cp) == 0
        for ep, etp in product(degrees, repeat=2)
        if world_size % (pp * ep * etp) == 0
    ]


def groups(layout: Layout, axis: str) -> list[list[int]]:
    """The groups of one axis as the JSON form lists them."""
    as_dict = layout.as_dict
    view = as_dict["attention"] if axis in ATTENTION_AXES else as_dict["moe"]
    return view[axis]


# The listing of arXiv:2504.14960 for 64 ranks, tp = cp = pp = ep = etp = 2, written out by hand: tp is the fastest,
# then cp, then pp, and the 8 data-parallel replicas are 8 ranks apart.
PAPER_TP = [[2 * i, 2 * i + 1] for i in range(32)]
PAPER_CP_FIRST_NODE = [[0, 2], [1, 3], [4, 6], [5, 7]]
PAPER_PP_FIRST_NODE = [[0, 4], [1, 5], [2, 6], [3, 7]]
PAPER_DP = [
    [0, 8, 16, 24, 32, 40, 48, 56],
    [1, 9, 17, 25, 33, 41, 49, 57],
    [2, 10, 18, 26, 34, 42, 50, 58],
    [3, 11, 19, 27, 35, 43, 51, 59],
    [4, 12, 20, 28, 36, 44, 52, 60],
    [5, 13, 21, 29, 37, 45, 53, 61],
    [6, 14, 22, 30, 38, 46, 54, 62],
    [7, 15, 23, 31, 39, 47, 55, 63],
]


def test_listing_of_the_paper_for_64_ranks():
    layout = fold(world_size=64, tp=2, cp=2, pp=2, ep=2, etp=2, **PAPER_ORDERS)
    every_node = range(0, 64, 8)
    cp = [[first + node for first in group] for node in every_node for group in PAPER_CP_FIRST_NODE]
    pp = [[first + node for first in group] for node in every_node for group in PAPER_PP_FIRST_NODE]
    assert (layout.dp, layout.edp) == (8, 8)
    for axes, table in ((("tp", "etp"), PAPER_TP), (("cp", "ep"), cp), (("dp", "edp"), PAPER_DP)):
        for axis in axes:
            assert groups(layout, axis) == table, axis
    assert layout.as_dict["attention"]["pp"] == pp
    assert layout.as_dict["moe"]["pp"] == pp
    assert cp[-1] == [61, 63]
    assert pp[-1] == [59, 63]


def test_listing_of_the_paper_in_the_default_orders():
    layout = fold(world_size=64, tp=2, cp=2, pp=2, ep=2, etp=2)
    assert groups(layout, "tp")[:2] == [[0, 1], [2, 3]]
    assert groups(layout, "cp")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert groups(layout, "dp") == [list(range(first, first + 32, 4)) for first in (0, 1, 2, 3, 32, 33, 34, 35)]
    assert groups(layout, "pp") == [[first, first + 32] for first in range(32)]


def test_figure_9_of_the_paper():
    layout = fold(world_size=8, tp=2, cp=2, ep=8)
    assert layout.as_dict == {
        "world_size": 8,
        "attention": {
            "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "pp": [[0], [1], [2], [3], [4], [5], [6], [7]],
        },
        "moe": {
            "etp": [[0], [1], [2], [3], [4], [5], [6], [7]],
            "ep": [[0, 1, 2, 3, 4, 5, 6, 7]],
            "edp": [[0], [1], [2], [3], [4], [5], [6], [7]],
            "pp": [[0], [1], [2], [3], [4], [5], [6], [7]],
        },
    }


def test_quickstart_folding():
    layout = fold(world_size=8, tp=2, cp=2, pp=2, ep=4)
    assert layout.as_dict == {
        "world_size": 8,
        "attention": {
            "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "dp": [[0], [1], [2], [3], [4], [5], [6], [7]],
            "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        },
        "moe": {
            "etp": [[0], [1], [2], [3], [4], [5], [6], [7]],
            "ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "edp": [[0], [1], [2], [3], [4], [5], [6], [7]],
            "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        },
    }


def test_the_accuracy_run_of_the_paper_folds_in_miniature():
    layout = fold(world_size=16, tp=2, cp=2, pp=2, ep=8)
    assert (layout.dp, layout.edp) == (2, 1)
    assert groups(layout, "ep") == [list(range(8)), list(range(8, 16))]
    assert groups(layout, "dp") == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]


def test_expert_tensor_parallel_across_attention_axes():
    layout = fold(world_size=12, tp=3, cp=2, ep=2, etp=2)
    assert (layout.dp, layout.edp) == (2, 3)
    assert groups(layout, "tp") == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert groups(layout, "etp") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert groups(layout, "ep") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]
    assert groups(layout, "edp") == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 12, *slow([(16,)])])
def test_group_algebra_of_every_legal_folding(world_size):
    foldings = legal_foldings(world_size)
    assert foldings
    for degrees in foldings:
        layout = fold(**degrees)
        assert layout.attention.groups("pp") == layout.moe.groups("pp"), degrees
        for view, axes in ((layout.attention, ATTENTION_AXES), (layout.moe, MOE_AXES)):
            assert sorted(view.axes) == sorted(axes)
            assert view.world_size == world_size
            for axis in axes:
                assert_axis(view, axis)


def assert_axis(view: View, axis: str) -> None:
    found = view.groups(axis)
    others = [other for other in view.axes if other != axis]
    assert sorted(rank for group in found for rank in group) == list(range(view.world_size))
    assert [group[0] for group in found] == sorted(group[0] for group in found)
    for group in found:
        assert len(group) == view.degree(axis)
        assert [view.coordinate(rank, axis) for rank in group] == list(range(view.degree(axis)))
        for other in others:
            assert len({view.coordinate(rank, other) for rank in group}) == 1
        for rank in group:
            assert view.group(rank, axis) == group
            assert found[view.group_indices(axis)[rank]] == group


@pytest.mark.parametrize("axes", [("dp", "cp"), ("cp", "tp"), ("pp", "dp", "cp", "tp"), ("tp", "cp")])
def test_groups_over_several_axes_hold_one_rank_per_coordinate(axes):
    view = fold(world_size=24, tp=2, cp=3, pp=2).attention
    found = view.groups(*axes)
    assert sorted(rank for group in found for rank in group) == list(range(24))
    for group in found:
        coordinates = [tuple(view.coordinate(rank, axis) for axis in axes) for rank in group]
        assert coordinates == list(product(*(range(view.degree(axis)) for axis in axes)))


def test_the_order_of_the_named_axes_is_the_order_of_the_members():
    view = fold(world_size=8, tp=2, cp=2).attention
    assert view.group(0, "cp", "tp") == (0, 1, 2, 3)
    assert view.group(0, "tp", "cp") == (0, 2, 1, 3)
    assert view.group(5, "dp", "cp") == (1, 3, 5, 7)


def test_coordinates_rebuild_the_rank():
    view = View(("cp", "pp", "tp", "dp"), (3, 2, 2, 4))
    for rank in range(48):
        assert sum(view.coordinate(rank, axis) * view.stride(axis) for axis in view.axes) == rank


@pytest.mark.parametrize("world_size", [2, 4, 8, 16, 24])
def test_law_of_the_pipeline_groups_in_the_order_of_the_paper(world_size):
    """With pp between the data-parallel and the inner axes, the inner axes of both views must cover the same ranks."""
    verdicts = set()
    for degrees in legal_foldings(world_size):
        if degrees["pp"] == 1:
            continue
        legal = degrees["cp"] * degrees["tp"] == degrees["ep"] * degrees["etp"]
        verdicts.add(legal)
        if legal:
            layout = fold(**degrees, **PAPER_ORDERS)
            assert layout.attention.groups("pp") == layout.moe.groups("pp")
        else:
            with pytest.raises(ConfigError, match="different pp groups"):
                fold(**degrees, **PAPER_ORDERS)
    assert verdicts == ({True, False} if world_size > 2 else {True})


@pytest.mark.parametrize("moe_order", ["pp-edp-ep-etp", "edp-pp-ep-etp", "ep-edp-pp-etp", "etp-ep-edp-pp"])
@pytest.mark.parametrize("order", ["pp-dp-cp-tp", "dp-pp-cp-tp", "tp-cp-dp-pp"])
def test_any_pair_of_orders_is_legal_exactly_where_the_pp_groups_coincide(order, moe_order):
    for degrees in legal_foldings(8):
        views = []
        sizes = degrees | {"dp": 8 // (degrees["tp"] * degrees["cp"] * degrees["pp"])}
        sizes |= {"edp": 8 // (degrees["etp"] * degrees["ep"] * degrees["pp"])}
        for text in (order, moe_order):
            axes = tuple(text.split("-"))
            views.append(View(axes, tuple(sizes[axis] for axis in axes)))
        if views[0].groups("pp") == views[1].groups("pp"):
            layout = fold(**degrees, order=order, moe_order=moe_order)
            assert (layout.attention, layout.moe) == tuple(views)
        else:
            with pytest.raises(ConfigError, match="different pp groups"):
                fold(**degrees, order=order, moe_order=moe_order)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (
            {"world_size": 64, "pp": 2, "ep": 6},
            "parallel.ep=6 must divide world_size/(etp*pp)=32; choose one of 1, 2, 4, 8, 16, 32, "
            "or make parallel.world_size a multiple of 12",
        ),
        (
            {"world_size": 8, "tp": 3},
            "parallel.tp=3 must divide world_size/pp=8; choose one of 1, 2, 4, 8, "
            "or make parallel.world_size a multiple of 3",
        ),
        (
            {"world_size": 8, "tp": 4, "cp": 4},
            "parallel.cp=4 must divide world_size/(tp*pp)=2; choose one of 1, 2, "
            "or make parallel.world_size a multiple of 16",
        ),
        (
            {"world_size": 12, "pp": 5},
            "parallel.pp=5 must divide world_size=12; choose one of 1, 2, 3, 4, 6, 12, "
            "or make parallel.world_size a multiple of 5",
        ),
        (
            {"world_size": 8, "pp": 2, "etp": 8},
            "parallel.etp=8 must divide world_size/pp=4; choose one of 1, 2, 4, "
            "or make parallel.world_size a multiple of 16",
        ),
        (
            {"world_size": 1, "tp": 2},
            "parallel.tp=2 must divide world_size/pp=1; choose 1, or make parallel.world_size a multiple of 2",
        ),
        (
            {"world_size": 5040, "tp": 11},
            "parallel.tp=11 must divide world_size/pp=5040; choose one of 6, 7, 8, 9, 10, 12, 14, 15, "
            "or make parallel.world_size a multiple of 11",
        ),
        ({"world_size": 0}, "parallel.world_size=0 must be at least 1; leave it out for the default of 1"),
        ({"world_size": 8, "ep": -2}, "parallel.ep=-2 must be at least 1; leave it out for the default of 1"),
        (
            {"world_size": 8, "order": "pp-dp-tp"},
            "parallel.order='pp-dp-tp' must name each of tp, cp, dp, pp once, slowest to fastest, joined by '-'; "
            "the default is 'pp-dp-cp-tp'",
        ),
        (
            {"world_size": 8, "moe_order": "pp-ep-ep-etp"},
            "parallel.moe_order='pp-ep-ep-etp' must name each of etp, ep, edp, pp once, slowest to fastest, "
            "joined by '-'; the default is 'pp-edp-ep-etp'",
        ),
        (
            {"world_size": 16, "tp": 2, "cp": 2, "pp": 2, "ep": 4, "etp": 2, **PAPER_ORDERS},
            "parallel.order='dp-pp-cp-tp' with parallel.moe_order='edp-pp-ep-etp' give different pp groups: pp has "
            "stride 4 in attention (cp*tp) but 8 in the MoE view (ep*etp), and a rank has one stage; choose ep=4 with "
            "etp=1, or ep=2 with etp=2, or ep=1 with etp=4, or order='pp-dp-cp-tp' with moe_order='pp-edp-ep-etp'",
        ),
    ],
)
def test_refusals_name_key_value_rule_and_way_out(degrees, message):
    with pytest.raises(ConfigError) as refused:
        fold(**degrees)
    assert str(refused.value) == message


def test_every_way_out_of_a_refused_order_is_legal():
    degrees = {"world_size": 16, "tp": 2, "cp": 2, "pp": 2, **PAPER_ORDERS}
    with pytest.raises(ConfigError):
        fold(**degrees, ep=4, etp=2)
    for ep, etp in ((4, 1), (2, 2), (1, 4)):
        fold(**degrees, ep=ep, etp=etp)


def test_a_refused_multiple_of_the_world_size_is_legal_once_taken():
    with pytest.raises(ConfigError, match="a multiple of 24$"):
        fold(world_size=16, tp=2, cp=2, pp=2, ep=3, etp=2)
    fold(world_size=24, tp=2, cp=2, pp=2, ep=3, etp=2)


@pytest.mark.parametrize("n", [1, 2, 7, 12, 36, 97, 360])
def test_divisors(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_a_thousand_ranks_fold_without_torch():
    code = (
        "import sys; from moefold.topology.layout import fold; "
        "layout = fold(world_size=1024, tp=4, cp=2, pp=8, ep=64); assert len(layout.as_dict['moe']['ep']) == 16; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
