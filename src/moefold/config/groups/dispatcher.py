"""Dispatchers, which send routed tokens to the ranks of their experts and results back, and their number formats."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from moefold.config.base.part import Part
from moefold.message_text import Problem, Setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moefold.config.sections.moe import MoEConfig
    from moefold.config.sections.parallel import ParallelConfig


HOPPER_CAPABILITY = (9, 0)


@dataclass(frozen=True, kw_only=True)
class DispatchSizes:
    """Sizes of the largest exchange of a micro-batch, for building a dispatcher and its buffers."""

    num_experts: int
    """E, over all ranks, a multiple of ep."""
    max_rows: int
    """Routed tokens of a rank: its tokens times top_k."""
    width: int
    """Elements of a token, H."""
    item_bytes: int
    """Bytes of an element."""
    fp8_dispatch: bool = False
    """Send routed tokens to the experts in 8 bits."""


class SentTokens(NamedTuple):
    """Tokens that a rank sends to experts in a micro-batch, for the price of the exchange.

    Numbers are means. They are arrays where many mappings with the same ep and etp are priced at once.
    """

    tokens: float
    """Tokens of the rank, T."""
    routed: float
    """Routed tokens of the rank: T times top_k, minus dropped tokens."""
    received: float
    """Routed tokens that the experts of the busiest rank compute: the routed tokens of all etp ranks."""
    row_bytes: float
    """Bytes of a row."""
    ep: int
    etp: int


class Transfer(NamedTuple):
    """One collective that sends tokens to their experts. The way back has the same price."""

    axis: Literal["ep", "etp"]
    num_bytes: float
    """All-to-all: sent by a rank. All-gather: held by a rank in the end."""
    gathers: bool = False
    """All-gather instead of all-to-all."""
    sends_once: bool = False
    """True if a token with several experts on a rank is sent to that rank only once."""


class ExpertRows(NamedTuple):
    """Rows of a rank in a micro-batch, for the memory of its exchanges."""

    tokens: int
    """Tokens of the rank, T."""
    top_k: int
    received: int
    """Routed tokens that the experts of the rank compute."""
    width: int
    item_bytes: int
    sum_bytes: int
    """Bytes of an element that is summed."""
    ep: int
    etp: int

    @property
    def routed(self) -> int:
        """Routed tokens of the rank."""
        return self.tokens * self.top_k

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.width * self.item_bytes


class ExchangeBytes(NamedTuple):
    """Temporary bytes of the exchanges of a micro-batch."""

    dispatch: int
    """Buffers to send and receive tokens."""
    combine: int
    """Buffers to send and receive results."""
    sums: int = 0
    """Sums over the experts of a rank, including tokens of other ranks."""


@dataclass(frozen=True, kw_only=True)
class DispatcherPart(Part):
    """Method of sending tokens to their experts. The defaults describe an all-to-all over ep, then over etp."""

    group: ClassVar[str] = "dispatcher"
    key: ClassVar[str] = "parallel.dispatcher"
    changes_maths: ClassVar[bool] = False

    # Where it may be used.
    spreads_experts: ClassVar[bool] = True
    """True if experts may be on other ranks: ep*etp of 2 or more."""
    needs_spread_experts: ClassVar[bool] = False
    """True if ep*etp=1 is refused. Otherwise the local dispatcher replaces it."""
    needs_whole_experts: ClassVar[bool] = False
    """True if etp of 2 or more, and padding to capacity, are refused."""
    is_searched: ClassVar[bool] = True
    """True if the planner may choose the dispatcher if the request does not name it."""
    for_inference: ClassVar[bool] = False
    """True if `moefold generate` and `moefold eval` may use the dispatcher."""
    needs_equal_token_counts: ClassVar[bool] = False
    """True if all ranks must hold equally many tokens."""
    has_shared_buffers: ClassVar[bool] = False
    """True if all ranks share buffers on the GPUs, which a lost rank leaves unusable."""
    kernel_package: ClassVar[str] = ""
    """Python package of the dispatcher's kernels, for Hopper GPUs or newer. Empty: the dispatcher runs anywhere."""
    package_source: ClassVar[str] = ""
    """Source that the package is built from."""

    # Behaviour.
    gathers_tokens: ClassVar[bool] = False
    """True if each rank gathers all tokens over ep*etp, in one collective, and sums its experts' results itself."""
    moves_experts: ClassVar[bool] = False
    """True if ranks take over routed tokens of busy experts with a copy of the weights."""
    sends_once: ClassVar[bool] = False
    """True if a token with several experts on a rank is sent to that rank only once."""
    keeps_sum_order: ClassVar[bool] = False
    """True if the rank of a token sums the outputs of its experts in the order of its choices, so that sampling and
    training have the same bits."""

    resolves_to: ClassVar[tuple[str, str] | None] = None
    """Kind that takes its place at the start of a run if all ranks can run it, and the kind otherwise. None: itself."""

    def unsupported(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        """Yield the reasons why the dispatcher does not support the settings of a recipe, one phrase each.

        Args:
            args: sections of the recipe, as of `check`.
        """
        yield from ()

    def unsupported_here(self, device: "torch.device") -> Iterator[str]:
        """Yield the reasons why this rank cannot run the dispatcher on its device."""
        if not self.kernel_package:
            return
        if device.type != "cuda":
            yield f"{self.kernel_package} needs CUDA GPUs, and this run is on the CPU"
            return
        import torch

        if torch.cuda.get_device_capability(device) < HOPPER_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            yield f"{self.kernel_package} needs a Hopper or newer GPU, and this is a {name}"
        if not self.has_package():
            yield f"the package {self.kernel_package} is not installed"

    def has_package(self) -> bool:
        """Return whether the package of its kernels is installed, without importing it."""
        parent, _, _ = self.kernel_package.rpartition(".")
        if parent and importlib.util.find_spec(parent) is None:
            return False
        return not self.kernel_package or importlib.util.find_spec(self.kernel_package) is not None

    def mapping_problems(self, parallel: "ParallelConfig", moe: "MoEConfig", *, has_experts: bool) -> Iterator[Problem]:
        """Yield the values of ep and etp, and the padding, that are incompatible with the dispatcher.

        Args:
            has_experts: whether the model has MoE layers.
        """
        p = parallel
        is_spread = p.ep * p.etp > 1
        if self.needs_spread_experts and has_experts and not is_spread:
            yield self._problem(
                f"sends tokens between the ranks of ep and etp, and {Setting('parallel.ep', 1)}, "
                f"{Setting('parallel.etp', 1)}",
                "choose 'alltoall' or 'auto', or ep or etp of 2 or more",
            )
        if self.needs_whole_experts and p.etp > 1:
            yield self._problem(
                f"sends tokens to whole experts, and {Setting('parallel.etp', p.etp)} shards the experts",
                "choose 'alltoall', or etp=1",
            )
        if self.needs_whole_experts and moe.pad_to_capacity:
            yield self._problem(
                "has a row for a token and a rank, and moe.pad_to_capacity=true pads the rows of an expert",
                "choose 'alltoall', or pad_to_capacity=false",
            )
        if is_spread and not self.spreads_experts:
            yield self._problem(
                f"needs ep=etp=1, and {Setting('parallel.ep', p.ep)}, {Setting('parallel.etp', p.etp)}",
                "choose 'alltoall' or 'allgather'",
            )

    def _problem(self, rule: str, way_out: str) -> Problem:
        return Problem(self.key, self.kind, rule, way_out)

    def collectives(self, ep: int, etp: int) -> tuple[str, ...]:
        """Return the collectives of a forward pass of one layer, in order, for the deadlock check."""
        axes = [axis for axis, size in (("ep", ep), ("etp", etp)) if size > 1]
        return *(f"dispatch over {axis}" for axis in axes), *(f"combine over {axis}" for axis in reversed(axes))

    def traffic(self, sent: SentTokens) -> tuple[Transfer, ...]:
        """Return the collectives that send tokens to their experts, with their bytes, for the price of a mapping."""
        over_etp = Transfer("etp", sent.received * sent.row_bytes, gathers=True)
        return Transfer("ep", sent.routed * sent.row_bytes, sends_once=self.sends_once), over_etp

    def receive_capacity(self, routed: int) -> int | None:
        """Return the capacity of the receive buffer of a rank in rows, or None if the buffer grows as needed.

        Args:
            routed: routed tokens of a rank, and the rows that it receives under balanced routing.
        """
        return None

    def overflow(self, load: float) -> str:
        """Return the message for a rank that should receive `load` times `receive_capacity`. It follows "rank 3 ".

        Called where `Dispatcher.take_receive_load` returns a load above 1.
        """
        return f"was to receive {load:.2f} times the rows that it has room for; choose another dispatcher"

    def exchange_bytes(self, rows: ExpertRows) -> ExchangeBytes:
        """Return the temporary bytes of the exchanges of a micro-batch.

        By default, etp needs two more buffers: the send buffer of its all-gather, and the tokens received over ep.
        """
        over_etp = (rows.received + (rows.received // rows.etp if rows.ep > 1 else 0)) if rows.etp > 1 else 0
        # Over etp each rank receives its tokens from all others.
        returned = rows.received if rows.etp > 1 else rows.routed
        return ExchangeBytes(
            (rows.routed + rows.received + over_etp) * rows.token_bytes, (rows.received + returned) * rows.token_bytes
        )

    def reserved_bytes(self, sizes: DispatchSizes) -> int:
        """Return the bytes that a rank allocates once for all layers, and holds between steps."""
        return 0

    def measured_reserved_bytes(self, sizes: DispatchSizes) -> int:
        """Return `reserved_bytes` for buffers without memory, for `moefold memory --dry`. `build` opens them."""
        return 0

    def build(self, groups: Any, sizes: DispatchSizes) -> Any:
        """Return the `Dispatcher` of all layers, with its buffers. It is collective. Not called if ep*etp is 1.

        Args:
            groups: process groups of the experts, a `MoEGroups`.
        """
        raise NotImplementedError


def overrides_any(part: DispatcherPart, *methods: str) -> bool:
    """Return whether a dispatcher overrides any of the given methods, whose defaults describe the all-to-all."""
    return any(getattr(type(part), name) is not getattr(DispatcherPart, name) for name in methods)


@dataclass(frozen=True, kw_only=True)
class WirePart(Part):
    """Number format of dispatched tokens. The default is the compute type of the model."""

    group: ClassVar[str] = "wire"
    key: ClassVar[str] = "moe.dispatch_precision"
    rounds: ClassVar[bool] = False
    """True if tokens are rounded to e4m3 with one scale for each 128 values before they are sent."""

    def value_bytes(self, computed_bytes: int) -> float:
        """Return the bytes of a dispatched value, with its share of a scale.

        Args:
            computed_bytes: bytes of a value in the compute type of the model.
        """
        return float(computed_bytes)

    def formula(self) -> Callable[["Tensor"], "Tensor"] | None:
        """Return the rounding of the input of the experts, [..., H], or None if it has no formula."""
        return None
