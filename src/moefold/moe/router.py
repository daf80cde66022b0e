"""The top-k router: which experts see a token, and with which weight."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.config.schema import ModelConfig, MoEConfig
from moefold.model.parameter import local
from moefold.moe.choice import (
    choose_experts,
    limit_to_groups,
    quantile_thresholds,
    round_robin,
    sinkhorn_offsets,
    skewed,
)
from moefold.moe.jitter import uniform_noise
from moefold.moe.scope import TokenPlaces
from moefold.moe.trace import Choices

SMALLEST_SUM = 1e-20
"""Added to a sum of scores before dividing by it, as DeepSeek-V3 does."""


@dataclass(frozen=True)
class RoutingSums:
    """Sums over my tokens, by who made the choices in one pass."""

    copies_E: Tensor
    """Copies that chose each expert, int64 [E]."""
    scores_E: Tensor
    """Scores of each expert, [E]."""
    z: Tensor
    """Squared log-sum-exp of the logits."""
    entropy: Tensor
    """Entropy of the scores, in nats."""


class RoutingKernel(Protocol):
    """Makes choices, weights and sums of logits in one pass."""

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None) -> Any:
        """See `moefold.kernels.triton_router.Routed`; `bias_E` is added to the scores for the choice alone."""
        ...


@dataclass(frozen=True)
class Routing:
    """What the router decided for the T tokens of this rank. No weight is below float32."""

    ids_TK: Tensor
    """Chosen experts, best first, int64 [T, K]; the K of one token differ."""
    probs_TK: Tensor
    """Weight of each choice, [T, K]."""
    scores_TE: Tensor
    """Scores of all experts, which sum to 1, [T, E]; what the load-balancing loss is about."""
    logits_TE: Tensor
    """[T, E]."""
    thresholds_E: Tensor | None = None
    """What quantile balancing took off the scores in this micro-batch, [E]."""
    sums: RoutingSums | None = None
    """What was summed up on the way."""


class Router(nn.Module):
    """Scores every expert and chooses K (arXiv:1701.06538 without its noise). Its maths never runs below float32.

    Args:
        model: sizes, and what makes a score and a weight.
        moe: how the choice is balanced, jitter and precision.
        jitter_seed: 64 bits; the noise of this layer comes from it.
    """

    expert_bias: Tensor | None

    def __init__(self, model: ModelConfig, moe: MoEConfig, *, jitter_seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.num_experts, model.hidden_size))
        self.bias = nn.Parameter(torch.empty(model.num_experts)) if model.router_bias else None
        # Zeros come with the initial weights: a model is built on the meta device.
        bias_E = torch.zeros(model.num_experts, dtype=torch.float32) if model.expert_bias else None
        self.register_buffer("expert_bias", bias_E)
        self.choices: Choices | None = None
        self.kernel: RoutingKernel | None = None
        self.step = 1
        """Of the optimizer; the noise depends on it."""
        self._model = model
        self._moe = moe
        self._jitter_seed = jitter_seed
        self._least_dtype = torch.float64 if moe.router_dtype == "float64" else torch.float32

    def forward(self, x_TH: Tensor, places: TokenPlaces) -> Routing:
        """Route [T, H]; communicates through the scope of `places` where the choice looks at the whole micro-batch.

        At training `choices` has the last word. `parallelize` sets `kernel`, where one knows this router.
        """
        dtype = torch.promote_types(x_TH.dtype, self._least_dtype)
        logits_TE = self._jittered(x_TH.to(dtype), places) @ local(self.weight, dtype).t()
        if self.bias is not None:
            logits_TE = logits_TE + local(self.bias, dtype)
        if self.kernel is not None and dtype == torch.float32:
            return self._fused(self.kernel, logits_TE)
        raw_TE = self._score(logits_TE)
        thresholds_E = None
        if self._moe.choice == "quantile" and self.training:
            thresholds_E = quantile_thresholds(raw_TE.detach(), self._model.top_k, places.scope)
        ids_TK = self._choose(logits_TE.detach(), raw_TE.detach(), thresholds_E, places)
        if self.choices is not None and self.training:
            ids_TK = self.choices.settle(ids_TK, places.samples_B)
        probs_TK = self._weigh(logits_TE, raw_TE, ids_TK).to(torch.promote_types(x_TH.dtype, torch.float32))
        is_softmax = self._model.router_score == "softmax"
        scores_TE = raw_TE if is_softmax else raw_TE / (raw_TE.sum(-1, keepdim=True) + SMALLEST_SUM)
        return Routing(ids_TK, probs_TK, scores_TE, logits_TE, thresholds_E)

    def _fused(self, kernel: RoutingKernel, logits_TE: Tensor) -> Routing:
        r = kernel(logits_TE, self.expert_bias)
        sums = RoutingSums(r.copies_E, r.score_sums_E, r.z_sum, r.entropy)
        return Routing(r.ids_TK, r.probs_TK, r.scores_TE, logits_TE, sums=sums)

    @torch.no_grad()
    def update_bias(self, copies_E: Tensor, thresholds_E: Tensor) -> None:
        """Balance the bias after a step.

        Args:
            copies_E: copies of the whole global batch that chose each expert.
            thresholds_E: of quantile balancing, the mean over the micro-batches of the global batch.
        """
        if self.expert_bias is None:
            return
        if self._moe.choice == "quantile":
            self.expert_bias.copy_(-thresholds_E)
            return
        # E * count against the sum of counts: whole numbers, so that an even load is seen as even.
        lack_E = copies_E.sum() - copies_E * len(copies_E)
        self.expert_bias.add_(lack_E.sign().to(self.expert_bias), alpha=self._moe.bias_update_rate)

    def _jittered(self, x_TH: Tensor, places: TokenPlaces) -> Tensor:
        width = self._moe.input_jitter
        if width == 0 or not self.training:
            return x_TH
        noise_TH = uniform_noise(
            self._jitter_seed,
            self.step,
            places.samples_B,
            places.positions(),
            x_TH.shape[1],
            scale=2 * width,
            shift=1 - width,
            dtype=x_TH.dtype,
        )
        return x_TH * noise_TH

    def _score(self, logits_TE: Tensor) -> Tensor:
        match self._model.router_score:
            case "softmax":
                return logits_TE.softmax(-1)
            case "sigmoid":
                return logits_TE.sigmoid()
            case "sqrtsoftplus":
                # The root has no gradient at 0, where softplus of a very negative logit ends.
                return F.softplus(logits_TE).clamp(min=torch.finfo(logits_TE.dtype).tiny).sqrt()

    def _choose(self, logits_TE: Tensor, raw_TE: Tensor, thresholds_E: Tensor | None, places: TokenPlaces) -> Tensor:
        model, moe = self._model, self._moe
        if moe.choice == "round_robin":
            return round_robin(places.keys(), model.top_k, model.num_experts)
        if moe.choice == "skewed":
            return skewed(places.keys(), model.top_k, model.num_experts, moe.skew)
        if moe.choice == "sinkhorn":
            offsets_E = sinkhorn_offsets(logits_TE, moe.sinkhorn_iterations, places.scope) if self.training else 0
            return choose_experts(logits_TE + offsets_E, model.top_k)
        # Softmax keeps the order of the logits, and the logits are the finer of the two.
        values_TE = logits_TE if model.router_score == "softmax" else raw_TE
        if thresholds_E is not None:
            values_TE = raw_TE - thresholds_E
        elif self.expert_bias is not None:
            values_TE = raw_TE + self.expert_bias
        if model.num_groups > 1:
            sums_two = model.router_score != "softmax"
            values_TE = limit_to_groups(values_TE, model.num_groups, model.top_groups, sums_two=sums_two)
        return choose_experts(values_TE, model.top_k)

    def _weigh(self, logits_TE: Tensor, raw_TE: Tensor, ids_TK: Tensor) -> Tensor:
        model = self._model
        if model.router_score == "softmax" and model.router_softmax == "post":
            probs_TK = logits_TE.gather(1, ids_TK).softmax(-1)
        else:
            probs_TK = raw_TE.gather(1, ids_TK)
            if model.router_score != "softmax" and model.router_normalize:
                probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + SMALLEST_SUM)
        return probs_TK if model.router_scaling_factor == 1 else probs_TK * model.router_scaling_factor
