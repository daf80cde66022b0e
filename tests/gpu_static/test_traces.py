"""Test traces of the CUDA step: host waits of an MoE layer, launches, bytes moved and bytes sent."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu_static.uninterpreted import trace_uninterpreted

TABLE = Path(__file__).parent / "traces.json"
MAPPINGS = json.loads(TABLE.read_text())
COMMAND = "python -m tests.gpu_static.trace_mappings --write"
MAX_RISE = 1.02
"""Largest factor over the table of bytes and launches."""
WITHOUT_WAIT = ("one rank", "one rank, dropped", "one rank, fp8", "ep8 symm_mem")
MAX_WAITS = {name: 0 if name in WITHOUT_WAIT or "padded" in name else 1 for name in MAPPINGS}
"""Host waits of a layer, forward and backward: one for the number of tokens that arrive."""

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")


@pytest.fixture(scope="module")
def traced():
    # Interpreted kernels are not launched.
    return trace_uninterpreted("-m", "tests.gpu_static.trace_mappings")


def test_the_table_has_every_mapping(traced):
    assert list(traced) == list(MAPPINGS), f"regenerate the table: {COMMAND}"


@pytest.mark.parametrize("name", MAPPINGS)
def test_the_host_waits_no_more_than_it_must(traced, name):
    assert len(traced[name]["waits"]) <= MAX_WAITS[name], traced[name]["waits"]


def test_no_operator_raises_with_run_deterministic(traced):
    assert not [counts for counts in traced.values() if counts["nondeterministic"]]


@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("key", ["moved_bytes", "sent_bytes", "launches"])
def test_no_count_rises_above_the_table(traced, name, key):
    now = traced[name][key]
    before = MAPPINGS[name][key]
    assert now <= before * MAX_RISE, f"{name}: {key} rose from {before:,} to {now:,}; if it must, {COMMAND}"


def test_our_kernels_are_launched(traced):
    # Router, activation and combine in both directions, under every mapping.
    assert all(counts["kernels"] >= 6 for counts in traced.values()), traced
