"""`parallel.elastic`: the recipe follows the number of ranks that a launcher started."""

from dataclasses import replace
from math import lcm

from moefold.config.checks import check_config
from moefold.config.choices import nearest_numbers
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.parallel.layout import divisors


def with_world_size(cfg: Config, world_size: int) -> Config:
    """The recipe on another number of ranks: dp and edp follow, every other degree and the global batch stay.

    Raises:
        ConfigError: the recipe does not fit that number; the message has those that it fits.
    """
    changed = _replace_world_size(cfg, world_size)
    try:
        check_config(changed)
    except ConfigError as error:
        p = cfg.parallel
        fitting = fitting_world_sizes(cfg)
        if not fitting:
            raise
        raise ConfigError(
            f"parallel.elastic=true: the launcher started {world_size} processes, and the recipe with tp={p.tp}, "
            f"cp={p.cp}, pp={p.pp}, ep={p.ep}, etp={p.etp} and train.global_batch_size={cfg.train.global_batch_size} "
            f"fits {nearest_numbers(world_size, fitting)}: {error}"
        ) from None
    return changed


def fitting_world_sizes(cfg: Config) -> list[int]:
    """All numbers of ranks that the recipe fits, ascending."""
    p, train = cfg.parallel, cfg.train
    dense = p.tp * p.cp * p.pp
    replicas = divisors(max(1, train.global_batch_size // train.micro_batch_size))
    candidates = [dense * dp for dp in replicas if dense * dp % lcm(dense, p.ep * p.etp * p.pp) == 0]
    return [number for number in candidates if _is_valid(_replace_world_size(cfg, number))]


def _replace_world_size(cfg: Config, world_size: int) -> Config:
    return replace(cfg, parallel=replace(cfg.parallel, world_size=world_size))


def _is_valid(cfg: Config) -> bool:
    try:
        check_config(cfg)
    except ConfigError:
        return False
    return True
