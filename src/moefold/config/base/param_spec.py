"""Shape of one parameter, and how each parallel axis and each optimizer shards it.

`cost/layer_spec.py` lists the parameters of every block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

ModelPart = Literal[
    "embedding", "head", "attention", "dense_mlp", "router", "experts", "shared_experts", "norms", "mtp"
]
Distribution = Literal["ones", "zeros", "normal", "output", "convolution", "decay_rate", "time_step"]


def shard_rows(size: int, degree: int, index: int) -> tuple[int, int]:
    """Return the first row and the number of rows of one of `degree` parts of a dim, as `torch.chunk` splits it.

    All parts have the rounded-up size, except that the last parts are smaller or empty.
    """
    rows = -(-size // degree)
    first = min(index * rows, size)
    return first, min(rows, size - first)


def expert_dp_dim(shape: Sequence[int], degree: int) -> int:
    """Return the dim of local experts that data-parallel ranks shard: experts, or rows if the experts are too few."""
    return 1 if shape[0] % degree and shape[1] % degree == 0 else 0


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Shape of one parameter, unsharded or sharded by tensor or expert parallelism."""

    name: str
    """Name of the parameter in its block, or with the block's prefix."""
    shape: tuple[int, ...]
    part: ModelPart
    """Part of the model for counts of parameters and FLOPs, and for matrices also their group of Muon."""
    tp_dim: int | None = None
    """Dim sharded by tensor parallelism. None: replicated on every tp rank."""
    tp_heads: int = 0
    """Heads along `tp_dim`, which is replicated if tp does not divide them. 0: always sharded."""
    etp_dim: int | None = None
    """Dim of routed experts sharded by expert tensor parallelism. Dim 0 is sharded over ep."""
    never_as_matrix: bool = False
    """True if optimizers with a special update of matrices, such as Muon, update this matrix like a vector."""
    matrix_rows: tuple[int, ...] = ()
    """Rows of the logical matrices, which are updated separately and alternate along dim 0. Empty: one matrix."""
    initial: tuple[float, ...] = ()
    """Initial values, one for each index of dim 0, or one for all. Empty: drawn by `drawn`."""
    drawn: Distribution | None = None
    """Distribution of initial values (`model/weight_init.py`). None: "normal" for matrices, "ones" for norms ("zeros"
    if they are zero-centred), "zeros" for other vectors."""
    in_exponent: bool = False
    """True if the model exponentiates it, so that rounding it to the compute type has a large effect."""

    @property
    def is_expert(self) -> bool:
        """Return whether the parameter belongs to the MoE view."""
        return self.part == "experts"

    @property
    def is_full_precision(self) -> bool:
        """Return whether the parameter is read in the type of the master weights, as in routers and exponents."""
        return self.in_exponent or self.part == "router"

    @property
    def is_matrix(self) -> bool:
        """Return whether the parameter is a matrix, or a matrix of each expert. Only matrices have weight decay."""
        return len(self.shape) - self.is_expert > 1

    @property
    def updates_as_matrix(self) -> bool:
        """Return whether an optimizer with a special update of matrices may use that update here."""
        return self.is_matrix and not self.never_as_matrix

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def tp_shard_dim(self, tp: int) -> int | None:
        """Return the dim that `tp` ranks shard, or None if each rank holds the whole parameter."""
        return None if self.tp_heads % tp else self.tp_dim

    def shard(self, tp: int, ep: int, etp: int) -> "ParamSpec":
        """Return the shard of the first rank of tensor or expert parallelism, the largest one.

        tp divides every dim that it shards, except the vocabulary.
        """
        shape = list(self.shape)
        tp_dim = self.tp_shard_dim(tp)
        if self.is_expert:
            shape[0] //= ep
            if self.etp_dim is not None:
                shape[self.etp_dim] //= etp
        elif tp_dim is not None:
            _, shape[tp_dim] = shard_rows(shape[tp_dim], tp, 0)
        return replace(self, shape=tuple(shape))

    def dp_shards(self, degree: int) -> "DataParallelShards":
        """Return the shards over `degree` data-parallel ranks along dim 0, or along dim 1 for too few experts."""
        dim = expert_dp_dim(self.shape, degree) if self.is_expert else 0
        rows = -(-self.shape[dim] // degree)
        return DataParallelShards(self.shape[dim], rows, self.numel // self.shape[dim], degree)


@dataclass(frozen=True, slots=True)
class DataParallelShards:
    """Parameter sharded over data-parallel ranks. The first ranks hold `rows` rows, the last ones fewer or none."""

    total_rows: int
    rows: int
    row_numel: int
    degree: int

    @property
    def padded_numel(self) -> int:
        """Elements of a shard with FSDP's padding, the same on every rank."""
        return self.rows * self.row_numel

    def numel(self, dp_rank: int) -> int:
        """Return the elements of one rank's shard, without padding."""
        return shard_rows(self.total_rows, self.degree, dp_rank)[1] * self.row_numel
