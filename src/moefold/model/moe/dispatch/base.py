"""Interface of token dispatchers: send routed tokens to their experts, and the expert outputs back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from torch import Tensor

from moefold.comm.async_collectives import WireFormat
from moefold.comm.resumable import Resumable, ResumableTask, run_to_end
from moefold.ops.expert_ops import ExpertOps, LazyCounts, Permutation, PermuteMap
from moefold.ops.permute import TORCH_PERMUTE_OPS, PermuteOps


@dataclass(frozen=True)
class SplitSizes:
    """All-to-all split sizes of this rank: tokens sent to and received from each member of a group."""

    group_name: Literal["ep", "etp", "experts"]
    """Group of the collective: ep, etp, or all ep x etp ranks."""
    input_splits: Sequence[int]
    output_splits: Sequence[int]

    def reversed(self) -> "SplitSizes":
        """Return the split sizes of the opposite direction."""
        return SplitSizes(self.group_name, self.output_splits, self.input_splits)


@dataclass(frozen=True)
class RoutingMap:
    """Destination experts of this rank's tokens."""

    ids_TK: Tensor
    """Chosen experts, int64 [T, K]."""
    probs_TK: Tensor
    """Routing probability of each choice, [T, K], differentiable."""
    kept_TK: Tensor | None = None
    """bool [T, K], or None if no token is dropped."""
    padded_capacity: int | None = None
    """Rows that each expert gets from each rank, the kept tokens first, then zeros, or None if there is no padding."""


class DispatchMetadata(Protocol):
    """Dispatch state of one micro-batch, from dispatch to combine."""

    @property
    def tokens_per_expert(self) -> Sequence[int]:
        """Tokens of each expert after dispatch: of this rank's experts, then of received experts."""


class ExpertMigration(Protocol):
    """Experts that are computed on another rank than their owner for one micro-batch."""

    def migrate(self, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Send and receive expert weights. Gradients of received weights are returned to the owner and added there.

        Collective in forward and backward: every rank of the group calls it, also without weights to send or receive,
        and must use the first list differentiably.

        Args:
            weights: weights of this rank's experts, each [experts, ...].

        Returns:
            The same weights, which replace the arguments, and the received experts' weights, each [received, ...].
        """

    def split_sizes(self) -> SplitSizes:
        """Return the split sizes in experts."""


@dataclass(frozen=True)
class ExpertInput:
    """Input of the experts of this rank."""

    x: Tensor
    """Tokens sorted by expert, [R, H], with a `permute_map` unsorted, [T, H]."""
    tokens_per_expert: Sequence[int]
    """Tokens of each expert of this rank, then of each received expert."""
    probs_R: Tensor | None = None
    """Factor of the output or the input of each row, [R], or None if rows are not scaled."""
    permute_map: PermuteMap | None = None
    """Permutation that the experts fuse: the outputs of each token are summed."""
    migration: ExpertMigration | None = None
    """Exchanges the weights of migrated experts."""

    def __post_init__(self) -> None:
        has_known_rows = self.permute_map is None and not isinstance(self.tokens_per_expert, LazyCounts)
        assert not has_known_rows or sum(self.tokens_per_expert) == len(self.x), (self.tokens_per_expert, self.x.shape)

    def split(self, num_experts: int) -> tuple["ExpertInput", "ExpertInput"]:
        """Return the input of the first experts and the input of the other experts, both without a migration."""
        counts = self.tokens_per_expert[:num_experts], self.tokens_per_expert[num_experts:]
        sizes = [sum(row) for row in counts]
        xs = self.x.split(sizes)
        probs = (None, None) if self.probs_R is None else self.probs_R.split(sizes)
        return ExpertInput(xs[0], counts[0], probs[0]), ExpertInput(xs[1], counts[1], probs[1])


class ExpertModule(Protocol):
    """Experts as a dispatcher applies them."""

    applies_probs: bool
    """True if the routing probabilities are always applied to the hidden values, not to the outputs."""
    probs_on_input: bool
    """True if routing probabilities are applied to the input of the experts, which is then permuted before."""
    ops: ExpertOps

    def __call__(self, expert_input: ExpertInput) -> Tensor:
        """Apply each expert to its tokens."""


MetadataT = TypeVar("MetadataT", bound=DispatchMetadata)


class Dispatcher(ABC, Generic[MetadataT]):
    """Token dispatcher in six phases, so that communication overlaps with another micro-batch (arXiv:2504.14960).

    Only `dispatch_preprocess` reads the routing and may synchronise with the device. All state of a micro-batch is in
    its metadata, none in the dispatcher, so several micro-batches may be in flight. All phases are differentiable.
    """

    combines_locally: bool = False
    """True if `combine_preprocess` sums the expert outputs of a token, which needs the routing probabilities."""
    takes_any_tokens: bool = False
    """True if ranks may hold different numbers of tokens, and more than in training: decoding uses it unchanged."""
    permute_ops: PermuteOps = TORCH_PERMUTE_OPS
    """Operations of the permutation and of the combine, set by `use_permute_ops`."""

    def use_permute_ops(self, ops: PermuteOps) -> None:
        """Set the operations of the permutation and of the combine."""
        self.permute_ops = ops

    @abstractmethod
    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, MetadataT]:
        """Compute the split sizes. It returns the tokens to send and the metadata."""

    @abstractmethod
    def dispatch_communicate(self, rows: Tensor, metadata: MetadataT) -> Tensor:
        """Send the tokens to the ranks of their experts."""

    @abstractmethod
    def dispatch_postprocess(self, rows: Tensor, metadata: MetadataT) -> Tensor:
        """Sort the received tokens by expert: [R, H], `metadata.tokens_per_expert` rows each."""

    @abstractmethod
    def combine_preprocess(self, y_RH: Tensor, metadata: MetadataT) -> Tensor:
        """Sort the expert outputs for the way back."""

    @abstractmethod
    def combine_communicate(self, rows: Tensor, metadata: MetadataT) -> Tensor:
        """Send the expert outputs back to the ranks of their tokens."""

    @abstractmethod
    def combine_postprocess(self, rows: Tensor, metadata: MetadataT) -> Tensor:
        """Compute the weighted sum of each token's expert outputs, [T, H]."""

    @abstractmethod
    def dispatch_probs(self, metadata: MetadataT) -> tuple[Tensor, MetadataT]:
        """Dispatch the routing probabilities to experts that apply them: (probs [R] of dispatched tokens, metadata).

        `combine` with the new metadata sums the expert outputs without weights. It is called between `dispatch` and
        `combine`, and communicates as `dispatch` does, with one number for each token instead of a row.
        """

    def dispatch_probs_async(self, metadata: MetadataT) -> Resumable[tuple[Tensor, MetadataT]]:
        """Run `dispatch_probs` in two steps: the first before the tokens are sent, the second once they have arrived.

        This default does all of it in the second step.
        """
        yield
        return self.dispatch_probs(metadata)

    def permute_map(self, metadata: MetadataT) -> PermuteMap | None:
        """Return the permutation of `dispatch_postprocess` and `combine_preprocess`, for experts that fuse it.

        Both phases are then skipped. Where `combines_locally`, `dispatch_probs` is called first. None if there is no
        permutation, or more than one.
        """
        return None

    def migration(self, metadata: MetadataT) -> ExpertMigration | None:
        """Return the experts that change ranks for this micro-batch, or None on all ranks if there are none."""
        return None

    def take_receive_load(self) -> Tensor | None:
        """Return the maximum rows sent to a rank since the last call, divided by its buffer size, on the device.

        Above 1, some rows were not sent, and the results are wrong. None without a buffer that could be too small.
        """
        return None

    def host_counts(self, counts: Tensor) -> Tensor:
        """Return counts that the host is about to read. Traces without a device replace this method."""
        return counts

    def routing_split_sizes(self, x_TH: Tensor) -> Sequence[SplitSizes]:
        """Return the split sizes of collectives in `dispatch_preprocess`, where they could differ between ranks."""
        return ()

    def split_sizes(self, metadata: MetadataT) -> Sequence[SplitSizes]:
        """Return the split sizes of `dispatch_communicate`. `combine_communicate` has the reverse."""
        return ()

    def dispatch_async(
        self, rows: Tensor, metadata: MetadataT, compute: Callable[[], Tensor] | None = None
    ) -> Resumable[tuple[Tensor, Tensor | None]]:
        """Run `dispatch_communicate`, yielding during communication: (the tokens, the result of `compute`).

        This default never yields.

        Args:
            rows: tokens to send. They must not change before the last step.
            compute: work that does not need the received tokens, done before the first yield.
        """
        computed = None if compute is None else compute()
        yield from ()
        return self.dispatch_communicate(rows, metadata), computed

    def combine_async(self, rows: Tensor, metadata: MetadataT) -> Resumable[Tensor]:
        """Run `combine_communicate`, yielding during communication. This default never yields."""
        yield from ()
        return self.combine_communicate(rows, metadata)

    def run(
        self,
        x_TH: Tensor,
        routing_map: RoutingMap,
        experts: ExpertModule,
        compute: Callable[[], Tensor] | None = None,
    ) -> Resumable[tuple[Tensor, Tensor | None]]:
        """Dispatch, apply the experts and combine, yielding while it communicates: ([T, H], result of `compute`).

        Args:
            experts: experts of this rank. If their operations fuse the permutation, it is left to them, and they apply
                the routing probabilities where these commute: the outputs are then not saved for backward.
        """
        rows, metadata = self.dispatch_preprocess(x_TH, routing_map)
        applies_probs = experts.applies_probs or (experts.ops.fuses_permutation and experts.ops.probs_commute)
        probs_task = ResumableTask(self.dispatch_probs_async(metadata)) if applies_probs else None
        if probs_task is not None:
            probs_task.resume()
        rows, computed = yield from self.dispatch_async(rows, metadata, compute)
        tokens_per_expert = metadata.tokens_per_expert
        migration = self.migration(metadata)
        permute_map = None
        # Experts that sum the rows of a token must have weighted them.
        sums_weighted_rows = applies_probs or not self.combines_locally
        fuses_permutation = experts.ops.fuses_permutation and not experts.probs_on_input
        if migration is None and fuses_permutation and sums_weighted_rows:
            permute_map = self.permute_map(metadata)
        is_permuted = permute_map is None
        if is_permuted:
            rows = self.dispatch_postprocess(rows, metadata)
        probs_R = None
        if probs_task is not None:
            probs_R, metadata = probs_task.run_to_end()
        rows = experts(ExpertInput(rows, tokens_per_expert, probs_R, permute_map, migration))
        if is_permuted:
            rows = self.combine_preprocess(rows, metadata)
        rows = yield from self.combine_async(rows, metadata)
        return self.combine_postprocess(rows, metadata), computed

    def dispatch(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, MetadataT]:
        """Run the three dispatch phases: ([R, H] sorted by expert, metadata)."""
        rows, metadata = self.dispatch_preprocess(x_TH, routing_map)
        rows, _ = run_to_end(self.dispatch_async(rows, metadata))
        return self.dispatch_postprocess(rows, metadata), metadata

    def combine(self, y_RH: Tensor, metadata: MetadataT) -> Tensor:
        """Run the three combine phases: [T, H]."""
        rows = self.combine_preprocess(y_RH, metadata)
        return self.combine_postprocess(run_to_end(self.combine_async(rows, metadata)), metadata)


def fp8_wire_format(rows: Tensor, ops: PermuteOps) -> WireFormat:
    """Return the FP8 wire format of tokens. Tokens quantised before change by at most the last bit."""
    width = rows.shape[1]
    dtype = rows.dtype
    return WireFormat(ops.pack, lambda packed: ops.unpack(packed, width, dtype))


def fp8_permuted_wire_format(x_TH: Tensor, permutation: Permutation, ops: PermuteOps) -> WireFormat:
    """Return the FP8 wire format that permutes after quantising: one row for each chosen expert of a token."""
    return WireFormat(
        lambda x: ops.permute(ops.pack(x), permutation),
        fp8_wire_format(x_TH, ops).unpack,
        lambda grad_RH: ops.combine(grad_RH, permutation, None),
    )
