"""What the routed experts of a rank keep and pass through: rows, inner values, results. Torch-free.

Letters as in `activation_memory.py`, whose formulas these are part of.
"""

from functools import cached_property
from math import ceil

from moefold.config.schema import Config
from moefold.cost.saved_tensors import INT_BYTES, BytesByPart, KernelProfile
from moefold.cost.state_memory import compute_dtype_bytes
from moefold.topology.dispatchers import dispatcher_of

INDICES_PER_ROUTED_TOKEN = 5
"""Of each copy of each gathered token: its expert twice, its place twice, its weight."""


class ExpertMemory:
    """The routed experts of one MoE layer, for one micro-batch.

    Args:
        cfg: a recipe that `check_config` passed.
        recompute: parts that run again.
        kernels: of the device.
        imbalance: rows of the fullest rank's experts over the mean of all ranks.
    """

    def __init__(self, cfg: Config, recompute: frozenset[str], kernels: KernelProfile, imbalance: float) -> None:
        p, train = cfg.parallel, cfg.train
        self._cfg, self._recompute, self._kernels, self._imbalance = cfg, recompute, kernels, imbalance
        self._item_bytes = compute_dtype_bytes(cfg)
        self._high_precision_bytes = max(4, self._item_bytes)
        self._gathers_tokens = dispatcher_of(cfg).gathers_tokens
        self._tokens = train.seq_len // p.cp * train.micro_batch_size // p.tp

    @cached_property
    def expert_tokens(self) -> int:
        """Rows that the routed experts of this rank work on, R: those of the fullest rank."""
        model, moe, p = self._cfg.model, self._cfg.moe, self._cfg.parallel
        copies = self._tokens * model.top_k
        balanced = copies * p.etp
        if moe.capacity_factor <= 0:
            return min(round(balanced * self._imbalance), balanced * p.ep)
        capacity = ceil(copies / model.num_experts * moe.capacity_factor) * model.num_experts * p.etp
        return capacity if moe.pad_to_capacity else min(round(balanced * self._imbalance), capacity)

    def saved(self) -> BytesByPart:
        """All that is kept: rows, what the experts make of them, and the results on their way home."""
        return self.saved_by_experts() + self.expert_outputs()

    def saved_by_experts(self) -> BytesByPart:
        """The rows, and what the experts keep of them."""
        return self.permuted_tokens() + self.fc1_outputs()

    def permuted_tokens(self) -> BytesByPart:
        """The rows that the routed experts read, and who wants them."""
        return BytesByPart({"dispatch buffers": self.expert_tokens * self.token_bytes}) + self.permute_indices()

    def permute_indices(self) -> BytesByPart:
        """Where each copy is and came from; the graph has these numbers even of a layer that runs again."""
        p = self._cfg.parallel
        order = 2 * self.expert_tokens if p.ep * p.etp > 1 else 0
        return BytesByPart({"dispatch buffers": (3 * self.routed_tokens + order) * INT_BYTES})

    def fc1_outputs(self) -> BytesByPart:
        """What the routed experts keep of their rows."""
        inner = (
            self.expert_tokens * self._saved_ffn_widths * self._cfg.model.moe_ffn_hidden_size // self._cfg.parallel.etp
        )
        weights = self.expert_tokens * self._high_precision_bytes if self._cfg.moe.weight_in_expert else 0
        return BytesByPart(experts=weights + inner * self._item_bytes)

    def expert_outputs(self) -> BytesByPart:
        """The results that the sum over the copies of a token keeps for the gradients of the weights."""
        if self._cfg.moe.weight_in_expert:
            return BytesByPart()
        if self.combines_locally:
            return BytesByPart(experts=self.expert_tokens * self.token_bytes)
        return BytesByPart({"dispatch buffers": self.routed_tokens * self.token_bytes})

    @property
    def combines_locally(self) -> bool:
        """Whether copies are made and added up where the experts are, and do not travel."""
        p = self._cfg.parallel
        return self._gathers_tokens or p.ep * p.etp == 1

    @property
    def routed_tokens(self) -> int:
        """Copies of this rank's tokens."""
        return self._tokens * self._cfg.model.top_k

    @property
    def token_bytes(self) -> int:
        """Bytes of one row."""
        return self._cfg.model.hidden_size * self._item_bytes

    @property
    def _saved_ffn_widths(self) -> int:
        """What the routed experts keep of a row, in inner widths."""
        runs_again = "expert_activation" in self._recompute
        if self._kernels.fused_swiglu:
            return 2 if runs_again else 3
        if runs_again:
            return 0
        if not self._kernels.grouped_experts:
            return 2
        return 3 if self._cfg.moe.weight_in_expert else 4

    def expert_transient(self) -> BytesByPart:
        """One routed expert at work, beside what is kept; what the one before it made goes when the new is there.

        Nothing where all run together: what they make is kept. Narrow types are counted as on a processor that
        multiplies them in float32: two inner projections and a result.
        """
        if self._kernels.grouped_experts:
            return BytesByPart()
        model, p = self._cfg.model, self._cfg.parallel
        num_experts = model.num_experts // p.ep
        runs_again, has_others = "expert_activation" in self._recompute, num_experts > 1
        widths = (3 + 2 * has_others) if runs_again else (1 + has_others)
        inner = max(
            widths * self._item_bytes,
            3 * self._high_precision_bytes if self._item_bytes < self._high_precision_bytes else 0,
        )
        return BytesByPart(experts=self.expert_tokens // num_experts * model.moe_ffn_hidden_size // p.etp * inner)

    def combine_buffer(self) -> BytesByPart:
        """The sum over the copies of each token, and the copies in float32 at least, in which it is taken."""
        hidden = self._cfg.model.hidden_size * self._high_precision_bytes
        copies = self.expert_tokens if self.combines_locally else self.routed_tokens
        widened = copies * hidden if self._item_bytes < self._high_precision_bytes else 0
        return BytesByPart({"dispatch buffers": widened + self._tokens * hidden})

    def allgather_combine_buffer(self) -> BytesByPart:
        """Where all tokens are gathered: their sums over copies, wide and in the compute type, and who chose whom."""
        model, p = self._cfg.model, self._cfg.parallel
        if not self._gathers_tokens:
            return BytesByPart()
        token = (
            model.hidden_size * (self._high_precision_bytes + self._item_bytes)
            + INDICES_PER_ROUTED_TOKEN * model.top_k * INT_BYTES
        )
        return BytesByPart({"dispatch buffers": self._tokens * p.ep * p.etp * token})

    def dispatch_comm_buffers(self) -> BytesByPart:
        """Rows while they travel to the experts: as they were sent, and as they arrive.

        Over etp there is one more of each row that is gathered, which is sent, and those that came over ep.
        """
        p = self._cfg.parallel
        if self._gathers_tokens:
            return BytesByPart({"dispatch buffers": self._tokens * p.ep * p.etp * self.token_bytes})
        over_etp = (self.expert_tokens + (self.expert_tokens // p.etp if p.ep > 1 else 0)) if p.etp > 1 else 0
        return BytesByPart(
            {"dispatch buffers": (self.routed_tokens + self.expert_tokens + over_etp) * self.token_bytes}
        )

    def combine_comm_buffers(self) -> BytesByPart:
        """Rows while they travel back, and what is kept of the results where these do not travel."""
        p = self._cfg.parallel
        if self._gathers_tokens:
            sums = self._tokens * (p.ep * p.etp + 1) * self.token_bytes
            return self.expert_outputs() + BytesByPart({"dispatch buffers": sums})
        # Over etp each member receives its rows from all.
        received = self.expert_tokens if p.etp > 1 else self.routed_tokens
        return BytesByPart({"dispatch buffers": (self.expert_tokens + received) * self.token_bytes})
