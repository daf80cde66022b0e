"""The mixture-of-experts layer: route, dispatch, apply experts, combine."""

from typing import Any

import torch
from torch import Tensor, nn

from moefold.config.schema import ModelConfig, MoEConfig
from moefold.model.parameter import local
from moefold.moe.dispatch.base import Assignment, Dispatcher
from moefold.moe.dispatch.local import LocalDispatcher
from moefold.moe.drop import DropRule
from moefold.moe.experts import Experts
from moefold.moe.losses import attach, load_balancing_part, z_part
from moefold.moe.router import Router, Routing
from moefold.moe.scope import LocalScope, TokenScope
from moefold.moe.stats import RoutingTotals


class MoELayer(nn.Module):
    """A sparse feed-forward layer: plain maths on this rank's tokens.

    `parallelize` replaces `dispatcher` (where the experts are) and `scope` (who shares the micro-batch).

    Args:
        model: sizes.
        moe: losses and dropping.
        loss_scale: factor of the auxiliary losses of one micro-batch: 1 / (micro-batches of the global batch).
        shared: an expert that sees every token, [S/(cp*tp), B, H] -> same.
    """

    def __init__(
        self, model: ModelConfig, moe: MoEConfig, *, loss_scale: float, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.router = Router(model.num_experts, model.hidden_size, model.top_k, model.router_softmax)
        self.experts = Experts(model.num_experts, model.hidden_size, model.moe_ffn_hidden_size)
        self.shared = shared
        has_gate = shared is not None and model.shared_expert_gate
        self.shared_gate = nn.Parameter(torch.empty(1, model.hidden_size)) if has_gate else None
        self.dispatcher: Dispatcher[Any] = LocalDispatcher(model.num_experts)
        self.scope: TokenScope = LocalScope()
        self.stats = RoutingTotals(model.num_experts)
        self._num_experts = model.num_experts
        self._aux_scale = moe.aux_loss * loss_scale
        self._z_scale = moe.z_loss * loss_scale
        drops_tokens = moe.capacity_factor > 0
        self._drop_rule = DropRule(moe.capacity_factor, moe.drop_policy, moe.drop_scope) if drops_tokens else None
        self._pads = moe.pad_to_capacity

    def forward(self, x: Tensor) -> Tensor:
        """[S/(cp*tp), B, H] -> [S/(cp*tp), B, H]; communicates through `dispatcher`, `scope` and `shared`."""
        x_TH = x.flatten(0, 1)
        routing = self.router(x_TH)
        assignment = self._assign(routing, batch_size=x.shape[1])
        rows_RH, plan = self.dispatcher.dispatch(x_TH, assignment)
        y_TH = self.dispatcher.combine(self.experts(rows_RH, plan.rows_per_expert), plan)
        y = y_TH.view_as(x)
        if self.shared is not None:
            y = y + self._shared(x)
        return self._attach_losses(y, routing, assignment) if self.training else y

    def _assign(self, routing: Routing, batch_size: int) -> Assignment:
        rule, (num_tokens, top_k) = self._drop_rule, routing.ids_TK.shape
        if rule is None:
            return Assignment(routing.ids_TK, routing.probs_TK)
        keys_T = self._token_keys(num_tokens, batch_size, routing.ids_TK.device)
        kept_TK = rule.keep(routing.ids_TK, routing.probs_TK, keys_T, self._num_experts, self.scope)
        slots = rule.slots(num_tokens, top_k, self._num_experts, self.scope) if self._pads else None
        return Assignment(routing.ids_TK, routing.probs_TK, kept_TK, slots)

    def _token_keys(self, num_tokens: int, batch_size: int, device: torch.device) -> Tensor:
        """The place of each token in the micro-batch, position * B + b: the same under every mapping."""
        positions = self.scope.positions
        if positions is None:
            return torch.arange(num_tokens, device=device)
        keys_SB = positions.to(device).unsqueeze(1) * batch_size + torch.arange(batch_size, device=device)
        return keys_SB.flatten()

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        y: Tensor = self.shared(x)
        if self.shared_gate is not None:
            y = y * torch.sigmoid(x @ local(self.shared_gate, x.dtype).t())
        return y

    def _attach_losses(self, y: Tensor, routing: Routing, assignment: Assignment) -> Tensor:
        """Make the auxiliary losses part of what is minimised, and count this micro-batch once its gradient comes."""
        ids_TK = routing.ids_TK
        ids = ids_TK.flatten()
        routed_E = torch.zeros(self._num_experts, dtype=torch.int64, device=ids.device)
        routed_E.scatter_add_(0, ids, torch.ones_like(ids))
        num_tokens = ids_TK.shape[0] * self.scope.size
        aux = z = None
        if self._aux_scale:
            whole_E = self.scope.sum(routed_E)
            part = load_balancing_part(routing.scores_TE, whole_E, num_tokens, ids_TK.shape[1])
            aux = part * self._aux_scale
            y = attach(y, aux)
        if self._z_scale:
            z = z_part(routing.logits_TE, num_tokens) * self._z_scale
            y = attach(y, z)
        if y.requires_grad:
            dropped = None if assignment.kept_TK is None else (~assignment.kept_TK).sum()
            parts = [None if part is None else part.detach() for part in (dropped, aux, z)]
            y.register_hook(lambda grad: self.stats.add(routed_E, *parts))
        return y
