"""Cost of a feed-forward network: a dense MLP, or the router, the exchange of tokens and the experts."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from moefold.config.groups.dispatcher import DispatcherPart, SentTokens, Transfer
from moefold.config.groups.ffn import RoutedPart
from moefold.planner.cost_model.block import BACKWARD_PASSES, BlockCost, BlockTime, CostItem, Launches
from moefold.planner.cost_model.collective import (
    GroupLimitedRouting,
    RankGroup,
    all_gather_s,
    all_to_all_s,
    larger,
    seconds_of_groups,
)
from moefold.planner.cost_model.gemm import GemmCost, LinearTimes, sum_times

DROP_KERNELS = Launches(20, 34)
"""Further kernels of moefold's layers that drop tokens. Source: the same traces."""

UNPADDED_DROP_KERNELS = Launches(10, 3)
"""Further kernels of Megatron-Core where it drops tokens without padding (`TrainingWorkload.drops_unpadded`). Source: a
count in megatron-core 0.14.0, of the mask of kept tokens, their sum, and the masked indices and probabilities."""

ROUTER_PEAK_SHARE = 0.1
"""Rate of the router's GEMM in float32 over the bf16 peak. Assumed, not fitted. Range: 0.07 (float32 of an H100 without
tensor cores) to 0.5 (TF32)."""

ROUTER_BYTES = 62.01
"""Bytes that the router's forward pass moves for each token and expert: scores, top-k, masks and counts in float32.
Source: fit, prior 60."""

UNFUSED_PERMUTE_PASSES = 1.41
"""Memory traffic of a permutation by separate kernels over the traffic of a fused one. Source: fit, prior 1.5."""

UNFUSED_CLAMP_FACTOR = 4.306
"""Passes of a clamped activation with biases in separate kernels over its passes in Megatron-Core of 2026. Source: fit,
prior 2, on GPT-OSS-120B on 64 B200, with 8,213 tokens/s in the container 25.11 and 13,722 in the next one."""

EXPERT_KERNELS = Launches(2, 4)
"""GEMMs of one expert, forward and backward. Each is a kernel without grouped GEMM."""
CAST_KERNELS = Launches(2, 3)
"""Kernels that cast the operands of one expert, forward and backward."""

EXPERT_LAUNCH_SHARE = 0.2176
"""Host time of the launch of one expert's GEMM over the time of another launch: a C++ loop over several streams
launches them, and their gaps overlap. Source: fit, prior 0.2."""

CLAMPED_SWIGLU_PASSES = 11.28
"""Memory passes of clamped SwiGLU with biases: add, clamp twice, gate and multiply are separate kernels. Source: fit,
prior 8."""


class DenseCost(BlockCost):
    """Cost of a dense MLP with its norm and residual."""

    def block_time(self, width: int) -> BlockTime:
        """Return the time of the block, given the width of the MLP."""
        forward_s, backward_s, weights_s = swiglu_mlp_s(self.gemm, self.tokens, self.hidden, width // self.tp, 3)
        part = "dense_mlp"
        return BlockTime(
            (CostItem(part, self.passes_s), self.gather, CostItem(part, forward_s), self.gather),
            (self.gather, CostItem(part, backward_s + weights_s + BACKWARD_PASSES * self.passes_s), self.gather),
            weights_s,
            self.kernel_counts("dense"),
            recompute=(self.norm_again, (part, forward_s + 2 * self.gather.seconds)),
        )


def swiglu_mlp_s(
    gemm: GemmCost,
    num_tokens: Any,
    hidden: int,
    width: Any,
    num_matrices: int,
    groups: int = 0,
    activation_passes: float = 1.0,
) -> LinearTimes:
    """Return the seconds of an MLP with its activation."""
    inner = (num_matrices - 1) * width
    fuses = groups > 0 and activation_passes == 1.0 and num_matrices == 3 and gemm.fuses_grouped_gemm
    times = [
        gemm.linear_s(num_tokens, inputs, outputs, groups=max(1, groups), fused=fuses)
        for inputs, outputs in ((hidden, inner), (width, hidden))
    ]
    if not fuses:
        casts = num_tokens * (hidden + width), num_tokens * (hidden + inner)
        moved = num_tokens * (inner + width), num_tokens * (2 * inner + width)
        rest_s, rest_back_s = (
            gemm.quantize_s(cast) + activation_passes * gemm.memory_bound_s(numbers * gemm.value_bytes)
            for cast, numbers in zip(casts, moved, strict=True)
        )
        times.append((rest_s, rest_back_s, 0.0))
    return sum_times(*times)


class MoECost(BlockCost):
    """Cost of a MoE block: norm, router, permutation, dispatch, experts, combine, and the shared expert.

    Args:
        block: the sizes and times of a mapping, or of many with arrays of tp, cp and mbs. Its expert degrees do not
            count.
    """

    def __init__(
        self,
        block: BlockCost,
        part: RoutedPart,
        ep: int,
        etp: int,
    ) -> None:
        self.__dict__.update(vars(block))
        self.part = part
        self.num_matrices = sum(weight.is_expert and weight.is_matrix for weight in part.params(1))
        """3 with a gate (SwiGLU), 2 without."""
        self.top_k = part.mean_active
        """Experts of a token that compute, on average."""
        self.ep = ep
        self.etp = etp
        self.local_experts = max(1, part.num_experts // self.ep)
        self.width = max(1, part.intermediate_size // self.etp)
        self.expert_hidden_size = part.token_size(self.hidden)
        self.imbalance = self.workload.imbalance_at(self.ep, part.num_experts)
        factor = self.workload.capacity_factor
        self.routed_tokens = self.local_tokens * self.top_k * (min(1.0, factor) if factor else 1.0)
        self.expert_tokens = self.routed_tokens * self.imbalance * self.etp
        self.has_fused_activation = part.activation.is_swiglu and not part.bias
        self.fuses_experts = self.has_fused_activation and self.num_matrices == 3 and self.gemm.fuses_grouped_gemm

    @cached_property
    def _experts_s(self) -> LinearTimes:
        """The seconds of the routed experts."""
        clamp_factor = UNFUSED_CLAMP_FACTOR if self.workload.unfused_clamp else 1.0
        return swiglu_mlp_s(
            self.gemm,
            self.expert_tokens,
            self.expert_hidden_size,
            self.width,
            self.num_matrices,
            self.local_experts,
            1.0 if self.has_fused_activation else CLAMPED_SWIGLU_PASSES * clamp_factor,
        )

    def block_time(self, dispatcher: DispatcherPart) -> BlockTime:
        """Return the time of the block with a dispatcher."""
        gemm = self.gemm
        experts_s, experts_back_s, weights_s = self._experts_s
        comm = self._ep_comm(dispatcher, gemm.value_bytes)
        router_s = self._router_s()
        permute = CostItem("permute", self._permute_s(dispatcher))
        forward = [
            CostItem("router", router_s + self.passes_s),
            permute,
            *self._ep_comm(dispatcher, self.workload.wire.value_bytes(gemm.value_bytes)),
            CostItem("experts", experts_s),
            *reversed(comm),
            permute,
        ]
        backward = [
            permute,
            *comm,
            CostItem("experts", experts_back_s + weights_s),
            *reversed(comm),
            permute,
            CostItem("router", 2 * router_s + BACKWARD_PASSES * self.passes_s),
        ]
        kernels = self._kernel_counts()
        recompute = [self.norm_again, ("expert_activation", self._activation_again_s())]
        if self.part.shared_width:
            width = larger(1, self.part.shared_width // self.tp)
            shared_s, shared_back_s, wgrad_s = swiglu_mlp_s(gemm, self.tokens, self.hidden, width, self.num_matrices)
            shared = [self.gather, CostItem("shared_experts", shared_s), self.gather]
            forward += shared
            backward += [self.gather, CostItem("shared_experts", shared_back_s + wgrad_s), self.gather]
            weights_s = weights_s + wgrad_s
            kernels = kernels.plus(self.kernel_counts("shared_experts"))
            recompute.append(("shared_experts", sum(work.seconds for work in shared)))
        recompute.append(("moe", sum(work.seconds for work in forward)))
        drops = self.workload.capacity_factor > 0
        has_full_graphs = not any(self.workload.launched)
        if self.workload.is_megatron and has_full_graphs and not drops:
            forward.append(self._stash())
            backward.insert(0, self._stash())
        syncs = 1.0 if self.workload.drops_unpadded or not drops else 0.0
        return BlockTime(tuple(forward), tuple(backward), weights_s, kernels, syncs, tuple(recompute))

    def _stash(self) -> CostItem:
        """Return the copy of the experts' saved tensors, which Megatron-Core keeps out of the buffers of a full graph.

        These buffers have room for the most tokens that a rank may get. The operands of both GEMMs are saved in their
        precision, the activation's inputs in the compute type.
        """
        gemm = self.gemm
        operands = gemm.element_bytes * (self.expert_hidden_size + self.width)
        saved = operands + gemm.value_bytes * (self.num_matrices - 1) * self.width
        return CostItem("permute", gemm.memory_bound_s(2 * self.expert_tokens * saved))

    def _activation_again_s(self) -> Any:
        """Return the seconds of recomputing the experts' activation."""
        gemm = self.gemm
        seconds = gemm.memory_bound_s(self.expert_tokens * self.num_matrices * self.width * gemm.value_bytes)
        if self.workload.is_megatron:
            return seconds
        # The outputs of the two inner projections are not saved either, so these GEMMs are recomputed.
        inner = (self.num_matrices - 1) * self.width
        return seconds + gemm.matmul_s(self.expert_tokens, inner, self.expert_hidden_size, groups=self.local_experts)

    def _kernel_counts(self) -> Launches:
        """Return the kernel launches of the block.

        moefold and fused experts have one kernel for all experts. Other software has kernels for each expert.
        """
        kernels = self.kernel_counts("moe")
        if self.fuses_experts:
            return Launches(kernels.forward / 2, kernels.backward / 2)
        if not self.workload.is_megatron:
            return kernels.plus(DROP_KERNELS) if self.workload.capacity_factor > 0 else kernels
        if self.workload.drops_unpadded:
            kernels = kernels.plus(UNPADDED_DROP_KERNELS)
        of_expert = EXPERT_KERNELS.plus(CAST_KERNELS) if self.gemm.quantize_bytes > 0 else EXPERT_KERNELS
        return kernels.plus(of_expert, EXPERT_LAUNCH_SHARE * self.local_experts)

    def _router_s(self) -> Any:
        """Return the seconds of the router: logits in float32, scores, top-k and counts.

        They read [T, H] once and [T, E] several times.
        """
        experts = self.part.num_choices
        flops = 2.0 * self.local_tokens * self.hidden * experts
        rate = self.device.peak("bf16") * ROUTER_PEAK_SHARE
        moved = self.local_tokens * (6 * self.hidden + ROUTER_BYTES * experts)
        return flops / rate + self.gemm.memory_bound_s(moved)

    def _permute_s(self, dispatcher: DispatcherPart) -> Any:
        """Return the seconds of the permutation on one side: expand the tokens, and sort received tokens by expert.

        Routed tokens arrive in the order of their senders, and are sorted after the etp group has gathered them. A rank
        with one expert, or with all of them, has nothing to sort (`AllToAllMetadata.expert_order`, as in
        Megatron-Core). DeepEP, HybridEP and moefold have fused kernels, Megatron's all-to-all separate ones.
        """
        passes = 1.0
        if self.fuses_experts:
            moved = self.expert_tokens / self.etp
        else:
            is_sorted = self.local_experts == 1 or self.ep * self.etp == 1
            moved = self.routed_tokens + (0.0 if is_sorted else 2 * self.expert_tokens)
            if self.workload.is_megatron and not dispatcher.kernel_package:
                passes = UNFUSED_PERMUTE_PASSES
        token_bytes = self.expert_hidden_size * self.gemm.value_bytes
        return passes * self.gemm.memory_bound_s((self.local_tokens + moved) * token_bytes)

    def _ep_comm(self, dispatcher: DispatcherPart, value_bytes: float) -> tuple[CostItem, ...]:
        """Return the dispatch collectives of one direction, for rows of numbers of `value_bytes`."""
        row_bytes = self.expert_hidden_size * value_bytes
        sent = SentTokens(self.local_tokens, self.routed_tokens, self.expert_tokens, row_bytes, self.ep, self.etp)
        return tuple(map(self._transfer, dispatcher.traffic(sent)))

    def _transfer(self, transfer: Transfer) -> CostItem:
        """Return the time of a collective. Ranks of ep wait for the busiest of them."""
        # If coupled, the ranks of tp and cp lie between neighbours of ep.
        stride = self.tp * self.mapping.cp if self.workload.is_coupled else self.etp
        group, imbalance = {
            "ep": (RankGroup(self.ep, stride), self.imbalance),
            "etp": (RankGroup(self.etp, 1), 1.0),
        }[transfer.axis]
        price: Callable[..., Any] = all_gather_s
        if not transfer.gathers:
            routing = GroupLimitedRouting(self.top_k, self.part.router.num_groups, self.part.router.top_groups)
            price = partial(all_to_all_s, routing=routing if transfer.sends_once else None)
        seconds = seconds_of_groups(partial(price, self.device), group, transfer.num_bytes)
        return CostItem(f"{transfer.axis}_comm", seconds * imbalance)
