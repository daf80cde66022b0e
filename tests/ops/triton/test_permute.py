"""The kernels of permute and combine equal torch's operations in float64, gradients included."""

import pytest
import torch

from moefold.model.moe.permute import permute, plan_permutation, truncate_permutation, unpermute
from moefold.ops.permute import TORCH_PERMUTE_OPS
from moefold.ops.triton.permute import TritonPermuteOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, K, E = 7, 3, 5
KINDS = ["all", "dropped", "truncated", "trailing", "none", "padded"]


def _permutation(kind):
    generator = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(T)])
    kept = torch.rand(T, K, generator=generator) < 0.6
    ids, kept = ids.to(DEVICE), kept.to(DEVICE)
    if kind in ("truncated", "trailing"):
        permutation = plan_permutation(ids, E, kept, num_rows=T * K)
        return permutation if kind == "trailing" else truncate_permutation(permutation, int(kept.sum()))
    kept = {"all": None, "none": torch.zeros_like(kept)}.get(kind, kept)
    return plan_permutation(ids, E, kept, T if kind == "padded" else None)


def _is_defined(permutation):
    """Which rows have a kept token."""
    if permutation.non_padding_R is not None:
        return permutation.non_padding_R
    num_kept = len(permutation.token_R) if permutation.kept_TK is None else int(permutation.kept_TK.sum())
    return torch.arange(len(permutation.token_R), device=DEVICE) < num_kept


def _journey(x, probs, scale, permutation, grad, ops):
    """Sum of the scaled rows of each token and its gradients. Rows without a kept token are NaN: not to be read."""
    rows = permute(x, permutation, ops) * scale[: len(permutation.token_R)]
    rows = torch.where(_is_defined(permutation).unsqueeze(1), rows, torch.nan)
    out = unpermute(rows, permutation, probs, ops)
    inputs = (x, scale) if probs is None else (x, scale, probs)
    return out, *torch.autograd.grad(out, inputs, grad)


@pytest.mark.parametrize(
    ("kind", "width", "dtype", "tolerance", "is_weighted"),
    [
        # In `make test` each kind with each width, and with each type, weighted and not.
        pytest.param(kind, width, *limit, is_weighted, marks=pytest.mark.slow if (i + j + k + is_weighted) % 3 else ())
        for i, kind in enumerate(KINDS)
        for j, width in enumerate((1, 8, 70))
        for k, limit in enumerate(((torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)))
        for is_weighted in (True, False)
    ],
)
def test_kernels_equal_torch_in_float64(dtype, tolerance, kind, width, is_weighted):
    permutation = _permutation(kind)
    generator = torch.Generator().manual_seed(width)
    x, grad = (torch.randn(T, width, generator=generator).to(DEVICE, dtype) for _ in range(2))
    scale = torch.randn(E * T, width, generator=generator).to(DEVICE, dtype)
    probs = torch.rand(T, K, generator=generator).to(DEVICE)
    found = []
    for ops, wide in ((TritonPermuteOps(), lambda t: t), (TORCH_PERMUTE_OPS, lambda t: t.double())):
        leaves = [wide(tensor.detach().clone()).requires_grad_() for tensor in (x, probs, scale)]
        weights = leaves[1] if is_weighted else None
        found.append(_journey(leaves[0], weights, leaves[2], permutation, wide(grad), ops))
    assert not any(tensor.isnan().any() for tensor in found[0])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=4 * tolerance)


def test_gradients_of_a_sum_have_no_stride_and_are_read():
    permutation = _permutation("all")
    rows = torch.randn(T * K, 8, device=DEVICE, requires_grad=True)
    probs = torch.rand(T, K, device=DEVICE, requires_grad=True)
    unpermute(rows, permutation, probs, TritonPermuteOps()).sum().backward()
    torch.testing.assert_close(probs.grad, rows.detach()[permutation.row_TK].sum(-1), rtol=1e-5, atol=1e-5)
