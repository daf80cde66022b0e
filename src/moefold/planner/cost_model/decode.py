"""Cost model of a forward pass with a KV cache: bytes read or FLOPs, launches and collectives. Torch-free.

A pass of few tokens reads every weight that it touches once, so memory bandwidth bounds it; a pass of many tokens, such
as prompts, is bound by FLOPs. Of N tokens with K of E experts each, drawn at random, E (1 - (1 - K/E)^N) experts are
touched in the mean. Not calibrated: no published measurement of decoding is in the repository.
"""

from dataclasses import dataclass

from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.cost.hardware import Device
from moefold.cost.kv_cache import CacheKind
from moefold.cost.layer_spec import embedding_weight
from moefold.planner.cost_model.collective import RankGroup, all_gather_s, all_to_all_s, p2p_s

LAUNCHES_PER_BLOCK = 55
"""Kernel launches of the forward pass of a MoE block (docs/design/018-cuda-graphs.md)."""
MAX_LAUNCH_S = 6e-6
"""Host time of a launch, at most. `host_launch_s` of a device is fitted on training, with its autograd and modules."""


@dataclass(frozen=True, slots=True)
class SamplingDegrees:
    """Degrees of a mapping for sampling; the data-parallel ranks of each view follow."""

    world_size: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def dp(self) -> int:
        """Ranks with samples of their own."""
        return self.world_size // (self.tp * self.pp)

    @property
    def edp(self) -> int:
        """Replicas of all experts in a pipeline stage."""
        return self.world_size // (self.etp * self.ep * self.pp)


class DecodeCost:
    """Seconds of forward passes of one model on one device, under any mapping.

    Args:
        model: the model.
        device: the device.
        dtype: compute type, as in run.dtype.
        itemsize: its bytes.
        cache: what latent attention caches.
    """

    def __init__(
        self, model: ModelConfig, device: Device, dtype: str, itemsize: int, cache: CacheKind = "latents"
    ) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self._itemsize = itemsize
        self._flops_per_s = device.peak("bf16") * device.gemm_fraction["bf16"] / device.dtype_slowdown(dtype)
        self._bytes_per_s = device.hbm_bytes_per_s * device.hbm_fraction

    def pass_s(self, degrees: SamplingDegrees, rows: float, keys: float, chunk: int = 1) -> float:
        """Return the seconds of one pass through all layers, which pipeline ranks run one after the other.

        Args:
            degrees: the mapping.
            rows: tokens of each data-parallel rank.
            keys: mean number of keys that a token attends to.
            chunk: tokens for which a state of linear attention is read and written once.
        """
        hidden_bytes = rows * self._model.hidden_size * self._itemsize
        seconds = sum(self._layer_s(layer, degrees, rows, keys, rows / chunk) for layer in self._model.block_kinds)
        head = embedding_weight(self._model).numel / degrees.tp
        seconds += self._local_s(head * self._itemsize, 2 * head * rows, launches=1)
        stride = degrees.world_size // degrees.pp
        seconds += (degrees.pp - 1) * p2p_s(self._device, stride, hidden_bytes / degrees.tp)
        # The host reads the new tokens before it starts the next pass.
        return seconds + self._device.sync_s

    def _layer_s(self, layer: Layer, degrees: SamplingDegrees, rows: float, keys: float, states: float) -> float:
        """Return the seconds of one layer."""
        model = self._model
        core = layer.core
        shards = [weight.shard(degrees.tp, degrees.ep, degrees.etp) for weight in layer.params]
        dense = sum(weight.numel for weight in shards if not weight.is_expert)
        experts = sum(weight.numel for weight in shards if weight.is_expert)
        # Sparse attention reads the index keys of all tokens, and keys and values of the selected ones.
        selected = min(keys, core.selected) if core.selected else keys
        index_width = core.index_width if selected < keys else 0
        width = core.cached_width(degrees.tp, expanded=self._cache == "heads")
        cached = selected * (width - index_width) + keys * index_width
        num_bytes = dense * self._itemsize + rows * cached * self._itemsize
        num_bytes += 2 * states * core.state_bytes(degrees.tp, self._itemsize)
        flops = 2.0 * dense * rows + core.flops(keys) * rows / degrees.tp
        tp_group = RankGroup(degrees.tp, 1)
        hidden_bytes = rows * model.hidden_size * self._itemsize
        # Each of the two sub-layers gathers and scatters its tokens; a MoE layer dispatches the tokens of its tp rank.
        comm_s = (2 if layer.ffn.is_routed else 4) * all_gather_s(self._device, tp_group, hidden_bytes)
        if experts:
            tokens = rows * degrees.dp / degrees.edp
            part = model.experts
            local = part.num_experts // degrees.ep
            touched = local * (1.0 - (1.0 - part.mean_active / part.num_experts) ** tokens)
            copies = tokens * part.mean_active / degrees.ep
            num_bytes += touched / local * experts * self._itemsize
            flops += 2.0 * experts / local * copies
            ep_group = RankGroup(degrees.ep, degrees.etp)
            copy_bytes = part.token_size(model.hidden_size) * self._itemsize
            sent = tokens * part.mean_active / (degrees.ep * degrees.etp) * copy_bytes
            comm_s += 2 * all_to_all_s(self._device, ep_group, sent)
            comm_s += 2 * all_gather_s(self._device, RankGroup(degrees.etp, 1), copies * copy_bytes)
        return self._local_s(num_bytes, flops, LAUNCHES_PER_BLOCK) + comm_s

    def _local_s(self, num_bytes: float, flops: float, launches: int) -> float:
        """Return the seconds of one device: reading, computing, or launching kernels, whichever takes longest."""
        launch_s = min(self._device.host_launch_s, MAX_LAUNCH_S)
        return max(num_bytes / self._bytes_per_s, flops / self._flops_per_s, launches * launch_s)
