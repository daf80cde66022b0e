"""Expert operations of one expert after another, so that the intermediates of an expert stay in the CPU's cache.

It is the fastest on a CPU, and serves dtypes without a grouped GEMM on other devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.ops.expert_ops import ExpertGradients, ExpertOptions, ExpertWeights, rowwise_dot, scale_rows
from moefold.ops.gemm import TORCH_GEMM, Gemm


@dataclass(frozen=True)
class SequentialExpertOps:
    """`ExpertOps` of one expert after another. It saves the gate and up projections, if asked.

    Args:
        gemm: GEMM backend. If it multiplies in higher precision, the intermediates are in that precision. If it accepts
            float32 weights, they are cast one expert at a time.
    """

    fuses_permutation = False
    probs_commute = True
    gemm: Gemm = TORCH_GEMM

    def weight_dtype(self, x: Tensor) -> torch.dtype | None:
        """See `ExpertOps`."""
        return None if self.gemm.accepts_fp32_weight(x) else x.dtype

    def forward(
        self, x: Tensor, weights: ExpertWeights, options: ExpertOptions, probs_R: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `ExpertOps`."""
        gemm = self.gemm
        y_RH = torch.empty_like(x)
        fc1_outputs: list[Tensor] = []
        # Saved tensors have a buffer for each expert. All experts share scratch buffers, which stay in the cache.
        saves_gemm_output = options.saves_fc1 and not gemm.upcasts(x)
        saved_buffers = self._buffers(x, weights, options, 2, per_expert=saves_gemm_output)
        scratch = self._buffers(x, weights, options, 1)
        for e, rows in _expert_slices(options.tokens_per_expert):
            x_MH = self._padded(x[rows])
            g, u = self._fc1(x_MH, weights, e, saved_buffers.slices(rows, len(x_MH)), x.dtype)
            (out,) = scratch.slices(rows, len(x_MH))
            hidden = options.activation.forward(g, u, out)
            probs = _pad_probs(probs_R, rows, len(x_MH))
            if probs is not None:
                hidden = scale_rows(hidden, probs)
            gemm.matmul_out(y_RH[rows], hidden, gemm.cast_weight(weights.down_EFH[e], x.dtype).t())
            if weights.down_bias_EH is not None:
                row_probs = None if probs_R is None else probs_R[rows]
                _add_bias(y_RH[rows, options.bias_slice], weights.down_bias_EH, e, row_probs)
            if options.saves_fc1:
                fc1_outputs += [g.to(x.dtype), u.to(x.dtype)]
        return y_RH, tuple(fc1_outputs)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weights: ExpertWeights,
        options: ExpertOptions,
        probs_R: Tensor | None,
        saved: Sequence[Tensor],
    ) -> ExpertGradients:
        """See `ExpertOps`. Weight gradients that are not delayed are computed while their inputs are in the cache."""
        gemm = self.gemm
        gradients = _WeightGradients(self, x, weights, options)
        delayed: list[_ExpertGradInputs] = []
        grad_x_RH = torch.empty_like(x)
        grad_probs_R = None if probs_R is None else torch.empty_like(probs_R)
        scratch = self._buffers(x, weights, options, 3, per_expert=options.delays_wgrad)
        fc1_buffers = self._buffers(x, weights, options, 0 if options.saves_fc1 else 2)
        for i, (e, rows) in enumerate(_expert_slices(options.tokens_per_expert)):
            grad_y = self._padded(grad[rows])
            if options.saves_fc1:
                g, u = saved[2 * i : 2 * i + 2]
            else:
                recomputed = self._fc1(
                    self._padded(x[rows]), weights, e, fc1_buffers.slices(rows, len(grad_y)), x.dtype
                )
                # Rounded like saved projections.
                g, u = (projection.to(x.dtype) for projection in recomputed)
            grad_out, *activation_outs = scratch.slices(rows, len(grad_y))
            outs = None if grad_out is None else (activation_outs[0], activation_outs[1])
            grad_hidden = gemm.matmul(grad_y, gemm.cast_weight(weights.down_EFH[e], x.dtype), grad_out)
            probs = _pad_probs(probs_R, rows, len(grad_y))
            if probs is None or grad_probs_R is None:
                hidden, grad_g, grad_u = options.activation.backward(grad_hidden, g, u, outs)
            else:
                hidden, grad_g, grad_u = options.activation.backward(scale_rows(grad_hidden, probs), g, u, outs)
                dot = rowwise_dot(grad_hidden, hidden, probs.dtype)
                if weights.down_bias_EH is not None:
                    dot += grad_y[:, options.bias_slice].to(dot.dtype) @ weights.down_bias_EH[e].to(dot.dtype)
                grad_probs_R[rows] = dot[: rows.stop - rows.start]
                grad_y = scale_rows(grad_y, probs)
            inputs = _ExpertGradInputs(e, rows, hidden, grad_g, grad_u, grad_y)
            if options.delays_wgrad:
                delayed.append(inputs)
            else:
                gradients.add(inputs)
            gate_term = (grad_g, gemm.cast_weight(weights.gate_EHF[e], x.dtype))
            up_term = (grad_u, gemm.cast_weight(weights.up_EHF[e], x.dtype))
            gemm.matmul_add_out(grad_x_RH[rows], gate_term, up_term)
        return ExpertGradients(grad_x_RH, grad_probs_R, lambda: gradients.compute(delayed))

    def _fc1(
        self, x_MH: Tensor, weights: ExpertWeights, expert: int, outs: Sequence[Tensor | None], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Compute gate and up projections of an expert, with weights cast to `dtype`, in the GEMM's dtype."""
        gemm = self.gemm
        g = gemm.matmul(x_MH, gemm.cast_weight(weights.gate_EHF[expert], dtype).t(), outs[0])
        u = gemm.matmul(x_MH, gemm.cast_weight(weights.up_EHF[expert], dtype).t(), outs[1])
        return _add_bias(g, weights.gate_bias_EF, expert), _add_bias(u, weights.up_bias_EF, expert)

    def _padded(self, x_MH: Tensor) -> Tensor:
        """Return rows in the GEMM's dtype, with zero rows appended up to a count that it supports efficiently."""
        padding = self.gemm.padded_rows(x_MH.shape[0], x_MH) - x_MH.shape[0]
        return self.gemm.upcast(F.pad(x_MH, (0, 0, 0, padding)) if padding else x_MH)

    def _buffers(
        self, x: Tensor, weights: ExpertWeights, options: ExpertOptions, count: int, *, per_expert: bool = False
    ) -> "_Buffers":
        """Allocate `count` buffers [rows, F] for intermediates of an expert, in the GEMM's dtype.

        There are no buffers if the GEMM allocates its output, as a GEMM with padded rows does: an unpadded output would
        then keep the buffers of all experts alive.

        Args:
            per_expert: True: a buffer for each expert. False: one buffer for all.
        """
        counts = options.tokens_per_expert
        like = self.gemm.upcast(x[:0])
        allocates_outputs = per_expert and any(n and self.gemm.padded_rows(n, x) != n for n in counts)
        if not self.gemm.supports_out(like) or allocates_outputs:
            return _Buffers([], count, per_expert)
        num_rows = len(x) if per_expert else max(counts, default=0)
        width = weights.gate_EHF.shape[2]
        return _Buffers([like.new_empty(num_rows, width) for _ in range(count)], count, per_expert)


@dataclass(frozen=True)
class _Buffers:
    """Buffers for the intermediates of an expert, or empty where the operations allocate their own."""

    tensors: list[Tensor]
    count: int
    per_expert: bool

    def slices(self, rows: slice, padded: int) -> Sequence[Any]:
        """Return [rows, F] of each buffer, for the expert with these rows."""
        if not self.tensors or padded != rows.stop - rows.start:
            return [None] * self.count
        return [tensor[rows if self.per_expert else slice(padded)] for tensor in self.tensors]


@dataclass(frozen=True)
class _ExpertGradInputs:
    """Inputs of the weight gradients of one expert."""

    expert: int
    rows: slice
    hidden: Tensor
    grad_g: Tensor
    grad_u: Tensor
    grad_y: Tensor


class _WeightGradients:
    """Weight gradients of all experts, computed expert by expert. Allocated on first use."""

    def __init__(self, ops: SequentialExpertOps, x: Tensor, weights: ExpertWeights, options: ExpertOptions) -> None:
        self._ops = ops
        self._x = x
        self._weights = weights
        self._options = options
        self._grads: list[Any] | None = None

    def compute(self, experts: Sequence[_ExpertGradInputs]) -> list[Tensor | None]:
        """Compute the gradients of these experts, and return the gradients of all, in the order of `ExpertWeights`."""
        for inputs in experts:
            self.add(inputs)
        return self._allocated()

    def add(self, inputs: _ExpertGradInputs) -> None:
        """Compute the gradients of one expert."""
        e = inputs.expert
        grads = ExpertWeights(*self._allocated())
        x_MH = self._ops._padded(self._x[inputs.rows])
        self._ops.gemm.weight_gradient_out(grads.down_EFH[e], inputs.hidden, inputs.grad_y)
        self._ops.gemm.weight_gradient_out(grads.gate_EHF[e], x_MH, inputs.grad_g)
        self._ops.gemm.weight_gradient_out(grads.up_EHF[e], x_MH, inputs.grad_u)
        for bias_grad, rows_grad in (
            (grads.gate_bias_EF, inputs.grad_g),
            (grads.up_bias_EF, inputs.grad_u),
            (grads.down_bias_EH, inputs.grad_y[:, self._options.bias_slice]),
        ):
            if bias_grad is not None:
                bias_grad[e] = rows_grad.sum(0)

    def _allocated(self) -> list[Any]:
        """Return the gradients: zero for experts without tokens, uninitialised before `add` for the other experts."""
        if self._grads is None:
            weights = (getattr(self._weights, entry.name) for entry in fields(ExpertWeights))
            self._grads = [None if weight is None else torch.empty_like(weight) for weight in weights]
            for grad in self._grads:
                for e, count in enumerate(self._options.tokens_per_expert):
                    if grad is not None and count == 0:
                        grad[e].zero_()
        return self._grads


def _add_bias(y_MN: Tensor, bias_EN: Tensor | None, expert: int, probs_M: Tensor | None = None) -> Tensor:
    """Add the bias of an expert in place, times the probability of each row if given."""
    if bias_EN is None:
        return y_MN
    bias_N = bias_EN[expert]
    return y_MN.add_(bias_N if probs_M is None else scale_rows(bias_N.expand_as(y_MN), probs_M))


def _expert_slices(tokens_per_expert: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have tokens, each with the slice of its rows."""
    start = 0
    for e, count in enumerate(tokens_per_expert):
        if count:
            yield e, slice(start, start + count)
        start += count


def _pad_probs(probs_R: Tensor | None, rows: slice, padded: int) -> Tensor | None:
    """Return the probabilities of an expert's rows, padded with zeros to `padded`."""
    return None if probs_R is None else F.pad(probs_R[rows], (0, padded - (rows.stop - rows.start)))
