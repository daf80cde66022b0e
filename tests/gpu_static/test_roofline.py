"""The arithmetic of the roofline estimate, and the FLOPs of the traces that it is made of."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch

from benchmarks.cuda_trace import Event, Trace, trace_cuda
from benchmarks.gpu_roofline import (
    DEPTHS,
    LAYERS,
    RATES,
    estimate,
    event_seconds,
    flops_rate,
    interpolated,
    operations_table,
    part_of,
)
from moefold.ops.autotune import Autotuner, TuningKey
from tests.gpu_static.uninterpreted import trace_uninterpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
GEMM = Event("op", "mm", "model/linear.py:1", flops=790e9, contraction=8192, width=8192)
COUNT_FLOPS = """
import json
from benchmarks.gpu_roofline import LAYERS, estimate_layer, model_flops, part_of
from benchmarks.cuda_layers import trace_layer
found = {}
for layer in LAYERS:
    cfg = layer.config()
    traced = sum(e.flops for e in trace_layer(cfg, "layer").events if "of experts" in part_of(e))
    found[layer.name] = traced, model_flops(cfg, "layer"), estimate_layer(layer).share
print(json.dumps(found))
"""


def test_a_layer_of_large_gemms_reaches_the_whole_rate():
    found = estimate([GEMM] * 3, 3 * GEMM.flops)
    assert found.share == pytest.approx(1.0)
    assert found.total == pytest.approx(3e-3)
    assert sum(found.losses.values()) == pytest.approx(0.0)


def test_time_beyond_the_flops_is_a_loss():
    copy = Event("op", "copy_", "model/moe/layer.py:1", moved_bytes=3.9e9)
    sent = Event("collective", "alltoall_base", "comm/collectives.py:1", moved_bytes=350e6)
    found = estimate([GEMM, copy, sent], GEMM.flops)
    assert found.share == pytest.approx(1 / 3)
    assert found.share_without_collectives == pytest.approx(1 / 2)
    assert found.losses["losses and counts"] == pytest.approx(1e-3)
    assert found.losses["collectives"] == pytest.approx(1e-3)


def test_flops_that_are_not_the_models_are_a_loss():
    router = Event("op", "mm", "ops/split_gemm.py:1", flops=790e9, contraction=2048, width=128)
    found = estimate([GEMM, router], GEMM.flops)
    assert found.share == pytest.approx(1 / 2)
    assert found.losses["router"] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("event", "seconds"),
    [
        (Event("op", "add", "x:1", moved_bytes=12), RATES["kernel"].value),
        (Event("op", "mm", "x:1", moved_bytes=3.9e9, flops=790e6), 1e-3),
        (Event("op", "mm", "x:1", flops=45e9, is_float32=True), 1e-3),
        (Event("op", "sort", "x:1", moved_bytes=12), RATES["sort"].value),
        # A GEMM hides its reads and writes, but not the writes of its epilogue beyond its results.
        (Event("op", "mm", "x:1", moved_bytes=3.9e9, epilogue_bytes=1.95e9, flops=790e9), 1.5e-3),
        (Event("wait", "item", "x:1"), RATES["host wait"].value),
        (Event("host", "sum", "x:1", moved_bytes=1e9), 0.0),
        (Event("copy", "copy to the host", "x:1", moved_bytes=1e9), 0.0),
    ],
)
def test_an_event_takes_its_flops_or_its_bytes(event, seconds):
    assert event_seconds(event) == pytest.approx(seconds)


def test_rates_of_grouped_gemms_grow_with_their_depth():
    assert interpolated(DEPTHS, 100) == interpolated(DEPTHS, 768) == 470e12
    assert interpolated(DEPTHS, 100_000) == interpolated(DEPTHS, 6144) == 620e12
    assert interpolated(DEPTHS, 2048) == 540e12
    # In the middle of the logarithms of 768 and 2048.
    assert interpolated(DEPTHS, 1254) == pytest.approx(505e12, rel=1e-3)


def test_triton_and_weight_gradients_have_rates_of_their_own():
    deep = {"flops": 1e9, "contraction": 2048, "width": 768}
    assert flops_rate(Event("op", "_grouped_mm", "x:1", **deep)) == 540e12
    assert flops_rate(Event("kernel", "_grouped_gemm_kernel", "x:1", **deep)) == pytest.approx(0.83 * 540e12)
    assert flops_rate(Event("op", "_grouped_mm", "x:1", is_weight_gradient=True, **deep)) == 500e12


def test_a_trace_records_the_candidate_with_the_smallest_estimate():
    trace = Trace(event_seconds=event_seconds)
    x = torch.empty(1000, 1000, device="meta")

    def run(name):
        for _ in range({"one": 1, "three": 3}[name]):
            x.sin()

    with trace_cuda(trace):
        chosen = Autotuner(is_enabled=False).choose(
            TuningKey("sin", 1000, ()), {name: partial(run, name) for name in ("three", "one")}
        )
        assert chosen == "one"
        assert trace.events == []
        run(chosen)
    assert [event.name for event in trace.events] == ["sin"]


def test_the_operations_of_a_table_sum_to_its_time():
    copy = Event("op", "copy_", "model/moe/layer.py:1", moved_bytes=3.9e9)
    rows = operations_table([GEMM, copy, copy, Event("op", "add", "x:1", moved_bytes=12)]).splitlines()
    assert "| mm K 8,192 N 8,192 | model/linear.py:1 | 1 | 0.000 | 0.790 | 790 | 1.000 |" in rows
    assert "| copy_ | model/moe/layer.py:1 | 2 | 7.800 | 0.000 |  | 2.000 |" in rows
    assert rows[-2:] == ["| others | | | | | | 0.003 |", "| sum | | | | | | 3.003 |"]


def test_parts_of_a_layer():
    assert part_of(Event("kernel", "_combine_kernel", "ops/triton/grouped_gemm.py:1")) == "combine"
    assert part_of(Event("op", "index_select", "ops/expert_ops.py:1")) == "gathers of tokens"
    assert part_of(Event("op", "add", "autograd")) == "sums of autograd"


def test_traced_experts_have_the_models_flops_and_no_layer_is_ideal():
    found = trace_uninterpreted("-c", COUNT_FLOPS)
    assert set(found) == {layer.name for layer in LAYERS}
    for name, (traced, of_model, share) in found.items():
        assert traced == pytest.approx(of_model), name
        assert 0 < share < 1, name
