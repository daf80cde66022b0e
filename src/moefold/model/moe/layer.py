"""Mixture-of-experts layer: route, dispatch, apply experts, combine."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moefold.comm.resumable import Resumable, run_to_end
from moefold.config.chosen import chosen_in
from moefold.config.groups.drop import DropPart, DropScopePart
from moefold.config.groups.ffn import RoutedPart
from moefold.config.groups.router import BalanceScopePart
from moefold.config.moe import MoEConfig
from moefold.config.routing import aux_coefficient
from moefold.model.linear import UnquantizedLinear, linear
from moefold.model.local_param import local_param
from moefold.model.moe.dispatch.base import Dispatcher, RoutingMap
from moefold.model.moe.dispatch.local import LocalDispatcher
from moefold.model.moe.experts import Experts
from moefold.model.moe.latent import LatentProjection
from moefold.model.moe.losses import (
    GlobalBatchLoad,
    RouterStats,
    attach_aux_loss,
    count_tokens_of_groups,
    count_tokens_per_expert,
    local_load_balancing_loss,
    local_weighted_load_balancing_loss,
    local_z_sum,
    placed_load_balancing_loss,
    uniform_if_empty,
    without_base,
)
from moefold.model.moe.router import Router, RoutingDecision
from moefold.model.moe.token_drop import CapacityPolicy
from moefold.model.moe.token_group import NO_COLUMNS, MicroBatchGroup, TokenColumns, TokenPositions
from moefold.ops.elementwise import sigmoid
from moefold.ops.gemm import TORCH_GEMM

LayerOutput = Tensor | tuple[Tensor, Tensor]
"""Output of a layer. An MoE layer with `model.ffn.moe.shortcut` also returns the routed part, which is added later."""


class MoELayer(nn.Module):
    """Sparse MoE feed-forward layer over this rank's tokens.

    `last_counts_E` holds the routed tokens of each expert over the global batch of the previous step, int64 [E], all 0
    before the first step; None unless `moe.aux_kind` is "last_global_batch" and `moe.aux_loss` is not 0.

    `parallelize` replaces `dispatcher` (expert parallelism) and `micro_batch_group` (ranks that share the micro-batch).

    Args:
        part: sizes.
        hidden: width of the residual stream, H.
        moe: expert choice, auxiliary losses and token dropping.
        loss_scale: factor of the auxiliary losses of one micro-batch: 1 / (micro-batches of the global batch).
        micro_batches_per_rank: micro-batches that a rank computes in a step.
        noise_seed: 64-bit seed of the router's noise.
        shared: shared expert, applied to every token, [S/(cp*tp), B, H] -> same.
    """

    last_counts_E: Tensor | None

    def __init__(
        self,
        part: RoutedPart,
        hidden: int,
        moe: MoEConfig,
        *,
        loss_scale: float,
        micro_batches_per_rank: int = 1,
        noise_seed: int = 0,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.router = Router(part, hidden, moe, noise_seed=noise_seed)
        self.experts = Experts(
            part.num_experts,
            part.token_size(hidden),
            part.intermediate_size,
            activation=part.activation.build(),
            has_bias=part.bias,
            applies_probs=moe.weight_in_expert,
            probs_on_input=part.probs_on_input,
        )
        self.latent_down = self.latent_up = None
        if part.latent_size:
            self.latent_down = LatentProjection(hidden, part.latent_size)
            self.latent_up = LatentProjection(part.latent_size, hidden)
        self.shared = shared
        self.is_shortcut = part.shortcut
        has_gate = part.shared is not None and part.shared.gate
        self.shared_gate = nn.Parameter(torch.empty(1, hidden)) if has_gate else None
        self.dispatcher: Dispatcher[Any] = LocalDispatcher(part.num_experts)
        self.micro_batch_group: MicroBatchGroup = MicroBatchGroup()
        self.stats = RouterStats(part.num_choices)
        self.counts_without_gradients = False
        """True if `stats` counts forward passes that have no backward pass, in training mode."""
        self._num_experts = part.num_experts
        self._num_choices = part.num_choices
        self._balance = chosen_in(moe, BalanceScopePart)
        self._aux_coefficient = aux_coefficient(moe)
        self._moe = moe
        self._scale_losses(loss_scale)
        self._global_batch_load = GlobalBatchLoad(micro_batches_per_rank, part.num_choices)
        uses_last_counts = self._aux_coefficient > 0 and self._balance.keeps_counts
        last_counts_E = torch.zeros(part.num_choices, dtype=torch.int64) if uses_last_counts else None
        self.register_buffer("last_counts_E", last_counts_E)
        self._micro_batches_per_rank = micro_batches_per_rank
        self._capacity_policy = _build_capacity_policy(moe, moe.capacity_factor)
        has_own_factor = moe.eval_capacity_factor >= 0
        self.eval_capacity_policy = (
            _build_capacity_policy(moe, moe.eval_capacity_factor) if has_own_factor else self._capacity_policy
        )
        """Token dropping outside training; None: dropless."""
        self._pads_to_capacity = moe.pad_to_capacity

    @property
    def has_zero_experts(self) -> bool:
        """True if the router may choose zero-computation experts."""
        return self._num_choices > self._num_experts

    def set_micro_batches(self, global_count: int, per_rank: int) -> None:
        """Set the numbers of micro-batches of the next step, in the global batch and on each rank.

        They may be lower than the numbers of the recipe if the number of samples varies from step to step.
        """
        self._scale_losses(1.0 / global_count)
        self._micro_batches_per_rank = per_rank

    def _scale_losses(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        self._aux_scale = self._aux_coefficient * loss_scale
        self._z_scale = self._moe.z_loss * loss_scale

    def begin_step(self, step: int) -> None:
        """Reset the router statistics and set the optimizer step."""
        self.stats.reset()
        self.router.step = step

    @torch.no_grad()
    def end_step(self, tokens_per_expert_E: Tensor, thresholds_E: Tensor) -> None:
        """Update the router's bias, and save the counts for the "last_global_batch" loss.

        Args:
            tokens_per_expert_E: routed tokens of each expert over the whole global batch.
            thresholds_E: thresholds of quantile balancing, mean over the tokens of the global batch.
        """
        self.router.update_bias(tokens_per_expert_E, thresholds_E)
        if self.last_counts_E is not None:
            self.last_counts_E.copy_(tokens_per_expert_E)

    def forward(self, x: Tensor, columns: TokenColumns = NO_COLUMNS) -> LayerOutput:
        """Compute the MoE layer, [S/(cp*tp), B, H] -> same; with `is_shortcut`, (shared expert, routed experts).

        Communicates through `dispatcher`, `micro_batch_group` and `shared`.

        Args:
            x: hidden states.
            columns: columns of the micro-batch.
        """
        return run_to_end(self.forward_resumable(x, columns))

    def forward_resumable(self, x: Tensor, columns: TokenColumns = NO_COLUMNS) -> Resumable[LayerOutput]:
        """Compute `forward`, yielding while the dispatcher communicates; `x` is not read after the first yield."""
        token_positions = TokenPositions.of_columns(self.micro_batch_group, x, columns)
        x_TH = x.flatten(0, 1)
        routing = self.router(x_TH, token_positions)
        routing_map = self._drop_tokens(routing, token_positions)
        dispatched = routing_map
        y_zero = None
        if self.has_zero_experts:
            dispatched, is_zero_TK = split_zero_experts(routing_map, self._num_experts)
            y_zero = zero_expert_output(x, routing.probs_TK, is_zero_TK)
        shared_expert = None if self.shared is None else lambda: self.run_shared_expert(x)
        expert_input = x_TH if self.latent_down is None else self.latent_down(x_TH)
        y_TH, y_shared = yield from self.dispatcher.run(expert_input, dispatched, self.experts, shared_expert)
        y = (y_TH if self.latent_up is None else self.latent_up(y_TH)).view_as(x)
        if y_zero is not None:
            y = y + y_zero
        if y_shared is not None and not self.is_shortcut:
            y = y + y_shared
        if self.training:
            y = self._attach_losses(y, routing, routing_map, token_positions)
        if self.is_shortcut:
            assert y_shared is not None, "refused by validate/shortcut.py"
            return y_shared, without_base(y)
        return y

    def _drop_tokens(self, routing: RoutingDecision, token_positions: TokenPositions) -> RoutingMap:
        policy = self._capacity_policy if self.training else self.eval_capacity_policy
        (num_tokens, top_k) = routing.ids_TK.shape
        is_token_T = token_positions.is_token()
        if policy is None:
            is_token_TK = None if is_token_T is None else is_token_T.unsqueeze(1).expand(-1, top_k).contiguous()
            return RoutingMap(routing.ids_TK, routing.probs_TK, is_token_TK)
        kept_TK = policy.keep_mask(
            routing.ids_TK,
            routing.probs_TK,
            token_positions.global_index(),
            self._num_choices,
            self.micro_batch_group,
            is_token_T,
        )
        padded_capacity = (
            policy.padded_capacity(num_tokens, top_k, self._num_choices, self.micro_batch_group)
            if self._pads_to_capacity
            else None
        )
        if self.has_zero_experts:
            # Zero-computation experts have no capacity.
            is_zero_TK = routing.ids_TK >= self._num_experts
            kept_TK = kept_TK | (is_zero_TK if is_token_T is None else is_zero_TK & is_token_T.unsqueeze(1))
        return RoutingMap(routing.ids_TK, routing.probs_TK, kept_TK, padded_capacity)

    def run_shared_expert(self, x: Tensor) -> Tensor:
        """Compute the shared expert with its gate, [S/(cp*tp), B, H] -> same."""
        assert self.shared is not None
        y: Tensor = self.shared(x)
        if self.shared_gate is not None:
            gate = local_param(self.shared_gate, x.dtype)
            gemm = self.router.kernels.gemm
            backend = None if gemm is TORCH_GEMM else UnquantizedLinear(gemm)
            y = y * sigmoid(x @ gate.t() if backend is None else linear(x, gate, linear_backend=backend))
        return y

    def _attach_losses(
        self, y: Tensor, routing: RoutingDecision, routing_map: RoutingMap, token_positions: TokenPositions
    ) -> Tensor:
        """Attach the auxiliary losses to y, and add this micro-batch to `stats` when its gradient arrives."""
        weights_T = token_positions.weights_T
        groups = self._loss_groups(token_positions)
        counts_XE = self._count_tokens(routing, groups, token_positions)
        aux = self._aux_loss(routing, counts_XE, groups, token_positions) if self._aux_scale else None
        z = self._z_loss(routing, weights_T) if self._z_scale else None
        for loss, scale in filter(None, (aux, z)):
            y = attach_aux_loss(y, loss, scale)
        if torch.is_grad_enabled() or self.counts_without_gradients:
            counts_E = counts_XE[0] if len(counts_XE) == 1 else counts_XE.sum(0)
            kept_TK = routing_map.kept_TK
            add = partial(
                self.stats.add,
                counts_E,
                entropy=routing.sums.entropy if routing.sums else _entropy_sum(routing.scores_TE.detach(), weights_T),
                dropped=None if kept_TK is None or self._capacity_policy is None else counts_E.sum() - kept_TK.sum(),
                aux=None if aux is None else (aux[0].detach(), aux[1]),
                z=None if z is None else (z[0].detach(), z[1]),
                thresholds_E=self._thresholds_part(routing, weights_T),
            )
            if y.requires_grad:
                y.register_hook(lambda grad: add())
            else:
                # No gradient passes a frozen layer, and it is not recomputed; or there is no backward pass.
                add()
        return y

    def _count_tokens(
        self, routing: RoutingDecision, groups: tuple[Tensor | None, int], token_positions: TokenPositions
    ) -> Tensor:
        """Count the tokens of each group of `_loss_groups` that chose each expert, [groups, E]."""
        group_T, num_groups = groups
        if routing.sums is not None and num_groups == 1:
            return routing.sums.tokens_per_expert_E.unsqueeze(0)
        is_token_T = token_positions.is_token()
        if group_T is None:
            return count_tokens_per_expert(routing.ids_TK, self._num_choices, num_groups, is_token_T)
        return count_tokens_of_groups(routing.ids_TK, self._num_choices, group_T, num_groups, is_token_T)

    def _aux_loss(
        self,
        routing: RoutingDecision,
        counts_XE: Tensor,
        groups: tuple[Tensor | None, int],
        token_positions: TokenPositions,
    ) -> tuple[Tensor, float]:
        """Return this rank's part of the load-balancing loss, and its factor."""
        num_tokens = len(routing.ids_TK) * self.micro_batch_group.size
        scores_TE = routing.scores_TE
        weights_T = token_positions.weights_T
        group_T, _ = groups
        load_XE = self._expert_load(counts_XE, token_positions)
        if group_T is not None:
            shares = 1.0 / num_tokens if weights_T is None else weights_T.to(scores_TE.dtype)
            loss = placed_load_balancing_loss(scores_TE, load_XE, group_T, shares)
        elif weights_T is None:
            sums = routing.sums
            loss = local_load_balancing_loss(scores_TE, load_XE, num_tokens, sums.scores_E if sums else None)
        else:
            loss = local_weighted_load_balancing_loss(scores_TE, load_XE, weights_T)
        return loss, self._aux_scale if weights_T is None else self._aux_coefficient

    def _z_loss(self, routing: RoutingDecision, weights_T: Tensor | None) -> tuple[Tensor, float]:
        """Return this rank's sum of the z loss, and its factor."""
        z_sum = local_z_sum(routing.logits_TE, weights_T) if routing.sums is None else routing.sums.z
        if weights_T is not None:
            return z_sum, self._moe.z_loss
        return z_sum, self._z_scale / (len(routing.ids_TK) * self.micro_batch_group.size)

    def _thresholds_part(self, routing: RoutingDecision, weights_T: Tensor | None) -> Tensor | None:
        """Return this rank's part of the mean of the thresholds over the tokens of the global batch, [E].

        The thresholds are equal on all ranks of the group: each adds the share of its tokens.
        """
        if routing.thresholds_E is None:
            return None
        if weights_T is None:
            return routing.thresholds_E * (self._loss_scale / self.micro_batch_group.size)
        return routing.thresholds_E * weights_T.sum()

    def _expert_load(self, tokens_per_expert_XE: Tensor, token_positions: TokenPositions) -> Tensor:
        """Return the routed tokens of each expert for the load-balancing loss, [1 or B, E]."""
        if self.last_counts_E is not None:
            return uniform_if_empty(self.last_counts_E).unsqueeze(0)
        if not self._balance.accumulates:
            if token_positions.placed is not None:
                return self.micro_batch_group.sum_over_data_parallel(tokens_per_expert_XE)
            return self.micro_batch_group.sum(tokens_per_expert_XE)
        return self._global_batch_load.add_micro_batch(
            self.micro_batch_group.sum_over_data_parallel(tokens_per_expert_XE),
            token_positions.micro_batch(self._micro_batches_per_rank),
        )

    def _loss_groups(self, token_positions: TokenPositions) -> tuple[Tensor | None, int]:
        """Return the load-balancing group of each row, int64 [T], and the number of groups.

        None if row i belongs to sample i modulo the number of groups.
        """
        batch_size = len(token_positions.sample_ids_B)
        placed = token_positions.placed
        if placed is None:
            return None, batch_size if self._balance.is_per_sample else 1
        if self._balance.is_global:
            return torch.zeros_like(placed.sample_ids_T), 1
        # A data-parallel rank has `micro_batches_per_rank` consecutive micro-batches of the global batch.
        owner_T = placed.micro_batches() // self._micro_batches_per_rank
        data_parallel_size = self.micro_batch_group.data_parallel_size
        if not self._balance.is_per_sample:
            return owner_T, data_parallel_size
        return owner_T * batch_size + placed.samples_in_micro_batch(), data_parallel_size * batch_size


def _entropy_sum(scores_TE: Tensor, weights_T: Tensor | None) -> Tensor:
    """Sum the entropies of the scores of tokens, in nats, without padding."""
    entropies_TE = torch.special.entr(scores_TE)
    return entropies_TE.sum() if weights_T is None else entropies_TE.sum(1).where(weights_T > 0, 0.0).sum()


def zero_expert_output(x: Tensor, probs_TK: Tensor, is_zero_TK: Tensor) -> Tensor:
    """Compute the sum of the zero-computation experts of each token: its input times their routing probabilities.

    Args:
        x: input of the layer, [S/(cp*tp), B, H].
        probs_TK: routing probabilities.
        is_zero_TK: choices that are zero-computation experts, bool [T, K].

    Returns:
        [S/(cp*tp), B, H], multiplied in the dtype of the probabilities and returned in the dtype of x.
    """
    weight_T1 = probs_TK.masked_fill(~is_zero_TK, 0.0).sum(-1, keepdim=True)
    return (x.flatten(0, 1) * weight_T1).to(x.dtype).view_as(x)


def split_zero_experts(routing_map: RoutingMap, num_experts: int) -> tuple[RoutingMap, Tensor]:
    """Return the routing to experts, and the choices of zero-computation experts, bool [T, K], without padding."""
    is_zero_TK = routing_map.ids_TK >= num_experts
    kept_TK = routing_map.kept_TK
    if kept_TK is None:
        return replace(routing_map, kept_TK=~is_zero_TK), is_zero_TK
    return replace(routing_map, kept_TK=kept_TK & ~is_zero_TK), kept_TK & is_zero_TK


def _build_capacity_policy(moe: MoEConfig, capacity_factor: float) -> CapacityPolicy | None:
    if capacity_factor <= 0:
        return None
    return CapacityPolicy(capacity_factor, chosen_in(moe, DropPart), chosen_in(moe, DropScopePart))
