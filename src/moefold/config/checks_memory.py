"""Whether a step fits into the memory that a recipe gives a rank."""

from collections.abc import Iterator

from moefold.config.checks_recompute import AUTO
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.metrics.activation_memory import CPU
from moefold.metrics.recompute_choice import GIB, choose_recompute


def memory_faults(cfg: Config) -> Iterator[str]:
    """With train.recompute "auto" some choice fits; for a recipe that all other rules passed.

    Asked where the recipe says that it runs on the CPU: what a GPU keeps, and has, is known where it is.
    """
    if AUTO not in cfg.train.recompute or cfg.run.device != "cpu":
        return
    try:
        choose_recompute(cfg, round(cfg.train.memory_budget_gib * GIB), CPU)
    except ConfigError as error:
        yield str(error)
