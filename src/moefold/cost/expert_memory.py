"""Memory of the routed experts of a rank: permuted tokens, hidden values, outputs and buffers.

Part of the formulas of `activation_memory.py`, with the same letters.
"""

from functools import cached_property
from math import ceil

from moefold.config.chosen import chosen_in
from moefold.config.groups.dispatcher import DispatcherPart, ExchangeBytes, ExpertRows
from moefold.config.groups.ffn import RoutedPart
from moefold.config.groups.layer_sizes import LayerSizes
from moefold.cost.saved_tensors import INT_BYTES, BytesByPart

GROUPED_TRANSIENT_WIDTHS = 4
"""Inner widths of each routed token in the backward pass of grouped experts: the hidden values, recomputed from the
saved projections, and the gradients of hidden values, gate and up."""


class ExpertMemory:
    """The routed experts of one MoE layer, for one micro-batch."""

    def __init__(self, batch: LayerSizes, part: RoutedPart) -> None:
        self._batch = batch
        self._part = part
        self.dispatcher = chosen_in(batch.parallel, DispatcherPart)

    @cached_property
    def expert_tokens(self) -> int:
        """Routed tokens that the experts of this rank process, R, on the busiest rank."""
        part = self._part
        moe = self._batch.moe
        p = self._batch.parallel
        routed = self.routed_tokens
        room = self.dispatcher.receive_capacity(routed) if p.ep > 1 else None
        if room is not None:
            # Allocated on every rank, however many arrive.
            return room
        # Zero-computation experts compute no rows.
        computed = self._batch.tokens * part.mean_active
        balanced = computed * p.etp
        if moe.capacity_factor <= 0:
            return min(round(balanced * self._batch.imbalance), round(balanced) * p.ep)
        if p.ep * p.etp == 1 and not moe.pad_to_capacity and self._batch.kernels.device_type == "cuda":
            # Rows of dropped tokens stay, as the host does not wait for the counts.
            return routed
        capacity = ceil(routed / part.num_choices * moe.capacity_factor) * part.num_experts * p.etp
        return capacity if moe.pad_to_capacity else min(round(balanced * self._batch.imbalance), capacity)

    @cached_property
    def applies_probs(self) -> bool:
        """True if the experts apply the routing probabilities: no outputs are saved then (`Dispatcher.run`)."""
        batch = self._batch
        runs_kernels = batch.kernel_choice == "triton" or (batch.kernel_choice == "auto" and batch.item_bytes == 2)
        commutes = batch.kernels.experts_apply_probs and runs_kernels and not batch.quantizes_gemms
        return batch.moe.weight_in_expert or self._part.probs_on_input or commutes

    def saved(self) -> BytesByPart:
        """Return all bytes saved for backward: permuted tokens, FC1 outputs and expert outputs."""
        return self.saved_by_experts() + self.expert_outputs()

    def saved_by_experts(self) -> BytesByPart:
        """Return the bytes of the permuted tokens with their indices, and of the FC1 outputs."""
        # The rows before and after the multiplication by the routing weights.
        copies = 2 if self._part.probs_on_input else 1
        permuted = BytesByPart({"dispatch buffers": copies * self.expert_tokens * self.token_bytes})
        return permuted + self.permute_indices() + self.fc1_outputs()

    def permute_indices(self) -> BytesByPart:
        """Return the bytes of the permutation indices, which the graph saves even for a recomputed layer."""
        p = self._batch.parallel
        order = 2 * self.expert_tokens if p.ep * p.etp > 1 else 0
        return BytesByPart({"dispatch buffers": (3 * self.routed_tokens + order) * INT_BYTES})

    def fc1_outputs(self) -> BytesByPart:
        """Return the bytes that the routed experts save between their input and output."""
        inner = self.expert_tokens * self._saved_ffn_widths * self._part.intermediate_size // self._batch.parallel.etp
        weights = self.expert_tokens * self._batch.high_precision_bytes if self.applies_probs else 0
        return BytesByPart(experts=weights + inner * self._batch.item_bytes)

    def expert_outputs(self) -> BytesByPart:
        """Return the bytes of expert outputs saved for the gradients of the routing weights."""
        if self.applies_probs:
            return BytesByPart()
        if self.combines_locally:
            return BytesByPart(experts=self.expert_tokens * self.token_bytes)
        return BytesByPart({"dispatch buffers": self.routed_tokens * self.token_bytes})

    @property
    def combines_locally(self) -> bool:
        """Return whether tokens are permuted and combined on the experts' rank, without an all-to-all."""
        p = self._batch.parallel
        return self.dispatcher.gathers_tokens or p.ep * p.etp == 1

    @property
    def routed_tokens(self) -> int:
        """Routed tokens of this rank: its tokens times top_k."""
        return self._batch.tokens * self._part.top_k

    @property
    def _token_width(self) -> int:
        """Width of a dispatched token."""
        return self._part.token_size(self._batch.hidden_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self._token_width * self._batch.item_bytes

    @property
    def _saved_ffn_widths(self) -> int:
        """Values that the routed experts save per routed token, in inner widths."""
        recomputes = "expert_activation" in self._batch.recompute
        if self._batch.kernels.fused_swiglu:
            return 2 if recomputes else 3
        return 0 if recomputes else 2

    def expert_transient(self) -> BytesByPart:
        """Return the temporary bytes of one looped expert, or of all grouped ones.

        The bytes of a looped expert are freed when the next expert's replace them. Low-precision types are counted as
        on a CPU that multiplies in float32: two inner projections and an output. Grouped experts hold
        `GROUPED_TRANSIENT_WIDTHS` in their backward pass, none if a fused SwiGLU is counted as saving them.
        """
        batch = self._batch
        part = self._part
        p = batch.parallel
        if batch.kernels.grouped_experts:
            widths = 0 if batch.kernels.fused_swiglu else GROUPED_TRANSIENT_WIDTHS
            return BytesByPart(experts=self.expert_tokens * widths * part.intermediate_size // p.etp * batch.item_bytes)
        num_experts = part.num_experts // p.ep
        has_others = num_experts > 1
        widths = (3 + 2 * has_others) if "expert_activation" in batch.recompute else (1 + has_others)
        multiplied = 3 * batch.high_precision_bytes if batch.item_bytes < batch.high_precision_bytes else 0
        inner = max(widths * batch.item_bytes, multiplied)
        return BytesByPart(experts=self.expert_tokens // num_experts * part.intermediate_size // p.etp * inner)

    def combine_buffer(self) -> BytesByPart:
        """Return the bytes of the combine: the sum per token, and the routed tokens in float32 or better.

        PyTorch's operators need them: the C kernel of a CPU (`ops.cpu.permute`) sums low-precision rows without a copy.
        """
        hidden = self._token_width * self._batch.high_precision_bytes
        num_tokens = self.expert_tokens if self.combines_locally else self.routed_tokens
        high_precision_copy = num_tokens * hidden if self._batch.item_bytes < self._batch.high_precision_bytes else 0
        return BytesByPart({"dispatch buffers": high_precision_copy + self._batch.tokens * hidden})

    @cached_property
    def exchange_bytes(self) -> ExchangeBytes:
        """Temporary bytes of the dispatcher's exchanges."""
        p = self._batch.parallel
        widths = self._token_width, self._batch.item_bytes, self._batch.high_precision_bytes
        return self.dispatcher.exchange_bytes(
            ExpertRows(self._batch.tokens, self._part.top_k, self.expert_tokens, *widths, p.ep, p.etp)
        )

    def dispatch_comm_buffers(self) -> BytesByPart:
        """Return the bytes of the dispatch's send and receive buffers.

        Buffers that are there between steps (`dispatch_buffer_bytes`) are not counted, but the tokens that are copied
        from them are.
        """
        return BytesByPart({"dispatch buffers": self.exchange_bytes.dispatch})

    def combine_comm_buffers(self) -> BytesByPart:
        """Return the bytes of the combine's send and receive buffers, and of outputs saved without an all-to-all."""
        buffers = BytesByPart({"dispatch buffers": self.exchange_bytes.combine})
        return self.expert_outputs() + buffers if self.dispatcher.gathers_tokens else buffers
