"""The [parallel] section: degrees of both views of the ranks, described in docs/folding.md."""

from dataclasses import dataclass
from typing import Annotated, Literal

from moefold.config.base.field import MaxMagnitude, ReadIf, at_least
from moefold.config.base.limits import MAX_LAYERS, MAX_RANKS
from moefold.config.base.part import KindOf, Part, Section


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig(Section):
    """Degrees of both views of the ranks (attention and MoE). dp and edp follow from world_size."""

    mapping: Literal["given", "auto"] = "given"
    """auto: `moefold train` plans the axes that the recipe leaves out ([planner.md](planner.md)). `parallel = "auto"`
    at the top level is short for it. Without world_size: all ranks of the launcher, or all devices of the machine."""
    world_size: Annotated[int, at_least(1), MaxMagnitude(MAX_RANKS)] = 1
    """Total number of ranks."""
    tp: Annotated[int, at_least(1), MaxMagnitude(MAX_RANKS)] = 1
    """Tensor parallelism of attention and dense layers, with sequence parallelism."""
    cp: Annotated[int, at_least(1), MaxMagnitude(MAX_RANKS)] = 1
    """Context parallelism: each rank holds seq_len / cp tokens of a sample."""
    pp: Annotated[int, at_least(1), MaxMagnitude(4096)] = 1
    """Pipeline-parallel ranks. Both views share them."""
    ep: Annotated[int, at_least(1), MaxMagnitude(MAX_RANKS)] = 1
    """Expert parallelism: each rank holds num_experts / ep experts."""
    etp: Annotated[int, at_least(1), MaxMagnitude(MAX_RANKS)] = 1
    """Expert tensor parallelism: each expert's inner width is sharded over etp ranks."""
    order: str = "pp-dp-cp-tp"
    """Rank order of the attention view, slowest to fastest axis."""
    moe_order: str = "pp-edp-ep-etp"
    """Rank order of the MoE view, slowest to fastest axis."""
    schedule: Annotated[str | Part, KindOf("schedule")] = "1f1b"
    """Pipeline schedule ([pipeline.md](pipeline.md))."""
    virtual_stages: Annotated[int, at_least(1), MaxMagnitude(MAX_LAYERS)] = 1
    """Model chunks on each pipeline rank (virtual pipeline stages)."""
    pipeline_layout: str = ""
    """Stage of each part of the model, as "Ett|(ttt|)*2tL": E embedding, t layer, m MTP (multi-token prediction) layer,
    L loss, | next stage. auto: the estimated fastest layout that fits into memory. Empty: layers split evenly."""
    zero: Literal[0, 1, 2, 3] = 1
    """0: replicate. 1: shard the optimizer state. 2: and the gradients. 3: and the parameters."""
    dispatcher: Annotated[str | Part, KindOf("dispatcher")] = "alltoall"
    """Token dispatcher of the MoE layers."""
    overlap_experts: bool = False
    """Overlap the forward pass of one micro-batch with the backward pass of another, so that the computation of each
    hides the dispatch and combine of the other ([pipeline.md](pipeline.md)). Keeps more micro-batches in memory."""
    overlap_tp: Annotated[bool, ReadIf("parallel.tp")] = False
    """Overlap tensor-parallel communication with the GEMMs of attention and dense layers: the tp ranks pass one shard
    of the tokens at a time round a ring, instead of one all-gather before and one reduce-scatter after the GEMM
    ([kernels.md](kernels.md)). For GPUs. Each GEMM is smaller by a factor of tp."""
    context: Annotated[str | Part, KindOf("context")] = "ring"
    """Context-parallel attention under cp: how each rank attends to the whole sequence."""
    elastic: bool = False
    """Under torchrun or srun, take world_size from the launcher: dp and edp follow from the available ranks, also after
    a restart with fewer nodes. The global batch stays. Without a launcher, moefold starts world_size ranks."""

    @property
    def dp(self) -> int:
        """Data-parallel degree of the attention view."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel degree of the experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def may_pad_batch(self) -> bool:
        """Return whether the last data-parallel ranks may have padded micro-batches if dp does not divide the batch."""
        return self.elastic

    def vocab_rows(self, vocab_size: int) -> int:
        """Return the rows of the vocabulary on a rank, V/tp rounded up."""
        return -(-vocab_size // self.tp)
