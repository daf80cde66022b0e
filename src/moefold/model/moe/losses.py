"""Auxiliary losses of a router, over a micro-batch, a sample or the global batch, and router statistics of a step.

A rank computes its *local* part of a loss. The sum of the parts over all ranks that share the micro-batch is the loss,
and the sum of their gradients is its gradient: both are independent of the parallel mapping.
"""

from typing import Any

import torch
from torch import Tensor

ScaledLoss = tuple[Tensor, float]
"""A loss and the factor of the loss."""


def local_load_balancing_loss(
    scores_TE: Tensor, tokens_per_expert_XE: Tensor, num_tokens: int, score_sums_E: Tensor | None = None
) -> Tensor:
    """Compute this rank's part of the load-balancing loss E * sum_e f_e P_e (arXiv:2101.03961 eq. 4); 1 if even.

    f_e is the share of the routed tokens that chose expert e, before dropping, and has no gradient; P_e is the mean
    score of e over the tokens of the micro-batch. With counts per sample, f and P are computed for each sample, and
    the loss is the mean over the samples (arXiv:2412.19437 eq. 17).

    Args:
        scores_TE: scores of all experts, which sum to 1, of this rank's tokens; row t belongs to sample t mod X.
        tokens_per_expert_XE: routed tokens of each expert, [1, E] over the micro-batch or more, or [B, E] per sample.
        num_tokens: tokens of the micro-batch.
        score_sums_E: the scores summed over this rank's tokens, if known; used with counts [1, E].
    """
    if score_sums_E is not None and len(tokens_per_expert_XE) == 1:
        scores_XE = score_sums_E.unsqueeze(0)
    else:
        scores_XE = scores_TE.unflatten(0, (-1, len(tokens_per_expert_XE))).sum(0)
    return scores_TE.shape[1] / num_tokens * (_shares(tokens_per_expert_XE, scores_TE.dtype) * scores_XE).sum()


def local_weighted_load_balancing_loss(scores_TE: Tensor, tokens_per_expert_XE: Tensor, weights_T: Tensor) -> Tensor:
    """Compute this rank's part of E * sum_t w_t sum_e f_e s_te: the load-balancing loss of a batch with padding.

    With equal weights w it is `local_load_balancing_loss`. A sample or micro-batch without tokens adds 0.

    Args:
        scores_TE: see `local_load_balancing_loss`.
        tokens_per_expert_XE: as for `local_load_balancing_loss`, without padding.
        weights_T: share of each token in the loss, 0 for padding.
    """
    weighted_TE = scores_TE * weights_T.to(scores_TE.dtype).unsqueeze(1)
    scores_XE = weighted_TE.unflatten(0, (-1, len(tokens_per_expert_XE))).sum(0)
    return scores_TE.shape[1] * (_shares(tokens_per_expert_XE, scores_TE.dtype) * scores_XE).sum()


def placed_load_balancing_loss(
    scores_TE: Tensor, tokens_per_expert_XE: Tensor, group_T: Tensor, weights_T: Tensor | float
) -> Tensor:
    """Compute this rank's part of E * sum_t w_t sum_e f_e s_te for rows of any samples.

    Args:
        scores_TE: scores of all experts of this rank's tokens, which sum to 1.
        tokens_per_expert_XE: routed tokens of each expert in each group of tokens, without padding.
        group_T: group of each row, int64 in [0, X).
        weights_T: share of each token in the loss, 0 for padding.
    """
    share_TE = _shares(tokens_per_expert_XE, scores_TE.dtype)[group_T]
    return scores_TE.shape[1] * ((share_TE * scores_TE).sum(1) * weights_T).sum()


def _shares(tokens_per_expert_XE: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the share of each expert in the routed tokens, [X, E]; 0 without routed tokens."""
    counts_XE = tokens_per_expert_XE.to(dtype)
    return counts_XE / counts_XE.sum(-1, keepdim=True).clamp(min=1.0)


def count_tokens_per_expert(
    ids_TK: Tensor, num_experts: int, num_samples: int = 1, is_token_T: Tensor | None = None
) -> Tensor:
    """Count this rank's routed tokens of each expert.

    Args:
        ids_TK: chosen experts; row t belongs to sample t mod `num_samples`.
        num_experts: E.
        num_samples: samples to count separately.
        is_token_T: rows to count, bool [T]; None: all.

    Returns:
        int64 [num_samples, E].
    """
    samples_X = torch.arange(num_samples, device=ids_TK.device) * num_experts
    cells = (ids_TK.unflatten(0, (-1, num_samples)) + samples_X.unsqueeze(1)).flatten()
    counts = torch.zeros(num_samples * num_experts, dtype=torch.int64, device=ids_TK.device)
    ones = torch.ones_like(cells) if is_token_T is None else is_token_T.long().repeat_interleave(ids_TK.shape[1])
    return counts.scatter_add_(0, cells, ones).view(num_samples, num_experts)


def uniform_if_empty(counts_E: Tensor) -> Tensor:
    """Return the counts, or 1 for each expert if all are 0, as before the first step; never synchronises."""
    return torch.where(counts_E.any(), counts_E, torch.ones_like(counts_E))


class GlobalBatchLoad:
    """Expert load of the global batch so far, by micro-batch (arXiv:2501.11873 sec. 2).

    Counts are stored per micro-batch, so that a recomputed forward pass reads the same sum, even after later
    micro-batches.

    Args:
        micro_batches_per_rank: micro-batches that a rank computes in a step.
        num_experts: E.
    """

    def __init__(self, micro_batches_per_rank: int, num_experts: int) -> None:
        self._counts_NE = torch.zeros(micro_batches_per_rank, num_experts, dtype=torch.int64, device="cpu")

    def add_micro_batch(self, counts_1E: Tensor, micro_batch: Tensor) -> Tensor:
        """Store the counts of a micro-batch, 0-dim int64 and 0-based; returns the sum up to and with it, [1, E]."""
        if self._counts_NE.device != counts_1E.device:
            self._counts_NE = self._counts_NE.to(counts_1E.device)
        self._counts_NE.index_copy_(0, micro_batch.view(1), counts_1E)
        is_past_N = torch.arange(len(self._counts_NE), device=micro_batch.device) <= micro_batch
        return (self._counts_NE * is_past_N.unsqueeze(1)).sum(0, keepdim=True)


def count_tokens_of_groups(
    ids_TK: Tensor, num_experts: int, group_T: Tensor, num_groups: int, is_token_T: Tensor | None = None
) -> Tensor:
    """Count this rank's routed tokens of each expert by group of tokens, int64 [num_groups, E].

    Args:
        ids_TK: chosen experts.
        num_experts: E.
        group_T: group of each row.
        num_groups: groups.
        is_token_T: rows to count, bool [T]; None: all.
    """
    cells = (ids_TK + group_T.unsqueeze(1) * num_experts).flatten()
    counts = torch.zeros(num_groups * num_experts, dtype=torch.int64, device=ids_TK.device)
    ones = torch.ones_like(cells) if is_token_T is None else is_token_T.long().repeat_interleave(ids_TK.shape[1])
    return counts.scatter_add_(0, cells, ones).view(num_groups, num_experts)


def local_z_sum(logits_TE: Tensor, weights_T: Tensor | None = None) -> Tensor:
    """Compute this rank's part of the z-loss times the tokens: sum of logsumexp(logits)^2 (arXiv:2202.08906 eq. 5).

    Args:
        logits_TE: logits of this rank's tokens.
        weights_T: factor of each token; None: 1.
    """
    squares_T = logits_TE.logsumexp(-1).square()
    return squares_T.sum() if weights_T is None else (squares_T * weights_T.to(squares_T.dtype)).sum()


def attach_aux_loss(x: Tensor, loss: Tensor, scale: float = 1.0) -> Tensor:
    """Return `x` unchanged; the backward pass through it adds the gradient of `scale * loss`.

    So the loss of any layer is minimised without being passed to the last pipeline stage.
    """
    return _AttachAuxLoss.apply(x, loss, scale)


def without_base(x: Tensor) -> Tensor:
    """Return `x` as a tensor that autograd does not treat as a view: FSDP warns of modules that return views."""
    return x if x._base is None else _WithoutBase.apply(x)


class _WithoutBase(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _AttachAuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.loss_options = {"dtype": loss.dtype, "device": loss.device}
        ctx.loss_shape = loss.shape
        ctx.scale = scale
        # The result has the same storage, but is not a view for autograd: FSDP warns of modules that return views.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full(ctx.loss_shape, ctx.scale, **ctx.loss_options), None


class RouterStats:
    """Router statistics of this rank's tokens, summed over the micro-batches of a step; on the device, without syncs.

    A micro-batch is counted when its gradient passes the layer: once, also if its forward pass is recomputed, and never
    in evaluation. Steps without a backward pass count it in the forward pass (`MoELayer.counts_without_gradients`).
    """

    def __init__(self, num_experts: int) -> None:
        self.tokens_per_expert_E = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        """Routed tokens of each expert of the model, before dropping."""
        self.dropped = torch.zeros((), dtype=torch.int64, device="cpu")
        """Dropped tokens."""
        self.aux = torch.zeros((), dtype=torch.float64, device="cpu")
        """This rank's part of the load-balancing loss as optimised: with its coefficient, mean over micro-batches."""
        self.z = torch.zeros((), dtype=torch.float64, device="cpu")
        """This rank's part of the z-loss as optimised."""
        self.entropy = torch.zeros((), dtype=torch.float64, device="cpu")
        """Sum over tokens of the entropy of their scores, in nats."""
        self.thresholds_E = torch.zeros(num_experts, dtype=torch.float64, device="cpu")
        """This rank's part of the mean over the tokens of the global batch of the thresholds of quantile balancing."""

    @property
    def routed_tokens(self) -> Tensor:
        """Routed tokens in total."""
        return self.tokens_per_expert_E.sum()

    def add(
        self,
        tokens_per_expert_E: Tensor,
        *,
        entropy: Tensor,
        dropped: Tensor | None,
        aux: ScaledLoss | None,
        z: ScaledLoss | None,
        thresholds_E: Tensor | None,
    ) -> None:
        """Add one micro-batch; None counts as zero."""
        self._move_to(tokens_per_expert_E.device)
        self.tokens_per_expert_E += tokens_per_expert_E
        self.entropy += entropy
        if dropped is not None:
            self.dropped += dropped
        if aux is not None:
            self.aux.add_(aux[0], alpha=aux[1])
        if z is not None:
            self.z.add_(z[0], alpha=z[1])
        if thresholds_E is not None:
            self.thresholds_E += thresholds_E

    def reset(self) -> None:
        """Set all sums to zero for a new step."""
        for total in vars(self).values():
            total.zero_()

    def _move_to(self, device: torch.device) -> None:
        if self.tokens_per_expert_E.device != device:
            for name, total in vars(self).items():
                setattr(self, name, total.to(device))
