"""The mixture-of-experts layer: route, dispatch, apply experts, combine."""

from typing import Any

import torch
from torch import Tensor, nn

from moefold.config.schema import ModelConfig, MoEConfig
from moefold.kernels.rows import Sorting
from moefold.model.parameter import local
from moefold.model.steps import Steps, finish
from moefold.moe.dispatch.base import Assignment, Dispatcher, Plan
from moefold.moe.dispatch.local import LocalDispatcher
from moefold.moe.drop import DropRule
from moefold.moe.experts import Experts
from moefold.moe.gate import expert_gate
from moefold.moe.losses import RunningLoad, attach, count_copies, even_if_none, load_balancing_part, z_part
from moefold.moe.router import Router, Routing
from moefold.moe.scope import LocalScope, TokenPlaces, TokenScope
from moefold.moe.stats import RoutingTotals


class MoELayer(nn.Module):
    """A sparse feed-forward layer: plain maths on this rank's tokens.

    `last_counts_E` are the copies of the whole global batch of the step before, int64 [E], all 0 before the first one;
    None unless the load-balancing loss looks back at them.

    `parallelize` replaces `dispatcher` (where the experts are) and `scope` (who shares the micro-batch).

    Args:
        model: sizes and router.
        moe: choice, losses and dropping.
        loss_scale: factor of the auxiliary losses of one micro-batch: 1 / (micro-batches of the global batch).
        rounds: micro-batches that a rank works through in a step.
        jitter_seed: 64 bits; the router's noise comes from it.
        shared: an expert that sees every token, [S/(cp*tp), B, H] -> same.
    """

    last_counts_E: Tensor | None

    def __init__(
        self,
        model: ModelConfig,
        moe: MoEConfig,
        *,
        loss_scale: float,
        rounds: int = 1,
        jitter_seed: int = 0,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.router = Router(model, moe, jitter_seed=jitter_seed)
        self.experts = Experts(
            model.num_experts,
            model.hidden_size,
            model.moe_ffn_hidden_size,
            gate=expert_gate(model),
            has_bias=model.moe_bias,
        )
        self.shared = shared
        has_gate = shared is not None and model.shared_expert_gate
        self.shared_gate = nn.Parameter(torch.empty(1, model.hidden_size)) if has_gate else None
        self.dispatcher: Dispatcher[Any] = LocalDispatcher(model.num_experts)
        self.scope: TokenScope = LocalScope()
        self.stats = RoutingTotals(model.num_experts)
        self._num_experts = model.num_experts
        self._aux_kind = moe.aux_kind
        self._aux_scale = moe.aux_coefficient * loss_scale
        self._z_scale = moe.z_loss * loss_scale
        self._running_load = RunningLoad(rounds, model.num_experts)
        looks_back = moe.aux_coefficient > 0 and moe.aux_kind == "last_global_batch"
        last_counts_E = torch.zeros(model.num_experts, dtype=torch.int64) if looks_back else None
        self.register_buffer("last_counts_E", last_counts_E)
        self._rounds = rounds
        self._drop_rule = _drop_rule(moe, moe.capacity_factor)
        has_own_factor = moe.eval_capacity_factor >= 0
        self._eval_drop_rule = _drop_rule(moe, moe.eval_capacity_factor) if has_own_factor else self._drop_rule
        self._pads = moe.pad_to_capacity
        self._weighs_in_expert = moe.weight_in_expert

    def begin_step(self, step: int) -> None:
        """Forget what was counted; all that follows belongs to this optimizer step."""
        self.stats.reset()
        self.router.step = step

    @torch.no_grad()
    def end_step(self, copies_E: Tensor, thresholds_E: Tensor) -> None:
        """Balance the bias, and keep the counts for a loss that looks back.

        Args:
            copies_E: copies of the whole global batch that chose each expert.
            thresholds_E: of quantile balancing, the mean over the micro-batches of the global batch.
        """
        self.router.update_bias(copies_E, thresholds_E)
        if self.last_counts_E is not None:
            self.last_counts_E.copy_(copies_E)

    def forward(self, x: Tensor, samples: Tensor | None = None) -> Tensor:
        """[S/(cp*tp), B, H] -> [S/(cp*tp), B, H]; communicates through `dispatcher`, `scope` and `shared`.

        Args:
            x: hidden states.
            samples: place of each sample in the global batch, int64 [B]; None stands for the first ones.
        """
        return finish(self.steps(x, samples))

    def steps(self, x: Tensor, samples: Tensor | None = None) -> Steps[Tensor]:
        """`forward`, with a pause wherever rows travel; nothing reads `x` after the first."""
        samples_B = torch.arange(x.shape[1], device=x.device) if samples is None else samples
        places = TokenPlaces(self.scope, x.shape[0], samples_B)
        x_TH = x.flatten(0, 1)
        routing = self.router(x_TH, places)
        assignment = self._assign(routing, places)
        beside = None if self.shared is None else lambda: self._shared(x)
        rows, plan = self.dispatcher.dispatch_preprocess(x_TH, assignment)
        rows, y_shared = yield from self.dispatcher.dispatch_steps(rows, plan, beside)
        rows_per_expert, loan, weights_R = plan.rows_per_expert, self.dispatcher.loan(plan), None
        sorting = None if loan is not None else self._sorting(plan)
        if sorting is None:
            rows = self.dispatcher.dispatch_postprocess(rows, plan)
        if self._weighs_in_expert or (sorting is not None and self.dispatcher.sums_copies):
            weights_R, plan = self.dispatcher.take_weights(plan)
        rows = self.experts(rows, rows_per_expert, loan, weights_R, sorting)
        if sorting is None:
            rows = self.dispatcher.combine_preprocess(rows, plan)
        rows = yield from self.dispatcher.combine_steps(rows, plan)
        y = self.dispatcher.combine_postprocess(rows, plan).view_as(x)
        if y_shared is not None:
            y = y + y_shared
        return self._attach_losses(y, routing, assignment, places) if self.training else y

    def _sorting(self, plan: Plan) -> Sorting | None:
        """How the experts are to sort, where they do so themselves."""
        kernels = self.experts.kernels
        if kernels is None:
            return None
        weighs = self._weighs_in_expert or kernels.weighs_anywhere
        return self.dispatcher.sorting(plan) if weighs or not self.dispatcher.sums_copies else None

    def _assign(self, routing: Routing, places: TokenPlaces) -> Assignment:
        rule, (num_tokens, top_k) = self._drop_rule if self.training else self._eval_drop_rule, routing.ids_TK.shape
        if rule is None:
            return Assignment(routing.ids_TK, routing.probs_TK)
        kept_TK = rule.keep(routing.ids_TK, routing.probs_TK, places.keys(), self._num_experts, self.scope)
        slots = rule.slots(num_tokens, top_k, self._num_experts, self.scope) if self._pads else None
        return Assignment(routing.ids_TK, routing.probs_TK, kept_TK, slots)

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        y: Tensor = self.shared(x)
        if self.shared_gate is not None:
            y = y * torch.sigmoid(x @ local(self.shared_gate, x.dtype).t())
        return y

    def _attach_losses(self, y: Tensor, routing: Routing, assignment: Assignment, places: TokenPlaces) -> Tensor:
        """Make the auxiliary losses part of what is minimised, and count this micro-batch once its gradient comes."""
        num_tokens = len(routing.ids_TK) * self.scope.size
        num_samples = len(places.samples_B) if self._aux_kind == "sequence" else 1
        sums = routing.sums
        if sums is not None and num_samples == 1:
            routed_XE = sums.copies_E.unsqueeze(0)
        else:
            routed_XE = count_copies(routing.ids_TK, self._num_experts, num_samples)
        aux = z = None
        if self._aux_scale:
            load_XE = self._load(routed_XE, places)
            part = load_balancing_part(routing.scores_TE, load_XE, num_tokens, sums.scores_E if sums else None)
            aux = part * self._aux_scale
            y = attach(y, aux)
        if self._z_scale:
            z = (z_part(routing.logits_TE, num_tokens) if sums is None else sums.z / num_tokens) * self._z_scale
            y = attach(y, z)
        if y.requires_grad:
            entropy = torch.special.entr(routing.scores_TE.detach()).sum() if sums is None else sums.entropy
            dropped = None if assignment.kept_TK is None else (~assignment.kept_TK).sum()
            parts = [None if part is None else part.detach() for part in (aux, z)]
            # All ranks of the scope have the same thresholds: each counts its part.
            thresholds_E = None if routing.thresholds_E is None else routing.thresholds_E / self.scope.size
            y.register_hook(
                lambda grad: self.stats.add(
                    routed_XE.sum(0),
                    entropy=entropy,
                    dropped=dropped,
                    aux=parts[0],
                    z=parts[1],
                    thresholds_E=thresholds_E,
                )
            )
        return y

    def _load(self, routed_XE: Tensor, places: TokenPlaces) -> Tensor:
        """The copies that count together for the balance loss of this micro-batch."""
        if self.last_counts_E is not None:
            return even_if_none(self.last_counts_E).unsqueeze(0)
        if self._aux_kind != "global_batch":
            return self.scope.sum(routed_XE)
        # A data-parallel rank has consecutive micro-batches of the global batch, `rounds` of them.
        round_ = places.samples_B[0] // len(places.samples_B) % self._rounds
        return self._running_load.include(self.scope.sum_parallel(routed_XE), round_)


def _drop_rule(moe: MoEConfig, capacity_factor: float) -> DropRule | None:
    return DropRule(capacity_factor, moe.drop_policy, moe.drop_scope) if capacity_factor > 0 else None
