"""Interface of the routed experts' operations, and the permutations of routed tokens that they read.

The reference of every `ExpertOps` is tests/model/moe/reference_experts.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar, overload

import torch
from torch import Tensor

from moefold.ops.swiglu import SWIGLU, ExpertActivation

ALL_COLUMNS = slice(None)
DerivedT = TypeVar("DerivedT")


class LazyCounts(Sequence[int]):
    """Tokens of each expert, counted on a device, int64 [E]. Only the first read of a number synchronises.

    Args:
        values: the same numbers, if the host knows them. Then no read synchronises.
    """

    def __init__(self, counts_E: Tensor, values: list[int] | None = None) -> None:
        self.counts_E = counts_E
        self._known_values = values

    @cached_property
    def _values(self) -> list[int]:
        return [int(count) for count in self.counts_E.tolist()] if self._known_values is None else self._known_values

    def __len__(self) -> int:
        return len(self.counts_E)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._values[index]


@dataclass(frozen=True)
class Permutation:
    """Permutation of routed tokens into rows sorted by expert, unless they were reordered.

    Routed tokens may be absent (dropped, or of another rank) and rows may be empty (padding). Without them, masks are
    None.
    """

    token_R: Tensor
    """Token of each row, int64 [R], 0 in a padding row."""
    topk_index_R: Tensor
    """Index t*K + k of each row's routed token, int64 [R], 0 in a padding row."""
    row_TK: Tensor
    """Row of each routed token, int64 [T, K], or 0 for an absent token."""
    tokens_per_expert_E: Tensor
    """int64 [E]. Sums to R, or to less where rows of dropped tokens follow."""
    kept_TK: Tensor | None
    """bool [T, K]."""
    non_padding_R: Tensor | None
    """bool [R]."""


@dataclass(frozen=True)
class GatheredRows:
    """Rows gathered on read: row i is values[source_R[i]], or zeros where source_R[i] is -1."""

    values: Tensor
    source_R: Tensor | None = None
    """int32 [R], or None if `values` are the rows."""
    has_padding: bool = True
    """False: no element of `source_R` is -1."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.values) if self.source_R is None else len(self.source_R)

    @property
    def is_materialized(self) -> bool:
        """True if reading the tensor of all rows copies nothing."""
        return self.source_R is None or "materialized" in vars(self)

    @cached_property
    def materialized(self) -> Tensor:
        """The tensor of all rows, gathered by the first read and stored as long as this object exists."""
        if self.source_R is None:
            return self.values
        if len(self.values) == 0:
            return self.values.new_zeros(self.num_rows, self.values.shape[1])
        if not self.has_padding:
            return self.values.index_select(0, self.source_R)
        rows = self.values.index_select(0, self.source_R.clamp(min=0))
        return rows.masked_fill_((self.source_R < 0).unsqueeze(1), 0.0)

    def derived(self, name: str, compute: Callable[["GatheredRows"], DerivedT]) -> DerivedT:
        """Return compute(self), stored under a name by the first call as long as this object exists."""
        stored = vars(self).setdefault("_derived", {})
        if name not in stored:
            stored[name] = compute(self)
        return stored[name]


@dataclass(frozen=True)
class PermuteMap:
    """Permutation as kernels use it: rows gathered on read, and outputs summed for each token."""

    source_R: Tensor
    """Token of each row, int32 [R], -1 in a padding row."""
    row_TK: Tensor
    """Row of each routed token, [T, K]."""
    kept_TK: Tensor | None
    """Routed tokens that have a row, bool [T, K]. None means all."""
    has_padding: bool
    """True: there may be padding rows. False: every row is gathered by its index."""

    @property
    def is_bijective(self) -> bool:
        """True if every token has one row and every row a token: the map only orders rows."""
        is_single = self.row_TK.shape[1] == 1 and self.kept_TK is None
        return is_single and not self.has_padding and len(self.source_R) == len(self.row_TK)

    def gather(self, x_TH: Tensor) -> GatheredRows:
        """Return the rows of unsorted tokens."""
        return GatheredRows(x_TH, self.source_R, self.has_padding)

    @staticmethod
    def from_permutation(permutation: Permutation) -> "PermuteMap":
        """Convert a permutation for kernels."""
        source_R = permutation.token_R.to(torch.int32)
        non_padding_R = permutation.non_padding_R
        if non_padding_R is not None:
            source_R = source_R.masked_fill(~non_padding_R, -1)
        return PermuteMap(source_R, permutation.row_TK, permutation.kept_TK, has_padding=non_padding_R is not None)

    @staticmethod
    def from_order(order_R: Tensor, inverse_R: Tensor) -> "PermuteMap":
        """Build a map where row i is row order_R[i], with inverse `inverse_R`."""
        return PermuteMap(order_R.to(torch.int32), inverse_R.unsqueeze(1), None, has_padding=False)


@dataclass(frozen=True)
class ExpertWeights:
    """Local weights of a set of experts, as the expert GEMMs read them. Either all biases are present or none.

    The matrices may be master weights of higher precision, where `ExpertOps.weight_dtype` allows it.
    """

    gate_EHF: Tensor
    up_EHF: Tensor
    down_EFH: Tensor
    gate_bias_EF: Tensor | None = None
    up_bias_EF: Tensor | None = None
    down_bias_EH: Tensor | None = None
    """Bias of the columns `bias_slice` of the output, which this rank adds."""


@dataclass(frozen=True)
class ExpertOptions:
    """Non-tensor arguments of a call of the experts."""

    tokens_per_expert: Sequence[int]
    """Tokens of each expert, whose rows are sorted by expert."""
    activation: ExpertActivation = SWIGLU
    bias_slice: slice = field(default_factory=lambda: ALL_COLUMNS)
    """Columns of H of the local part of the bias of the down projection."""
    permute_map: PermuteMap | None = None
    """Permutation that the operations fuse, or None if rows are sorted by expert already, in input and output."""
    saves_fc1: bool = True
    """True: save the gate and up projections for backward. False: recompute them."""
    delays_wgrad: bool = False
    """True: weight gradients are computed after the backward pass."""


@dataclass(frozen=True)
class ExpertGradients:
    """Gradients of a call of the experts."""

    x: Tensor
    probs_R: Tensor | None
    """Gradient of the probabilities, or None without probabilities."""
    weights: Callable[[], Sequence[Tensor | None]]
    """Computes the gradients of the weights in the order of `ExpertWeights`, None for an absent weight, once."""


class ExpertOps(Protocol):
    """Forward and backward pass of a set of experts over their tokens, without autograd and communication."""

    @property
    def fuses_permutation(self) -> bool:
        """True if a `permute_map` is supported."""
        ...

    @property
    def probs_commute(self) -> bool:
        """True if routing probabilities may scale the expert's hidden values instead of its output.

        False where hidden values are quantised: the results would then differ, and the parallel mapping must not decide
        between them.
        """
        ...

    def weight_dtype(self, x: Tensor) -> torch.dtype | None:
        """Return the dtype that the matrices must have for tokens such as x. None means any."""
        ...

    def forward(
        self, x: Tensor, weights: ExpertWeights, options: ExpertOptions, probs_R: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the outputs: (outputs, further tensors to save for `backward`).

        Args:
            x: tokens sorted by expert [R, H], or with a `permute_map` unsorted tokens [T, H].
            options: all other arguments.
            probs_R: factor of each output row, [R]. It is applied before the down projection, so that its gradient
                does not need the outputs.

        Returns:
            Outputs like `x`: an output for each row, or the sum for each token.
        """
        ...

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weights: ExpertWeights,
        options: ExpertOptions,
        probs_R: Tensor | None,
        saved: Sequence[Tensor],
    ) -> ExpertGradients:
        """Compute the gradients, given the gradients of the outputs and the tensors that `forward` saved."""
        ...


def scale_rows(x_MF: Tensor, scales_M: Tensor) -> Tensor:
    """Scale rows in the higher precision of the two dtypes. It returns the dtype of the rows."""
    return (x_MF * scales_M.unsqueeze(1)).to(x_MF.dtype)


def rowwise_dot(a_MF: Tensor, b_MF: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the dot product of each pair of rows in a dtype, [M]."""
    return torch.linalg.vecdot(a_MF.to(dtype), b_MF.to(dtype))


def unit_stride(x: Tensor) -> Tensor:
    """Return x with a contiguous last dim, as kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()
