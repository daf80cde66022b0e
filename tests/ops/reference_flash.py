"""Operators with the schemas of torch's CUDA flash attention, for every device and dtype, written by the definition."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import torch
from torch import Tensor

from moefold.ops.block_attention import CudaFlash

FORWARD_SCHEMA = torch.ops.aten._flash_attention_forward.default._schema
BACKWARD_SCHEMA = torch.ops.aten._flash_attention_backward.default._schema


class ReferenceFlash:
    """Flash attention of [B, S, heads, D] tensors, or of [tokens, heads, D] for sequences of variable length.

    Arguments are bound to torch's schemas, by name.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, *args, **kwargs) -> tuple[Tensor, ...]:
        """(out, lse [B, heads, Sq], and three that are not read)."""
        self.calls.append("forward")
        given = _bound(FORWARD_SCHEMA, args, kwargs)
        assert given["return_debug_mask"] is False
        parts = [_forward(part) for part in _sequences(given)]
        unread = torch.empty(0)
        return _joined([out for out, _ in parts], given), _joined_lse([lse for _, lse in parts], given), *(unread,) * 3

    def backward(self, *args, **kwargs) -> tuple[Tensor, ...]:
        """(dq, dk, dv), from the log-sum-exp and the output that were given (arXiv:2205.14135 algorithm 4)."""
        self.calls.append("backward")
        given = _bound(BACKWARD_SCHEMA, args, kwargs)
        assert given["logsumexp"].is_contiguous()
        assert given["rng_state"].dtype == torch.uint64
        parts = [_backward(part) for part in _sequences(given)]
        return tuple(_joined(list(gradients), given) for gradients in zip(*parts, strict=True))


@contextmanager
def reference_flash() -> Iterator[ReferenceFlash]:
    """Make the CUDA flash kernel support every device and dtype, and compute with the reference."""
    flash = ReferenceFlash()
    module = "moefold.ops.block_attention"
    with (
        mock.patch(f"{module}.cuda_flash_attention", return_value=flash.forward),
        mock.patch(f"{module}.cuda_flash_attention_backward", return_value=flash.backward),
        mock.patch(f"{module}.CudaFlash.supports", return_value=True),
        mock.patch(f"{module}.block_kernel", _flash_only),
    ):
        yield flash


def _flash_only(q: Tensor, block_mask: object) -> CudaFlash:
    assert not isinstance(block_mask, Tensor), "a mask in memory"
    return CudaFlash()


def bind(schema, args: tuple, kwargs: dict) -> dict:
    """The arguments by their names in the schema, which must know them all and get all that it requires."""
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    assert len(args) <= len(positional)
    given = dict(zip([argument.name for argument in positional], args, strict=False)) | kwargs
    assert len(given) == len(args) + len(kwargs)
    assert set(given) <= {argument.name for argument in schema.arguments}
    assert all(argument.has_default_value() or argument.name in given for argument in schema.arguments)
    assert given["dropout_p"] == 0.0
    return given


def _bound(schema, args: tuple, kwargs: dict) -> dict:
    given = bind(schema, args, kwargs)
    if given["query"].dim() == 4:
        assert (given["cum_seq_q"], given["cum_seq_k"]) == (None, None)
        assert (given["max_q"], given["max_k"]) == (given["query"].shape[1], given["key"].shape[1])
        return given
    if given.get("block_table") is not None:
        given = _with_gathered_pages(given)
    for limits, longest, tokens in (("cum_seq_q", "max_q", "query"), ("cum_seq_k", "max_k", "key")):
        lengths = given[limits].diff()
        assert given[limits].dtype == torch.int32
        assert given[limits][0] == 0
        assert given[limits][-1] == len(given[tokens])
        assert lengths.min() > 0
        assert given[longest] == lengths.max()
    return given


def _with_gathered_pages(given: dict) -> dict:
    """The keys and values in the order of segments, after the checks of torch's kernel (flash_api.cpp)."""
    table, counts = given["block_table"], given["seqused_k"]
    assert table.dtype == counts.dtype == torch.int32
    assert table.stride(-1) == 1
    assert counts.is_contiguous()
    assert table.shape[:1] == counts.shape == (len(given["cum_seq_q"]) - 1,)
    assert torch.equal(given["cum_seq_k"].diff(), counts), "both are places in the same keys"
    assert given["key"].shape == given["value"].shape
    assert given["key"].shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    pairs = list(zip(table, counts.tolist(), strict=True))
    gathered = {
        name: torch.cat([given[name][pages].flatten(0, 1)[:count] for pages, count in pairs])
        for name in ("key", "value")
    }
    return given | gathered


def _sequences(given: dict) -> list[dict]:
    """Return the arguments of each sequence of variable length as a batch of one, or a whole batch as given."""
    if given["query"].dim() == 4:
        return [given]
    parts = []
    for (q, q_end), (k, k_end) in zip(
        pairwise(given["cum_seq_q"].tolist()), pairwise(given["cum_seq_k"].tolist()), strict=True
    ):
        of_queries = {name: given[name][q:q_end].unsqueeze(0) for name in ("query", "grad_out", "out") if name in given}
        of_keys = {name: given[name][k:k_end].unsqueeze(0) for name in ("key", "value")}
        lse = {"logsumexp": given["logsumexp"][:, q:q_end].unsqueeze(0)} if "logsumexp" in given else {}
        parts.append(given | of_queries | of_keys | lse)
    return parts


def _joined(parts: list[Tensor], given: dict) -> Tensor:
    return parts[0] if given["query"].dim() == 4 else torch.cat(parts, 1).squeeze(0)


def _joined_lse(parts: list[Tensor], given: dict) -> Tensor:
    return parts[0] if given["query"].dim() == 4 else torch.cat(parts, 2).squeeze(0)


def _forward(given: dict) -> tuple[Tensor, Tensor]:
    q, k, v = _query_heads(given)
    scores = _scores(q, k, given)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def _backward(given: dict) -> tuple[Tensor, ...]:
    q, k, v = _query_heads(given)
    grad_out = given["grad_out"].transpose(1, 2)
    probs = (_scores(q, k, given) - given["logsumexp"].unsqueeze(-1)).exp()
    delta = (grad_out * given["out"].transpose(1, 2)).sum(-1, keepdim=True)
    grad_scores = probs * (grad_out @ v.mT - delta) / q.shape[-1] ** 0.5
    groups = given["key"].shape[2]
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (grad_scores.mT @ q, probs.mT @ grad_out))
    return tuple(x.transpose(1, 2) for x in (grad_scores @ k, dk, dv))


def _query_heads(given: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and the keys and values of each query head, [B, A, S, D]."""
    q, k, v = (given[name].transpose(1, 2) for name in ("query", "key", "value"))
    share = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)


def _scores(q: Tensor, k: Tensor, given: dict) -> Tensor:
    """Masked scores, [B, A, Sq, Sk]. The kernel aligns the last query with the last key."""
    distance = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    left, right = given["window_size_left"], 0 if given["is_causal"] else given["window_size_right"]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))


class PagedReferenceFlash(ReferenceFlash):
    """The same over pages, in float64 within, with the dtypes of the kernel's results."""

    def forward(self, *args, **kwargs) -> tuple[Tensor, ...]:
        """(out, lse [heads, rows], and three that are not read)."""
        out, lse, *rest = super().forward(*(x.double() for x in args[:3]), *args[3:], **kwargs)
        return out.to(args[0].dtype), lse.to(torch.promote_types(args[0].dtype, torch.float32)), *rest


@contextmanager
def paged_reference_flash() -> Iterator[PagedReferenceFlash]:
    """Make the flash kernel read pages on every device and dtype, and compute with the reference."""
    flash = PagedReferenceFlash()
    with (
        mock.patch("moefold.ops.paged_flash.cuda_flash_attention", return_value=flash.forward),
        mock.patch("moefold.ops.paged_flash.CudaFlash.supports", return_value=True),
    ):
        yield flash
