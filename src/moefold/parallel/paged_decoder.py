"""Forward passes over a paged KV cache, through the stages of an inference model or of a model in training."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.comm.host_copy import copy_to_device
from moefold.comm.private_torch import has_forward_hooks
from moefold.config.chosen import default_part
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.cost.kv_cache import PAGE_POSITIONS, CacheKind, page_positions
from moefold.cost.state_bytes import dispatch_sizes
from moefold.data.routing_trace import expert_index_dtype
from moefold.model.attention import SelfAttention, TokenMixer
from moefold.model.block import Block, MTPBlock
from moefold.model.fused_block import (
    FusedBlock,
    FusedHead,
    FusedLayers,
    fused_unsupported_reason,
    supports_fused,
    supports_fused_head,
)
from moefold.model.head import Head
from moefold.model.layer_cache import CacheSize, CurrentPass, LayerCache, PassRows
from moefold.model.local_param import CastCopies
from moefold.model.moe.dispatch import Dispatcher
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.router import Router
from moefold.model.moe.router_replay import RouterOverride
from moefold.model.paged_cache import PagedAttention
from moefold.model.rope import RopeTable
from moefold.model.transformer import Transformer
from moefold.parallel.expert_parallel import build_dispatcher
from moefold.parallel.fsdp import gathered_parameters
from moefold.parallel.inference_model import ForwardChain, InferenceModel
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.routing_cache import RoutingCache
from moefold.parallel.tied_embedding import sync_tied_embedding

if TYPE_CHECKING:
    from moefold.ops.cpu.decode import CDecode, CDecodePass

logger = logging.getLogger(__name__)

MODULES_COST = "about 1 ms of CPU time more for each in every pass"
"""For a layer of the small benchmark shape on a Zen 4, compared with the same layer in C."""


def decoding_notice(model: InferenceModel | ParallelModel, kind: CacheKind = "latents") -> str:
    """Describe how this rank decodes: its kernels on CUDA, or the layers without a kernel for whole layers on a CPU.

    Args:
        kind: contents of the cache of latent attention.
    """
    if model.groups.device.type != "cpu":
        # The message of a model in training is in its log already.
        kernels = model.message if isinstance(model, InferenceModel) else ""
        return "; ".join(filter(None, (kernels, _pages_notice(model, kind))))
    # Blocks of multi-token prediction do not run.
    blocks = [block for stage in model.stages for block in stage.layers.values() if type(block) is not MTPBlock]
    reasons = Counter(filter(None, map(fused_unsupported_reason, blocks)))
    if not reasons:
        return ""
    counts = ", ".join(f"{count} for {reason}" for reason, count in reasons.items())
    return f"{reasons.total()} of {len(blocks)} layers decode by modules instead of in C ({counts}): {MODULES_COST}"


def _pages_notice(model: InferenceModel | ParallelModel, kind: CacheKind) -> str:
    """Describe how the caches of this rank's layers will read pages on CUDA, or "" without pages."""
    device = model.groups.device
    size = CacheSize(num_pages=1, page_positions=page_positions(device.type), kind=kind)
    paths: list[str] = []
    for stage in model.stages:
        for number, block in stage.layers.items():
            attention = block.attention
            # The keys that an indexer selects are read by their slots.
            if isinstance(block, MTPBlock) or not isinstance(attention, SelfAttention) or attention.selects_keys:
                continue
            sizes = attention.head_sizes(stage.config.decoder_layers[int(number)].core, device)
            key, value = (torch.empty(0, 1, width, dtype=stage.dtype, device=device) for width in sizes)
            paths += [cache.page_path_of(key, key, value) for cache in attention.open_caches(CurrentPass(), size)]
            attention.close_caches()
    return _describe_paths(paths)


def _describe_paths(paths: Sequence[str]) -> str:
    """Count the layers whose caches have the same `page_path`, or "" if no cache has a path."""
    counts = Counter(filter(None, paths))
    text = "; ".join(f"{count} layer{'s' * (count > 1)}: {path}" for path, count in counts.items())
    return f"pages of {text}" if text else ""


@contextmanager
def forward_chain(model: InferenceModel | ParallelModel) -> Iterator[ForwardChain]:
    """Prepare a model for forward passes without gradients, and return its stages. It is collective over all ranks.

    The weights of a model in training are not copied: inside this context its parameters are gathered, as by FSDP, and
    it is in evaluation mode. They must not change inside.
    """
    if isinstance(model, InferenceModel):
        yield model.chain
        model.chain.wait_send()
        return
    stages = model.stages
    was_training = stages[0].training
    sync_tied_embedding(stages)
    with gathered_parameters(stages), _cast_once(model):
        model.train(False)
        try:
            chain = ForwardChain(stages, model.stage_plan, model.groups)
            yield chain
            chain.wait_send()
        finally:
            model.train(was_training)


@contextmanager
def _cast_once(model: ParallelModel) -> Iterator[None]:
    """Cast each weight once in all passes inside this context. With several ranks, FSDP casts gathered weights."""
    if model.groups.layout.world_size > 1 or model.cast_copies:
        with model.cast_copies.fresh():
            yield
        return
    # Training on a CPU keeps no copies: these are freed before the next step.
    copies = CastCopies(model.named_parameters.values())
    try:
        with copies.fresh():
            yield
    finally:
        copies.drop()


class PagedDecoder:
    """Context manager for passes over a paged cache. It sets these attributes, and restores them at its end.

    * `TokenMixer.open_caches`: attention reads the cache of its layer.
    * `SequenceParallel.split_unevenly`, `Head.picked_rows_N`: a pass has any number of tokens, and few with logits.
    * `MoELayer.decoding_dispatcher`: the all-to-all, if the layer's own needs equal token counts or moves experts.
    * `Router.override`: a `RoutingCache`, if choices are recorded.
    * `Block.fused`, `Transformer.fused`, `Head.fused`: a kernel for a layer, for a stage of such layers, for the head.

    Args:
        chain: from `forward_chain`, under any tp, pp, ep and etp. The ranks of dp and cp have different rows.
        records_routing: record the chosen experts for `recorded_choices`.
    """

    def __init__(self, chain: ForwardChain, size: CacheSize, *, records_routing: bool = False) -> None:
        self._chain = chain
        self._size = size
        self._pass = CurrentPass()
        self._caches: list[LayerCache] = []
        self._records_routing = records_routing
        self._routing: list[RoutingCache] = []
        self._overrides: list[tuple[Router, RouterOverride | None]] = []
        self._positions_before: list[Tensor | None] = []
        self._has_reported = chain.groups.device.type == "cpu"
        self._rope_tables: list[RopeTable] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the cache on this rank. A layer's pages are allocated by its first pass."""
        return sum(cache.nbytes for cache in self._caches)

    def __enter__(self) -> "PagedDecoder":
        dispatcher = _replacement_dispatcher(self._chain)
        for stage in self._chain.stages:
            self._positions_before.append(stage.positions)
            self._rope_tables.append(stage.rope_table(self._chain.groups.device))
            for module in stage.modules():
                if isinstance(module, TokenMixer):
                    self._caches += module.open_caches(self._pass, self._size)
                if isinstance(module, MoELayer):
                    module.decoding_dispatcher = dispatcher or module.dispatcher
            if self._records_routing:
                self._record_routing(stage)
        self._fuse_layers()
        return self

    def __exit__(self, *error: object) -> None:
        for router, override in reversed(self._overrides):
            router.override = override
        for stage, positions in zip(self._chain.stages, self._positions_before, strict=True):
            if positions is not None:
                stage.set_positions(positions)
            stage.fused = None
            stage.sequence_parallel.split_evenly()
            for module in stage.modules():
                if isinstance(module, TokenMixer):
                    module.close_caches()
                if isinstance(module, MoELayer):
                    module.decoding_dispatcher = None
                if isinstance(module, Head):
                    module.picked_rows_N = None
                    module.fused = None
                if isinstance(module, Block):
                    module.fused = None
        self._overrides.clear()
        self._rope_tables.clear()
        self._caches.clear()
        self._routing.clear()

    def _fuse_layers(self) -> None:
        """Set `fused` on the layers and the head that the C kernel supports, after the caches are opened."""
        if self._size.page_positions != PAGE_POSITIONS:
            return
        decode_passes: dict[CDecode, CDecodePass] = {}
        for stage in self._chain.stages:
            fused: list[FusedBlock] = []
            blocks = [block for block in stage.layers.values() if type(block) is not MTPBlock]
            for block in blocks:
                if not supports_fused(block):
                    continue
                assert isinstance(block, Block)
                cache = block.attention.core_attention
                kernel = block.attention.kernels.decode
                assert isinstance(cache, PagedAttention)
                assert kernel is not None
                decode_pass = decode_passes.setdefault(kernel, kernel.new_pass())
                fused.append(FusedBlock(block, decode_pass, self._pass, cache))
                block.fused = fused[-1]
            if (
                fused
                and len(fused) == len(blocks)
                and len(decode_passes) == 1
                and not any(map(has_forward_hooks, blocks))
            ):
                stage.fused = FusedLayers(fused, decode_pass, self._pass)
            if fused and stage.is_last and supports_fused_head(stage.head, decode_pass.kernel):
                stage.head.fused = FusedHead(stage.head, decode_pass.kernel)

    def _record_routing(self, stage: Transformer) -> None:
        """Set a `RoutingCache` on the router of each MoE layer. Layers of multi-token prediction do not run."""
        model = self._chain.stages[0].config
        num_slots = self._size.num_pages * self._size.page_positions
        for number, layer in stage.moe_layers().items():
            if number >= model.num_layers:
                continue
            cache = RoutingCache(
                self._pass, num_slots, expert_index_dtype(model.experts.num_choices), self._chain.groups.attn.tp
            )
            self._routing.append(cache)
            self._overrides.append((layer.router, layer.router.override))
            layer.router.override = cache

    def recorded_choices(self, slots: NDArray[np.int64]) -> NDArray[np.integer]:
        """Return the experts chosen for some cached tokens, [MoE layers of this rank, tokens, K].

        With tensor parallelism, 0 for tokens that another rank routed. See `merge_over_tp`.

        Args:
            slots: index of each token in the cache, page * positions of a page + offset.
        """
        if not self._routing:
            moe = self._chain.stages[0].config.routed
            top_k, num_choices = (moe.top_k, moe.num_choices) if moe else (0, 0)
            return np.zeros((0, len(slots), top_k), expert_index_dtype(num_choices))
        slots_N = torch.from_numpy(slots).to(self._chain.groups.device)
        return torch.stack([cache.read(slots_N) for cache in self._routing]).cpu().numpy()

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages of all layers, (from, to). No page is copied to twice."""
        if copies:
            source, target = copy_to_device(torch.tensor(copies), self._chain.groups.device).unbind(1)
            for cache in self._caches:
                cache.copy_pages(source, target)
            for routing in self._routing:
                routing.copy_pages(source, target, self._size.page_positions)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the states of linear attention between slots in all layers, (from, to)."""
        if copies:
            source, target = copy_to_device(torch.tensor(copies), self._chain.groups.device).unbind(1)
            for cache in self._caches:
                cache.copy_states(source, target, 1 + max(slot for pair in copies for slot in pair))

    def forward(self, tokens_R: Tensor, rows: PassRows, picked_N: Tensor) -> Tensor | None:
        """Run one pass. It is collective over all ranks. Each rank of dp and cp has its own rows, or none.

        Args:
            tokens_R: int64 [R].
            picked_N: rows whose logits are returned, int64 [N].

        Returns:
            Logits of this rank's vocabulary shard, [N, V/tp], float32 or higher, on the ranks of the last stage,
            elsewhere None.
        """
        self._pass.rows = rows
        last = max(rows.last_positions, default=0)
        for stage, table in zip(self._chain.stages, self._rope_tables, strict=True):
            stage.set_rope(rows.positions_R, table.rope(rows.positions_R, last))
            num_local = stage.sequence_parallel.split_unevenly(len(tokens_R))
            if stage.is_last:
                stage.head.picked_rows_N = picked_N
        for routing in self._routing:
            routing.num_recorded = 0
        logits = self._chain.forward(tokens_R.unsqueeze(0), num_local)
        # A path around the routers would leave choices of other tokens in the cache.
        assert all(routing.num_recorded == num_local for routing in self._routing), "a router did not record its rows"
        # No choices are known while this rank has no rows.
        if not self._has_reported and (message := _describe_paths([cache.page_path for cache in self._caches])):
            self._has_reported = True
            logger.info("%s", message)
        if logits is None:
            return None
        return logits.squeeze(1).to(torch.promote_types(logits.dtype, torch.float32))


def _replacement_dispatcher(chain: ForwardChain) -> Dispatcher[Any] | None:
    """Return the default dispatcher if the layers' dispatcher needs equal token counts or buffers."""
    layers = [layer for stage in chain.stages for layer in stage.moe_layers().values()]
    if not layers or layers[0].dispatcher.takes_any_tokens:
        return None
    if chain.groups.moe.experts.size == 1:
        return None
    stage, layout = chain.stages[0], chain.groups.layout
    settings = stage.settings
    sizes = dispatch_sizes(stage.config, settings.train, settings.ffn.moe, layout.cp * layout.tp, stage.dtype.itemsize)
    dispatcher = build_dispatcher(default_part(DispatcherPart), chain.groups.moe, sizes)
    dispatcher.use_permute_ops(layers[0].dispatcher.permute_ops)
    return dispatcher


def shares_experts_over_samples(chain: ForwardChain) -> bool:
    """Return whether ranks that share a set of experts run different samples, so that they must step together."""
    if chain.fetches_experts:
        return False
    groups = chain.groups
    view = groups.layout.attention
    coordinates = {(view.coordinate(rank, "dp"), view.coordinate(rank, "cp")) for rank in groups.moe.experts.ranks}
    return len(coordinates) > 1
