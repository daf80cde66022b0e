"""Mixture of experts (MoE): a router sends each token to some of many SwiGLU networks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import TYPE_CHECKING, ClassVar, Self

from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.small_sizes import SmallSizes
from moefold.config.groups.attention import prefixed
from moefold.config.groups.ffn import FeedForwardFormula, FeedForwardFrame, RoutedPart, swiglu_params
from moefold.cost.expert_memory import ExpertMemory
from moefold.cost.saved_tensors import INT_BYTES, BytesByPart

if TYPE_CHECKING:
    from moefold.config.groups.layer_sizes import LayerSizes
    from moefold.model.moe.layer import MoELayer


@dataclass(frozen=True, kw_only=True)
class MoePart(RoutedPart):
    """Add the outputs of the chosen experts, and of a shared expert if the layer has it."""

    recompute_parts: ClassVar[frozenset[str]] = frozenset({"moe", "expert_activation", "shared_experts"})

    def shrink(self, small: SmallSizes) -> Self:
        """Return the part with few narrow experts."""
        num_experts = small.experts(self.num_experts, self.top_k)
        return replace(
            self,
            num_experts=num_experts,
            zero_experts=min(self.zero_experts, num_experts),
            intermediate_size=small.shard_width * small.etp,
            latent_size=lcm(small.head_dim, small.etp) if self.latent_size else 0,
            shared=replace(self.shared, intermediate_size=small.shard_width * small.tp) if self.shared else None,
            router=self.router.shrink(small),
            activation=self.activation.shrink(small),
        )

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of `MoELayer`. See base class."""
        ffn = self.intermediate_size
        experts = self.num_experts
        width = self.latent_size or hidden
        if self.shared and self.shared.gate:
            yield ParamSpec("shared_gate", (1, hidden), "shared_experts", never_as_matrix=True)
        yield ParamSpec("router.weight", (self.num_choices, hidden), "router")
        if self.router.bias:
            yield ParamSpec("router.bias", (self.num_choices,), "router")
        yield ParamSpec("experts.w_gate", (experts, width, ffn), "experts", etp_dim=2)
        yield ParamSpec("experts.w_up", (experts, width, ffn), "experts", etp_dim=2)
        yield ParamSpec("experts.w_down", (experts, ffn, width), "experts", etp_dim=1, drawn="output")
        if self.bias:
            yield ParamSpec("experts.b_gate", (experts, ffn), "experts", etp_dim=1)
            yield ParamSpec("experts.b_up", (experts, ffn), "experts", etp_dim=1)
            yield ParamSpec("experts.b_down", (experts, width), "experts", etp_dim=1)
        if self.latent_size:
            yield ParamSpec("latent_down.weight", (width, hidden), "shared_experts")
            yield ParamSpec("latent_up.weight", (hidden, width), "shared_experts")
        if self.shared_width:
            yield from prefixed("shared", swiglu_params("shared_experts", hidden, self.shared_width))

    def saved(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of router, experts and shared expert. See base class."""
        experts = ExpertMemory(sizes, self)
        if "moe" in sizes.recompute:
            return sizes.norm_with_output(saves_output=True) + experts.permute_indices()
        has_shared = self.shared_width > 0
        # The router saves its input in the compute type, also if another module saves it.
        saved = sizes.norm_with_output(saves_output=True)
        if has_shared and "shared_experts" not in sizes.recompute:
            saved["shared experts"] += sizes.swiglu(self.shared_width)
            saved["shared experts"] += sizes.gathered_bytes(sizes.hidden_size) if sizes.parallel.tp > 1 else 0
        if self.latent_size:
            # The input of the projection back.
            saved["shared experts"] += sizes.tokens * self.latent_size * sizes.item_bytes
        routing_bytes = 2 * self.num_choices * sizes.high_precision_bytes + self.top_k * (
            sizes.high_precision_bytes + INT_BYTES
        )
        saved["router"] += sizes.tokens * routing_bytes
        router_bytes = self.router.saved_bytes(self.top_k, self.num_choices, sizes.high_precision_bytes)
        saved["router"] += sizes.tokens * router_bytes
        if sizes.moe.input_jitter:
            # The noise and the product with it, in the type of the logits.
            saved["router"] += 2 * sizes.tokens * sizes.hidden_size * sizes.high_precision_bytes
        return saved + experts.saved()

    def delayed_wgrad(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of the projections. See base class."""
        delayed = BytesByPart()
        experts = ExpertMemory(sizes, self)
        if not experts.dispatcher.moves_experts:
            width = 2 * self.token_size(sizes.hidden_size) + 3 * self.intermediate_size // sizes.parallel.etp
            delayed["experts"] = experts.expert_tokens * sizes.item_bytes * width
        if self.shared_width:
            delayed["shared experts"] = sizes.swiglu_wgrad(self.shared_width)
        if self.latent_size:
            widths = 2 * (sizes.hidden_size + self.latent_size)
            delayed["shared experts"] += sizes.tokens * sizes.item_bytes * widths
        return delayed

    def concurrent_wgrad(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of the hidden values and inner gradients of looped experts.

        Experts that run one after another free their inner projections when the last expert is done.
        """
        experts = ExpertMemory(sizes, self)
        if sizes.kernels.grouped_experts or experts.dispatcher.moves_experts:
            return BytesByPart()
        # The output gradient replaces the output where that is saved.
        inner = 3 * self.intermediate_size // sizes.parallel.etp
        width = inner + self.token_size(sizes.hidden_size) * experts.applies_probs
        return BytesByPart(experts=experts.expert_tokens * sizes.item_bytes * width)

    def transient(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the peak of temporary bytes of the routed experts: one expert at work, or the combine."""
        p = sizes.parallel
        experts = ExpertMemory(sizes, self)
        combine_bytes = experts.combine_buffer()
        if p.ep * p.etp > 1:
            # Outputs in expert order and in sender order; before that, the partial sums of all etp ranks are added.
            outputs = experts.expert_tokens * experts.token_bytes
            reduce_bytes = outputs if p.etp > 1 else 0
            buffers = 2 * outputs + max(combine_bytes.total(), reduce_bytes)
            # An all-gather dispatcher has sums for tokens of other ranks instead.
            combine_bytes = BytesByPart({"dispatch buffers": max(buffers, experts.exchange_bytes.sums)})
        return max(experts.expert_transient(), combine_bytes, key=BytesByPart.total)

    def saved_if_recomputed(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of the indices of the permutation. See base class."""
        return ExpertMemory(sizes, self).permute_indices()

    def build(self, frame: FeedForwardFrame, number: int) -> "MoELayer":
        """Return the module. See base class."""
        from moefold.model.mlp import SwiGLU
        from moefold.model.moe.layer import MoELayer
        from moefold.model.weight_init import seed_for

        hidden = frame.hidden_size
        return MoELayer(
            self,
            hidden,
            frame.moe,
            loss_scale=1.0 / frame.micro_batches,
            micro_batches_per_rank=frame.rank_micro_batches,
            noise_seed=seed_for(frame.seed, f"layers.{number}.ffn.router.jitter"),
            shared=SwiGLU(hidden, self.shared_width) if self.shared_width else None,
        )

    def formula(self) -> FeedForwardFormula | None:
        """Return the shared expert, and all routed experts. See base class."""
        from moefold.parts.ffn.moe.oracle import output

        return None if self.activation.formula() is None else partial(output, self)
