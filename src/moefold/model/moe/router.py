"""Top-k router: chooses the experts of a token and their routing probabilities.

The choice itself is not differentiable. A choice that depends on other tokens considers the whole micro-batch, so that
no choice depends on the parallel mapping. Also here: the fused router kernel with its gradient.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.export import register_dataclass

from moefold.config.chosen import chosen_in
from moefold.config.groups.ffn import RoutedPart
from moefold.config.groups.router import ChoiceInputs, ChoicePart
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.model.kernels import TORCH_KERNELS, Kernels, RoutingKernel
from moefold.model.local_param import local_param
from moefold.model.moe.router_replay import RouterOverride
from moefold.model.moe.token_group import TokenPositions
from moefold.model.moe.token_noise import SECOND_STREAM, uniform_noise
from moefold.ops.decode import SoftmaxRouting
from moefold.ops.split_gemm import upcast_linear

if TYPE_CHECKING:
    from moefold.ops.triton.router import RouterOptions, RouterOutput


def topk_experts(values_TE: Tensor, top_k: int) -> Tensor:
    """Return the experts of the K largest values of each token, descending. Ties go to the lower expert. int64 [T, K].

    torch.topk leaves the order of equal values open, so routing would depend on the shape of the shard. argmax returns
    the first of them, and K passes are faster than a stable sort.
    """
    # The clamp distinguishes a value of -inf, which may still be chosen, from an expert that is already chosen.
    candidates_TE = values_TE.clamp(min=torch.finfo(values_TE.dtype).min)
    chosen_ids = []
    for _ in range(top_k):
        best_T1 = candidates_TE.argmax(1, keepdim=True)
        candidates_TE.scatter_(1, best_T1, float("-inf"))
        chosen_ids.append(best_T1)
    return torch.cat(chosen_ids, 1)


def mask_to_top_groups(values_TE: Tensor, num_groups: int, top_groups: int, *, sums_top2: bool) -> Tensor:
    """Mask all experts outside a token's best groups (group-limited routing).

    Args:
        num_groups: groups of E/num_groups neighbouring experts each.
        top_groups: groups that stay unmasked.
        sums_top2: the value of a group is the sum of its two best experts, as in the released code of DeepSeek-V3 and
            in transformers. (arXiv:2412.19437 sec. 2.1.2 sums the K/top_groups best: two for V3, with 8 experts of 4
            nodes.) False: its best expert (DeepSeek-V2, arXiv:2405.04434 sec. 2.2.2).

    Returns:
        values_TE with -inf in masked groups.
    """
    values_TGX = values_TE.unflatten(1, (num_groups, -1))
    group_TG = values_TGX.topk(2, -1).values.sum(-1) if sums_top2 else values_TGX.amax(-1)
    masked_TG = torch.ones_like(group_TG, dtype=torch.bool)
    masked_TG.scatter_(1, topk_experts(group_TG, top_groups), False)
    return values_TGX.masked_fill(masked_TG.unsqueeze(-1), float("-inf")).flatten(1)


@dataclass(frozen=True)
class RouterLossSums:
    """Sums over this rank's tokens, computed by the fused router kernel in one pass."""

    tokens_per_expert_E: Tensor
    """Routed tokens of each expert, int64 [E]."""
    scores_E: Tensor
    """Sum of the scores of each expert, [E]."""
    z: Tensor
    """Sum of the squared log-sum-exp of the logits."""
    entropy: Tensor
    """Sum of the entropy of the scores, in nats."""


@dataclass(frozen=True)
class RoutingDecision:
    """Routing of the T tokens of this rank. Floating-point fields are in float32 or float64."""

    ids_TK: Tensor
    """Chosen experts, best first, int64 [T, K]. The K experts of a token differ."""
    probs_TK: Tensor
    """Routing probability of each choice, [T, K]."""
    scores_TE: Tensor
    """Scores of all experts, which sum to 1, [T, E], as input of the load-balancing loss."""
    logits_TE: Tensor
    """[T, E]."""
    thresholds_E: Tensor | None = None
    """Thresholds subtracted from the scores by quantile balancing in this micro-batch, [E]."""
    sums: RouterLossSums | None = None
    """Sums for the auxiliary losses, where the fused kernel computed them."""


# FSDP and CUDA graphs look for tensors in the output of a router. torch 2.13 finds them in every dataclass, torch 2.11
# only in registered classes.
register_dataclass(RouterLossSums)
register_dataclass(RoutingDecision)


class Router(nn.Module):
    """Top-k router (arXiv:1701.06538 without its noise), computed in float32 at least.

    Args:
        noise_seed: 64-bit seed of this layer's noise: input jitter, or the samples of a SparseMixer.
    """

    expert_bias: Tensor | None

    def __init__(self, part: RoutedPart, hidden: int, moe: MoEConfig, *, noise_seed: int = 0) -> None:
        super().__init__()
        choices = part.num_choices
        self.weight = nn.Parameter(torch.empty(choices, hidden))
        self.bias = nn.Parameter(torch.empty(choices)) if part.router.bias else None
        # Not zeroed here: the model is built on the meta device, and `init_weights` fills it.
        bias_E = torch.zeros(choices, dtype=torch.float32) if part.router.expert_bias else None
        self.register_buffer("expert_bias", bias_E)
        self.override: RouterOverride | None = None
        self.kernels: Kernels = TORCH_KERNELS
        self._step = 1
        self._step_on_device = torch.ones((), dtype=torch.int64, device="cpu")
        self._part = part
        self._moe = moe
        self._noise_seed = noise_seed
        self._router_part = part.router
        self._choice = chosen_in(moe, ChoicePart)
        self._noise_width = part.router.noise_width(part.top_k, choices)
        self._min_dtype = torch.float64 if moe.router_dtype == "float64" else torch.float32

    @property
    def step(self) -> int:
        """Optimizer step, which seeds the noise."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if self._moe.input_jitter or self._noise_width:
            # In place: a CUDA graph reads it at this address.
            self._step_on_device.fill_(step)

    def forward(self, x_TH: Tensor, token_positions: TokenPositions) -> RoutingDecision:
        """Route tokens [T, H], communicating over `token_positions.group` where the choice needs the whole micro-batch.

        `override` may record or replace the chosen experts, and then the fused kernel does not run. `parallelize` sets
        `kernels`, which has a router kernel if it supports this router.
        """
        dtype = self.logits_dtype(x_TH.dtype)
        x_TH = self._apply_jitter(x_TH, token_positions)
        logits_TE = upcast_linear(x_TH, local_param(self.weight, dtype), self.kernels.gemm)
        if self.bias is not None:
            logits_TE = logits_TE + local_param(self.bias, dtype)
        return self.route(logits_TE, x_TH.dtype, token_positions)

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return self._part.top_k

    def logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the logits of tokens of a dtype are computed."""
        return torch.promote_types(dtype, self._min_dtype)

    def route(self, logits_TE: Tensor, dtype: torch.dtype, token_positions: TokenPositions) -> RoutingDecision:
        """Choose the experts from the logits of tokens of a dtype. It communicates as `forward` does."""
        override = self.override
        if override is not None and not (self.training or override.in_evaluation):
            override = None
        if self.kernels.router is not None and logits_TE.dtype == torch.float32 and override is None:
            return self._route_fused(self.kernels.router, logits_TE, has_padding=token_positions.weights_T is not None)
        scores_TE = self._router_part.scores(logits_TE, self._softmax)
        thresholds_E = None
        if self.training:
            thresholds_E = self._choice.thresholds(scores_TE.detach(), self.top_k, token_positions)
        noise_TN = self._choice_noise(token_positions)
        ids_TK = self._select_experts(logits_TE.detach(), scores_TE.detach(), thresholds_E, noise_TN, token_positions)
        if override is not None:
            ids_TK = override.apply(ids_TK, token_positions.sample_ids_B)
        probs_TK = self._router_part.weights(logits_TE, scores_TE, ids_TK, noise_TN, self._softmax)
        factor = self._part.router.scaling_factor
        probs_TK = (probs_TK if factor == 1 else probs_TK * factor).to(torch.promote_types(dtype, torch.float32))
        return RoutingDecision(ids_TK, probs_TK, self._router_part.distribution(scores_TE), logits_TE, thresholds_E)

    def _route_fused(self, kernel: RoutingKernel, logits_TE: Tensor, *, has_padding: bool) -> RoutingDecision:
        output = kernel(logits_TE, self.expert_bias)
        if has_padding:
            # The sums of the kernel are over all rows.
            return RoutingDecision(output.ids_TK, output.probs_TK, output.scores_TE, logits_TE)
        sums = RouterLossSums(output.tokens_per_expert_E, output.score_sums_E, output.z_sum, output.entropy)
        return RoutingDecision(output.ids_TK, output.probs_TK, output.scores_TE, logits_TE, sums=sums)

    @torch.no_grad()
    def update_bias(self, tokens_per_expert_E: Tensor, thresholds_E: Tensor) -> None:
        """Update the expert bias after a step: loss-free or quantile balancing.

        Loss-free balancing leaves the bias of zero-computation experts at 0.

        Args:
            tokens_per_expert_E: routed tokens of each expert over the whole global batch.
            thresholds_E: thresholds of quantile balancing, mean over the micro-batches of the global batch.
        """
        if self.expert_bias is None:
            return
        if self._choice.sets_bias:
            self.expert_bias.copy_(-thresholds_E)
            return
        deficit_E = self._deficit(tokens_per_expert_E)
        # The share of the zero-computation experts follows from the others' shares (arXiv:2509.01322 sec. 2.1.2).
        deficit_E[self._part.num_experts :] = 0
        self.expert_bias.add_(deficit_E.sign().to(self.expert_bias), alpha=self._moe.bias_update_rate)

    def _deficit(self, tokens_per_expert_E: Tensor) -> Tensor:
        """Return the tokens that each expert lacks to its share of the load, times a positive factor, [E]."""
        total = tokens_per_expert_E.sum()
        part = self._part
        if part.active_experts:
            share = part.active_experts / (part.top_k * part.num_experts)
            return total * share - tokens_per_expert_E.double()
        # E * count against the sum of counts: integers, so that an even load compares equal.
        return total - tokens_per_expert_E * len(tokens_per_expert_E)

    def _apply_jitter(self, x_TH: Tensor, token_positions: TokenPositions) -> Tensor:
        width = self._moe.input_jitter
        if width == 0 or not self.training:
            return x_TH
        x_TH = x_TH.to(torch.promote_types(x_TH.dtype, self._min_dtype))
        step = self._step_tensor(x_TH.device)
        keys = token_positions.keys()
        return x_TH * uniform_noise(
            self._noise_seed, step, *keys, x_TH.shape[1], scale=2 * width, shift=1 - width, dtype=x_TH.dtype
        )

    def _choice_noise(self, token_positions: TokenPositions) -> Tensor | None:
        """Return the uniform numbers in (0, 1) of choices that are sampled, float64 [T, `noise_width`]."""
        if not self._noise_width or not self.training:
            return None
        sample_ids_B, positions_S = token_positions.keys()
        # The shift keeps the logarithm of the smallest number finite; input jitter has another stream.
        return uniform_noise(
            self._noise_seed ^ SECOND_STREAM,
            self._step_tensor(sample_ids_B.device),
            sample_ids_B,
            positions_S,
            self._noise_width,
            scale=1 - 2.0**-52,
            shift=2.0**-53,
        )

    def _step_tensor(self, device: torch.device) -> Tensor:
        """Return the step as a tensor that a CUDA graph reads at a fixed address."""
        if self._step_on_device.device != device:
            self._step_on_device = torch.full((), self.step, dtype=torch.int64, device=device)
        return self._step_on_device

    def _softmax(self, x: Tensor) -> Tensor:
        kernel = self.kernels.router_softmax
        return x.softmax(-1) if kernel is None else kernel(x)

    def softmax_routing(self) -> SoftmaxRouting | None:
        """Return the routing of this router in evaluation if it needs only the largest logits and a softmax."""
        softmax = self._router_part.softmax_in_decoding()
        by_scores = self._choice.scores_decide and self.expert_bias is None and self._part.router.num_groups == 1
        if softmax is None or not by_scores:
            return None
        return SoftmaxRouting(is_post=softmax == "post", scale=self._part.router.scaling_factor)

    def _select_experts(
        self,
        logits_TE: Tensor,
        scores_TE: Tensor,
        thresholds_E: Tensor | None,
        noise_TN: Tensor | None,
        token_positions: TokenPositions,
    ) -> Tensor:
        bias_E = self.expert_bias
        ranking_TE = self._router_part.ranking(logits_TE, scores_TE) if bias_E is None else scores_TE + bias_E
        inputs = ChoiceInputs(
            top_k=self.top_k,
            logits_TE=logits_TE,
            scores_TE=scores_TE,
            ranking_TE=ranking_TE,
            thresholds_E=thresholds_E,
            noise_TN=noise_TN,
            is_training=self.training,
            tokens=token_positions,
            best=self._best_experts,
            largest=self._largest,
        )
        return self._router_part.select(inputs, self._choice)

    def _largest(self, values_TE: Tensor) -> Tensor:
        return topk_experts(values_TE, self.top_k)

    def _best_experts(self, values_TE: Tensor) -> Tensor:
        """Choose the experts with the largest values, within the best groups if the recipe has groups."""
        part = self._part
        if part.router.num_groups > 1:
            values_TE = mask_to_top_groups(
                values_TE, part.router.num_groups, part.router.top_groups, sums_top2=self._router_part.sums_top2
            )
        return topk_experts(values_TE, part.top_k)


class FusedRouting:
    """Fused router kernel with its gradient: one pass over the logits in each direction."""

    def __init__(self, part: RoutedPart) -> None:
        # Lazy import: CPU-only installations have no Triton.
        from moefold.ops.triton.router import RouterOptions

        options = part.router.fused_options()
        assert options is not None, "fused_router_unsupported_reason"
        self._options = RouterOptions(
            top_k=part.top_k,
            **options,
            scaling_factor=part.router.scaling_factor,
            num_groups=part.router.num_groups,
            top_groups=part.router.top_groups,
        )

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None) -> "RouterOutput":
        """Choose experts. Probabilities, scores, their sums and the z-loss sum are differentiable.

        Args:
            bias_E: added to the scores for the top-k only.
        """
        from moefold.ops.triton.router import RouterOutput

        return RouterOutput(*_FusedRouterFunction.apply(logits_TE, bias_E, self._options))


def fused_router_unsupported_reason(model: ModelConfig, moe: MoEConfig) -> str:
    """Return the reason why the fused kernel does not support the router of a recipe, or empty if it does."""
    choice = chosen_in(moe, ChoicePart)
    score = model.ffn.moe.router
    if not choice.scores_decide:
        return f"moe.choice={choice.kind!r}"
    if score.fused_options() is None:
        return f"{score.weighting.key}={score.weighting.kind!r}"
    if moe.router_dtype != "float32":
        return f"moe.router_dtype={moe.router_dtype!r}"
    if moe.trace_every or moe.replay:
        return "choices are traced or replayed"
    return ""


class _FusedRouterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, options: "RouterOptions") -> tuple[Tensor, ...]:
        from moefold.ops.triton.router import route_forward

        logits_TE = logits_TE.contiguous()
        output = route_forward(logits_TE, bias_E, options)
        ctx.save_for_backward(logits_TE, output.ids_TK)
        ctx.options = options
        ctx.mark_non_differentiable(output.ids_TK, output.tokens_per_expert_E, output.entropy)
        # The losses use few of the outputs; zeros for the other outputs would have to be written and read.
        ctx.set_materialize_grads(False)
        return (
            output.ids_TK,
            output.probs_TK,
            output.scores_TE,
            output.tokens_per_expert_E,
            output.score_sums_E,
            output.z_sum,
            output.entropy,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        from moefold.ops.triton.router import route_backward

        _, probs, scores, _, sums, z, _ = grads
        logits_TE, ids_TK = ctx.saved_tensors
        return route_backward(logits_TE, ids_TK, (probs, scores, sums, z), ctx.options), None, None
