"""Attention sinks: a learned logit per head that takes its share of the softmax and gives nothing (arXiv:2309.17453).

softmax over the keys and the sink is softmax over the keys, scaled by 1 - exp(sink - lse), with lse the log-sum-exp
over both (gpt-oss, arXiv:2508.10925). A sink is one more key whose value is zero, so what holds for blocks holds for
it: it is folded in once, after the union of all blocks, and given the output and the log-sum-exp with it, the backward
pass of each block is exact as it stands.
"""

import torch
from torch import Tensor


def fold_in_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp with the sinks; both as they are without any.

    Args:
        out: attention over all keys, [S, B, A, D].
        lse: log-sum-exp over them, [S, B, A], float32 or float64.
        sinks: one logit for each head, [A].
    """
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype).expand_as(lse))
    return (out * torch.exp(lse - total).unsqueeze(-1)).to(out.dtype), total


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Gradient of the sinks, [A], from these queries; None without sinks.

    Args:
        grad_out: gradient of the output with the sinks, [S, B, A, D].
        out: that output, [S, B, A, D].
        lse: log-sum-exp with the sinks, [S, B, A].
        sinks: [A].
    """
    if sinks is None:
        return None
    # d loss / d score = p * (grad_out . value - grad_out . out), and the value of a sink is zero.
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum((0, 1)).to(sinks.dtype)
