"""Gate and up projections in one kernel against float64: odd sizes, experts without rows, empty rows."""

from collections import defaultdict

import pytest
import torch

from moefold.ops.autotune import Autotuner
from moefold.ops.expert_ops import ExpertOptions, ExpertWeights, GatheredRows
from moefold.ops.grouped_experts import GroupedExpertOps
from moefold.ops.swiglu import SWIGLU, ClampedSwiGLUActivation
from moefold.ops.triton.experts import TritonExpertOps, clamp_params
from moefold.ops.triton.fc1 import Fc1Output, fc1
from moefold.ops.triton.grouped_gemm import TileConfig
from tests.slow import slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
FEW = [3, 0, 18, 1]
"""Two tiles of rows: the interpreter takes long for each."""
COUNTS = (FEW, [0, 0, 5], [0, 0])
DEPTH, WIDTH = 20, 35
OTHER = TileConfig(block_m=16, block_n=32, block_k=16, num_warps=4, num_stages=2)
CLAMPED = ClampedSwiGLUActivation(1.702, 0.7)
OPTIONS = {
    "plain": (False, False, False, SWIGLU, None),
    "gathered-weighted": (True, False, True, SWIGLU, OTHER),
    "biased-clamped": (True, True, True, CLAMPED, None),
}


def _random(dtype, *shape):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(DEVICE)


def _inputs(counts, dtype, gathers, has_bias):
    num_rows = sum(counts)
    x = _random(dtype, 20 if gathers else num_rows, DEPTH)
    source = torch.randint(-1, 20, (num_rows,), dtype=torch.int32).to(DEVICE) if gathers else None
    experts = len(counts)
    down = _random(dtype, experts, WIDTH, DEPTH)
    gate, up = (_random(dtype, experts, DEPTH, WIDTH) for _ in range(2))
    biases = [_random(dtype, experts, width) for width in (WIDTH, WIDTH, DEPTH)] if has_bias else []
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE)
    return GatheredRows(x, source), ExpertWeights(gate, up, down, *biases), offsets


def _expected_projections(rows, weights, counts):
    """Both projections, in float64."""
    projections = []
    for w, bias in ((weights.gate_EHF, weights.gate_bias_EF), (weights.up_EHF, weights.up_bias_EF)):
        y = torch.cat([x @ w[e].double() for e, x in enumerate(rows.materialized.double().split(counts))])
        if bias is not None:
            y = y + torch.cat([bias[e].double().expand(count, -1) for e, count in enumerate(counts)])
        projections.append(y)
    return projections


def _assert_close(actual, expected, dtype):
    scale = expected.abs().max().clamp(min=1.0) if expected.numel() else 1.0
    torch.testing.assert_close(actual.double() / scale, expected / scale, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("counts", "dtype", "gathers", "has_bias", "is_weighted", "activation", "tile_config"),
    [
        # In `make test` each two of counts, types and options together.
        pytest.param(
            counts, dtype, *options, marks=pytest.mark.slow if (i + j + k) % 2 else (), id=f"{counts}-{dtype}-{name}"
        )
        for i, counts in enumerate(COUNTS)
        for j, dtype in enumerate(TOLERANCE)
        for k, (name, options) in enumerate(OPTIONS.items())
    ],
)
def test_projections_and_hidden_values(counts, dtype, gathers, has_bias, is_weighted, activation, tile_config):
    rows, weights, offsets = _inputs(counts, dtype, gathers, has_bias)
    num_rows = sum(counts)
    probs = torch.rand(num_rows).to(DEVICE) if is_weighted else None

    def written(writes_hidden, writes_projections):
        hidden, g, u = (
            torch.full((num_rows, WIDTH), float("nan"), dtype=dtype, device=DEVICE) if is_written else None
            for is_written in (writes_hidden, writes_projections, writes_projections)
        )
        options = {"source_R": rows.source_R, "probs_R": probs, "clamp": clamp_params(activation)}
        fc1(rows.values, weights, offsets, Fc1Output(hidden, g, u), tile_config=tile_config, **options)
        return hidden, g, u

    hidden, g, u = written(True, True)
    for actual, expected in zip((g, u), _expected_projections(rows, weights, counts), strict=True):
        _assert_close(actual, expected, dtype)
    # Hidden values are computed from the rounded projections, as in the backward pass.
    expected = activation.forward(g.double(), u.double())
    _assert_close(hidden, expected if probs is None else expected * probs.double().unsqueeze(1), dtype)
    torch.testing.assert_close(written(True, False)[0], hidden, rtol=0, atol=0)
    for actual, expected in zip(written(False, True)[1:], (g, u), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class _All(Autotuner):
    """Runs every candidate and returns the first."""

    def __init__(self):
        super().__init__(is_enabled=False)
        self.results = {}
        self.keys = defaultdict(set)

    def choose(self, key, candidates):
        self.keys[key[0]].add(key)
        self.results |= {(key[0], name): candidate() for name, candidate in candidates.items()}
        return next(iter(candidates))


@pytest.mark.parametrize(
    ("saves_fc1", "has_bias"), [(True, True), *slow([(False, False), (False, True), (True, False)])]
)
def test_all_candidates_equal_the_reference(saves_fc1, has_bias):
    counts = [3, 0, 5]
    rows, weights, offsets = _inputs(counts, torch.float32, True, has_bias)
    probs = torch.rand(rows.num_rows).to(DEVICE)
    options = ExpertOptions(counts, CLAMPED if has_bias else SWIGLU, saves_fc1=saves_fc1)
    tuner = _All()
    ops = TritonExpertOps(tuner)
    ops.fc1_activation(rows, weights, offsets, options, probs)
    ops.fc1(rows, weights, offsets)
    hidden, saved = GroupedExpertOps().fc1_activation(rows, weights, offsets, options, probs)
    wanted = {"fc1 activation": (hidden, *saved), "fc1": GroupedExpertOps().fc1(rows, weights, offsets)}
    found = {key: result for key, result in tuner.results.items() if key[0] in wanted}
    assert {name for _, name in found} == {"apart", "fused 16x16"}
    for (op, _), result in found.items():
        tensors = result if op == "fc1" else (result[0], *result[1])
        for actual, expected in zip(tensors, wanted[op], strict=True):
            _assert_close(actual, expected.double(), torch.float32)


def test_matrices_of_different_strides_are_multiplied_separately():
    rows, weights, offsets = _inputs([5], torch.float32, False, False)
    transposed = ExpertWeights(weights.gate_EHF, weights.up_EHF.mT.contiguous().mT, weights.down_EFH)
    tuner = _All()
    ops = TritonExpertOps(tuner)
    g, u = ops.fc1(rows, transposed, offsets)
    assert {name for op, name in tuner.results if op == "fc1"} == {"apart"}
    ops.fc1(rows, weights, offsets)
    assert len(tuner.keys["fc1"]) == 2, "the choice for one is none for the other"
    for actual, expected in zip((g, u), GroupedExpertOps().fc1(rows, weights, offsets), strict=True):
        _assert_close(actual, expected.double(), torch.float32)
