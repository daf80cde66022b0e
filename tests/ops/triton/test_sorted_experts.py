"""Experts that sort rows as they read them equal permuting, looping and adding up; a run with the kernels too."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.model.moe.experts import fused_experts
from moefold.model.moe.permute import (
    order_by_expert,
    permute,
    permute_probs,
    plan_permutation,
    truncate_permutation,
    unpermute,
)
from moefold.ops.autotune import Autotuner
from moefold.ops.expert_ops import ExpertOptions, ExpertWeights, GatheredRows, LazyCounts, PermuteMap
from moefold.ops.grouped_experts import GroupedExpertOps
from moefold.ops.swiglu import ClampedSwiGLUActivation, SwiGLUActivation
from moefold.ops.torch_experts import TORCH_EXPERT_OPS
from moefold.ops.triton.experts import TritonExpertOps
from moefold.ops.triton.grouped_gemm import tile_configs
from moefold.parallel.kernels.select import select_kernels
from moefold.verify.distributed_run import run_distributed
from tests.model.moe.reference_experts import reference_experts
from tests.slow import slow
from tests.verify.recipes import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="CPU ranks need Triton's interpreter; GPU ranks: tests/gpu")
E, H, F, T, K = 4, 9, 7, 11, 2
TRITON = TritonExpertOps(Autotuner(is_enabled=False))
ENGINES = [
    pytest.param(GroupedExpertOps(), torch.float64, 1e-12, id="plain-float64"),
    pytest.param(GroupedExpertOps(), torch.float32, 1e-5, id="plain-float32"),
    pytest.param(TRITON, torch.float32, 1e-5, id="triton-float32"),
]


class _Pool:
    """Takes weight gradients at once."""

    def put(self, weights, compute):
        for weight, grad in zip(weights, compute(), strict=True):
            weight.grad = grad


class _Bilinear:
    """Activation g * u, which no kernel knows, as of a part from outside."""

    def forward(self, g, u, out=None):
        return g * u

    def backward(self, grad, g, u, outs=None):
        return g * u, grad * u, grad * g


def _random(dtype, *shape):
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype)


def _leaves(dtype, has_bias):
    shapes = [(T, H), (T, K), (E, H, F), (E, H, F), (E, F, H)]
    shapes += [(E, F), (E, F), (E, 4)] if has_bias else []
    return [torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def _permutation(kind):
    ids = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)]).to(DEVICE)  # the last expert has no rows
    kept = None if kind == "all" else (torch.rand(T, K) > 0.3).to(DEVICE)
    return plan_permutation(ids, E, kept, T if kind == "slots" else None, T * K if kind == "trailing" else None)


@pytest.mark.parametrize(("kernels", "dtype", "tolerance"), ENGINES)
@pytest.mark.parametrize(
    ("kind", "has_bias", "postpones"),
    [
        # In `make test` each two of them together.
        pytest.param(kind, has_bias, postpones, marks=pytest.mark.slow if (i + has_bias + postpones) % 2 else ())
        for i, kind in enumerate(("all", "dropped", "trailing", "slots"))
        for has_bias in (False, True)
        for postpones in (False, True)
    ],
)
def test_sorting_experts_equal_the_loop(kernels, dtype, tolerance, kind, has_bias, postpones):
    permutation, (x, probs, *tensors) = _permutation(kind), _leaves(dtype, has_bias)
    gate = ClampedSwiGLUActivation(1.702, 0.7) if has_bias else SwiGLUActivation()
    gate = _Bilinear() if kind == "dropped" else gate
    columns = slice(3, 7) if has_bias else slice(None)
    counts = permutation.tokens_per_expert_E
    later = _Pool() if postpones else None
    how = ExpertOptions(
        LazyCounts(counts), gate, columns, PermuteMap.from_permutation(permutation), saves_fc1=not postpones
    )
    y = fused_experts(x, ExpertWeights(*tensors), how, kernels, permute_probs(probs, permutation), later)
    grad = torch.randn(T, H, dtype=torch.float64).to(DEVICE, dtype)
    y.backward(grad)
    actual = [y, x.grad, probs.grad, *(t.grad for t in tensors)]

    if kind == "trailing":
        permutation = truncate_permutation(permutation, int(counts.sum()))
    leaves = [t.detach().double().requires_grad_() for t in (x, probs, *tensors)]
    rows, weights = permute(leaves[0], permutation), ExpertWeights(*leaves[2:])
    expected = unpermute(
        reference_experts(
            rows, weights, ExpertOptions(counts.tolist(), gate, columns), permute_probs(leaves[1], permutation)
        ),
        permutation,
        None,
    )
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    for a, e in zip(actual, (expected, *gradients), strict=True):
        torch.testing.assert_close(a.double(), e, rtol=tolerance, atol=tolerance * 10)


class _CopiedRows(TorchDispatchMode):
    """Counts index_select, clamp and masked_fill_ of a width."""

    def __init__(self, width):
        super().__init__()
        self.width, self.found = width, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ("index_select", "masked_fill_") and result.shape[-1] == self.width:
            self.found.append(name)
        return result


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        ("all", ["index_select"], ["index_select"] * 2),
        ("slots", ["index_select", "masked_fill_"], ["index_select", "masked_fill_"] * 2),
    ],
)
def test_tokens_and_gradients_are_gathered_once_a_pass(kind, forward, backward):
    permutation, (x, probs, *tensors) = _permutation(kind), _leaves(torch.float64, has_bias=False)
    how = ExpertOptions(permutation.tokens_per_expert_E.tolist(), permute_map=PermuteMap.from_permutation(permutation))
    with _CopiedRows(H) as copies:
        y = fused_experts(x, ExpertWeights(*tensors), how, GroupedExpertOps(), permute_probs(probs, permutation))
    assert copies.found == forward
    with _CopiedRows(H) as copies:
        y.sum().backward()
    assert copies.found == backward


@pytest.mark.parametrize(("delays", "is_gathered"), [(False, True), (True, False)])
def test_a_gather_that_the_weight_gradient_needs_is_not_a_cost_of_another_gemm(delays, is_gathered):
    needs_gather = {}

    class Watched(Autotuner):
        def choose(self, key, candidates):
            needs_gather.setdefault((key.op, key.shape[0]), key.shape[1])
            return next(iter(candidates))

    permutation, (x, probs, *tensors) = _permutation("all"), _leaves(torch.float32, has_bias=False)
    counts = LazyCounts(permutation.tokens_per_expert_E)
    options = ExpertOptions(counts, permute_map=PermuteMap.from_permutation(permutation))
    ops = TritonExpertOps(Watched(is_enabled=True))
    store = _Pool() if delays else None
    y = fused_experts(x, ExpertWeights(*tensors), options, ops, permute_probs(probs, permutation), store)
    needs_gather.clear()
    y.sum().backward()
    # The gradient of the hidden values is the first product of rows of width H.
    assert needs_gather["product", H] == (not is_gathered,)


class _Chosen(Autotuner):
    """Takes the candidate of a name wherever it is offered, and records the names."""

    def __init__(self, name):
        super().__init__(is_enabled=True)
        self.name, self.offered = name, set()

    def choose(self, key, candidates):
        if key.op == "product and combine":
            self.offered |= set(candidates)
        return self.name if self.name in candidates else next(iter(candidates))


@pytest.mark.parametrize("candidate", ["summed by gemm", "summed by combine", "scattered"])
@pytest.mark.parametrize("kind", ["all", "dropped", "slots", "ordered"])
def test_every_candidate_of_product_and_combine_equals_the_reference(candidate, kind):
    dtype = torch.float32
    if kind == "ordered":
        counts_GE = torch.tensor([[3, 0, 2, 1], [0, 4, 1, 0]], device=DEVICE)
        order, inverse = order_by_expert(counts_GE, 11)
        permute_map, counts = PermuteMap.from_order(order, inverse), counts_GE.sum(0).tolist()
    else:
        permutation = _permutation(kind)
        permute_map, counts = PermuteMap.from_permutation(permutation), permutation.tokens_per_expert_E.tolist()
    assert permute_map.is_bijective == (kind == "ordered")
    num_rows = len(permute_map.source_R)
    first, second = ((_random(dtype, num_rows, F), _random(dtype, E, F, H)) for _ in range(2))
    offsets = torch.tensor(counts).cumsum(0).to(DEVICE, torch.int32)
    name = candidate if candidate != "scattered" else f"scattered {tile_configs(first[0])[0].block_m}x"
    for pair in (None, second):
        tuner = _Chosen("")
        ops = TritonExpertOps(tuner)
        ops.grouped_gemm_combine(GatheredRows(first[0]), first[1], offsets, permute_map, pair)
        offered = [offer for offer in tuner.offered if offer.startswith(name)]
        must_be_offered = {
            "summed by gemm": True,
            "summed by combine": pair is not None,
            "scattered": kind == "ordered",
        }
        assert bool(offered) == must_be_offered[candidate]
        for offer in offered:
            ops = TritonExpertOps(_Chosen(offer))
            y = ops.grouped_gemm_combine(GatheredRows(first[0]), first[1], offsets, permute_map, pair)
            wide = [None if p is None else tuple(t.double() for t in p) for p in (first, pair)]
            expected = GroupedExpertOps().grouped_gemm_combine(
                GatheredRows(wide[0][0]), wide[0][1], offsets, permute_map, wide[1]
            )
            torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


def test_candidates_are_timed_with_their_gather_unless_rows_are_gathered_already():
    gathers = []

    class Watched(Autotuner):
        def choose(self, key, ways):
            for way in ways.values():
                with _CopiedRows(H) as copies:
                    way()
                gathers.append((key.shape[1], copies.found))
            return next(iter(ways))

    rows = GatheredRows(torch.randn(T, H), torch.arange(T, dtype=torch.int32), has_padding=False)
    kernels = TritonExpertOps(Watched(is_enabled=True))
    plain_way = {"plain": lambda rows: rows.materialized}
    for _ in range(2):
        kernels._run_autotuned("copy", (rows,), (), plain_way)
    assert gathers == [((True,), ["index_select"]), ((False,), [])]


def test_counts_on_a_device_are_read_once_and_only_if_asked():
    counts = LazyCounts(torch.tensor([3, 0, 2], device=DEVICE))
    assert len(counts) == 3
    assert "_values" not in vars(counts)
    assert list(counts) == [3, 0, 2]
    assert counts[1:] == [0, 2]


MAPPINGS = [
    {"world_size": 2, "dispatcher": "alltoall", "ep": 2},
    *slow([({"world_size": 1},), ({"world_size": 2, "dispatcher": "allgather", "ep": 2},)]),
]


def _single(**mapping):
    train = {"seq_len": 8, "global_batch_size": 2}
    cfg = tiny(model={"layers": 1}, moe={"weight_in_expert": False}, train=train, **mapping)
    return replace(cfg, run=replace(cfg.run, dtype="float32"))


@ON_CPU
@pytest.mark.parity
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_kernels_on_and_off_give_the_same_losses(pool, mapping):
    cfg = _single(**mapping)
    runs = []
    for kernels in ("plain", "triton"):
        chosen = replace(cfg, run=replace(cfg.run, kernels=kernels))
        runs.append(pool.run(cfg.parallel.world_size, run_distributed, chosen, 2, timeout_s=280)[0])
    for a, b in zip(*(run.steps for run in runs), strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-5)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-4)


@ON_CPU
def test_the_choice_is_automatic_and_switchable():
    cpu = torch.device("cpu")
    cfg = _single()
    assert not isinstance(select_kernels(cfg, cpu).expert_ops, TritonExpertOps)
    plain = select_kernels(replace(cfg, run=replace(cfg.run, kernels="plain")), cpu)
    assert plain.expert_ops is TORCH_EXPERT_OPS
    chosen = select_kernels(replace(cfg, run=replace(cfg.run, kernels="triton")), cpu)
    assert isinstance(chosen.expert_ops, TritonExpertOps)
