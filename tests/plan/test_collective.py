"""Collectives over link levels, by hand, and the published times of dispatch."""

import pytest

from moefold.plan.collective import Group, Routing, all_reduce_s, exchange_s, gather_s, ranks_inside, send_s
from moefold.plan.device import load_device

H100, GB200 = load_device("h100"), load_device("gb200")
NVLINK, RAIL = H100.links
DEEPSEEK = Routing(8, 8, 4)
PAYLOAD = 4096 * 8 * 7168 * 2


def test_a_group_of_one_has_nothing_to_say():
    for price in (gather_s, all_reduce_s, exchange_s):
        assert price(H100, Group(1, 4), 1e9) == 0.0


@pytest.mark.parametrize(
    ("size", "stride", "inside"), [(8, 1, 8), (16, 1, 8), (8, 2, 4), (4, 8, 1), (12, 1, 6), (16, 4, 2)]
)
def test_ranks_of_a_group_in_one_node(size, stride, inside):
    assert ranks_inside(Group(size, stride), NVLINK) == inside
    assert ranks_inside(Group(size, stride), RAIL) == size


def test_a_gather_within_a_node_is_a_ring_over_nvlink():
    expected = 1e9 * 7 / 8 / (NVLINK.bytes_per_s * NVLINK.fraction)
    assert gather_s(H100, Group(8, 1), 1e9) == pytest.approx(expected, rel=0.05)


def test_a_gather_over_nodes_uses_every_card_of_a_node():
    bound = RAIL.bytes_per_s * RAIL.fraction
    assert gather_s(H100, Group(16, 1), 1e10) == pytest.approx(1e10 / 2 / 8 / bound, rel=0.05)
    assert gather_s(H100, Group(2, 8), 1e10) == pytest.approx(1e10 / 2 / bound, rel=0.05)


def test_an_exchange_over_nodes_sends_half_of_all_copies_away():
    expected = PAYLOAD / 2 / (RAIL.bytes_per_s * RAIL.fraction)
    assert exchange_s(H100, Group(16, 1), PAYLOAD) == pytest.approx(expected, rel=0.05)


def test_a_token_reaches_few_units():
    assert Routing(8).reached(8) == pytest.approx(8 * (1 - (7 / 8) ** 8))
    assert Routing(1).reached(64) == pytest.approx(1.0)
    # Four of eight groups, two groups a node: one minus the chance that neither of a node's two is chosen.
    assert DEEPSEEK.reached(4) == pytest.approx(4 * (1 - 15 / 70))
    assert DEEPSEEK.reached(64) < 8


# arXiv:2603.07685 as quoted in published/README.md: microseconds of dispatch, deduplicated and plain.
@pytest.mark.parametrize(
    ("device", "ep", "once", "plain"),
    [
        (H100, 8, 661, 1265),
        (H100, 16, 1485, 5774),
        (H100, 32, 3064, 8059),
        (H100, 64, 4626, 9164),
        (GB200, 8, 391, 735),
        (GB200, 16, 578, 743),
        (GB200, 32, 612, 769),
        (GB200, 64, 675, 930),
    ],
)
def test_dispatch_takes_what_was_measured(device, ep, once, plain):
    assert exchange_s(device, Group(ep, 1), PAYLOAD, routing=DEEPSEEK) * 1e6 == pytest.approx(once, rel=0.3)
    assert exchange_s(device, Group(ep, 1), PAYLOAD) * 1e6 == pytest.approx(plain, rel=0.3)


def test_a_send_takes_the_link_between_the_ranks():
    assert send_s(H100, 4, 1e9) == pytest.approx(1e9 / (NVLINK.bytes_per_s * NVLINK.fraction), rel=0.01)
    assert send_s(H100, 8, 1e9) == pytest.approx(1e9 / (RAIL.bytes_per_s * RAIL.fraction), rel=0.01)
