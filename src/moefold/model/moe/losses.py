"""Auxiliary losses of a router, over a micro-batch, a sample or the global batch, and router statistics of a step.

A rank computes its *local* part of a loss. The sum of the parts over all ranks that share the micro-batch is the loss,
and the sum of their gradients is its gradient: both are independent of the parallel mapping.
"""

from functools import partial

import torch
from torch import Tensor

from moefold.config.chosen import chosen_in
from moefold.config.groups.router import BalanceScopePart, aux_coefficient
from moefold.config.sections.moe import MoEConfig
from moefold.model.gradient_paths import attach_aux_loss
from moefold.model.moe.router import RoutingDecision
from moefold.model.moe.token_group import TokenPositions

ScaledLoss = tuple[Tensor, float]
"""A loss and the factor of the loss."""


def local_load_balancing_loss(
    scores_TE: Tensor,
    tokens_per_expert_XE: Tensor,
    num_tokens: int,
    weights_T: Tensor | None = None,
    group_T: Tensor | None = None,
    score_sums_E: Tensor | None = None,
) -> Tensor:
    """Compute this rank's part of the load-balancing loss E * sum_e f_e P_e (arXiv:2101.03961 eq. 4). Return 1 if even.

    f_e is the share of the routed tokens that chose expert e, before dropping, and has no gradient. P_e is the mean
    score of e over the tokens of the micro-batch. With counts per sample, f and P are computed for each sample, and the
    loss is the mean over the samples (arXiv:2412.19437 eq. 17). With weights it is E * sum_t w_t sum_e f_e s_te. A
    group without tokens adds 0.

    Args:
        scores_TE: scores of all experts, which sum to 1, of this rank's tokens.
        tokens_per_expert_XE: routed tokens of each expert without padding, [1, E] over the micro-batch or more, or for
            each of X groups of tokens.
        num_tokens: tokens of the micro-batch, not used with weights.
        weights_T: share of each token in the loss, 0 for padding. None means 1/num_tokens.
        group_T: group of each row, int64 in [0, X). None means row t belongs to group t mod X.
        score_sums_E: the scores summed over this rank's tokens, if known. Used with counts [1, E] and no weights.
    """
    num_experts = scores_TE.shape[1]
    counts_XE = tokens_per_expert_XE.to(scores_TE.dtype)
    shares_XE = counts_XE / counts_XE.sum(-1, keepdim=True).clamp(min=1.0)
    if group_T is not None:
        weights = 1.0 / num_tokens if weights_T is None else weights_T.to(scores_TE.dtype)
        return num_experts * ((shares_XE[group_T] * scores_TE).sum(1) * weights).sum()
    factor = num_experts / num_tokens
    if weights_T is not None:
        scores_TE = scores_TE * weights_T.to(scores_TE.dtype).unsqueeze(1)
        factor = num_experts
    if score_sums_E is not None and weights_T is None and len(counts_XE) == 1:
        scores_XE = score_sums_E.unsqueeze(0)
    else:
        scores_XE = scores_TE.unflatten(0, (-1, len(counts_XE))).sum(0)
    return factor * (shares_XE * scores_XE).sum()


def count_tokens_per_expert(
    ids_TK: Tensor,
    num_experts: int,
    num_groups: int = 1,
    is_token_T: Tensor | None = None,
    group_T: Tensor | None = None,
) -> Tensor:
    """Count this rank's routed tokens of each expert, for each group of tokens, int64 [num_groups, E].

    Args:
        is_token_T: rows to count, bool [T]. None means all.
        group_T: group of each row. None means row t belongs to group t mod `num_groups`.
    """
    if group_T is None:
        first_X = torch.arange(num_groups, device=ids_TK.device) * num_experts
        cells = (ids_TK.unflatten(0, (-1, num_groups)) + first_X.unsqueeze(1)).flatten()
    else:
        cells = (ids_TK + group_T.unsqueeze(1) * num_experts).flatten()
    counts = torch.zeros(num_groups * num_experts, dtype=torch.int64, device=ids_TK.device)
    ones = torch.ones_like(cells) if is_token_T is None else is_token_T.long().repeat_interleave(ids_TK.shape[1])
    return counts.scatter_add_(0, cells, ones).view(num_groups, num_experts)


def local_z_sum(logits_TE: Tensor, weights_T: Tensor | None = None) -> Tensor:
    """Compute this rank's part of the z-loss times the tokens: sum of logsumexp(logits)^2 (arXiv:2202.08906 eq. 5).

    Args:
        weights_T: factor of each token. None means 1.
    """
    squares_T = logits_TE.logsumexp(-1).square()
    return squares_T.sum() if weights_T is None else (squares_T * weights_T.to(squares_T.dtype)).sum()


class RouterLosses:
    """Auxiliary losses of the router of one layer, attached to the layer's output, and the statistics of a step.

    Args:
        loss_scale: factor of the auxiliary losses of one micro-batch: 1 / (micro-batches of the global batch).
    """

    def __init__(self, moe: MoEConfig, num_choices: int, loss_scale: float, micro_batches_per_rank: int) -> None:
        self.stats = RouterStats(num_choices)
        self.counts_without_gradients = False
        """True if `stats` counts forward passes that have no backward pass, in training mode."""
        self.aux_coefficient = aux_coefficient(moe)
        self._z_coefficient = moe.z_loss
        self._num_choices = num_choices
        self._balance = chosen_in(moe, BalanceScopePart)
        self._loss_scale = loss_scale
        self._micro_batches_per_rank = micro_batches_per_rank
        self._global_batch_load = GlobalBatchLoad(micro_batches_per_rank, num_choices)

    @property
    def uses_last_batch_load(self) -> bool:
        """True if the load-balancing loss needs the expert load of the last global batch."""
        return self.aux_coefficient > 0 and self._balance.keeps_counts

    def set_micro_batches(self, global_count: int, per_rank: int) -> None:
        """Set the numbers of micro-batches of the next step, in the global batch and on each rank.

        They may be lower than the numbers of the recipe if the number of samples varies from step to step.
        """
        self._loss_scale = 1.0 / global_count
        self._micro_batches_per_rank = per_rank

    def attach(
        self,
        y: Tensor,
        routing: RoutingDecision,
        kept_TK: Tensor | None,
        tokens: TokenPositions,
        last_counts_E: Tensor | None,
    ) -> Tensor:
        """Attach the losses to y, and add this micro-batch to `stats` when its gradient arrives.

        Communicates over the ranks of the micro-batch, or over the pipeline stage.

        Args:
            kept_TK: choices that are not dropped, or None if the experts have no capacity.
            tokens: positions and weights of the tokens.
            last_counts_E: expert load of the last global batch, if it `uses_last_batch_load`.
        """
        weights_T = tokens.weights_T
        group_T, num_groups = self._groups(tokens)
        if routing.sums is not None and num_groups == 1:
            counts_XE = routing.sums.tokens_per_expert_E.unsqueeze(0)
        else:
            counts_XE = count_tokens_per_expert(
                routing.ids_TK, self._num_choices, num_groups, tokens.is_token(), group_T
            )
        aux = z = None
        if self.aux_coefficient:
            aux = self._aux_loss(routing, self._expert_load(counts_XE, tokens, last_counts_E), group_T, tokens)
        if self._z_coefficient:
            z = self._z_loss(routing, tokens)
        for loss, scale in filter(None, (aux, z)):
            y = attach_aux_loss(y, loss, scale)
        if torch.is_grad_enabled() or self.counts_without_gradients:
            counts_E = counts_XE[0] if len(counts_XE) == 1 else counts_XE.sum(0)
            add = partial(
                self.stats.add,
                counts_E,
                entropy=routing.sums.entropy if routing.sums else entropy_sum(routing.scores_TE.detach(), weights_T),
                dropped=None if kept_TK is None else counts_E.sum() - kept_TK.sum(),
                aux=None if aux is None else (aux[0].detach(), aux[1]),
                z=None if z is None else (z[0].detach(), z[1]),
                thresholds_E=self._thresholds_part(routing, tokens),
            )
            if y.requires_grad:
                y.register_hook(lambda grad: add())
            else:
                # No gradient passes a frozen layer, and it is not recomputed; or there is no backward pass.
                add()
        return y

    def _aux_loss(
        self, routing: RoutingDecision, load_XE: Tensor, group_T: Tensor | None, tokens: TokenPositions
    ) -> ScaledLoss:
        """Return this rank's part of the load-balancing loss, and its factor."""
        weights_T = tokens.weights_T
        loss = local_load_balancing_loss(
            routing.scores_TE,
            load_XE,
            len(routing.ids_TK) * tokens.group.size,
            weights_T,
            group_T,
            routing.sums.scores_E if routing.sums else None,
        )
        return loss, self.aux_coefficient * (self._loss_scale if weights_T is None else 1.0)

    def _z_loss(self, routing: RoutingDecision, tokens: TokenPositions) -> ScaledLoss:
        """Return this rank's sum of the z loss, and its factor."""
        weights_T = tokens.weights_T
        z_sum = local_z_sum(routing.logits_TE, weights_T) if routing.sums is None else routing.sums.z
        if weights_T is not None:
            return z_sum, self._z_coefficient
        return z_sum, self._z_coefficient * self._loss_scale / (len(routing.ids_TK) * tokens.group.size)

    def _thresholds_part(self, routing: RoutingDecision, tokens: TokenPositions) -> Tensor | None:
        """Return this rank's part of the mean of the thresholds over the tokens of the global batch, [E].

        The thresholds are equal on all ranks of the group: each adds the share of its tokens.
        """
        if routing.thresholds_E is None:
            return None
        if tokens.weights_T is None:
            return routing.thresholds_E * (self._loss_scale / tokens.group.size)
        return routing.thresholds_E * tokens.weights_T.sum()

    def _expert_load(
        self, tokens_per_expert_XE: Tensor, tokens: TokenPositions, last_counts_E: Tensor | None
    ) -> Tensor:
        """Return the routed tokens of each expert for the load-balancing loss, [1 or B, E]."""
        if last_counts_E is not None:
            # Even before the first step, when all are 0, and without a wait for the device.
            return torch.where(last_counts_E.any(), last_counts_E, 1).unsqueeze(0)
        if not self._balance.accumulates:
            if tokens.placed is not None:
                return tokens.group.sum_over_data_parallel(tokens_per_expert_XE)
            return tokens.group.sum(tokens_per_expert_XE)
        return self._global_batch_load.add_micro_batch(
            tokens.group.sum_over_data_parallel(tokens_per_expert_XE), tokens.micro_batch(self._micro_batches_per_rank)
        )

    def _groups(self, tokens: TokenPositions) -> tuple[Tensor | None, int]:
        """Return the load-balancing group of each row, int64 [T], and the number of groups.

        None if row i belongs to sample i modulo the number of groups.
        """
        batch_size = len(tokens.sample_ids_B)
        placed = tokens.placed
        if placed is None:
            return None, batch_size if self._balance.is_per_sample else 1
        if self._balance.is_global:
            return torch.zeros_like(placed.sample_ids_T), 1
        # A data-parallel rank has `micro_batches_per_rank` consecutive micro-batches of the global batch.
        owner_T = placed.micro_batches() // self._micro_batches_per_rank
        num_owners = tokens.group.data_parallel_size
        if not self._balance.is_per_sample:
            return owner_T, num_owners
        return owner_T * batch_size + placed.samples_in_micro_batch(), num_owners * batch_size


class GlobalBatchLoad:
    """Expert load of the global batch so far, by micro-batch (arXiv:2501.11873 sec. 2).

    Counts are stored per micro-batch, so that a recomputed forward pass reads the same sum, even after later
    micro-batches.
    """

    def __init__(self, micro_batches_per_rank: int, num_experts: int) -> None:
        self._counts_NE = torch.zeros(micro_batches_per_rank, num_experts, dtype=torch.int64, device="cpu")

    def add_micro_batch(self, counts_1E: Tensor, micro_batch: Tensor) -> Tensor:
        """Store the counts of a micro-batch, 0-dim int64 and 0-based. It returns the sum up to and with it, [1, E]."""
        if self._counts_NE.device != counts_1E.device:
            self._counts_NE = self._counts_NE.to(counts_1E.device)
        self._counts_NE.index_copy_(0, micro_batch.view(1), counts_1E)
        is_past_N = torch.arange(len(self._counts_NE), device=micro_batch.device) <= micro_batch
        return (self._counts_NE * is_past_N.unsqueeze(1)).sum(0, keepdim=True)


class RouterStats:
    """Router statistics of this rank's tokens, summed over the micro-batches of a step, on the device, without syncs.

    A micro-batch is counted when its gradient passes the layer: once, also if its forward pass is recomputed, and never
    in evaluation. Steps without a backward pass count it in the forward pass (`RouterLosses.counts_without_gradients`).
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
        """Add one micro-batch. None counts as zero."""
        device = tokens_per_expert_E.device
        if self.tokens_per_expert_E.device != device:
            for name, total in vars(self).items():
                setattr(self, name, total.to(device))
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


def entropy_sum(scores_TE: Tensor, weights_T: Tensor | None) -> Tensor:
    """Sum the entropies of the scores of tokens, in nats, without padding."""
    entropies_TE = torch.special.entr(scores_TE)
    return entropies_TE.sum() if weights_T is None else entropies_TE.sum(1).where(weights_T > 0, 0.0).sum()
