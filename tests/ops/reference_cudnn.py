"""Operators with the schemas of torch's cuDNN attention, for every device and dtype, written by the definition."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from moefold.ops.block_attention import MathBlockAttention
from tests.ops.reference_flash import bind

FORWARD_SCHEMA = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
BACKWARD_SCHEMA = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default._schema


class ReferenceCudnn:
    """cuDNN attention of [B, heads, S, D] tensors. Arguments are bound to torch's schemas, by name."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, *args, **kwargs) -> tuple[Tensor, ...]:
        """(out, lse [B, heads, Sq, 1], and seven that are not read)."""
        self.calls.append("forward")
        given = bind(FORWARD_SCHEMA, args, kwargs)
        assert (given["attn_bias"], given["compute_log_sumexp"]) == (None, True)
        q, k, v = _wide(given, "query", "key", "value")
        out, lse = MathBlockAttention().forward(q, k, v, "causal" if given["is_causal"] else "all")
        return _heads_first(out).to(given["query"].dtype), lse.permute(1, 2, 0).unsqueeze(-1), *(None,) * 7

    def backward(self, *args, **kwargs) -> tuple[Tensor, ...]:
        """(dq, dk, dv), from the log-sum-exp and the output that were given."""
        self.calls.append("backward")
        given = bind(BACKWARD_SCHEMA, args, kwargs)
        lse = given["logsumexp"]
        assert lse.is_contiguous()
        assert lse.shape == (*given["query"].shape[:3], 1)
        assert (given["max_q"], given["max_k"]) == (given["query"].shape[2], given["key"].shape[2])
        assert (given["attn_bias"], given["cum_seq_q"], given["cum_seq_k"]) == (None, None, None)
        tensors = _wide(given, "grad_out", "query", "key", "value", "out")
        mask = "causal" if given["is_causal"] else "all"
        gradients = MathBlockAttention().backward(*tensors, lse.squeeze(-1).permute(2, 0, 1).double(), mask)
        return tuple(_heads_first(x).to(given["query"].dtype) for x in gradients)


@contextmanager
def reference_cudnn() -> Iterator[ReferenceCudnn]:
    """Make the kernel support every device and dtype, and compute with the reference."""
    cudnn = ReferenceCudnn()
    module = "moefold.ops.cudnn_attention"
    with (
        mock.patch(f"{module}.cudnn_attention", return_value=cudnn.forward),
        mock.patch(f"{module}.cudnn_attention_backward", return_value=cudnn.backward),
        mock.patch(f"{module}.CudaFlash.supports", return_value=True),
    ):
        yield cudnn


def _wide(given: dict, *names: str) -> list[Tensor]:
    return [given[name].double().permute(2, 0, 1, 3) for name in names]


def _heads_first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)
