"""Experts: gated feed-forward networks (arXiv:2002.05202) over tokens sorted by expert."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefold.model.activation_checkpoint import checkpoint_wrapper
from moefold.model.delayed_wgrad import WeightGradStoreProtocol, should_delay
from moefold.model.local_param import local_param
from moefold.model.moe.dispatch.base import ExpertMigration
from moefold.model.moe.expert_weights import ExpertWeights
from moefold.model.moe.fused_experts import FusedExpertOptions, fused_experts
from moefold.model.moe.permute import LazyCounts
from moefold.ops.gemm import TORCH_GEMM, Gemm
from moefold.ops.interface import ExpertOps, PermuteMap
from moefold.ops.swiglu import ExpertActivation, SwiGLUActivation

GROUPED_ALIGNMENT_BYTES = 16
"""Alignment of every stride that grouped_mm requires."""
SWIGLU = SwiGLUActivation()
FULL_SLICE = slice(None)


class Experts(nn.Module):
    """Routed experts: w_down(activation(x w_gate, x w_up)) each; this rank holds [E/ep, H, F/etp] of the weights.

    Biases b_gate and b_up [E/ep, F/etp] are sharded like the columns that they are added to. b_down [E/ep, H/etp] is
    sharded too: the outputs of the etp ranks are summed, so each rank adds the bias of its own columns, and every
    element is added once. Every weight gets a gradient on every rank, zero for an expert without tokens: the gradient
    reduction requires it.

    `parallelize` replaces `bias_slice` (the columns of H of the local part of b_down), `wgrad_store` (backward pass
    split in two), `saves_fc1` (save the gate and up projections for backward, or recompute them), `kernels` (fused
    kernels instead of PyTorch operations) and `gemm` (GEMM backend of `sequential_experts`).

    Args:
        num_experts: E.
        hidden_size: H.
        ffn_hidden_size: F, inner width of one expert.
        activation: of the gate and up projections; None: SwiGLU.
        has_bias: True if the three projections have biases.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: ExpertActivation | None = None,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size))
        self.w_up = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size))
        self.w_down = nn.Parameter(torch.empty(num_experts, ffn_hidden_size, hidden_size))
        self.b_gate = nn.Parameter(torch.empty(num_experts, ffn_hidden_size)) if has_bias else None
        self.b_up = nn.Parameter(torch.empty(num_experts, ffn_hidden_size)) if has_bias else None
        self.b_down = nn.Parameter(torch.empty(num_experts, hidden_size)) if has_bias else None
        self.activation = activation or SWIGLU
        self.bias_slice = FULL_SLICE
        self.wgrad_store: WeightGradStoreProtocol | None = None
        self.saves_fc1 = True
        self.kernels: ExpertOps | None = None
        self.gemm: Gemm = TORCH_GEMM

    def forward(
        self,
        x_RH: Tensor,
        tokens_per_expert: Sequence[int],
        migration: ExpertMigration | None = None,
        probs_R: Tensor | None = None,
        permute_map: PermuteMap | None = None,
    ) -> Tensor:
        """Apply each expert to its tokens; local unless experts are migrated.

        Args:
            x_RH: tokens sorted by expert, [R, H].
            tokens_per_expert: one count for each expert of this rank, then for each received one; they sum to R.
            migration: exchanges the weights of migrated experts.
            probs_R: factor of each output row, [R]. It is applied between activation and down projection, so that its
                gradient does not need the outputs, and they are not saved for backward.
            permute_map: with kernels only: x_RH is tokens [T, H], permuted by the kernels; the outputs of each are
                summed.

        Returns:
            [R, H]; under etp a partial sum over F, from this rank's weights. With a permute_map [T, H].
        """
        has_known_counts = permute_map is None and not isinstance(tokens_per_expert, LazyCounts)
        assert not has_known_counts or sum(tokens_per_expert) == x_RH.shape[0], (tokens_per_expert, x_RH.shape)
        # Where the GEMM accepts float32 weights, they are cast one expert at a time.
        accepts_fp32 = migration is None and self.kernels is None and self.gemm.accepts_fp32_weight(x_RH)
        own = [local_param(p, None if accepts_fp32 else x_RH.dtype) for p in (self.w_gate, self.w_up, self.w_down)]
        own += [local_param(p, x_RH.dtype) for p in (self.b_gate, self.b_up, self.b_down) if p is not None]
        if migration is None:
            return self._compute(x_RH, own, tokens_per_expert, probs_R, self.wgrad_store, permute_map)
        # Gradients of migrated weights are returned by a collective of the backward pass: they cannot be delayed.
        own, received = migration.migrate(own)
        num_own = own[0].shape[0]
        own_counts = tokens_per_expert[:num_own]
        received_counts = tokens_per_expert[num_own:]
        if not received_counts:
            return self._compute(x_RH, own, own_counts, probs_R)
        # Two calls, because concatenating the weights would copy all of them.
        counts = [sum(own_counts), sum(received_counts)]
        probs = (None, None) if probs_R is None else probs_R.split(counts)
        x_own, x_received = x_RH.split(counts)
        y_own = self._compute(x_own, own, own_counts, probs[0])
        return torch.cat((y_own, self._compute(x_received, received, received_counts, probs[1])))

    def _compute(
        self,
        x_RH: Tensor,
        weights: Sequence[Tensor],
        tokens_per_expert: Sequence[int],
        probs_R: Tensor | None,
        wgrad_store: WeightGradStoreProtocol | None = None,
        permute_map: PermuteMap | None = None,
    ) -> Tensor:
        w = ExpertWeights(*weights)
        if self.kernels is not None:
            fused_options = FusedExpertOptions(
                self.kernels,
                _offsets(tokens_per_expert, x_RH.device),
                self.activation,
                self.bias_slice,
                permute_map,
                self.saves_fc1,
                wgrad_store,
            )
            return fused_experts(x_RH, w, fused_options, probs_R)
        assert permute_map is None, "permute_map needs kernels"
        has_kernel = _has_grouped_kernel(x_RH, w.gate_EHF, w.down_EFH)
        if not has_kernel:
            token_counts = list(tokens_per_expert)
            sequential_options = SequentialExpertOptions(
                token_counts, self.activation, self.bias_slice, self.saves_fc1, self.gemm, wgrad_store
            )
            return sequential_experts(x_RH, w, sequential_options, probs_R)
        apply = grouped_experts if self.saves_fc1 else checkpoint_wrapper(grouped_experts)
        y_RH: Tensor = apply(x_RH, w, tokens_per_expert, self.activation, self.bias_slice, probs_R, wgrad_store)
        return y_RH


@dataclass(frozen=True)
class SequentialExpertOptions:
    """Non-tensor arguments of `sequential_experts`, saved for its backward pass."""

    tokens_per_expert: Sequence[int]
    """Tokens of each local expert; the rows are sorted by expert."""
    activation: ExpertActivation = SWIGLU
    bias_slice: slice = field(default_factory=lambda: FULL_SLICE)
    """Columns of H of the local part of b_down."""
    saves_fc1: bool = True
    """True: save the gate and up projections for backward; False: recompute them."""
    gemm: Gemm = TORCH_GEMM
    """GEMM backend."""
    wgrad_store: WeightGradStoreProtocol | None = None
    """Receives delayed weight gradients."""
    tracked_weights: tuple[Tensor, ...] = ()
    """Differentiable weights, where autograd gets detached ones because of `wgrad_store`; set internally."""


def sequential_experts(
    x_RH: Tensor, weights: ExpertWeights, options: SequentialExpertOptions, probs_R: Tensor | None = None
) -> Tensor:
    """Compute one expert after another: the reference implementation, and the fastest on CPU."""
    tensors = [getattr(weights, part.name) for part in fields(weights)]
    if options.wgrad_store is not None and should_delay(options.wgrad_store, x_RH, weights.gate_EHF):
        options = replace(options, tracked_weights=tuple(w for w in tensors if w is not None))
        tensors = [None if w is None else w.detach() for w in tensors]
    else:
        options = replace(options, wgrad_store=None)
    return _SequentialExperts.apply(x_RH, options, probs_R, *tensors)


def grouped_experts(
    x_RH: Tensor,
    weights: ExpertWeights,
    tokens_per_expert: Sequence[int],
    activation: ExpertActivation = SWIGLU,
    bias_slice: slice = FULL_SLICE,
    probs_R: Tensor | None = None,
    wgrad_store: WeightGradStoreProtocol | None = None,
) -> Tensor:
    """Compute all experts with one grouped GEMM a projection, on GPUs; needs at least one row.

    Equivalent to `sequential_experts`.
    """
    offsets_E = _offsets(tokens_per_expert, x_RH.device)
    gate_RF = _grouped_gemm(x_RH, weights.gate_EHF, offsets_E, wgrad_store)
    up_RF = _grouped_gemm(x_RH, weights.up_EHF, offsets_E, wgrad_store)
    if weights.gate_bias_EF is None or weights.up_bias_EF is None or weights.down_bias_EH is None:
        hidden_RF = _apply_activation(activation, gate_RF, up_RF, probs_R)
        return _grouped_gemm(hidden_RF, weights.down_EFH, offsets_E, wgrad_store)
    # A GEMM with a one-hot matrix instead of a gather: the order of the sum in its gradient is deterministic.
    row_R = torch.arange(x_RH.shape[0], device=x_RH.device)[:, None]
    is_before_RE = row_R < offsets_E
    one_hot_RE = is_before_RE.to(x_RH.dtype).diff(dim=1, prepend=torch.zeros_like(row_R, dtype=x_RH.dtype))
    gate_RF, up_RF = gate_RF + one_hot_RE @ weights.gate_bias_EF, up_RF + one_hot_RE @ weights.up_bias_EF
    y_RH = _grouped_gemm(
        _apply_activation(activation, gate_RF, up_RF, probs_R), weights.down_EFH, offsets_E, wgrad_store
    )
    first, stop, _ = bias_slice.indices(y_RH.shape[1])
    bias_RH = one_hot_RE @ weights.down_bias_EH
    return y_RH + F.pad(bias_RH if probs_R is None else _scale_rows(bias_RH, probs_R), (first, y_RH.shape[1] - stop))


def _offsets(tokens_per_expert: Sequence[int], device: torch.device) -> Tensor:
    """Return the end offset of each expert's rows, int32 [E] on the device, without a sync."""
    if isinstance(tokens_per_expert, LazyCounts):
        return tokens_per_expert.counts_E.cumsum(0, dtype=torch.int32)
    return torch.tensor(tokens_per_expert, dtype=torch.int32).to(device, non_blocking=True).cumsum(0, dtype=torch.int32)


def _apply_activation(activation: ExpertActivation, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None) -> Tensor:
    return (
        activation.forward(g_RF, u_RF) if probs_R is None else _ScaledActivation.apply(activation, g_RF, u_RF, probs_R)
    )


def _scale_rows(x_MF: Tensor, probs_M: Tensor) -> Tensor:
    """Scale rows by their probabilities in the higher precision of the two dtypes; returns the dtype of the rows."""
    return (x_MF * probs_M.unsqueeze(1)).to(x_MF.dtype)


def _rowwise_dot(a_MF: Tensor, b_MF: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linalg.vecdot(a_MF.to(dtype), b_MF.to(dtype))


class _ScaledActivation(torch.autograd.Function):
    """Activation times the routing probability of each row; saves the gate and up projections, not the product."""

    @staticmethod
    def forward(ctx: Any, activation: ExpertActivation, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(g_RF, u_RF, probs_R)
        return _scale_rows(activation.forward(g_RF, u_RF), probs_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        g_RF, u_RF, probs_R = ctx.saved_tensors
        hidden_RF, grad_g, grad_u = ctx.activation.backward(_scale_rows(grad_RF, probs_R), g_RF, u_RF)
        return None, grad_g, grad_u, _rowwise_dot(grad_RF, hidden_RF, probs_R.dtype)


def _has_grouped_kernel(x_RH: Tensor, *weights: Tensor) -> bool:
    if x_RH.device.type != "cuda" or x_RH.dtype != torch.bfloat16 or x_RH.shape[0] == 0:
        return False
    strides = {x_RH.shape[1], *(w.shape[2] for w in weights)}
    is_aligned = all(stride * x_RH.element_size() % GROUPED_ALIGNMENT_BYTES == 0 for stride in strides)
    return is_aligned and torch.cuda.get_device_capability(x_RH.device) >= (8, 0)


def _grouped_gemm(
    x_RK: Tensor, weights_EKN: Tensor, offsets_E: Tensor, wgrad_store: WeightGradStoreProtocol | None
) -> Tensor:
    """Multiply each row by the matrix of its expert, [R, N]; rows of expert e end at offsets_E[e]."""
    if wgrad_store is None or not should_delay(wgrad_store, x_RK, weights_EKN):
        return F.grouped_mm(x_RK, weights_EKN, offs=offsets_E)
    y_RN: Tensor = _DelayedWgradGroupedGemm.apply(x_RK, weights_EKN.detach(), (weights_EKN,), wgrad_store, offsets_E)
    return y_RN


class _DelayedWgradGroupedGemm(torch.autograd.Function):
    """Grouped GEMM with delayed weight gradients; autograd does not see the differentiable `tracked_weights`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RK: Tensor,
        weights_EKN: Tensor,
        tracked_weights: tuple[Tensor, ...],
        wgrad_store: WeightGradStoreProtocol,
        offsets_E: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_RK, weights_EKN, offsets_E)
        ctx.args = tracked_weights, wgrad_store
        return F.grouped_mm(x_RK, weights_EKN, offs=offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:
        x_RK, weights_EKN, offsets_E = ctx.saved_tensors
        tracked_weights, wgrad_store = ctx.args
        grad_RN = grad_RN.contiguous()
        wgrad_store.put(tracked_weights, lambda: (F.grouped_mm(x_RK.t(), grad_RN, offs=offsets_E),))
        return F.grouped_mm(grad_RN, weights_EKN.transpose(1, 2), offs=offsets_E), None, None, None, None


@dataclass(frozen=True)
class _ExpertGradInputs:
    """Inputs of the weight gradients of one expert."""

    expert: int
    rows: slice
    hidden: Tensor
    grad_g: Tensor
    grad_u: Tensor
    grad_y: Tensor


class _SequentialExperts(torch.autograd.Function):
    """Sequential experts; saves x and, if asked, gate and up projections. The rest stays in the CPU cache."""

    @staticmethod
    def forward(
        ctx: Any, x_RH: Tensor, options: SequentialExpertOptions, probs_R: Tensor | None, *tensors: Any
    ) -> Tensor:
        w = ExpertWeights(*tensors)
        width = tensors[0].shape[2]
        dtype = x_RH.dtype
        gemm = options.gemm
        y_RH = torch.empty_like(x_RH)
        fc1_outputs: list[Tensor] = []
        # Saved tensors have a buffer for each expert; scratch buffers are shared by all, so they stay in the cache.
        saves_gemm_output = options.saves_fc1 and not gemm.upcasts(x_RH)
        saved_buffers = _ScratchBuffers(x_RH, options, width, 2, per_expert=saves_gemm_output)
        scratch = _ScratchBuffers(x_RH, options, width, 1)
        for e, rows in _expert_slices(options.tokens_per_expert):
            x = gemm.upcast(_pad_rows(x_RH[rows], gemm))
            g, u = _fc1(x, w, e, saved_buffers.slices(rows, len(x)), options, dtype)
            (out,) = scratch.slices(rows, len(x))
            hidden = options.activation.forward(g, u, out)
            probs = _pad_probs(probs_R, rows, len(x))
            if probs is not None:
                hidden = _scale_rows(hidden, probs)
            gemm.matmul_out(y_RH[rows], hidden, gemm.cast_weight(w.down_EFH[e], dtype).t())
            if w.down_bias_EH is not None:
                count = rows.stop - rows.start
                row_probs = None if probs is None else probs[:count]
                _add_bias(y_RH[rows, options.bias_slice], w.down_bias_EH, e, row_probs)
            if options.saves_fc1:
                fc1_outputs += [g.to(x_RH.dtype), u.to(x_RH.dtype)]
        ctx.save_for_backward(x_RH, probs_R, *tensors, *fc1_outputs)
        ctx.options = options
        return y_RH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, probs_R, *tensors = ctx.saved_tensors
        num_weights = len(fields(ExpertWeights))
        tensors, fc1_outputs = tensors[:num_weights], tensors[num_weights:]
        options = ctx.options
        w = ExpertWeights(*tensors)
        dtype = x_RH.dtype
        gemm = ctx.options.gemm
        gradients = _WeightGradients(x_RH, options, tensors)
        delayed = []
        grad_x_RH = torch.empty_like(x_RH)
        grad_probs_R = None if probs_R is None else torch.empty_like(probs_R)
        width = tensors[0].shape[2]
        is_delayed = options.wgrad_store is not None
        scratch = _ScratchBuffers(x_RH, options, width, 3, per_expert=is_delayed)
        fc1_buffers = _ScratchBuffers(x_RH, options, width, 0 if options.saves_fc1 else 2)
        for i, (e, rows) in enumerate(_expert_slices(options.tokens_per_expert)):
            grad_y = gemm.upcast(_pad_rows(grad_RH[rows], gemm))
            count = rows.stop - rows.start
            if options.saves_fc1:
                gate_up = fc1_outputs[2 * i : 2 * i + 2]
            else:
                # Rounded like saved projections.
                x = gemm.upcast(_pad_rows(x_RH[rows], gemm))
                recomputed = _fc1(x, w, e, fc1_buffers.slices(rows, len(grad_y)), options, dtype)
                gate_up = [t.to(x_RH.dtype) for t in recomputed]
            g, u = gate_up
            grad_out, *activation_outs = scratch.slices(rows, len(grad_y))
            outs = None if grad_out is None else (activation_outs[0], activation_outs[1])
            grad_hidden = gemm.matmul(grad_y, gemm.cast_weight(w.down_EFH[e], dtype), grad_out)
            probs = _pad_probs(probs_R, rows, len(grad_y))
            if probs is None or grad_probs_R is None:
                hidden, grad_g, grad_u = options.activation.backward(grad_hidden, g, u, outs)
            else:
                hidden, grad_g, grad_u = options.activation.backward(_scale_rows(grad_hidden, probs), g, u, outs)
                dot = _rowwise_dot(grad_hidden, hidden, probs.dtype)
                if w.down_bias_EH is not None:
                    dot += grad_y[:, options.bias_slice].to(dot.dtype) @ w.down_bias_EH[e].to(dot.dtype)
                grad_probs_R[rows] = dot[:count]
                grad_y = _scale_rows(grad_y, probs)
            grad_inputs = _ExpertGradInputs(e, rows, hidden, grad_g, grad_u, grad_y)
            if options.wgrad_store is None:
                # Computed now, while the inputs are in the cache.
                gradients.add(grad_inputs)
            else:
                delayed.append(grad_inputs)
            gate_term = (grad_g, gemm.cast_weight(w.gate_EHF[e], dtype))
            up_term = (grad_u, gemm.cast_weight(w.up_EHF[e], dtype))
            gemm.matmul_add_out(grad_x_RH[rows], gate_term, up_term)
        if options.wgrad_store is None:
            return grad_x_RH, None, grad_probs_R, *gradients.grads
        options.wgrad_store.put(options.tracked_weights, lambda: gradients.compute(delayed))
        return grad_x_RH, None, grad_probs_R, *[None] * num_weights


class _WeightGradients:
    """Weight gradients of all experts, computed expert by expert; allocated on first use."""

    def __init__(self, x_RH: Tensor, options: SequentialExpertOptions, tensors: Sequence[Tensor | None]) -> None:
        self._x_RH = x_RH
        self._options = options
        self._tensors = tensors
        self._grads: list[Any] | None = None

    @property
    def grads(self) -> list[Any]:
        """Gradients in the order of `ExpertWeights`, None without a weight; zero for experts without tokens."""
        if self._grads is None:
            self._grads = [None if w is None else torch.empty_like(w) for w in self._tensors]
            unused_experts = [e for e, count in enumerate(self._options.tokens_per_expert) if count == 0]
            for grad in self._grads:
                for e in unused_experts if grad is not None else ():
                    grad[e].zero_()
        return self._grads

    def compute(self, experts: Sequence[_ExpertGradInputs]) -> list[Tensor]:
        """Compute the gradients of all weights that are present."""
        for inputs in experts:
            self.add(inputs)
        return [grad for grad in self.grads if grad is not None]

    def add(self, inputs: _ExpertGradInputs) -> None:
        """Compute the gradients of one expert."""
        e = inputs.expert
        grads = ExpertWeights(*self.grads)
        gemm = self._options.gemm
        x = gemm.upcast(_pad_rows(self._x_RH[inputs.rows], gemm))
        for out, left, right in (
            (grads.down_EFH[e], inputs.hidden, inputs.grad_y),
            (grads.gate_EHF[e], x, inputs.grad_g),
            (grads.up_EHF[e], x, inputs.grad_u),
        ):
            gemm.weight_gradient_out(out, left, right)
        for bias_grad, rows_grad in (
            (grads.gate_bias_EF, inputs.grad_g),
            (grads.up_bias_EF, inputs.grad_u),
            (grads.down_bias_EH, inputs.grad_y[:, self._options.bias_slice]),
        ):
            if bias_grad is not None:
                bias_grad[e] = rows_grad.sum(0)


class _ScratchBuffers:
    """Buffers for the intermediates of an expert in the GEMM's dtype; empty where the operations allocate their own.

    Args:
        x_RH: all rows.
        options: their counts.
        width: F.
        count: tensors of an expert.
        per_expert: True: a buffer for each expert; False: one shared by all.
    """

    def __init__(
        self, x_RH: Tensor, options: SequentialExpertOptions, width: int, count: int, *, per_expert: bool = False
    ) -> None:
        self._count = count
        self._per_expert = per_expert
        self._tensors: list[Tensor] = []
        like = options.gemm.upcast(x_RH[:0])
        # A GEMM with padded rows allocates its output; an unpadded one would keep the buffers of all experts alive.
        allocates_outputs = per_expert and any(
            n and options.gemm.padded_rows(n, x_RH) != n for n in options.tokens_per_expert
        )
        if options.gemm.supports_out(like) and not allocates_outputs:
            rows = len(x_RH) if per_expert else max(options.tokens_per_expert, default=0)
            self._tensors = [like.new_empty(rows, width) for _ in range(count)]

    def slices(self, rows: slice, padded: int) -> Sequence[Any]:
        """Return [rows, F] of each buffer, for the expert with these rows."""
        if not self._tensors or padded != rows.stop - rows.start:
            return [None] * self._count
        return [tensor[rows if self._per_expert else slice(padded)] for tensor in self._tensors]


def _fc1(
    x_MH: Tensor,
    w: ExpertWeights,
    expert: int,
    outs: Sequence[Any],
    options: SequentialExpertOptions,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Compute gate and up projections of an expert, with weights cast to `dtype`, in the GEMM's dtype."""
    gemm = options.gemm
    g = _add_bias(gemm.matmul(x_MH, gemm.cast_weight(w.gate_EHF[expert], dtype).t(), outs[0]), w.gate_bias_EF, expert)
    return g, _add_bias(gemm.matmul(x_MH, gemm.cast_weight(w.up_EHF[expert], dtype).t(), outs[1]), w.up_bias_EF, expert)


def _add_bias(y_MN: Tensor, bias_EN: Tensor | None, expert: int, probs_M: Tensor | None = None) -> Tensor:
    """Add the bias of an expert in place, times the probability of each row if given."""
    if bias_EN is None:
        return y_MN
    bias_N = bias_EN[expert]
    return y_MN.add_(bias_N if probs_M is None else _scale_rows(bias_N.expand_as(y_MN), probs_M))


def _expert_slices(tokens_per_expert: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have tokens, each with the slice of its rows."""
    start = 0
    for e, count in enumerate(tokens_per_expert):
        if count:
            yield e, slice(start, start + count)
        start += count


def _pad_rows(x_MH: Tensor, gemm: Gemm) -> Tensor:
    """Append zero rows up to a row count that the GEMM supports efficiently."""
    padding = gemm.padded_rows(x_MH.shape[0], x_MH) - x_MH.shape[0]
    return F.pad(x_MH, (0, 0, 0, padding)) if padding else x_MH


def _pad_probs(probs_R: Tensor | None, rows: slice, padded: int) -> Tensor | None:
    """Return the probabilities of an expert's rows, padded with zeros to `padded`."""
    return None if probs_R is None else F.pad(probs_R[rows], (0, padded - (rows.stop - rows.start)))
