"""Collectives over link levels, by hand, and the published times of dispatch."""

from dataclasses import asdict, replace

import pytest

from moefold.cost.hardware import load_device
from moefold.planner.cost_model.collective import (
    GroupLimitedRouting,
    RankGroup,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    p2p_s,
    ranks_per_unit,
)

H100, GB200 = load_device("h100"), load_device("gb200")
NVLINK, RAIL = H100.links
DEEPSEEK = GroupLimitedRouting(8, 8, 4)
PAYLOAD = 4096 * 8 * 7168 * 2


def test_a_group_of_one_has_nothing_to_say():
    for price in (all_gather_s, all_reduce_s, all_to_all_s):
        assert price(H100, RankGroup(1, 4), 1e9) == 0.0


@pytest.mark.parametrize(
    ("size", "stride", "inside"), [(8, 1, 8), (16, 1, 8), (8, 2, 4), (4, 8, 1), (12, 1, 6), (16, 4, 2)]
)
def test_ranks_of_a_group_in_one_node(size, stride, inside):
    assert ranks_per_unit(RankGroup(size, stride), NVLINK) == inside
    assert ranks_per_unit(RankGroup(size, stride), RAIL) == size


def test_a_gather_within_a_node_is_a_ring_over_nvlink():
    expected = 1e9 * 7 / 8 / (NVLINK.bytes_per_s * NVLINK.fraction)
    assert all_gather_s(H100, RankGroup(8, 1), 1e9) == pytest.approx(expected, rel=0.05)


def test_a_gather_over_nodes_uses_every_card_of_a_node():
    rail, nvlink = (link.bytes_per_s * link.fraction for link in (RAIL, NVLINK))
    for nodes in (2, 16):
        expected = 1e10 * max((nodes - 1) / nodes / 8 / rail, 7 / 8 / nvlink)
        assert all_gather_s(H100, RankGroup(8 * nodes, 1), 1e10) == pytest.approx(expected, rel=0.05)
    assert all_gather_s(H100, RankGroup(2, 8), 1e10) == pytest.approx(1e10 / 2 / rail, rel=0.05)


@pytest.mark.parametrize("device", [H100, GB200], ids=["h100", "gb200"])
def test_a_gather_over_more_ranks_is_no_faster(device):
    times = [all_gather_s(device, RankGroup(size, 1), 1e10) for size in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)]
    assert times == sorted(times)


def test_an_exchange_over_nodes_sends_half_of_all_copies_away():
    expected = PAYLOAD / 2 / (RAIL.bytes_per_s * RAIL.fraction)
    assert all_to_all_s(H100, RankGroup(16, 1), PAYLOAD) == pytest.approx(expected, rel=0.05)


def test_a_token_reaches_few_units():
    assert GroupLimitedRouting(8).expected_units(8) == pytest.approx(8 * (1 - (7 / 8) ** 8))
    assert GroupLimitedRouting(1).expected_units(64) == pytest.approx(1.0)
    # Four of eight groups, two groups a node: one minus the chance that no group of a node is chosen.
    assert DEEPSEEK.expected_units(4) == pytest.approx(4 * (1 - 15 / 70))
    assert DEEPSEEK.expected_units(64) < 8


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
def test_dispatch_takes_measured_times(device, ep, once, plain):
    assert all_to_all_s(device, RankGroup(ep, 1), PAYLOAD, routing=DEEPSEEK) * 1e6 == pytest.approx(once, rel=0.3)
    assert all_to_all_s(device, RankGroup(ep, 1), PAYLOAD) * 1e6 == pytest.approx(plain, rel=0.3)


def test_a_send_takes_the_link_between_the_ranks():
    assert p2p_s(H100, 4, 1e9) == pytest.approx(1e9 / (NVLINK.bytes_per_s * NVLINK.fraction), rel=0.01)
    assert p2p_s(H100, 8, 1e9) == pytest.approx(1e9 / (RAIL.bytes_per_s * RAIL.fraction), rel=0.01)


def with_pods(tmp_path, base, gpus, divisor):
    """The device, whose last level joins pods of some GPUs and has a part of the bandwidth of its rails."""
    path = tmp_path / f"pods-{base}-{divisor}.toml"
    *inner, rail = load_device(base).links
    links = (*inner, replace(rail, gpus=gpus), replace(rail, level="spine", bytes_per_s=rail.bytes_per_s / divisor))
    tables = [
        "\n".join(["[[links]]", *(f"{key} = {value!r}" for key, value in asdict(link).items())]) for link in links
    ]
    path.write_text("\n".join([f'base = "{base}"\nname = "pods"', *tables]))
    return load_device(str(path))


@pytest.mark.parametrize("base", ["h100", "gb200"])
def test_pods_with_fewer_uplinks_slow_down_messages_that_leave_them(tmp_path, base):
    plain, pods = load_device(base), with_pods(tmp_path, base, 576, 4)
    assert [link.level for link in pods.links] == ["nvlink", "rail", "spine"]
    uplinks = pods.links[-1].reached_bytes_per_s
    # Four pods: three quarters of all copies leave theirs.
    exchanged = all_to_all_s(pods, RankGroup(2304, 1), 1e10)
    assert exchanged == pytest.approx(0.75 * 1e10 / uplinks, rel=0.01)
    # One replica a pod; and many replicas a pod, whose rings leave it only once.
    assert all_gather_s(pods, RankGroup(4, 576), 1e10) == pytest.approx(0.75 * 1e10 / uplinks, rel=0.01)
    wide = all_gather_s(plain, RankGroup(2304, 1), 1e10)
    assert all_gather_s(pods, RankGroup(2304, 1), 1e10) == pytest.approx(wide, rel=0.01)
    # Stages: the first rank of the next one is a pod away, or not.
    assert p2p_s(pods, 576, 1e9) == pytest.approx(1e9 / uplinks, rel=0.01)
    for price, group in (
        (all_gather_s, RankGroup(576, 1)),
        (all_to_all_s, RankGroup(64, 8)),
        (all_to_all_s, RankGroup(2, 1)),
    ):
        assert price(pods, group, 1e9) == price(plain, group, 1e9)
