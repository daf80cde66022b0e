"""Operators with the schemas of torch's CUDA flash attention, for every device and dtype, written by the definition."""

import torch
from torch import Tensor

FORWARD_SCHEMA = torch.ops.aten._flash_attention_forward.default._schema
BACKWARD_SCHEMA = torch.ops.aten._flash_attention_backward.default._schema


class ReferenceFlash:
    """Flash attention of [B, S, heads, D] tensors; arguments are bound to torch's schemas, by name."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, *args, **kwargs) -> tuple[Tensor, ...]:
        """(out, lse [B, heads, Sq], and three that are not read)."""
        self.calls.append("forward")
        given = _bound(FORWARD_SCHEMA, args, kwargs)
        assert given["return_debug_mask"] is False
        q, k, v = _query_heads(given)
        scores = _scores(q, k, given)
        unread = torch.empty(0)
        return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1), unread, unread, unread

    def backward(self, *args, **kwargs) -> tuple[Tensor, ...]:
        """(dq, dk, dv), from the log-sum-exp and the output that were given (arXiv:2205.14135 algorithm 4)."""
        self.calls.append("backward")
        given = _bound(BACKWARD_SCHEMA, args, kwargs)
        assert given["logsumexp"].is_contiguous()
        assert given["rng_state"].dtype == torch.uint64
        q, k, v = _query_heads(given)
        grad_out = given["grad_out"].transpose(1, 2)
        probs = (_scores(q, k, given) - given["logsumexp"].unsqueeze(-1)).exp()
        delta = (grad_out * given["out"].transpose(1, 2)).sum(-1, keepdim=True)
        grad_scores = probs * (grad_out @ v.mT - delta) / q.shape[-1] ** 0.5
        groups = given["key"].shape[2]
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (grad_scores.mT @ q, probs.mT @ grad_out))
        return tuple(x.transpose(1, 2) for x in (grad_scores @ k, dk, dv))


def use_reference_flash(monkeypatch) -> ReferenceFlash:
    """Make every device and dtype one that the CUDA flash kernel supports, and compute with the reference."""
    flash = ReferenceFlash()
    monkeypatch.setattr("moefold.ops.block_attention.cuda_flash_attention", lambda: flash.forward)
    monkeypatch.setattr("moefold.ops.block_attention.cuda_flash_attention_backward", lambda: flash.backward)
    monkeypatch.setattr("moefold.ops.block_attention._cuda_flash_supports", lambda q: True)
    return flash


def _bound(schema, args: tuple, kwargs: dict) -> dict:
    """The arguments by their names in the schema, which must know them all and get all that it requires."""
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    assert len(args) <= len(positional)
    given = dict(zip([argument.name for argument in positional], args, strict=False)) | kwargs
    assert len(given) == len(args) + len(kwargs)
    assert set(given) <= {argument.name for argument in schema.arguments}
    assert all(argument.has_default_value() or argument.name in given for argument in schema.arguments)
    assert given["dropout_p"] == 0.0
    assert (given["cum_seq_q"], given["cum_seq_k"]) == (None, None)
    assert (given["max_q"], given["max_k"]) == (given["query"].shape[1], given["key"].shape[1])
    return given


def _query_heads(given: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and the keys and values of each query head, [B, A, S, D]."""
    q, k, v = (given[name].transpose(1, 2) for name in ("query", "key", "value"))
    share = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)


def _scores(q: Tensor, k: Tensor, given: dict) -> Tensor:
    """Masked scores, [B, A, Sq, Sk]; the kernel aligns the last query with the last key."""
    distance = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    left, right = given["window_size_left"], 0 if given["is_causal"] else given["window_size_right"]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
