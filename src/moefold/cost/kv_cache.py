"""Memory of the cached keys and values of a rank, and of the states of linear attention."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from moefold.config.groups.attention import AttentionCore
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.cost.stage_balance import plan_stages
from moefold.cost.state_bytes import compute_dtype_bytes
from moefold.topology.pipeline_layout import StagePlan
from moefold.topology.rollout_mapping import has_rollout_mapping, rollout_config

CACHE_PART = "rollout cache"
PAGE_POSITIONS = 64
"""Positions of a page on a CPU: `KEYS` of the C kernels."""
CUDA_PAGE_POSITIONS = 256
"""The same on CUDA: torch's flash attention reads pages whose size is a multiple of this."""


def page_positions(device_type: str) -> int:
    """Return the positions of a page on a type of device."""
    return CUDA_PAGE_POSITIONS if device_type == "cuda" else PAGE_POSITIONS


CacheKind = Literal["latents", "heads"]
"""Cached values of latent attention: latents, or the keys and values of all heads, computed as in training."""


def num_state_slots(slots: int) -> int:
    """Return the number of states on a rank that decodes `slots` samples: one for each, and some of shared prompts."""
    return slots + slots // 4 + 1


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of the cache of a model. MTP layers do not run in decoding."""

    model: ModelConfig
    plan: StagePlan
    tp: int
    item_bytes: int
    page_positions: int

    def kv_bytes(self, num_tokens: int, kind: CacheKind = "latents") -> int:
        """Return the bytes of the KV cache (or MLA latent cache) of some tokens on the rank with the most layers."""
        return num_tokens * max(self.widths(kind).values(), default=0) * self.item_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sample on the rank with the most layers of linear attention."""
        return max(self.states.values(), default=0)

    def total_bytes(self, num_pages: int, num_samples: int, kind: CacheKind = "latents") -> int:
        """Return the bytes of the pages and the states of `num_samples` samples that are decoded at once."""
        return self.kv_bytes(num_pages * self.page_positions, kind) + num_state_slots(num_samples) * self.state_bytes

    def widths(self, kind: CacheKind) -> Counter[int]:
        """Return the numbers that a rank caches of a token, by pipeline rank."""
        widths: Counter[int] = Counter()
        for rank, core in self._cores:
            widths[rank] += core.cached_width(self.tp, expanded=kind == "heads")
        return widths

    @property
    def states(self) -> Counter[int]:
        """Bytes of the states of one sample, by pipeline rank."""
        found: Counter[int] = Counter()
        for rank, core in self._cores:
            found[rank] += core.state_bytes(self.tp, self.item_bytes)
        return found

    @property
    def _cores(self) -> list[tuple[int, AttentionCore]]:
        """The pipeline rank of each layer, and its sub-layers without a weight."""
        ranks = self.plan.rank_of_layers(self.model.num_layers)
        return [(ranks[number], layer.core) for number, layer in enumerate(self.model.decoder_layers)]


def cache_sizes(cfg: Config, device_type: str) -> CacheSizes:
    """Return the cache sizes of the ranks of a recipe, on their chosen type of device."""
    item_bytes = compute_dtype_bytes(cfg.run)
    return CacheSizes(cfg.model, plan_stages(cfg), cfg.parallel.tp, item_bytes, page_positions(device_type))


def rollouts_at_once(cfg: Config) -> int:
    """Return the largest number of rollouts that a rank decodes in one pass, or 0 where a server samples."""
    if cfg.rollout.uses_server:
        return 0
    p = (rollout_config(cfg) if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout) else cfg).parallel
    num_rollouts = cfg.rl.updates * cfg.train.global_batch_size // (p.world_size // (p.tp * p.pp))
    return min(num_rollouts, cfg.rollout.slots)


def min_rollout_cache_bytes(cfg: Config) -> int:
    """Return the minimum bytes of the cache while the rollouts of a round are sampled, mean over ranks.

    The cache has room for as many rollouts of full length as a rank decodes at once, or rollout.cache_gib. Prompts
    count as one token.

    Args:
        cfg: a recipe of reinforcement learning that `check_config` passed.
    """
    sampling = rollout_config(cfg) if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout) else cfg
    p = sampling.parallel
    # Tokens are counted instead of pages, because the size of a page depends on the device.
    sizes = cache_sizes(sampling, "cpu")
    num_slots = rollouts_at_once(cfg)
    num_tokens = num_slots * cfg.rollout.max_tokens
    states = num_slots * sizes.state_bytes
    needed = sizes.kv_bytes(num_tokens, cfg.rollout.cache)
    # The engine takes the states of all slots from the limit first.
    limit = int(cfg.rollout.cache_gib * 2**30) - num_state_slots(cfg.rollout.slots) * sizes.state_bytes
    size = min(needed, max(0, limit))
    if size:
        widths = sizes.widths(cfg.rollout.cache).values()
        size = size * sum(widths) // (p.pp * max(widths))
    if states:
        by_rank = sizes.states.values()
        states = states * sum(by_rank) // (p.pp * max(by_rank))
    return size + states
