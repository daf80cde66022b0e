"""What every dispatcher does: bring copies of tokens to their experts, and the results home.

What an exchange of rows is to be, before it is made.

Rows in 8 bits on their way to the experts; their gradients travel back in the type that they have.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from torch import Tensor

from moefold.comm.async_collectives import WireFormat
from moefold.comm.resumable import Resumable, run_to_end
from moefold.model.moe.permute import permute_no_grad, unpermute_no_grad
from moefold.ops.interface import Permutation, PermuteMap
from moefold.ops.quantization.formats import pack, unpack


@dataclass(frozen=True)
class SplitSizes:
    """Rows that this rank sends to each member of a group, and those that it expects of each."""

    group_name: Literal["ep", "etp", "experts"]
    """The group: of ep, of etp, or all ep x etp ranks."""
    input_splits: Sequence[int]
    output_splits: Sequence[int]

    def reversed(self) -> "SplitSizes":
        """The same way in the other direction."""
        return SplitSizes(self.group_name, self.output_splits, self.input_splits)


@dataclass(frozen=True)
class RoutingMap:
    """Where the copies of this rank's tokens are to go."""

    ids_TK: Tensor
    """Chosen experts, int64 [T, K]."""
    probs_TK: Tensor
    """Weight of each copy, [T, K]; its gradient comes back."""
    kept_TK: Tensor | None = None
    """bool [T, K]; None means that no copy is dropped."""
    padded_capacity: int | None = None
    """Rows that each expert gets from each rank, the kept copies first and zeros behind; None means no padding."""


class DispatchMetadata(Protocol):
    """The way of one micro-batch, out and back."""

    @property
    def tokens_per_expert(self) -> Sequence[int]:
        """Rows of each expert after dispatch: those of this rank, then those that it borrows."""
        ...


class ExpertMigration(Protocol):
    """Experts that compute away from home for one micro-batch."""

    def migrate(self, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Lend and borrow weights; the gradients of the borrowed ones return to their owners and are added there.

        Collective, in the forward and in the backward pass: all ranks of the loan call it, also those that neither
        lend nor borrow, and let gradients reach the first list.

        Args:
            weights: of the experts of this rank, each [experts, ...].

        Returns:
            The same weights, to be used instead of them, and those of the borrowed experts, each [borrowed, ...].
        """
        ...

    def split_sizes(self) -> SplitSizes:
        """How many experts go where."""
        ...


MetadataT = TypeVar("MetadataT", bound=DispatchMetadata)


class Dispatcher(ABC, Generic[MetadataT]):
    """Six phases, so that communication can overlap with the maths of another micro-batch (arXiv:2504.14960).

    Only `dispatch_preprocess` reads the routing, and it alone may wait for the device. All that a micro-batch needs on
    its way is in its plan, none of it in the dispatcher: several micro-batches may be under way. Gradients flow through
    all phases.
    """

    combines_locally: bool = False
    """Whether `combine_preprocess` adds up the copies of a token, which needs their weights."""

    @abstractmethod
    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, MetadataT]:
        """Decide who sends what to whom; returns the rows to send and the plan."""

    @abstractmethod
    def dispatch_communicate(self, rows: Tensor, metadata: MetadataT) -> Tensor:
        """Exchange rows."""

    @abstractmethod
    def dispatch_postprocess(self, rows: Tensor, metadata: MetadataT) -> Tensor:
        """Sort what arrived by expert: [R, H] with plan.rows_per_expert rows for each."""

    @abstractmethod
    def combine_preprocess(self, y_RH: Tensor, metadata: MetadataT) -> Tensor:
        """Sort the experts' results for the way back."""

    @abstractmethod
    def combine_communicate(self, rows: Tensor, metadata: MetadataT) -> Tensor:
        """Exchange results."""

    @abstractmethod
    def combine_postprocess(self, rows: Tensor, metadata: MetadataT) -> Tensor:
        """The weighted sum of each token's results, [T, H]."""

    @abstractmethod
    def dispatch_probs(self, metadata: MetadataT) -> tuple[Tensor, MetadataT]:
        """Bring the weights to the rows, for experts that apply them: (weights [R] of the dispatched rows, new plan).

        With the new plan, `combine` sums the results as they are. Communicates as `dispatch` does, with one number a
        row. Between `dispatch` and `combine`.
        """

    def permute_map(self, metadata: MetadataT) -> PermuteMap | None:
        """How `dispatch_postprocess` and `combine_preprocess` sort, for experts that do it as they read and write.

        Both are left out then; where `combines_locally`, `dispatch_probs` comes first. None: they sort nothing, or more.
        """
        return None

    def migration(self, metadata: MetadataT) -> ExpertMigration | None:
        """The experts that change ranks for this micro-batch; None, for all or for none of the ranks, if none does."""
        return None

    def routing_split_sizes(self, x_TH: Tensor) -> Sequence[SplitSizes]:
        """What `dispatch_preprocess` exchanges, where ranks could bring different sizes."""
        return ()

    def split_sizes(self, metadata: MetadataT) -> Sequence[SplitSizes]:
        """What `dispatch_communicate` exchanges; `combine_communicate` does the reverse."""
        return ()

    def dispatch_async(
        self, rows: Tensor, metadata: MetadataT, compute: Callable[[], Tensor] | None = None
    ) -> Resumable[tuple[Tensor, Tensor | None]]:
        """`dispatch_communicate` with a pause while rows travel: (the rows, what was computed meanwhile).

        This one never pauses.

        Args:
            split_sizes: to send; they must not change before the last step.
            metadata: of the micro-batch.
            compute: what does not need the rows, to be done before the first pause.
        """
        computed = None if compute is None else compute()
        yield from ()
        return self.dispatch_communicate(rows, metadata), computed

    def combine_async(self, rows: Tensor, metadata: MetadataT) -> Resumable[Tensor]:
        """`combine_communicate` with a pause while rows travel. This one never pauses."""
        yield from ()
        return self.combine_communicate(rows, metadata)

    def dispatch(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, MetadataT]:
        """The three phases to the experts: ([R, H] sorted by expert, plan)."""
        rows, plan = self.dispatch_preprocess(x_TH, routing_map)
        rows, _ = run_to_end(self.dispatch_async(rows, plan))
        return self.dispatch_postprocess(rows, plan), plan

    def combine(self, y_RH: Tensor, metadata: MetadataT) -> Tensor:
        """The three phases back: [T, H]."""
        rows = self.combine_preprocess(y_RH, metadata)
        return self.combine_postprocess(run_to_end(self.combine_async(rows, metadata)), metadata)


def fp8_wire_format(rows: Tensor) -> WireFormat:
    """Each row is sent in 8 bits. Rows that were rounded before are not changed any more, but for the last bit."""
    width = rows.shape[1]
    dtype = rows.dtype
    return WireFormat(pack, lambda packed: unpack(packed, width, dtype))


def fp8_permuted_wire_format(x_TH: Tensor, permutation: Permutation) -> WireFormat:
    """A copy of each token is sent for each of its experts, in the order of the permutation."""
    return WireFormat(
        lambda x: permute_no_grad(pack(x), permutation),
        fp8_wire_format(x_TH).unpack,
        lambda grad_RH: unpermute_no_grad(grad_RH, permutation),
    )
