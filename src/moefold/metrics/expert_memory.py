"""What the routed experts of a rank keep and pass through: rows, inner values, results. Torch-free.

Letters as in `activation_memory.py`, whose formulas these are part of.
"""

from functools import cached_property
from math import ceil

from moefold.config.schema import Config
from moefold.metrics.kept_parts import INT_BYTES, Kernels, Parts
from moefold.metrics.state_memory import compute_bytes

NUMBERS_OF_A_COPY = 5
"""Of each copy of each gathered token: its expert twice, its place twice, its weight."""


class ExpertMemory:
    """The routed experts of one MoE layer, for one micro-batch.

    Args:
        cfg: a recipe that `check_config` passed.
        recompute: parts that run again.
        kernels: of the device.
        imbalance: rows of the fullest rank's experts over the mean of all ranks.
    """

    def __init__(self, cfg: Config, recompute: frozenset[str], kernels: Kernels, imbalance: float) -> None:
        p, train = cfg.parallel, cfg.train
        self._cfg, self._recompute, self._kernels, self._imbalance = cfg, recompute, kernels, imbalance
        self._item = compute_bytes(cfg)
        self._wide = max(4, self._item)
        self._tokens = train.seq_len // p.cp * train.micro_batch_size // p.tp

    @cached_property
    def rows(self) -> int:
        """Rows that the routed experts of this rank work on, R: those of the fullest rank."""
        model, moe, p = self._cfg.model, self._cfg.moe, self._cfg.parallel
        copies = self._tokens * model.top_k
        balanced = copies * p.etp
        if moe.capacity_factor <= 0:
            return min(round(balanced * self._imbalance), balanced * p.ep)
        capacity = ceil(copies / model.num_experts * moe.capacity_factor) * model.num_experts * p.etp
        return capacity if moe.pad_to_capacity else min(round(balanced * self._imbalance), capacity)

    def kept(self) -> Parts:
        """All that is kept: rows, what the experts make of them, and the results on their way home."""
        return self.worked_on() + self.results()

    def worked_on(self) -> Parts:
        """The rows, and what the experts keep of them."""
        return self.sorted_rows() + self.inner_values()

    def sorted_rows(self) -> Parts:
        """The rows that the routed experts read, and who wants them."""
        return Parts({"dispatch buffers": self.rows * self.row}) + self.places()

    def places(self) -> Parts:
        """Where each copy is and came from; the graph has these numbers even of a layer that runs again."""
        p = self._cfg.parallel
        order = 2 * self.rows if p.ep * p.etp > 1 else 0
        return Parts({"dispatch buffers": (3 * self.copies + order) * INT_BYTES})

    def inner_values(self) -> Parts:
        """What the routed experts keep of their rows."""
        inner = self.rows * self._inner_widths * self._cfg.model.moe_ffn_hidden_size // self._cfg.parallel.etp
        weights = self.rows * self._wide if self._cfg.moe.weight_in_expert else 0
        return Parts(experts=weights + inner * self._item)

    def results(self) -> Parts:
        """The results that the sum over the copies of a token keeps for the gradients of the weights."""
        if self._cfg.moe.weight_in_expert:
            return Parts()
        if self.gathers_rows:
            return Parts(experts=self.rows * self.row)
        return Parts({"dispatch buffers": self.copies * self.row})

    @property
    def gathers_rows(self) -> bool:
        """Whether copies are made and added up where the experts are, and do not travel."""
        p = self._cfg.parallel
        return p.dispatcher == "allgather" or p.ep * p.etp == 1

    @property
    def copies(self) -> int:
        """Copies of this rank's tokens."""
        return self._tokens * self._cfg.model.top_k

    @property
    def row(self) -> int:
        """Bytes of one row."""
        return self._cfg.model.hidden_size * self._item

    @property
    def _inner_widths(self) -> int:
        """What the routed experts keep of a row, in inner widths."""
        runs_again = "expert_activation" in self._recompute
        if self._kernels.fused_swiglu:
            return 2 if runs_again else 3
        if runs_again:
            return 0
        if not self._kernels.grouped_experts:
            return 2
        return 3 if self._cfg.moe.weight_in_expert else 4

    def at_work(self) -> Parts:
        """One routed expert at work, beside what is kept; what the one before it made goes when the new is there.

        Nothing where all run together: what they make is kept. Narrow types are counted as on a processor that
        multiplies them in float32: two inner projections and a result.
        """
        if self._kernels.grouped_experts:
            return Parts()
        model, p = self._cfg.model, self._cfg.parallel
        num_experts = model.num_experts // p.ep
        runs_again, has_others = "expert_activation" in self._recompute, num_experts > 1
        widths = (3 + 2 * has_others) if runs_again else (1 + has_others)
        inner = max(widths * self._item, 3 * self._wide if self._item < self._wide else 0)
        return Parts(experts=self.rows // num_experts * model.moe_ffn_hidden_size // p.etp * inner)

    def summing(self) -> Parts:
        """The sum over the copies of each token, and the copies in float32 at least, in which it is taken."""
        hidden = self._cfg.model.hidden_size * self._wide
        copies = self.rows if self.gathers_rows else self.copies
        widened = copies * hidden if self._item < self._wide else 0
        return Parts({"dispatch buffers": widened + self._tokens * hidden})

    def gathered_sums(self) -> Parts:
        """Where all tokens are gathered: their sums over copies, wide and in the compute type, and who chose whom."""
        model, p = self._cfg.model, self._cfg.parallel
        if p.dispatcher != "allgather":
            return Parts()
        token = model.hidden_size * (self._wide + self._item) + NUMBERS_OF_A_COPY * model.top_k * INT_BYTES
        return Parts({"dispatch buffers": self._tokens * p.ep * p.etp * token})

    def rows_to_experts(self) -> Parts:
        """Rows while they travel to the experts: as they were sent, and as they arrive.

        Over etp there is one more of each row that is gathered, which is sent, and those that came over ep.
        """
        p = self._cfg.parallel
        if p.dispatcher == "allgather":
            return Parts({"dispatch buffers": self._tokens * p.ep * p.etp * self.row})
        over_etp = (self.rows + (self.rows // p.etp if p.ep > 1 else 0)) if p.etp > 1 else 0
        return Parts({"dispatch buffers": (self.copies + self.rows + over_etp) * self.row})

    def rows_from_experts(self) -> Parts:
        """Rows while they travel back, and what is kept of the results where these do not travel."""
        p = self._cfg.parallel
        if p.dispatcher == "allgather":
            sums = self._tokens * (p.ep * p.etp + 1) * self.row
            return self.results() + Parts({"dispatch buffers": sums})
        # Over etp each member receives its rows from all.
        received = self.rows if p.etp > 1 else self.copies
        return Parts({"dispatch buffers": (self.rows + received) * self.row})
