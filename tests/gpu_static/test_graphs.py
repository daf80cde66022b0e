"""The launches of the host that `run.cuda_graphs` leaves, traced without a GPU. Nothing in a graph needs the host."""

from importlib.util import find_spec

import pytest

from tests.gpu_static.uninterpreted import trace_uninterpreted

LAUNCHES = {
    "none": 133,
    "attention": 113,
    "attention_router": 93,
    "attention_router, jitter": 93,
    "full": 4,
    "full, padded": 4,
    "full, dropped": 4,
    "full, plain": 4,
    "full, jitter": 4,
}
"""Launches of the host for a micro-batch of a model of one layer of Qwen3-30B-A3B, a replay counted as one."""
MAX_RISE = 1.02

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")


@pytest.fixture(scope="module")
def traced():
    # Interpreted kernels are not launched.
    return trace_uninterpreted("-m", "tests.gpu_static.trace_graphs")


def test_no_more_launches_are_left_than_the_table_says(traced):
    assert traced.keys() == LAUNCHES.keys()
    for name, launches in LAUNCHES.items():
        assert traced[name]["launches"] <= launches * MAX_RISE, name


def test_nothing_in_a_graph_waits_for_the_host_copies_or_communicates(traced):
    assert {name: counts["not captured"] for name, counts in traced.items()} == dict.fromkeys(LAUNCHES, [])


def test_graphs_hold_the_launches_that_are_gone(traced):
    for name, counts in traced.items():
        assert (counts["captured"] > 0) == (name != "none")
    assert traced["full"]["captured"] >= LAUNCHES["none"]
