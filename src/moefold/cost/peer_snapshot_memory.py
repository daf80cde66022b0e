"""Host memory of the snapshots that `checkpoint.peer_every` takes."""

from moefold.config.schema import Config
from moefold.cost.rank_state_memory import RankStateMemory
from moefold.cost.shard_boxes import WeightSharding

NUM_KEPT = 2
"""Snapshots in memory: the last complete one, and the one that is being taken."""


def snapshot_bytes(cfg: Config) -> tuple[int, ...]:
    """Return the most bytes of snapshots on a rank of each pipeline stage: its own state, and one other rank's.

    Exact except for the padding of uneven shards and for buffers. With ZeRO 1 to 3 a rank holds a copy of all shards of
    another rank. With ZeRO 0 the other replicas have the weights, and only experts with one owner are copied. If all
    owners are on one node, another copy of their shards is not counted.

    Args:
        cfg: a recipe that `check_config` passed.
    """
    p = cfg.parallel
    if not cfg.checkpoint.peer_every or p.dp == 1:
        return (0,) * p.pp
    sharding = WeightSharding.from_config(cfg, for_training=True)
    view = sharding.layout.attention
    first = {view.coordinate(rank, "pp"): rank for rank in reversed(range(p.world_size))}
    sizes = []
    for pp_rank, states in enumerate(RankStateMemory(cfg).max_by_pp_rank):
        # Like checkpoints, snapshots have only the adapters where no other weight is trained: weight and two moments.
        own = states.optimizer * 3 // 2 if cfg.trains_adapters_only else states.weights + states.optimizer
        copied = 1.0
        if p.zero == 0:
            boxes = sharding.boxes(first[pp_rank])
            experts = sum(box.numel for name, box in boxes.items() if ".experts." in name)
            copied = experts / sum(box.numel for box in boxes.values()) if p.edp == 1 else 0.0
        sizes.append(NUM_KEPT * round(own * (1 + copied)))
    return tuple(sizes)
