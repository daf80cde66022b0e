"""Memory of reinforcement learning outside the training step: weights of further models, and draws of tokens."""

from moefold.config.schema import Config
from moefold.cost.kv_cache import CACHE_PART, min_rollout_cache_bytes, rollouts_at_once
from moefold.cost.layer_spec import model_weights
from moefold.cost.rank_state_memory import RankStateMemory
from moefold.cost.saved_tensors import KERNEL_PROFILES, BytesByPart
from moefold.cost.shard_boxes import WeightSharding, held_bytes
from moefold.cost.state_bytes import compute_dtype_bytes, master_dtype_bytes
from moefold.topology.rollout_mapping import fetches_experts, has_rollout_mapping, rollout_config

DRAWS_PART = "draws of tokens"
MAX_WEIGHTS = 1 << 24
"""Weights of tokens that are computed at a time to draw from them. One row may have more."""
BYTES_OF_A_WEIGHT = 24
"""Bytes that a draw has in memory for each weight: scaled logits, powers and integers of 8 bytes. Top-k and top-p,
which rollouts of training do not use, take up to 41."""


def drawn_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the bytes of the draws of a pass on a rank that draws: the first over tp, of the last pipeline stage."""
    return min(num_rows, max(1, MAX_WEIGHTS // vocab_size)) * vocab_size * BYTES_OF_A_WEIGHT


def sampled_itemsize(cfg: Config) -> dict[str, int]:
    """Return the bytes of an element of each weight for inference: the compute type, or the master type."""
    wide = master_dtype_bytes(cfg.run)
    narrow = compute_dtype_bytes(cfg.run)
    names = WeightSharding.from_config(cfg, for_training=False).shapes
    weights = model_weights(cfg.model)
    # Tensors that are not parameters are buffers of a router.
    return {name: wide if name not in weights or weights[name].is_full_precision else narrow for name in names}


def rollout_weight_bytes(cfg: Config) -> tuple[int, ...]:
    """Return the bytes of each rank's weights for sampling that it does not share with training, or 0 without them.

    With rollout.ranks, these are the bytes of each rollout rank.
    """
    ranks = range(cfg.rollout.ranks or cfg.parallel.world_size)
    if not has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout):
        return tuple(0 for _ in ranks)
    trained = WeightSharding.from_config(cfg, for_training=True)
    sampled = WeightSharding.from_config(rollout_config(cfg), for_training=False)
    itemsize = sampled_itemsize(rollout_config(cfg))
    wide = master_dtype_bytes(cfg.run)
    # Experts that other ranks read are in separate memory.
    peer_read = {
        name for name, weight in model_weights(cfg.model).items() if weight.is_expert and fetches_experts(cfg.rollout)
    }
    found = []
    for rank in ranks:
        held = {} if cfg.rollout.ranks else trained.boxes(rank)
        own = {
            name: box
            for name, box in sampled.boxes(rank).items()
            if itemsize[name] != wide or held.get(name) != box or name in peer_read
        }
        found.append(held_bytes(own, itemsize))
    return tuple(found)


def gathered_weight_bytes(cfg: Config) -> tuple[int, ...]:
    """Return the bytes of the weights that a model in training gathers to sample, on the first rank of each stage.

    FSDP gathers all weights in the compute type. A single rank gathers none. Copies of its weights in the compute type
    depend on the kernels and are not counted.
    """
    p = cfg.parallel
    if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout) or p.world_size == 1:
        return (0,) * p.pp
    whole = WeightSharding.from_config(cfg, for_training=False)
    itemsize = sampled_itemsize(cfg)
    names = model_weights(cfg.model).keys()
    found = [0] * p.pp
    for rank in range(p.world_size):
        stage = whole.layout.attention.coordinate(rank, "pp")
        if not found[stage]:
            found[stage] = held_bytes({n: b for n, b in whole.boxes(rank).items() if n in names}, itemsize)
    return tuple(found)


def reference_weight_bytes(cfg: Config) -> tuple[int, ...]:
    """Return the bytes of the reference model on the first rank of each pipeline stage: master weights and buffers.

    Its gathered weights and those in the compute type are freed before the training step.
    """
    return tuple(states.weights + states.buffers for states in RankStateMemory(cfg).max_by_pp_rank)


def min_sampling_memory(cfg: Config, device_type: str) -> tuple[BytesByPart, ...]:
    """Return the minimum memory of a rank of each pipeline stage while rollouts are sampled, without other models."""
    memory = RankStateMemory(cfg, KERNEL_PROFILES[device_type])
    cache = min_rollout_cache_bytes(cfg)
    p = cfg.parallel
    drawn = drawn_bytes(rollouts_at_once(cfg), cfg.model.vocab_size)
    if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout):
        # Every stage may have ranks that draw under the other mapping: only their mean is certain.
        sampling = rollout_config(cfg).parallel
        draws = [drawn // (sampling.tp * sampling.pp)] * p.pp
    else:
        draws = _draws_by_stage(drawn, p.pp, p.tp, device_type)
    return tuple(
        BytesByPart(
            {
                "weights": states.weights,
                "optimizer": states.optimizer - moments.offloaded,
                "buffers": states.buffers,
                "gathered weights": gathered,
                CACHE_PART: cache,
                DRAWS_PART: draw_bytes,
            }
        )
        for states, moments, gathered, draw_bytes in zip(
            memory.max_by_pp_rank, memory.offloaded_moments, gathered_weight_bytes(cfg), draws, strict=True
        )
    )


def _draws_by_stage(drawn: int, num_stages: int, tp: int, device_type: str) -> list[int]:
    """Return the bytes of draws of each stage when sampling: one rank of each tp group of the last stage draws.

    On a CPU, whose ranks share memory, this is the mean of the ranks. On GPUs it is for the rank that draws.
    """
    return [0] * (num_stages - 1) + [drawn // (tp if device_type == "cpu" else 1)]


def sampling_rank_memory(cfg: Config, device_type: str) -> tuple[BytesByPart, ...]:
    """Return the minimum memory of a rank of rollout.ranks for each pipeline stage of sampling, if there are any."""
    if not cfg.rollout.ranks:
        return ()

    view = WeightSharding.from_config(rollout_config(cfg), for_training=False).layout.attention
    sizes: dict[int, int] = {}
    for rank, size in enumerate(rollout_weight_bytes(cfg)):
        pp_rank = view.coordinate(rank, "pp")
        sizes[pp_rank] = min(size, sizes.get(pp_rank, size))
    cache = min_rollout_cache_bytes(cfg)
    drawn = drawn_bytes(rollouts_at_once(cfg), cfg.model.vocab_size)
    draws = _draws_by_stage(drawn, len(sizes), rollout_config(cfg).parallel.tp, device_type)
    return tuple(
        BytesByPart({"rollout weights": sizes[pp_rank], CACHE_PART: cache, DRAWS_PART: draws[pp_rank]})
        for pp_rank in sorted(sizes)
    )


def further_weights(cfg: Config) -> tuple[BytesByPart, ...]:
    """Return the weight bytes of the reference model and of a second model for sampling, for each pipeline stage."""
    by_stage = [BytesByPart() for _ in range(cfg.parallel.pp)]
    if not cfg.is_rl:
        return tuple(by_stage)

    if cfg.rl.kl:
        # The reference model has the weights of training, under its mapping, and no gradients.
        for parts, size in zip(by_stage, reference_weight_bytes(cfg), strict=True):
            parts["reference weights"] = size
    if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout) and not cfg.rollout.ranks:
        view = WeightSharding.from_config(cfg, for_training=True).layout.attention
        sizes: list[list[int]] = [[] for _ in by_stage]
        for rank, size in enumerate(rollout_weight_bytes(cfg)):
            sizes[view.coordinate(rank, "pp")].append(size)
        # The ranks of a stage differ under the other mapping. Their mean is a lower bound for the fullest rank.
        for parts, stage_sizes in zip(by_stage, sizes, strict=True):
            parts["rollout weights"] = sum(stage_sizes) // len(stage_sizes)
    return tuple(by_stage)
