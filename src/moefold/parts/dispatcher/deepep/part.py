"""DeepEP (github.com/deepseek-ai/DeepEP): kernels that send a token once to each rank that holds its experts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

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
    from moefold.parts.dispatcher.deepep.module import DeepEPDispatcher

ALIGNMENT_BYTES = 16
"""Alignment in bytes of a token in DeepEP's kernels."""
FP8_BLOCK = 128
"""Values per scale in FP8 dispatch."""


@dataclass(frozen=True, kw_only=True)
class DeepEPDispatcherPart(DispatcherPart):
    """Dispatch and combine with the kernels of DeepEP, on Hopper GPUs or newer."""

    needs_spread_experts: ClassVar[bool] = True
    sends_once: ClassVar[bool] = True
    has_shared_buffers: ClassVar[bool] = True
    kernel_package: ClassVar[str] = "deep_ep"
    package_source: ClassVar[str] = "github.com/deepseek-ai/DeepEP"

    def unsupported(
        self,
        run: "RunConfig",
        model: "ModelConfig",
        parallel: "ParallelConfig",
        moe: "MoEConfig",
        faults: "FaultsConfig",
    ) -> Iterator[str]:
        """Yield settings that the kernels do not support."""
        p = parallel
        part = model.routed
        if part is None:
            return
        size = part.token_size(model.hidden_size)
        width_key = "ffn.moe.latent_size" if part.latent_size else "hidden_size"
        width = f"model.{width_key}={size}"
        if p.etp > 1:
            yield f"deep_ep moves whole experts' tokens, and {Setting('parallel.etp', p.etp)} shards the experts"
        if moe.pad_to_capacity:
            yield "deep_ep sends no padding, and moe.pad_to_capacity=true pads"
        if run.dtype != "bfloat16":
            yield f"deep_ep supports only bfloat16, and {Setting('run.dtype', run.dtype)}"
        if size * 2 % ALIGNMENT_BYTES:
            yield (
                f"deep_ep moves tokens in units of {ALIGNMENT_BYTES} bytes, and {width} is not a multiple of "
                f"{ALIGNMENT_BYTES // 2}"
            )
        if chosen_in(moe, WirePart).rounds and size % FP8_BLOCK:
            yield (
                f"deep_ep has a scale for {FP8_BLOCK} values, and with moe.dispatch_precision="
                f"'{moe.dispatch_precision}' {width} is not a multiple of that"
            )
        if faults.check_dispatch:
            yield "deep_ep does not expose its row counts, and faults.check_dispatch=true compares them"
        if p.overlap_experts:
            yield "deep_ep waits for its all-to-all immediately, and parallel.overlap_experts=true computes meanwhile"
        if run.device == "cpu":
            yield f"deep_ep needs CUDA GPUs, and {Setting('run.device', 'cpu')}"

    def build(self, groups: "MoEGroups", sizes: DispatchSizes) -> "DeepEPDispatcher":
        """Open the buffers of DeepEP, and return the dispatcher. It is collective over ep."""
        from moefold.parts.dispatcher.deepep.module import DeepEPDispatcher, open_buffer

        return DeepEPDispatcher(open_buffer(groups.ep, sizes.width), sizes.num_experts, fp8_dispatch=sizes.fp8_dispatch)
