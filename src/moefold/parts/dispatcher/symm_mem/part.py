"""All-to-all over symmetric memory (NVSHMEM) that never waits for the host."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from moefold.config.base.field import at_least
from moefold.config.chosen import chosen_in
from moefold.config.groups.dispatcher import DispatcherPart, DispatchSizes, WirePart
from moefold.message_text import Setting

if TYPE_CHECKING:
    from moefold.comm.groups import MoEGroups
    from moefold.config.model import ModelConfig
    from moefold.config.sections.faults import FaultsConfig
    from moefold.config.sections.moe import MoEConfig
    from moefold.config.sections.parallel import ParallelConfig
    from moefold.config.sections.run import RunConfig
    from moefold.parts.dispatcher.symm_mem.module import SymmMemDispatcher

NUM_BUFFERS = 3
"""Buffers of `comm/row_exchange.py`: two to send from, one to receive into. All layers of a rank share them."""
NUM_SPLIT_BUFFERS = 4
"""Buffers of two numbers for each expert in that file: two of sent sizes, two of received sizes and offsets."""
ROW_ALIGNMENT = 16
"""Bytes of a row of its buffers are a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class SymmMemDispatcherPart(DispatcherPart):
    """Receive tokens into symmetric memory (NVSHMEM) on GPUs, without waits for the host.

    A rank has room for `receive_factor` times the rows of balanced routing.
    """

    receive_factor: Annotated[float, at_least(1)] = 2.0
    """Rows that an ep rank has room to receive in a micro-batch, over the rows of balanced routing. A step that needs
    more stops the run."""

    needs_spread_experts: ClassVar[bool] = True
    has_shared_buffers: ClassVar[bool] = True
    kernel_package: ClassVar[str] = "nvidia.nvshmem"
    package_source: ClassVar[str] = "the CUDA build of torch, which installs nvidia-nvshmem"

    def unsupported(
        self,
        run: "RunConfig",
        model: "ModelConfig",
        parallel: "ParallelConfig",
        moe: "MoEConfig",
        faults: "FaultsConfig",
    ) -> Iterator[str]:
        """Yield settings that the exchange does not support."""
        p = parallel
        if p.etp > 1:
            yield f"it sends tokens to whole experts, and {Setting('parallel.etp', p.etp)} shards the experts"
        if moe.pad_to_capacity:
            yield "it sends no padding, and with moe.pad_to_capacity=true 'alltoall' waits for nothing either"
        if chosen_in(moe, WirePart).rounds:
            yield f"it sends tokens in {Setting('run.dtype')}, and moe.dispatch_precision='{moe.dispatch_precision}'"
        if model.routed and model.routed.bias:
            yield "it leaves rows without an expert, and model.ffn.moe.bias=true adds the bias of an expert to each row"
        if faults.check_dispatch:
            yield "its row counts stay on the device, and faults.check_dispatch=true compares them on the host"
        if p.overlap_experts:
            yield "its all-to-all runs on the stream of the model, and parallel.overlap_experts=true computes meanwhile"
        if run.device == "cpu":
            yield f"it needs CUDA GPUs, and {Setting('run.device', 'cpu')}"

    def unsupported_here(self, device: Any) -> Iterator[str]:
        """Yield missing requirements of the machine: a GPU, the package, or NVSHMEM in torch."""
        from moefold.comm.private_torch import is_nvshmem_available

        yield from super().unsupported_here(device)
        if not is_nvshmem_available():
            yield "torch finds no NVSHMEM"

    def receive_capacity(self, routed: int) -> int:
        """Return the rows of the receive buffer."""
        return ceil(routed * self.receive_factor)

    def overflow(self, load: float) -> str:
        """Describe how far the routing is from balanced, and the factor that it needs."""
        factor = self.receive_factor
        needed = ceil(load * factor * 10) / 10
        return (
            f"was to receive {load * factor:.2f} times the routed tokens of balanced routing, and "
            f"{self.key}.receive_factor={factor:g} has room for {factor:g} times; train on (from the last checkpoint, "
            f"if there is one) with {self.key}.receive_factor={needed:g} or more, or {self.key}='alltoall'"
        )

    def reserved_bytes(self, sizes: DispatchSizes) -> int:
        """Return the bytes of the symmetric memory of a rank."""
        row_bytes = -(-sizes.width * sizes.item_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        rows = NUM_BUFFERS * max(sizes.max_rows, self.receive_capacity(sizes.max_rows)) * row_bytes
        return rows + NUM_SPLIT_BUFFERS * 2 * sizes.num_experts * 8

    def measured_reserved_bytes(self, sizes: DispatchSizes) -> int:
        """Return the bytes of the buffers on the meta device."""
        from moefold.comm.row_exchange import MetaSymmetricMemory, RowExchange

        return RowExchange(MetaSymmetricMemory(), *self._exchange_sizes(sizes)).num_bytes

    def build(self, groups: "MoEGroups", sizes: DispatchSizes) -> "SymmMemDispatcher":
        """Allocate symmetric memory, and return the dispatcher. It is collective over ep."""
        from moefold.comm.row_exchange import open_row_exchange
        from moefold.parts.dispatcher.symm_mem.module import SymmMemDispatcher

        exchange = open_row_exchange(groups.ep, *self._exchange_sizes(sizes))
        return SymmMemDispatcher(groups.ep, exchange, sizes.num_experts)

    def _exchange_sizes(self, sizes: DispatchSizes) -> tuple[int, int, int, int]:
        """Return the sizes of a `RowExchange`: experts, maximum rows that a rank sends and receives, bytes of a row."""
        return sizes.num_experts, sizes.max_rows, self.receive_capacity(sizes.max_rows), sizes.width * sizes.item_bytes
