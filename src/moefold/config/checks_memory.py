"""Whether a step fits into the memory that a recipe gives a rank."""

from collections.abc import Iterator

from moefold.config.checks_recompute import AUTO
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.metrics.kept_parts import KERNEL_PROFILES
from moefold.metrics.recompute_choice import GIB, choose_recompute


def validate_memory(cfg: Config) -> Iterator[str]:
    """With train.recompute "auto" some choice fits; for a recipe that all other rules passed.

    Asked where the recipe says that it runs on the CPU: `check_memory_device` asks once the device is known.
    """
    if cfg.run.device == "cpu":
        try:
            check_memory_device(cfg, "cpu")
        except ConfigError as error:
            yield str(error)


def check_memory_device(cfg: Config, device_type: str) -> None:
    """With train.recompute "auto" there is a budget, and some choice fits; cheap, and before there are ranks.

    A budget that is a part of the GPUs' memory is known to them alone: `parallel/recompute.py` asks them.

    Raises:
        ConfigError: nobody said how much memory a rank on the CPU may use, or nothing fits.
    """
    if AUTO not in cfg.train.recompute:
        return
    if cfg.train.memory_budget_gib:
        choose_recompute(cfg, round(cfg.train.memory_budget_gib * GIB), KERNEL_PROFILES[device_type])
    elif device_type == "cpu":
        raise ConfigError(
            f"train.recompute=['{AUTO}'] needs train.memory_budget_gib, and the ranks would run on the CPU, whose "
            "memory they share; give what one rank may use"
        )
