"""The options of a machine that is less than ideal: slow ranks, and times that vary. Torch-free."""

import argparse
from collections.abc import Sequence

from moefold.config.schema import Config
from moefold.errors import ConfigError


def add_disturbance(parser: argparse.ArgumentParser, where: str = "") -> None:
    """The options that make a machine less than ideal."""
    add = parser.add_argument
    straggler = f"{where}a rank that computes slower; repeatable"
    add("--straggler", action="append", default=[], metavar="RANK=FACTOR", help=straggler)
    jitter = f"{where}spread of the times of actions, such as 0.05 (default 0)"
    add("--jitter", type=float, default=0.0, metavar="S", help=jitter)
    add("--seed", type=int, default=0, help="of the jitter (default 0)")


def stragglers_of(cfg: Config, words: Sequence[str]) -> dict[int, float]:
    """The factor of each slow pipeline rank, of words such as `17=1.3`; a stage waits for the slowest of its ranks.

    Raises:
        ConfigError: a word is none, or there is no such rank.
    """
    from moefold.cli.layout import fold_of

    layout, found = fold_of(cfg), dict[int, float]()
    for word in words:
        rank, _, factor = word.partition("=")
        try:
            number, times = int(rank), float(factor)
        except ValueError:
            raise ConfigError(f"--straggler {word!r} must be RANK=FACTOR, such as 17=1.3") from None
        if not 0 <= number < layout.world_size:
            raise ConfigError(f"--straggler {word}: ranks run from 0 to {layout.world_size - 1}")
        if not 0 < times < float("inf"):
            raise ConfigError(f"--straggler {word}: the factor must be above 0; 1.3 computes 1.3 times as long")
        pp_rank = layout.attention.coordinate(number, "pp")
        found[pp_rank] = max(times, found.get(pp_rank, times))
    return found


def jitter_of(value: float) -> float:
    """The spread of the times of actions.

    Raises:
        ConfigError: it is none.
    """
    if not 0 <= value <= 1:
        raise ConfigError(
            f"--jitter {value:g} must lie between 0 and 1: 0.05 makes the times of actions vary by about 5 %"
        )
    return value
