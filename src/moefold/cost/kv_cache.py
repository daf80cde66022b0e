"""Memory of the cached keys and values of a rank, and of the states of linear attention. Torch-free."""

from collections import Counter
from typing import Literal

from moefold.config.groups.attention import AttentionCore
from moefold.config.schema import Config
from moefold.cost.stages import plan_stages
from moefold.cost.unit_memory import compute_dtype_bytes
from moefold.topology.rollout_mapping import has_rollout_mapping, rollout_config

PAGE_POSITIONS = 64
"""Positions of a page of the cache."""
CacheKind = Literal["latents", "heads"]
"""What latent attention caches: latents, or keys and values of all heads, computed as in training."""


def kv_cache_bytes(cfg: Config, num_tokens: int, batch_size: int, kind: CacheKind = "latents") -> int:
    """Return the bytes of the KV cache (or MLA latent cache) of a batch on the rank with the most layers."""
    width = max(_cached_widths(cfg, kind).values(), default=0)
    return num_tokens * batch_size * width * compute_dtype_bytes(cfg.run)


def num_state_slots(slots: int) -> int:
    """Return the states that a rank holds while it decodes `slots` samples: theirs, and some of shared prompts."""
    return slots + slots // 4 + 1


def recurrent_state_bytes(cfg: Config) -> int:
    """Return the bytes of the states of one sample on the rank with the most layers of linear attention."""
    return max(_state_bytes(cfg).values(), default=0)


def cache_bytes(cfg: Config, num_pages: int, num_samples: int, kind: CacheKind = "latents") -> int:
    """Return the bytes of pages, and of the states with which `num_samples` samples are decoded at once."""
    states = num_state_slots(num_samples) * recurrent_state_bytes(cfg)
    return kv_cache_bytes(cfg, num_pages * PAGE_POSITIONS, 1, kind) + states


def rollouts_at_once(cfg: Config) -> int:
    """Return the largest number of rollouts that a rank decodes in one pass; 0 where a server samples."""
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
    num_slots = rollouts_at_once(cfg)
    num_tokens = num_slots * cfg.rollout.max_tokens
    state_bytes = recurrent_state_bytes(sampling)
    states = num_slots * state_bytes
    needed = kv_cache_bytes(sampling, num_tokens, 1, cfg.rollout.cache)
    # The engine takes the states of all slots from the limit first.
    limit = int(cfg.rollout.cache_gib * 2**30) - num_state_slots(cfg.rollout.slots) * state_bytes
    size = min(needed, max(0, limit))
    if size:
        widths = _cached_widths(sampling, cfg.rollout.cache).values()
        size = size * sum(widths) // (p.pp * max(widths))
    if states:
        by_rank = _state_bytes(sampling).values()
        states = states * sum(by_rank) // (p.pp * max(by_rank))
    return size + states


def _cached_widths(cfg: Config, kind: CacheKind) -> Counter[int]:
    """Return the numbers that a rank caches of a token, by pipeline rank; MTP layers do not run in decoding."""
    widths: Counter[int] = Counter()
    for rank, core in _cores(cfg):
        widths[rank] += core.cached_width(cfg.parallel.tp, expanded=kind == "heads")
    return widths


def _state_bytes(cfg: Config) -> Counter[int]:
    """Return the bytes of the states of one sample, by pipeline rank."""
    found: Counter[int] = Counter()
    for rank, core in _cores(cfg):
        found[rank] += core.state_bytes(cfg.parallel.tp, compute_dtype_bytes(cfg.run))
    return found


def _cores(cfg: Config) -> list[tuple[int, AttentionCore]]:
    """Return the pipeline rank of each layer, and what it computes without a weight."""
    ranks = plan_stages(cfg).rank_of_layers(cfg.model.num_layers)
    return [(ranks[number], layer.core) for number, layer in enumerate(cfg.model.decoder_layers)]
