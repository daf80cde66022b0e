"""Causal attention in C equals its plain twin with vectors of every width; torch's stands in where there is none."""

from functools import cache
from itertools import product

import pytest
import torch

from moefold.model.attention import CausalAttention
from moefold.ops.block_attention import MathBlockAttention
from moefold.parallel.kernels.select import select_kernels
from tests.model.attention_reference import documents
from tests.ops.c_kernels import (
    CPU,
    HALF_STEPS,
    PROCESSORS,
    WITH_AND_WITHOUT_PAIRS,
    assert_same_losses,
    in_each_type,
    needs_compiler,
    recipe,
    same_bits_on_threads,
    steps_of,
)
from tests.verify.recipes import LATENT

pytestmark = needs_compiler

ROUNDING = HALF_STEPS | {torch.float32: 0.0}
"""Rounding to each type, or 0 for float32, whose rounding is within the error of its sums."""


@pytest.fixture(scope="module", params=WITH_AND_WITHOUT_PAIRS)
def kernel(request, built_with):
    from moefold.ops.cpu.attention import CAttention

    return built_with(CAttention, PROCESSORS[request.param])


@pytest.fixture
def native():
    from moefold.ops.cpu.attention import CAttention

    return CAttention()


def _heads(
    tokens: int, samples: int, heads: int, groups: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """(q, k, v, grad) as the model has them: heads of a projection, and keys and values that lie within a wider one."""
    generator = torch.Generator().manual_seed(seed)
    q, grad = (torch.randn(tokens, samples, heads, d, generator=generator).to(dtype) for _ in range(2))
    both = torch.randn(tokens, samples, groups, 2 * d + 3, generator=generator).to(dtype)
    return [2 * q, both[..., 1 : d + 1], both[..., d + 2 : 2 * d + 2], grad]


def _passes(kernel, q, k, v, grad):
    out, lse = kernel.forward(q, k, v, "causal")
    return [out, lse, *kernel.backward(grad, q, k, v, out, lse, "causal")]


def _assert_equal(found, q, k, v, grad):
    wide = [x.double() for x in (q, k, v)]
    out, lse = MathBlockAttention().forward(*wide, "causal")
    # Backwards the output is read as it was rounded to a narrow type, and no other rounding is in the way.
    read = found[0].double() if q.dtype == torch.bfloat16 else out
    gradients = MathBlockAttention().backward(grad.double(), *wide, read, lse, "causal")
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), found, (out, lse, *gradients), strict=True):
        assert a.dtype == (torch.float32 if name == "lse" else q.dtype)
        assert a.shape == e.shape
        # Relative to the largest value, as parts of long sums cancel; all parts of one token's gradients do.
        error = (a.double() - e).abs() - ROUNDING[a.dtype] * e.abs()
        assert error.max() < 3e-6 * e.abs().max().clamp(min=1.0), (name, float(error.max()))


def _passes_token_by_token(q, k, v, grad):
    """The definition, without any term of later tokens, not even times 0."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in leaves[1:])
    out, lse = [], []
    for t, query in enumerate(leaves[0]):
        scores = torch.einsum("bad,tbad->tba", query, keys[: t + 1]) * q.shape[-1] ** -0.5
        lse.append(scores.logsumexp(0))
        out.append(torch.einsum("tba,tbad->bad", scores.softmax(0), values[: t + 1]))
    gradients = torch.autograd.grad(torch.stack(out), leaves, grad.double())
    return [torch.stack(out), torch.stack(lse), *gradients]


SHAPES = [
    (1, 1, 1, 1, 8),
    (2, 1, 2, 1, 16),
    (5, 3, 2, 2, 1),
    (31, 2, 4, 2, 24),
    (32, 1, 2, 2, 32),
    (33, 2, 3, 1, 40),
    (63, 1, 4, 4, 20),
    (64, 2, 2, 1, 64),
    (65, 1, 2, 2, 7),
    (100, 2, 6, 3, 33),
    (129, 1, 2, 1, 128),
    (150, 1, 2, 2, 192),
    (257, 1, 1, 1, 256),
    (300, 2, 8, 2, 48),
]
"""Tokens, samples, query heads, key/value heads and numbers of a head."""


@in_each_type
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_the_definition(kernel, shape, dtype):
    q, k, v, grad = _heads(*shape, dtype=dtype)
    _assert_equal(_passes(kernel, q, k, v, grad), q, k, v, grad)


@pytest.mark.parametrize("d", [8, 24, 40])
def test_attention_of_every_length_equals_float64(kernel, d):
    for tokens in range(1, 140, 3):
        dtype = torch.bfloat16 if tokens % 2 else torch.float32
        q, k, v, grad = _heads(tokens, 1, 2, 1, d, seed=tokens, dtype=dtype)
        _assert_equal(_passes(kernel, q, k, v, grad), q, k, v, grad)


@in_each_type
def test_memory_may_hold_anything(kernel, monkeypatch, dtype):
    """Results and scratch memory begin as NaN, and the memory after tensors too."""
    shape = (70, 2, 4, 2, 24)
    plain = _heads(*shape, dtype=dtype)
    expected = _passes(kernel, *plain)

    def empty(like, size, dtype=None):
        return torch.full(size, float("nan"), dtype=dtype or like.dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", empty)
    walled = []
    for x in plain:
        wall = torch.full((72, 4, x.shape[2] + 1, 27), float("nan"), dtype=dtype)
        inside = wall[1:-1, 1:-1, :-1, 1:-2]
        inside.copy_(x)
        walled.append(inside)
    for a, e in zip(_passes(kernel, *walled), expected, strict=True):
        assert torch.equal(a, e)


@in_each_type
def test_gradients_may_have_any_strides(kernel, dtype):
    q, k, v, grad = _heads(45, 3, 2, 2, 16, dtype=dtype)
    expected = _passes(kernel, q, k, v, grad)
    turned = [x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for x in (q, k, v, grad)]
    one = torch.ones((), dtype=dtype).expand(grad.shape)
    for a, e in zip(_passes(kernel, *turned), expected, strict=True):
        assert torch.equal(a, e)
    _assert_equal(_passes(kernel, q, k, v, one), q, k, v, one)


@in_each_type
def test_threads_change_no_bit(kernel, dtype):
    q, k, v, grad = _heads(257, 3, 12, 2, 24, dtype=dtype)
    # More than once, as threads that take turns on a busy core do not meet.
    same_bits_on_threads(lambda: _passes(kernel, q, k, v, grad), (1, 2, 3, 2, 3, 2, 3))


@in_each_type
def test_tokens_and_samples_behind_change_no_bit(kernel, dtype):
    q, k, v, _ = _heads(200, 2, 4, 2, 24, dtype=dtype)
    whole, lse = kernel.forward(q, k, v, "causal")
    for tokens in (1, 31, 64, 77, 130):
        part, part_lse = kernel.forward(*(x[:tokens, 1:] for x in (q, k, v)), "causal")
        assert torch.equal(part, whole[:tokens, 1:])
        assert torch.equal(part_lse, lse[:tokens, 1:])


def test_large_scores_do_not_overflow(kernel):
    q, k, v, grad = _heads(80, 1, 2, 2, 16)
    q, k = 40 * q, 40 * k
    found = _passes(kernel, q, k, v, grad)
    right = _passes(MathBlockAttention(), *(x.double() for x in (q, k, v, grad)))
    # Scores of thousands are rounded to 1e-4 before they are exponents.
    for a, e in zip(found, right, strict=True):
        assert (a.double() - e).abs().max() < 2e-3 * e.abs().max()


@cache
def _given_and_right(value: float, where: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Heads with a value in one place, and the right result of every kernel."""
    given = dict(zip(("q", "k", "v", "grad"), _heads(150, 1, 2, 1, 24, dtype=dtype), strict=True))
    given[where] = given[where].clone()
    given[where][100, 0, 0, 5] = value
    return list(given.values()), _passes_token_by_token(*given.values())


@in_each_type
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["q", "k", "v", "grad"])
def test_nan_arrives(kernel, value, where, dtype):
    """Wherever the definition has none, and in no query of an earlier panel."""
    given, right = _given_and_right(value, where, dtype)
    found = _passes(kernel, *given)
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), found, right, strict=True):
        assert not a[~e.isfinite()].isfinite().any(), name
    assert any((~e.isfinite()).any() for e in right)
    out, lse = found[:2]
    assert out[:96].isfinite().all()
    assert lse[:96].isfinite().all()


def test_nan_stays_in_its_sample(kernel):
    q, k, v, grad = _heads(40, 3, 2, 1, 16)
    expected = _passes(kernel, q, k, v, grad)
    q = q.clone()
    q[:, 1] = float("nan")
    for a, e in zip(_passes(kernel, q, k, v, grad), expected, strict=True):
        assert a[:, 1].isnan().all()
        assert torch.equal(a[:, ::2], e[:, ::2])


def _core_passes(core, given, starts=None, sinks=None):
    leaves = [x.detach().clone().requires_grad_() for x in (*given[:3], *(() if sinks is None else (sinks,)))]
    out = core(*leaves[:3], documents(starts), *leaves[3:])
    out.backward(given[3])
    return [out, *(leaf.grad for leaf in leaves)]


@in_each_type
@pytest.mark.parametrize("what", ["causal", "documents", "short documents", "sinks", "window", "window and documents"])
def test_the_core_computes_the_same_with_it(native, what, dtype):
    """Through autograd, and as torch's kernels."""
    tokens = 600 if what == "documents" else 70
    given = _heads(tokens, 2, 4, 2, 32, dtype=dtype)
    starts = sinks = None
    if "documents" in what:
        border = tokens - 20
        starts = torch.zeros(tokens, 2, dtype=torch.int64)
        starts[border:, 1] = border
    if what == "sinks":
        sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=dtype)
    runs = []
    for kernel in (native, None):
        core = CausalAttention(window=9 if "window" in what else 0)
        core.kernel = kernel
        runs.append(_core_passes(core, given, starts, sinks))
    # torch's kernel multiplies weights that it has rounded to bfloat16.
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    assert not torch.equal(runs[0][0], runs[1][0])
    for a, e in zip(*runs, strict=True):
        assert (a - e).norm() <= tolerance * e.norm()


@in_each_type
def test_it_keeps_the_tensors_of_torchs_kernel(native, dtype):
    q, k, v, _ = _heads(40, 2, 4, 2, 16, dtype=dtype)
    kept = []
    for kernel in (native, None):
        core, sizes = CausalAttention(), {}

        def pack(x, sizes=sizes):
            sizes[x.untyped_storage().data_ptr()] = x.numel() * x.element_size()
            return x

        core.kernel = kernel
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
            out = core(*leaves)
        kept.append(sorted(sizes.values()))
        del out
    assert kept[0] == kept[1]


def test_it_names_unsupported_cases(native):
    q, k, v, _ = _heads(6, 2, 4, 2, 16)
    assert native.supports(q, k, v)
    assert not native.supports(q.double(), k.double(), v.double())
    assert native.supports(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert not native.supports(q.half(), k.half(), v.half())
    assert not native.supports(q.bfloat16(), k, v)
    assert not native.supports(q, k, v.bfloat16())
    assert not native.supports(q[:3], k, v)
    assert not native.supports(q, k, v[..., :8])
    assert not native.supports(*(x.to("meta") for x in (q, k, v)))
    assert not native.supports(*(torch.empty(2, 1, 1, 257) for _ in "qkv"))
    assert not native.supports(*(torch.empty(1, 1, 1, 1).expand(20000, 1, 1, 8) for _ in "qkv"))
    for empty in (q[:0], q[:, :0]):
        assert not native.supports(empty, k[: len(empty), : empty.shape[1]], v[: len(empty), : empty.shape[1]])


def test_the_choice_is_automatic_and_switchable(native):
    for kernels, dtype in product(("auto", "c"), ("float32", "bfloat16")):
        chosen = select_kernels(recipe(dtype, kernels), CPU)
        assert (chosen.attention is not None) == native.is_fast
        assert ("causal attention" in chosen.message) == native.is_fast
    assert select_kernels(recipe("float32", "plain"), CPU).attention is None
    assert select_kernels(recipe("float64", "auto"), CPU).attention is None


def test_without_a_compiler_it_is_torchs(no_compiler):
    assert select_kernels(recipe("float32", "auto"), CPU).attention is None


CASES = [
    pytest.param({"train": {"recompute": ("core_attention",)}}, id="one-rank-recompute", marks=pytest.mark.slow),
    pytest.param({"model": LATENT}, id="latent"),
    pytest.param({"world_size": 2, "tp": 2}, id="tp", marks=pytest.mark.slow),
    pytest.param({"world_size": 2, "cp": 2}, id="cp-has-its-own", marks=pytest.mark.slow),
]


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES)
def test_on_and_off_give_the_same_losses(pool, case):
    assert_same_losses(pool, case)


@pytest.mark.parity
def test_recompute_gives_the_same_bits(pool):
    kept = steps_of(pool, recipe("float32", "c"))
    for part in ("core_attention", "layer"):
        again = steps_of(pool, recipe("float32", "c", train={"recompute": (part,)}))
        assert [(step.loss, step.grad_norm) for step in again] == [(step.loss, step.grad_norm) for step in kept]
