"""Numbers of ranks that a recipe fits, for elastic launchers and for jobs that have lost ranks."""

from dataclasses import replace
from math import lcm

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.message_text import nearest_numbers
from moefold.validate.config import check_config, is_legal

NEAR_WORLD_SIZES = 8
"""Limit of the world sizes in messages, as a multiple of the available ranks."""


def with_world_size(cfg: Config, world_size: int) -> Config:
    """Return the recipe for another number of ranks: dp and edp change, other degrees and global batch stay.

    Raises:
        ConfigError: the recipe does not fit that number. The message names numbers that fit.
    """
    changed = _replace_world_size(cfg, world_size)
    try:
        check_config(changed)
    except ConfigError as error:
        p = cfg.parallel
        fitting = fitting_world_sizes(cfg, largest=NEAR_WORLD_SIZES * world_size)
        if not fitting:
            raise
        raise ConfigError(
            f"parallel.elastic=true: the launcher started {world_size} processes, and the recipe with tp={p.tp}, "
            f"cp={p.cp}, pp={p.pp}, ep={p.ep}, etp={p.etp} and train.global_batch_size={cfg.train.global_batch_size} "
            f"fits {nearest_numbers(world_size, fitting)}: {error}"
        ) from None
    return changed


def fitting_world_sizes(cfg: Config, largest: int | None = None) -> list[int]:
    """Return the world sizes that the recipe fits, ascending.

    All degrees except dp and edp are fixed, so that a world size is a multiple of tp*cp*pp and of ep*etp*pp. The number
    of micro-batches of the global batch must be a multiple of dp, unless `ParallelConfig.may_pad_batch`.

    Args:
        largest: largest world size to consider, or None if there is no limit.
    """
    p = cfg.parallel
    count = max(1, cfg.train.global_batch_size // cfg.train.micro_batch_size)
    dense = p.tp * p.cp * p.pp
    multiple = lcm(dense, p.ep * p.etp * p.pp)
    limit = count * dense if largest is None else min(largest, count * dense)
    return [
        number
        for number in range(multiple, limit + 1, multiple)
        if (cfg.parallel.may_pad_batch or count % (number // dense) == 0) and is_legal(_replace_world_size(cfg, number))
    ]


def without_lost_ranks(cfg: Config, world_size: int) -> Config:
    """Return the recipe for the remaining ranks. The last of them may have padding, as in elastic jobs.

    The rules on `faults.on_loss` apply to the start of a job, so its keys have their defaults.
    """
    parallel = replace(cfg.parallel, world_size=world_size, elastic=True)
    changed = replace(cfg, parallel=parallel, faults=replace(cfg.faults, on_loss="stop", min_ranks=1))
    if changed.parallel.dp > 1:
        return changed
    # A single replica has no peers.
    return replace(changed, checkpoint=replace(changed.checkpoint, peer_every=0))


def world_sizes_after_rank_loss(cfg: Config) -> list[int]:
    """Return the numbers of ranks that can continue a job which has lost ranks, ascending. See faults.on_loss."""
    limit = cfg.parallel.world_size - 1
    sizes = fitting_world_sizes(without_lost_ranks(cfg, cfg.parallel.world_size), largest=limit)
    return [size for size in sizes if size >= cfg.faults.min_ranks]


def _replace_world_size(cfg: Config, world_size: int) -> Config:
    return replace(cfg, parallel=replace(cfg.parallel, world_size=world_size))
