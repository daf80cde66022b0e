"""The experts: one gated feed-forward (arXiv:2002.05202) each, over rows sorted by expert."""

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
"""grouped_mm wants every stride to be a multiple of this."""
SWIGLU = SwiGLUActivation()
FULL_SLICE = slice(None)


class Experts(nn.Module):
    """w_down(gate(x w_gate, x w_up)) for each expert; this rank holds [E/ep, H, F/etp] of them.

    With biases, b_gate and b_up [E/ep, F/etp] are cut as the columns that they belong to. b_down [E/ep, H/etp] is cut
    apart too: the results of the etp ranks are added up, so each rank adds the bias of its own columns, and every
    element is added once. Every weight gets a gradient on every rank, zero for an expert without rows: the reduction of
    gradients over ranks counts on it.

    `parallelize` replaces `bias_slice`, the columns of H that the local part of b_down belongs to, `wgrad_store` (a
    backward pass in two parts), `saves_fc1`: whether the inner projections are kept for the backward pass, or made
    again there, `kernels`, which compute instead of the plain maths, and `gemm`, whose products the loop takes.

    Args:
        num_experts: E.
        hidden_size: H.
        ffn_hidden_size: F, inner width of one expert.
        activation: what is done with the two inner projections; None: SwiGLU.
        has_bias: whether the three projections have biases.
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
        """Apply each expert to its rows; local without a loan.

        Args:
            x_RH: rows sorted by expert, [R, H].
            tokens_per_expert: one count for each expert of this rank, then for each borrowed one; they sum to R.
            migration: brings the weights of the borrowed experts.
            probs_R: factor of each row's result, [R]. It multiplies between the gate and the outer projection, so
                that its gradient needs no results, and nobody has to keep them.
            permute_map: with kernels alone: x_RH is tokens [T, H], to be sorted as they are read; the results of each are
                added up.

        Returns:
            [R, H]; under etp the part of the sum over F that this rank's weights give. With a sorting [T, H].
        """
        is_known = permute_map is None and not isinstance(tokens_per_expert, LazyCounts)
        assert not is_known or sum(tokens_per_expert) == x_RH.shape[0], (tokens_per_expert, x_RH.shape)
        # Where products can, wide weights are read as they are, and rounded one expert at a time.
        reads_wide = migration is None and self.kernels is None and self.gemm.accepts_fp32_weight(x_RH)
        own = [local_param(p, None if reads_wide else x_RH.dtype) for p in (self.w_gate, self.w_up, self.w_down)]
        own += [local_param(p, x_RH.dtype) for p in (self.b_gate, self.b_up, self.b_down) if p is not None]
        if migration is None:
            return self._apply_to(x_RH, own, tokens_per_expert, probs_R, self.wgrad_store, permute_map)
        # What is lent comes back with a collective, which has its place in the backward pass: nothing is postponed.
        own, borrowed = migration.migrate(own)
        num_own = own[0].shape[0]
        own_rows = tokens_per_expert[:num_own]
        borrowed_rows = tokens_per_expert[num_own:]
        if not borrowed_rows:
            return self._apply_to(x_RH, own, own_rows, probs_R)
        # Two calls rather than one over joined weights: that would copy all of them.
        counts = [sum(own_rows), sum(borrowed_rows)]
        factors = (None, None) if probs_R is None else probs_R.split(counts)
        x_own, x_borrowed = x_RH.split(counts)
        y_own = self._apply_to(x_own, own, own_rows, factors[0])
        return torch.cat((y_own, self._apply_to(x_borrowed, borrowed, borrowed_rows, factors[1])))

    def _apply_to(
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
            how = FusedExpertOptions(
                self.kernels,
                _offsets(tokens_per_expert, x_RH.device),
                self.activation,
                self.bias_slice,
                permute_map,
                self.saves_fc1,
                wgrad_store,
            )
            return fused_experts(x_RH, w, how, probs_R)
        assert permute_map is None, "without kernels rows are sorted before they come"
        has_kernel = _has_grouped_kernel(x_RH, w.gate_EHF, w.down_EFH)
        if not has_kernel:
            rows = list(tokens_per_expert)
            loop = SequentialExpertOptions(
                rows, self.activation, self.bias_slice, self.saves_fc1, self.gemm, wgrad_store
            )
            return sequential_experts(x_RH, w, loop, probs_R)
        apply = grouped_experts if self.saves_fc1 else checkpoint_wrapper(grouped_experts)
        y_RH: Tensor = apply(x_RH, w, tokens_per_expert, self.activation, self.bias_slice, probs_R, wgrad_store)
        return y_RH


@dataclass(frozen=True)
class SequentialExpertOptions:
    """How `sequential_experts` works: what its backward pass has to know beside tensors."""

    tokens_per_expert: Sequence[int]
    """Rows of each expert that lies here; the rows are sorted by it."""
    activation: ExpertActivation = SWIGLU
    bias_slice: slice = field(default_factory=lambda: FULL_SLICE)
    """The columns of H that the local part of b_down belongs to."""
    saves_fc1: bool = True
    """Whether the inner projections are kept, or made again."""
    gemm: Gemm = TORCH_GEMM
    """Who multiplies."""
    wgrad_store: WeightGradStoreProtocol | None = None
    """Takes the gradients of the weights."""
    tracked_weights: tuple[Tensor, ...] = ()
    """The differentiable weights, where autograd is given detached ones because of `wgrad_store`; not for callers."""


def sequential_experts(
    x_RH: Tensor, weights: ExpertWeights, options: SequentialExpertOptions, probs_R: Tensor | None = None
) -> Tensor:
    """One expert after another: the reference, and the fastest way on CPU."""
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
    """All experts in one kernel for each product; the twin of `sequential_experts` for GPUs. Needs at least one row."""
    offsets_E = _offsets(tokens_per_expert, x_RH.device)
    gate_RF = _grouped_gemm(x_RH, weights.gate_EHF, offsets_E, wgrad_store)
    up_RF = _grouped_gemm(x_RH, weights.up_EHF, offsets_E, wgrad_store)
    if weights.gate_bias_EF is None or weights.up_bias_EF is None or weights.down_bias_EH is None:
        hidden_RF = _apply_activation(activation, gate_RF, up_RF, probs_R)
        return _grouped_gemm(hidden_RF, weights.down_EFH, offsets_E, wgrad_store)
    # A product with the expert of each row instead of a look-up: its gradient is a sum in a fixed order.
    row_R = torch.arange(x_RH.shape[0], device=x_RH.device)[:, None]
    is_before_RE = row_R < offsets_E
    is_mine_RE = is_before_RE.to(x_RH.dtype).diff(dim=1, prepend=torch.zeros_like(row_R, dtype=x_RH.dtype))
    gate_RF, up_RF = gate_RF + is_mine_RE @ weights.gate_bias_EF, up_RF + is_mine_RE @ weights.up_bias_EF
    y_RH = _grouped_gemm(
        _apply_activation(activation, gate_RF, up_RF, probs_R), weights.down_EFH, offsets_E, wgrad_store
    )
    first, stop, _ = bias_slice.indices(y_RH.shape[1])
    bias_RH = is_mine_RE @ weights.down_bias_EH
    return y_RH + F.pad(bias_RH if probs_R is None else _scale_rows(bias_RH, probs_R), (first, y_RH.shape[1] - stop))


def _offsets(tokens_per_expert: Sequence[int], device: torch.device) -> Tensor:
    """Where the rows of each expert end, int32 [E] on the device; does not wait for it."""
    if isinstance(tokens_per_expert, LazyCounts):
        return tokens_per_expert.counts_E.cumsum(0, dtype=torch.int32)
    return torch.tensor(tokens_per_expert, dtype=torch.int32).to(device, non_blocking=True).cumsum(0, dtype=torch.int32)


def _apply_activation(activation: ExpertActivation, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None) -> Tensor:
    return (
        activation.forward(g_RF, u_RF) if probs_R is None else _ScaledActivation.apply(activation, g_RF, u_RF, probs_R)
    )


def _scale_rows(x_MF: Tensor, probs_M: Tensor) -> Tensor:
    """Rows times their weights, taken in the wider of the two types and given in that of the rows."""
    return (x_MF * probs_M.unsqueeze(1)).to(x_MF.dtype)


def _rowwise_dot(a_MF: Tensor, b_MF: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linalg.vecdot(a_MF.to(dtype), b_MF.to(dtype))


class _ScaledActivation(torch.autograd.Function):
    """The hidden values times the weight of their row; keeps the inner projections, not the hidden values."""

    @staticmethod
    def forward(ctx: Any, activation: ExpertActivation, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(g_RF, u_RF, probs_R)
        return _scale_rows(activation.forward(g_RF, u_RF), probs_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        g_RF, u_RF, weights_R = ctx.saved_tensors
        hidden_RF, grad_g, grad_u = ctx.activation.backward(_scale_rows(grad_RF, weights_R), g_RF, u_RF)
        return None, grad_g, grad_u, _rowwise_dot(grad_RF, hidden_RF, weights_R.dtype)


def _has_grouped_kernel(x_RH: Tensor, *weights: Tensor) -> bool:
    if x_RH.device.type != "cuda" or x_RH.dtype != torch.bfloat16 or x_RH.shape[0] == 0:
        return False
    strides = {x_RH.shape[1], *(w.shape[2] for w in weights)}
    is_aligned = all(stride * x_RH.element_size() % GROUPED_ALIGNMENT_BYTES == 0 for stride in strides)
    return is_aligned and torch.cuda.get_device_capability(x_RH.device) >= (8, 0)


def _grouped_gemm(
    x_RK: Tensor, weights_EKN: Tensor, offsets_E: Tensor, wgrad_store: WeightGradStoreProtocol | None
) -> Tensor:
    """Each row times the matrix of its expert, [R, N]; expert e has the rows before offsets_E[e]."""
    if wgrad_store is None or not should_delay(wgrad_store, x_RK, weights_EKN):
        return F.grouped_mm(x_RK, weights_EKN, offs=offsets_E)
    y_RN: Tensor = _DelayedWgradGroupedGemm.apply(x_RK, weights_EKN.detach(), (weights_EKN,), wgrad_store, offsets_E)
    return y_RN


class _DelayedWgradGroupedGemm(torch.autograd.Function):
    """`tracked_weights` has the differentiable weights, where autograd does not see them: their gradient takes another way."""

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
        held, later = ctx.args
        grad_RN = grad_RN.contiguous()
        later.put(held, lambda: (F.grouped_mm(x_RK.t(), grad_RN, offs=offsets_E),))
        return F.grouped_mm(grad_RN, weights_EKN.transpose(1, 2), offs=offsets_E), None, None, None, None


@dataclass(frozen=True)
class _ExpertGradInputs:
    """What the weight gradients of one expert are made of."""

    expert: int
    rows: slice
    hidden: Tensor
    grad_g: Tensor
    grad_u: Tensor
    grad_y: Tensor


class _SequentialExperts(torch.autograd.Function):
    """Keeps x and, if asked, the two inner projections; everything else of an expert lives in the cache."""

    @staticmethod
    def forward(
        ctx: Any, x_RH: Tensor, options: SequentialExpertOptions, probs_R: Tensor | None, *tensors: Any
    ) -> Tensor:
        w = ExpertWeights(*tensors)
        width = tensors[0].shape[2]
        dtype = x_RH.dtype
        gemm = options.gemm
        y_RH = torch.empty_like(x_RH)
        inner: list[Tensor] = []
        # What is kept has memory of its own; all else is the same for every expert, and stays in the cache.
        keeps_as_made = options.saves_fc1 and not gemm.upcasts(x_RH)
        kept = _ScratchBuffers(x_RH, options, width, 2, per_expert=keeps_as_made)
        scratch = _ScratchBuffers(x_RH, options, width, 1)
        for e, rows in _expert_slices(options.tokens_per_expert):
            x = gemm.upcast(_pad_rows(x_RH[rows], gemm))
            g, u = _fc1(x, w, e, kept.slices(rows, len(x)), options, dtype)
            (room,) = scratch.slices(rows, len(x))
            hidden = options.activation.forward(g, u, room)
            weights = _pad_probs(probs_R, rows, len(x))
            if weights is not None:
                hidden = _scale_rows(hidden, weights)
            gemm.matmul_out(y_RH[rows], hidden, gemm.cast_weight(w.down_EFH[e], dtype).t())
            if w.down_bias_EH is not None:
                count = rows.stop - rows.start
                of_rows = None if weights is None else weights[:count]
                _add_bias(y_RH[rows, options.bias_slice], w.down_bias_EH, e, of_rows)
            if options.saves_fc1:
                inner += [g.to(x_RH.dtype), u.to(x_RH.dtype)]
        ctx.save_for_backward(x_RH, probs_R, *tensors, *inner)
        ctx.options = options
        return y_RH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, weights_R, *tensors = ctx.saved_tensors
        num_weights = len(fields(ExpertWeights))
        tensors, inner = tensors[:num_weights], tensors[num_weights:]
        how = ctx.options
        w = ExpertWeights(*tensors)
        dtype = x_RH.dtype
        gemm = ctx.options.gemm
        gradients = _WeightGradients(x_RH, how, tensors)
        waiting = []
        grad_x_RH = torch.empty_like(x_RH)
        grad_weights_R = None if weights_R is None else torch.empty_like(weights_R)
        width = tensors[0].shape[2]
        is_postponed = how.wgrad_store is not None
        scratch = _ScratchBuffers(x_RH, how, width, 3, per_expert=is_postponed)
        made_again = _ScratchBuffers(x_RH, how, width, 0 if how.saves_fc1 else 2)
        for i, (e, rows) in enumerate(_expert_slices(how.tokens_per_expert)):
            grad_y = gemm.upcast(_pad_rows(grad_RH[rows], gemm))
            count = rows.stop - rows.start
            if how.saves_fc1:
                inner_pair = inner[2 * i : 2 * i + 2]
            else:
                # Rounded as what is kept.
                x = gemm.upcast(_pad_rows(x_RH[rows], gemm))
                again = _fc1(x, w, e, made_again.slices(rows, len(grad_y)), how, dtype)
                inner_pair = [t.to(x_RH.dtype) for t in again]
            g, u = inner_pair
            room, *rooms = scratch.slices(rows, len(grad_y))
            two_rooms = None if room is None else (rooms[0], rooms[1])
            grad_hidden = gemm.matmul(grad_y, gemm.cast_weight(w.down_EFH[e], dtype), room)
            weights = _pad_probs(weights_R, rows, len(grad_y))
            if weights is None or grad_weights_R is None:
                hidden, grad_g, grad_u = how.activation.backward(grad_hidden, g, u, two_rooms)
            else:
                hidden, grad_g, grad_u = how.activation.backward(_scale_rows(grad_hidden, weights), g, u, two_rooms)
                dot = _rowwise_dot(grad_hidden, hidden, weights.dtype)
                if w.down_bias_EH is not None:
                    dot += grad_y[:, how.bias_columns].to(dot.dtype) @ w.down_bias_EH[e].to(dot.dtype)
                grad_weights_R[rows] = dot[:count]
                grad_y = _scale_rows(grad_y, weights)
            of_expert = _ExpertGradInputs(e, rows, hidden, grad_g, grad_u, grad_y)
            if how.wgrad_store is None:
                # While they are in the cache.
                gradients.add(of_expert)
            else:
                waiting.append(of_expert)
            by_gate = (grad_g, gemm.cast_weight(w.gate_EHF[e], dtype))
            by_up = (grad_u, gemm.cast_weight(w.up_EHF[e], dtype))
            gemm.matmul_add_out(grad_x_RH[rows], by_gate, by_up)
        if how.wgrad_store is None:
            return grad_x_RH, None, grad_weights_R, *gradients.grads
        how.wgrad_store.put(how.held, lambda: gradients.compute(waiting))
        return grad_x_RH, None, grad_weights_R, *[None] * num_weights


class _WeightGradients:
    """The gradients of all experts' weights, one expert after another; made when the first is added."""

    def __init__(self, x_RH: Tensor, options: SequentialExpertOptions, tensors: Sequence[Tensor | None]) -> None:
        self._x_RH = x_RH
        self._options = options
        self._tensors = tensors
        self._grads: list[Any] | None = None

    @property
    def grads(self) -> list[Any]:
        """One for each weight of `ExpertWeights`, None where it has none; zero for experts without rows."""
        if self._grads is None:
            self._grads = [None if w is None else torch.empty_like(w) for w in self._tensors]
            without_rows = [e for e, count in enumerate(self._options.tokens_per_expert) if count == 0]
            for grad in self._grads:
                for e in without_rows if grad is not None else ():
                    grad[e].zero_()
        return self._grads

    def compute(self, experts: Sequence[_ExpertGradInputs]) -> list[Tensor]:
        """The gradients of the weights that there are, from all that each expert gave."""
        for of_expert in experts:
            self.add(of_expert)
        return [grad for grad in self.grads if grad is not None]

    def add(self, inputs: _ExpertGradInputs) -> None:
        """Compute those of one expert."""
        e = inputs.expert
        to = ExpertWeights(*self.grads)
        gemm = self._options.gemm
        x = gemm.upcast(_pad_rows(self._x_RH[inputs.rows], gemm))
        for out, left, right in (
            (to.down_EFH[e], inputs.hidden, inputs.grad_y),
            (to.gate_EHF[e], x, inputs.grad_g),
            (to.up_EHF[e], x, inputs.grad_u),
        ):
            gemm.weight_gradient_out(out, left, right)
        for bias_grad, rows_grad in (
            (to.gate_bias_EF, inputs.grad_g),
            (to.up_bias_EF, inputs.grad_u),
            (to.down_bias_EH, inputs.grad_y[:, self._options.bias_slice]),
        ):
            if bias_grad is not None:
                bias_grad[e] = rows_grad.sum(0)


class _ScratchBuffers:
    """Memory for what an expert makes of its rows, in the type of its products; none where they bring their own.

    Args:
        x_RH: all rows.
        options: their counts.
        width: F.
        count: tensors of an expert.
        per_expert: each expert has its own memory; else all have the same.
    """

    def __init__(
        self, x_RH: Tensor, options: SequentialExpertOptions, width: int, count: int, *, per_expert: bool = False
    ) -> None:
        self._count = count
        self._per_expert = per_expert
        self._tensors: list[Tensor] = []
        like = options.gemm.upcast(x_RH[:0])
        # A product whose rows are padded brings its own; one that is not would keep the memory of all.
        bring_their_own = per_expert and any(
            n and options.gemm.padded_rows(n, x_RH) != n for n in options.tokens_per_expert
        )
        if options.gemm.supports_out(like) and not bring_their_own:
            rows = len(x_RH) if per_expert else max(options.tokens_per_expert, default=0)
            self._tensors = [like.new_empty(rows, width) for _ in range(count)]

    def slices(self, rows: slice, padded: int) -> Sequence[Any]:
        """[rows, F] for each tensor of the expert that has these rows."""
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
    """The two inner projections of an expert, of weights as in `dtype`, in the type of its products."""
    gemm = options.gemm
    g = _add_bias(gemm.matmul(x_MH, gemm.cast_weight(w.gate_EHF[expert], dtype).t(), outs[0]), w.gate_bias_EF, expert)
    return g, _add_bias(gemm.matmul(x_MH, gemm.cast_weight(w.up_EHF[expert], dtype).t(), outs[1]), w.up_bias_EF, expert)


def _add_bias(y_MN: Tensor, bias_EN: Tensor | None, expert: int, probs_M: Tensor | None = None) -> Tensor:
    """Add the bias of an expert, times the weight of each row if there are any, in place."""
    if bias_EN is None:
        return y_MN
    bias_N = bias_EN[expert]
    return y_MN.add_(bias_N if probs_M is None else _scale_rows(bias_N.expand_as(y_MN), probs_M))


def _expert_slices(tokens_per_expert: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, each with its rows."""
    start = 0
    for e, count in enumerate(tokens_per_expert):
        if count:
            yield e, slice(start, start + count)
        start += count


def _pad_rows(x_MH: Tensor, gemm: Gemm) -> Tensor:
    """Append rows of zeros up to a number of rows that the product likes."""
    padding = gemm.padded_rows(x_MH.shape[0], x_MH) - x_MH.shape[0]
    return F.pad(x_MH, (0, 0, 0, padding)) if padding else x_MH


def _pad_probs(probs_R: Tensor | None, rows: slice, padded: int) -> Tensor | None:
    """As many as the rows of an expert, whose type says how they are padded."""
    return None if probs_R is None else F.pad(probs_R[rows], (0, padded - (rows.stop - rows.start)))
