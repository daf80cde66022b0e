"""Top-k router: chooses the experts of a token and their routing probabilities.

The choice itself is not differentiable. A choice that depends on other tokens considers the whole micro-batch, so that
no choice depends on the parallel mapping. Also here: recorded and replayed choices, and the fused router kernel with
its gradient.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.export import register_dataclass

from moefold.config.model import ModelConfig
from moefold.config.schema import MoEConfig
from moefold.model.kernels import TORCH_KERNELS, Kernels, RoutingKernel
from moefold.model.local_param import local_param
from moefold.model.moe.sparse_mixer import mixer_weights, noise_width, sample_experts
from moefold.model.moe.token_group import MicroBatchGroup, TokenPositions
from moefold.model.moe.token_noise import SECOND_STREAM, uniform_noise
from moefold.ops.decode import SoftmaxRouting
from moefold.ops.elementwise import sigmoid, softplus
from moefold.ops.split_gemm import upcast_linear

if TYPE_CHECKING:
    from moefold.ops.triton.router import RouterOptions, RouterOutput


def topk_experts(values_TE: Tensor, top_k: int) -> Tensor:
    """Return the experts of the K largest values of each token, descending; ties go to the lower expert. int64 [T, K].

    torch.topk leaves the order of equal values open, which would make routing depend on the shape of the shard; argmax
    returns the first one, and K passes are faster than a stable sort.
    """
    # The clamp distinguishes a value of -inf, which may still be chosen, from an expert chosen already.
    candidates_TE = values_TE.clamp(min=torch.finfo(values_TE.dtype).min)
    chosen = []
    for _ in range(top_k):
        best_T1 = candidates_TE.argmax(1, keepdim=True)
        candidates_TE.scatter_(1, best_T1, float("-inf"))
        chosen.append(best_T1)
    return torch.cat(chosen, 1)


def mask_to_top_groups(values_TE: Tensor, num_groups: int, top_groups: int, *, sums_top2: bool) -> Tensor:
    """Mask all experts outside a token's best groups (group-limited routing).

    Args:
        values_TE: values by which experts are chosen.
        num_groups: groups of E/num_groups neighbouring experts each.
        top_groups: groups that stay unmasked.
        sums_top2: the value of a group is the sum of its two best experts, as in the code that DeepSeek-V3 was released
            with and in transformers (arXiv:2412.19437 sec. 2.1.2 sums the K/top_groups best: two for V3, with 8 experts
            of 4 nodes); else its best one (DeepSeek-V2, arXiv:2405.04434 sec. 2.2.2).

    Returns:
        values_TE with -inf in masked groups.
    """
    values_TGX = values_TE.unflatten(1, (num_groups, -1))
    group_TG = values_TGX.topk(2, -1).values.sum(-1) if sums_top2 else values_TGX.amax(-1)
    masked_TG = torch.ones_like(group_TG, dtype=torch.bool)
    masked_TG.scatter_(1, topk_experts(group_TG, top_groups), False)
    return values_TGX.masked_fill(masked_TG.unsqueeze(-1), float("-inf")).flatten(1)


def sinkhorn_offsets(
    logits_TE: Tensor, iterations: int, group: MicroBatchGroup, is_token_T: Tensor | None = None
) -> Tensor:
    """Compute the Sinkhorn offsets of each expert's logits that balance the load.

    Runs the iterations of Sinkhorn and Knopp on the matrix exp(logits) of the micro-batch, in logarithms: rows first,
    then columns. The scale of a row does not change its token's choice, so only the offsets of the columns are needed.
    All-gathers the logits of the micro-batch.

    Args:
        logits_TE: of this rank's tokens.
        iterations: number of iterations.
        group: the ranks that share the micro-batch.
        is_token_T: rows that are no padding, which has no row in the matrix, bool [T]; None: all.

    Returns:
        [E]; 0 if the micro-batch is padding alone.
    """
    whole_TE = group.gather(logits_TE if is_token_T is None else _mask_padding(logits_TE, is_token_T, -math.inf))
    is_absent_T1 = None
    if is_token_T is not None:
        is_absent_T1 = whole_TE[:, :1].isneginf()
        whole_TE = whole_TE.masked_fill(is_absent_T1, 0.0)
    offsets_E = torch.zeros_like(whole_TE[0])
    for _ in range(iterations):
        rows_T1 = (whole_TE + offsets_E).logsumexp(1, keepdim=True)
        balanced_TE = whole_TE - rows_T1
        if is_absent_T1 is not None:
            balanced_TE.masked_fill_(is_absent_T1, -math.inf)
        offsets_E = -balanced_TE.logsumexp(0)
    return offsets_E if is_absent_T1 is None else torch.where(is_absent_T1.all(), 0.0, offsets_E)


def quantile_thresholds(
    scores_TE: Tensor, top_k: int, group: MicroBatchGroup, is_token_T: Tensor | None = None
) -> Tensor:
    """Compute the (1 - K/E) quantile of each expert's scores: a share K/E of the micro-batch's tokens exceeds it.

    Interpolates linearly between neighbouring scores. All-gathers the scores of the micro-batch.

    Args:
        scores_TE: of this rank's tokens.
        top_k: K.
        group: the ranks that share the micro-batch.
        is_token_T: rows that are no padding, bool [T]; None: all.

    Returns:
        [E]; 0 if the micro-batch is padding alone.
    """
    if is_token_T is not None:
        return _masked_quantiles(group.gather(_mask_padding(scores_TE, is_token_T, math.inf)), top_k)
    sorted_TE = group.gather(scores_TE).sort(0).values
    num_tokens, num_experts = sorted_TE.shape
    position = (1 - top_k / num_experts) * (num_tokens - 1)
    below = math.floor(position)
    above = min(below + 1, num_tokens - 1)
    return sorted_TE[below].lerp(sorted_TE[above], position - below)


def _masked_quantiles(scores_TE: Tensor, top_k: int) -> Tensor:
    """Compute `quantile_thresholds` of scores that are infinite for padding; the host does not wait."""
    sorted_TE = scores_TE.sort(0).values
    num_experts = sorted_TE.shape[1]
    last = sorted_TE[:, 0].isfinite().sum() - 1
    position = (1 - top_k / num_experts) * last.clamp(min=0).double()
    below = position.floor()
    rows = torch.stack((below, torch.minimum(below + 1, last.double()))).clamp(min=0).long()
    ends_2E = sorted_TE[rows]
    thresholds_E = ends_2E[0].lerp(ends_2E[1], (position - below).to(sorted_TE.dtype))
    return torch.where(last >= 0, thresholds_E, 0.0)


def _mask_padding(values_TE: Tensor, is_token_T: Tensor, value: float) -> Tensor:
    """Replace the values of padding."""
    return values_TE.masked_fill(~is_token_T.unsqueeze(1), value)


def assign_round_robin(index_T: Tensor, top_k: int, num_experts: int, *, first: int = 0) -> Tensor:
    """Assign the experts from `first` on to the tokens in turn: perfectly even load. int64 [T, K]."""
    counter_TK = index_T.unsqueeze(1) * top_k + torch.arange(top_k, device=index_T.device)
    return first + counter_TK % (num_experts - first)


def assign_skewed(index_T: Tensor, top_k: int, num_experts: int, skew: float) -> Tensor:
    """Assign expert 0 to an evenly spread share `skew` of the tokens, and the other experts round-robin.

    Returns:
        int64 [T, K].
    """
    ids_TK = assign_round_robin(index_T, top_k, num_experts, first=1)
    index_T = index_T.double()
    ids_TK[:, 0].masked_fill_(((index_T + 1) * skew).floor() > (index_T * skew).floor(), 0)
    return ids_TK


class RouterOverride(Protocol):
    """Override of the router's expert choices in training."""

    in_evaluation: bool
    """Whether it also applies to forward passes in evaluation mode."""

    @property
    def only_records(self) -> bool:
        """Return whether it leaves all choices as they are."""
        ...

    def apply(self, ids_TK: Tensor, sample_ids_B: Tensor) -> Tensor:
        """Return the experts to use, int64 [T, K].

        Args:
            ids_TK: choices of the router, int64 [T, K]; token s*B + b is position s of sample b.
            sample_ids_B: index of each sample of the micro-batch in the global batch, int64 [B].
        """
        ...


@dataclass
class ReplayedRouting:
    """Expert choices of one layer in one step for this rank's tokens: replayed, recorded, or both.

    Both are stored by sample, so the order of micro-batches does not matter, and a recomputed forward pass reads and
    writes the same choices again.
    """

    first_sample: int
    """Index of this rank's first sample in the global batch."""
    replayed_NSK: Tensor | None = None
    """Choices that replace the router's, [N samples of this rank, S/(cp*tp), K]; None: no replay."""
    recorded_NSK: Tensor | None = None
    """Buffer for the choices in use, in the same layout; None: no recording."""
    is_replayed_NS: Tensor | None = None
    """Tokens whose choices are replaced, bool [N, S/(cp*tp)]; None: all. The router chooses for the others."""
    in_evaluation: bool = False

    @property
    def only_records(self) -> bool:
        """Return whether no choice is replaced."""
        return self.replayed_NSK is None

    def apply(self, ids_TK: Tensor, sample_ids_B: Tensor) -> Tensor:
        """Replace the choices, then record them."""
        rows_B = sample_ids_B - self.first_sample
        if self.replayed_NSK is not None:
            replayed_TK = self.replayed_NSK[rows_B].transpose(0, 1).reshape(ids_TK.shape).to(ids_TK.dtype)
            if self.is_replayed_NS is None:
                ids_TK = replayed_TK
            else:
                is_replayed_T1 = self.is_replayed_NS[rows_B].transpose(0, 1).reshape(-1, 1)
                ids_TK = replayed_TK.where(is_replayed_T1, ids_TK)
        if self.recorded_NSK is not None:
            ids_SBK = ids_TK.reshape(-1, len(sample_ids_B), ids_TK.shape[1])
            self.recorded_NSK[rows_B] = ids_SBK.transpose(0, 1).to(self.recorded_NSK.dtype)
        return ids_TK


SCORE_SUM_EPS = 1e-20
"""Added to a sum of scores before dividing by it, as DeepSeek-V3 does."""


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
    """Chosen experts, best first, int64 [T, K]; the K experts of a token differ."""
    probs_TK: Tensor
    """Routing probability of each choice, [T, K]."""
    scores_TE: Tensor
    """Scores of all experts, which sum to 1, [T, E]; input of the load-balancing loss."""
    logits_TE: Tensor
    """[T, E]."""
    thresholds_E: Tensor | None = None
    """Thresholds subtracted from the scores by quantile balancing in this micro-batch, [E]."""
    sums: RouterLossSums | None = None
    """Sums for the auxiliary losses, where the fused kernel computed them."""


# FSDP and CUDA graphs look for tensors in what a router returns. torch 2.13 finds them in every dataclass, 2.11 only in
# registered ones.
register_dataclass(RouterLossSums)
register_dataclass(RoutingDecision)


class Router(nn.Module):
    """Top-k router (arXiv:1701.06538 without its noise), computed in float32 at least.

    Args:
        model: sizes, score function and probabilities.
        moe: load balancing, jitter and precision.
        noise_seed: 64-bit seed of this layer's noise: input jitter, or the samples of a SparseMixer.
    """

    expert_bias: Tensor | None

    def __init__(self, model: ModelConfig, moe: MoEConfig, *, noise_seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.num_router_choices, model.hidden_size))
        self.bias = nn.Parameter(torch.empty(model.num_router_choices)) if model.router_bias else None
        # Not zeroed here: the model is built on the meta device, and `init_weights` fills it.
        bias_E = torch.zeros(model.num_router_choices, dtype=torch.float32) if model.expert_bias else None
        self.register_buffer("expert_bias", bias_E)
        self.override: RouterOverride | None = None
        self.kernels: Kernels = TORCH_KERNELS
        self._step = 1
        self._step_on_device = torch.ones((), dtype=torch.int64, device="cpu")
        self._model = model
        self._moe = moe
        self._noise_seed = noise_seed
        self._is_sparse_mixer = model.router_softmax == "sparsemixer"
        self._samples = self._is_sparse_mixer and moe.sparsemixer_sampling
        self._min_dtype = torch.float64 if moe.router_dtype == "float64" else torch.float32

    @property
    def step(self) -> int:
        """Optimizer step; seeds the noise."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if self._moe.input_jitter or self._samples:
            # In place: a CUDA graph reads it at this address.
            self._step_on_device.fill_(step)

    def forward(self, x_TH: Tensor, token_positions: TokenPositions) -> RoutingDecision:
        """Route tokens [T, H]; communicates over `token_positions.group` where the choice needs the whole micro-batch.

        `override` may record or replace the chosen experts, and then the fused kernel does not run. `parallelize` sets
        `kernels`, with one for the router where it supports this router.
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
        return self._model.top_k

    def logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the logits of tokens of a dtype are computed."""
        return torch.promote_types(dtype, self._min_dtype)

    def route(self, logits_TE: Tensor, dtype: torch.dtype, token_positions: TokenPositions) -> RoutingDecision:
        """Choose the experts from the logits of tokens of a dtype; communicates as `forward` does."""
        override = self.override
        if override is not None and not (self.training or override.in_evaluation):
            override = None
        if self.kernels.router is not None and logits_TE.dtype == torch.float32 and override is None:
            return self._route_fused(self.kernels.router, logits_TE, has_padding=token_positions.weights_T is not None)
        raw_TE = self._score(logits_TE)
        thresholds_E = None
        if self._moe.choice == "quantile" and self.training:
            thresholds_E = quantile_thresholds(
                raw_TE.detach(), self._model.top_k, token_positions.group, token_positions.is_token()
            )
        mixer_noise_TN = self._mixer_noise(token_positions)
        if self._is_sparse_mixer:
            ids_TK = sample_experts(logits_TE, self.top_k, self._model.sparsemixer_jitter, mixer_noise_TN)
        else:
            ids_TK = self._select_experts(logits_TE.detach(), raw_TE.detach(), thresholds_E, token_positions)
        if override is not None:
            ids_TK = override.apply(ids_TK, token_positions.sample_ids_B)
        probs_TK = self._routing_probs(logits_TE, raw_TE, ids_TK, mixer_noise_TN).to(
            torch.promote_types(dtype, torch.float32)
        )
        is_softmax = self._model.router_score == "softmax"
        scores_TE = raw_TE if is_softmax else raw_TE / (raw_TE.sum(-1, keepdim=True) + SCORE_SUM_EPS)
        return RoutingDecision(ids_TK, probs_TK, scores_TE, logits_TE, thresholds_E)

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
            thresholds_E: of quantile balancing, mean over the micro-batches of the global batch.
        """
        if self.expert_bias is None:
            return
        if self._moe.choice == "quantile":
            self.expert_bias.copy_(-thresholds_E)
            return
        # E * count against the sum of counts: integers, so that an even load compares equal.
        total = tokens_per_expert_E.sum()
        deficit_E = total - tokens_per_expert_E * len(tokens_per_expert_E)
        model = self._model
        if model.active_experts:
            share = model.active_experts / (model.top_k * model.num_experts)
            deficit_E = total * share - tokens_per_expert_E.double()
        # Once the others have their share, so have the zero-computation experts (arXiv:2509.01322 sec. 2.1.2).
        deficit_E[model.num_experts :] = 0
        self.expert_bias.add_(deficit_E.sign().to(self.expert_bias), alpha=self._moe.bias_update_rate)

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

    def _mixer_noise(self, token_positions: TokenPositions) -> Tensor | None:
        """Return the uniform numbers in (0, 1) of a SparseMixer's choices, float64 [T, `noise_width`]; None: none."""
        if not self._samples or not self.training:
            return None
        sample_ids_B, positions_S = token_positions.keys()
        width = noise_width(self.top_k, self._model.num_router_choices)
        # The shift keeps the logarithm of the smallest number finite; input jitter has another stream.
        return uniform_noise(
            self._noise_seed ^ SECOND_STREAM,
            self._step_tensor(sample_ids_B.device),
            sample_ids_B,
            positions_S,
            width,
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
        """Return how this router chooses in evaluation, if that is by the largest logits and their softmax alone."""
        model = self._model
        is_softmax = model.router_score == "softmax" and not self._is_sparse_mixer and self._moe.choice == "topk"
        if not is_softmax or self.expert_bias is not None or model.num_groups > 1:
            return None
        return SoftmaxRouting(is_post=model.router_softmax == "post", scale=model.router_scaling_factor)

    def _score(self, logits_TE: Tensor) -> Tensor:
        match self._model.router_score:
            case "softmax":
                return self._softmax(logits_TE)
            case "sigmoid":
                return sigmoid(logits_TE)
            case "sqrtsoftplus":
                # The root has no gradient at 0, to which softplus of a very negative logit underflows.
                return softplus(logits_TE).clamp(min=torch.finfo(logits_TE.dtype).tiny).sqrt()

    def _select_experts(
        self, logits_TE: Tensor, raw_TE: Tensor, thresholds_E: Tensor | None, token_positions: TokenPositions
    ) -> Tensor:
        model = self._model
        moe = self._moe
        if moe.choice == "round_robin":
            return assign_round_robin(token_positions.global_index(), model.top_k, model.num_router_choices)
        if moe.choice == "skewed":
            return assign_skewed(token_positions.global_index(), model.top_k, model.num_router_choices, moe.skew)
        if moe.choice == "sinkhorn":
            if not self.training:
                return topk_experts(logits_TE, model.top_k)
            offsets_E = sinkhorn_offsets(
                logits_TE, moe.sinkhorn_iterations, token_positions.group, token_positions.is_token()
            )
            return topk_experts(logits_TE + offsets_E, model.top_k)
        # Softmax is monotonic, and the logits have the finer resolution.
        values_TE = logits_TE if model.router_score == "softmax" else raw_TE
        if thresholds_E is not None:
            values_TE = raw_TE - thresholds_E
        elif self.expert_bias is not None:
            values_TE = raw_TE + self.expert_bias
        if model.num_groups > 1:
            sums_top2 = model.router_score != "softmax"
            values_TE = mask_to_top_groups(values_TE, model.num_groups, model.top_groups, sums_top2=sums_top2)
        return topk_experts(values_TE, model.top_k)

    def _routing_probs(
        self, logits_TE: Tensor, raw_TE: Tensor, ids_TK: Tensor, mixer_noise_TN: Tensor | None
    ) -> Tensor:
        model = self._model
        if self._is_sparse_mixer:
            probs_TK = mixer_weights(logits_TE, ids_TK, model.sparsemixer_jitter, mixer_noise_TN)
        elif model.router_score == "softmax" and model.router_softmax == "post":
            probs_TK = self._softmax(logits_TE.gather(1, ids_TK))
        else:
            probs_TK = raw_TE.gather(1, ids_TK)
            if model.router_score != "softmax" and model.router_normalize:
                probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + SCORE_SUM_EPS)
        return probs_TK if model.router_scaling_factor == 1 else probs_TK * model.router_scaling_factor


class FusedRouting:
    """Fused router kernel with its gradient: one pass over the logits in each direction.

    Args:
        model: sizes, score function and probabilities.
    """

    def __init__(self, model: ModelConfig) -> None:
        # Lazy import, like those below: CPU-only installations have no Triton.
        from moefold.ops.triton.router import RouterOptions

        is_softmax = model.router_score == "softmax"
        self._options = RouterOptions(
            top_k=model.top_k,
            is_softmax=is_softmax,
            is_post_softmax=is_softmax and model.router_softmax == "post",
            normalizes_probs=not is_softmax and model.router_normalize,
            scaling_factor=model.router_scaling_factor,
            num_groups=model.num_groups,
            top_groups=model.top_groups,
        )

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None) -> "RouterOutput":
        """Choose experts; probabilities, scores, their sums and the z-loss sum are differentiable.

        Args:
            logits_TE: float32.
            bias_E: added to the scores for the top-k only.
        """
        from moefold.ops.triton.router import RouterOutput

        return RouterOutput(*_FusedRouterFunction.apply(logits_TE, bias_E, self._options))


def fused_router_unsupported_reason(model: ModelConfig, moe: MoEConfig) -> str:
    """Return why the fused kernel does not support the router of a recipe; empty if it does."""
    if moe.choice != "topk":
        return f"moe.choice={moe.choice!r}"
    if model.router_softmax == "sparsemixer":
        return "model.router_softmax='sparsemixer'"
    if model.router_score == "sqrtsoftplus":
        return "model.router_score='sqrtsoftplus'"
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
        # The losses use few of the outputs: zeros for the others would be written and read.
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
