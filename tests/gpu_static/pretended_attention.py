"""Attention kernels of CUDA libraries, flash and cuDNN, by their definitions in float64, with the masks of their flags.

They have the signatures of torch's operators. Like a kernel, they read a negative window as no limit.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moefold.comm import private_torch
from moefold.ops import block_attention, cudnn_attention, paged_flash


class Flags(NamedTuple):
    """Masks and scale of a call; None or a negative window: no limit."""

    causal: bool
    scale: float | None = None
    left: int | None = None
    right: int | None = None


def seen_keys(queries: int, keys: int, flags: Flags) -> Tensor:
    """Return which query attends to which key, [queries, keys]. The last query is at the last key."""
    distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if flags.causal:
        seen &= distance >= 0
    if flags.left is not None and flags.left >= 0:
        seen &= distance <= flags.left
    if flags.right is not None and flags.right >= 0:
        seen &= -distance <= flags.right
    return seen


def _scores(q_QAD: Tensor, k_KAD: Tensor, flags: Flags) -> Tensor:
    scores_AQK = torch.einsum("qad,kad->aqk", q_QAD, k_KAD) * _scale(q_QAD, flags)
    return scores_AQK.masked_fill(~seen_keys(len(q_QAD), len(k_KAD), flags), float("-inf"))


def _scale(q: Tensor, flags: Flags) -> float:
    return flags.scale or q.shape[-1] ** -0.5


def _repeated(x_KGD: Tensor, heads: int) -> Tensor:
    return x_KGD.double().repeat_interleave(heads // x_KGD.shape[1], 1)


def attend(q_QAD: Tensor, k_KGD: Tensor, v_KGD: Tensor, flags: Flags) -> tuple[Tensor, Tensor]:
    """Return the output [Q, A, D] and the log-sum-exp [A, Q] of one sample or document, in float64."""
    k_KAD, v_KAD = (_repeated(x, q_QAD.shape[1]) for x in (k_KGD, v_KGD))
    scores_AQK = _scores(q_QAD.double(), k_KAD, flags)
    lse_AQ = scores_AQK.logsumexp(-1)
    probs_AQK = torch.exp(scores_AQK - lse_AQ.masked_fill(lse_AQ.isinf(), 0)[..., None])
    return torch.einsum("aqk,kad->qad", probs_AQK, v_KAD), lse_AQ


def attend_backward(
    grad_QAD: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out_QAD: Tensor, lse_AQ: Tensor, flags: Flags
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of one sample or document."""
    q, k, v = qkv
    heads = q.shape[1]
    q_QAD = q.double()
    k_KAD, v_KAD = (_repeated(x, heads) for x in (k, v))
    grad_QAD = grad_QAD.double()
    probs_AQK = torch.exp(_scores(q_QAD, k_KAD, flags) - lse_AQ.double()[..., None])
    delta_AQ = (grad_QAD * out_QAD.double()).sum(-1).t()
    gap_AQK = torch.einsum("qad,kad->aqk", grad_QAD, v_KAD) - delta_AQ[..., None]
    grad_AQK = probs_AQK * gap_AQK * _scale(q, flags)
    grads = [
        torch.einsum("aqk,kad->qad", grad_AQK, k_KAD),
        torch.einsum("aqk,qad->kad", grad_AQK, q_QAD),
        torch.einsum("aqk,qad->kad", probs_AQK, grad_QAD),
    ]
    folded = [grad.unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype) for grad, x in zip(grads, qkv, strict=True)]
    return folded[0], folded[1], folded[2]


def _documents(starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of the queries and of the keys of each document."""
    for q, k in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
        yield slice(*q), slice(*k)


def flash(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Compute `_flash_attention_forward`: [B, S, A, D], or [T, A, D] with the starts of documents."""
    flags = _flash_flags(rest[3], options)
    if options.get("block_table") is not None:
        k, v = (_gathered_pages(x, starts_k, options) for x in (k, v))
    empty = (torch.zeros(2, dtype=torch.int64), torch.zeros(0), torch.zeros(0))
    if starts_q is None:
        found = [attend(*sample, flags) for sample in zip(q, k, v, strict=True)]
        lse = torch.stack([lse for _, lse in found]).float()
        # The kernel marks a query without keys so.
        lse = torch.where(lse == float("-inf"), float("inf"), lse)
        return torch.stack([out for out, _ in found]).to(q.dtype), lse, *empty
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    lse = torch.zeros(q.shape[1], len(q))
    for rows, keys in _documents(starts_q, starts_k):
        y, part = attend(q[rows], k[keys], v[keys], flags)
        out[rows] = y.to(q.dtype)
        lse[:, rows] = part.float()
    return out, lse, *empty


def _gathered_pages(x: Tensor, starts_k: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Return the keys of all documents, which the operator reads from pages by its block table."""
    table, counts = options["block_table"], options["seqused_k"]
    assert table.dtype == counts.dtype == torch.int32
    assert x.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert starts_k is not None, "both starts must be set or both not"
    assert torch.equal(starts_k.diff(), counts)
    return torch.cat([x[pages].flatten(0, 1)[:count] for pages, count in zip(table, counts.tolist(), strict=True)])


def _flash_flags(causal: bool, options: dict[str, Any]) -> Flags:
    windows = (options.get("window_size_left"), options.get("window_size_right"))
    return Flags(causal, options.get("scale"), *windows)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_flash_attention_backward`."""
    assert lse.is_contiguous(), "the kernel reads the log-sum-exp as contiguous"
    starts_q, starts_k, _, _, _, causal, *_ = rest
    flags = _flash_flags(causal, options)
    if starts_q is None:
        parts = [
            attend_backward(sample[0], sample[1:4], sample[4], sample[5], flags)
            for sample in zip(grad, q, k, v, out, lse, strict=True)
        ]
        grads = [torch.stack(x) for x in zip(*parts, strict=True)]
        return grads[0], grads[1], grads[2]
    found = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    for rows, keys in _documents(starts_q, starts_k):
        part = attend_backward(grad[rows], (q[rows], k[keys], v[keys]), out[rows], lse[:, rows], flags)
        for target, value, where in zip(found, part, (rows, keys, keys), strict=True):
            target[where] = value
    return found


def cudnn(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    """Compute `_scaled_dot_product_cudnn_attention`: [B, A, S, D]."""
    bias, _, _, causal, *_ = rest
    assert bias is None, "no caller has a bias"
    samples = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = flash(*samples, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale)
    return (out.transpose(1, 2), lse.unsqueeze(-1), *[torch.zeros(0)] * 7)


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    """Compute `_scaled_dot_product_cudnn_attention_backward`."""
    samples = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
    causal = rest[-1]
    lse = lse.squeeze(-1).contiguous()
    grads = flash_backward(*samples, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale)
    return tuple(x.transpose(1, 2) for x in grads)


def _on_host(function: Callable[..., tuple[Tensor, ...]], mark: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a kernel that computes without the modes, and marks its results."""

    def run(*args: Any, **options: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            out = function(*args, **options)
        return mark(out)

    return lambda: run


@contextmanager
def library_attention(mark: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the kernels that the project takes from torch.

    Args:
        mark: marks results as tensors of the pretended device.
    """
    replaced = {
        "cuda_flash_attention": (flash, block_attention, paged_flash),
        "cuda_flash_attention_backward": (flash_backward, block_attention),
        "cudnn_attention": (cudnn, cudnn_attention),
        "cudnn_attention_backward": (cudnn_backward, cudnn_attention),
    }
    with ExitStack() as stack:
        for name, (function, *users) in replaced.items():
            for module in (private_torch, *users):
                stack.enter_context(mock.patch.object(module, name, _on_host(function, mark)))
        yield
