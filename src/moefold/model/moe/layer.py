"""Mixture-of-experts layer: route, dispatch, apply experts, combine."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moefold.comm.resumable import Resumable, run_to_end
from moefold.config.chosen import chosen_in
from moefold.config.groups.drop import DropPart, DropScopePart
from moefold.config.groups.ffn import RoutedPart
from moefold.config.sections.moe import MoEConfig
from moefold.model.gradient_paths import without_base
from moefold.model.linear import UnquantizedLinear, linear
from moefold.model.local_param import local_param
from moefold.model.moe.dispatch.base import Dispatcher, RoutingMap
from moefold.model.moe.dispatch.local import LocalDispatcher
from moefold.model.moe.experts import Experts, LatentProjection
from moefold.model.moe.losses import RouterLosses
from moefold.model.moe.router import Router, RoutingDecision
from moefold.model.moe.token_drop import CapacityPolicy
from moefold.model.moe.token_group import NO_COLUMNS, MicroBatchGroup, TokenColumns, TokenPositions
from moefold.ops.elementwise import sigmoid
from moefold.ops.gemm import TORCH_GEMM


class LayerOutput(NamedTuple):
    """Output of an MoE layer, or of a layer of the transformer, both [S/(cp*tp), B, H]."""

    y: Tensor
    routed: Tensor | None = None
    """Output of the routed experts if `model.ffn.moe.shortcut` adds it after the next layer. Otherwise it is in `y`."""


class MoELayer(nn.Module):
    """Sparse MoE feed-forward layer over this rank's tokens.

    `last_counts_E` holds the routed tokens of each expert over the global batch of the previous step, int64 [E], all 0
    before the first step, or None unless `moe.aux_kind` is "last_global_batch" and `moe.aux_loss` is not 0.

    `parallelize` replaces `dispatcher` (expert parallelism) and `micro_batch_group` (ranks that share the micro-batch).
    A decoder sets `decoding_dispatcher`.

    Args:
        loss_scale: factor of the auxiliary losses of one micro-batch: 1 / (micro-batches of the global batch).
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
        self.decoding_dispatcher: Dispatcher[Any] | None = None
        """Sends the tokens while the model generates, without token dropping."""
        self.micro_batch_group: MicroBatchGroup = MicroBatchGroup()
        self.losses = RouterLosses(moe, part.num_choices, loss_scale, micro_batches_per_rank)
        self.stats = self.losses.stats
        self._num_experts = part.num_experts
        self._num_choices = part.num_choices
        last_counts_E = torch.zeros(part.num_choices, dtype=torch.int64) if self.losses.uses_last_batch_load else None
        self.register_buffer("last_counts_E", last_counts_E)
        self._capacity_policy = _build_capacity_policy(moe, moe.capacity_factor)
        has_own_factor = moe.eval_capacity_factor >= 0
        self._eval_capacity_policy = (
            _build_capacity_policy(moe, moe.eval_capacity_factor) if has_own_factor else self._capacity_policy
        )
        """Token dropping outside training. None means dropless."""
        self._pads_to_capacity = moe.pad_to_capacity

    @property
    def has_zero_experts(self) -> bool:
        """True if the router may choose zero-computation experts."""
        return self._num_choices > self._num_experts

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
        """Compute the MoE layer, [S/(cp*tp), B, H] -> same. With `is_shortcut`, `y` is the shared expert only.

        Communicates through `dispatcher`, `micro_batch_group` and `shared`.
        """
        return run_to_end(self.forward_resumable(x, columns))

    def forward_resumable(self, x: Tensor, columns: TokenColumns = NO_COLUMNS) -> Resumable[LayerOutput]:
        """Compute `forward`, yielding while the dispatcher communicates. `x` is not read after the first yield."""
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
        dispatcher = self.decoding_dispatcher or self.dispatcher
        expert_input = x_TH if self.latent_down is None else self.latent_down(x_TH)
        y_TH, y_shared = yield from dispatcher.run(expert_input, dispatched, self.experts, shared_expert)
        y = (y_TH if self.latent_up is None else self.latent_up(y_TH)).view_as(x)
        if y_zero is not None:
            y = y + y_zero
        if y_shared is not None and not self.is_shortcut:
            y = y + y_shared
        if self.training:
            kept_TK = None if self._capacity_policy is None else routing_map.kept_TK
            y = self.losses.attach(y, routing, kept_TK, token_positions, self.last_counts_E)
        if self.is_shortcut:
            assert y_shared is not None, "refused by validate/moe.py"
            return LayerOutput(y_shared, without_base(y))
        return LayerOutput(y)

    def _drop_tokens(self, routing: RoutingDecision, token_positions: TokenPositions) -> RoutingMap:
        policy = self._capacity_policy if self.training else self._eval_capacity_policy
        if self.decoding_dispatcher is not None:
            policy = None
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


def zero_expert_output(x: Tensor, probs_TK: Tensor, is_zero_TK: Tensor) -> Tensor:
    """Compute the sum of the zero-computation experts of each token: its input times their routing probabilities.

    Args:
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
