"""The options of a machine that is less than ideal: slow ranks, and times that vary. Torch-free."""

import argparse
from collections.abc import Sequence

from moefold.config.schema import Config
from moefold.errors import ConfigError


def add_noise_options(parser: argparse.ArgumentParser, help_prefix: str = "") -> None:
    """The options that make a machine less than ideal."""
    add = parser.add_argument
    straggler = f"{help_prefix}a rank that computes slower; repeatable"
    add("--straggler", action="append", default=[], metavar="RANK=FACTOR", help=straggler)
    jitter = f"{help_prefix}spread of the times of actions, such as 0.05 (default 0)"
    add("--jitter", type=float, default=0.0, metavar="S", help=jitter)
    add("--seed", type=int, help="seed of --jitter (default 0)")


def parse_stragglers(cfg: Config, options: Sequence[str]) -> dict[int, float]:
    """The factor of each slow pipeline rank, of words such as `17=1.3`; a stage waits for the slowest of its ranks.

    Raises:
        ConfigError: a word is none, there is no such rank, or a rank is faster than others that its stage waits for.
    """
    from moefold.cli.layout import layout_from_config

    layout = layout_from_config(cfg)
    given = parse_straggler_factors(options, layout.world_size)
    found = dict[int, float]()
    for pp_rank in dict.fromkeys(layout.attention.coordinate(rank, "pp") for rank in given):
        stage = [rank for rank in range(layout.world_size) if layout.attention.coordinate(rank, "pp") == pp_rank]
        found[pp_rank] = max(given.get(rank, 1.0) for rank in stage)
        fast = next((rank for rank in stage if given.get(rank, 1.0) < 1), None)
        if fast is not None and found[pp_rank] == 1:
            raise ConfigError(
                f"--straggler {fast}={given[fast]:g}: its stage has {len(stage)} ranks and goes at the pace of the "
                "slowest, so one that is faster changes nothing; name all of them, or choose a factor of at least 1"
            )
    return found


def parse_straggler_factors(options: Sequence[str], num_ranks: int) -> dict[int, float]:
    """The factor of each rank that words such as `17=1.3` name, the largest where one is named twice.

    Raises:
        ConfigError: a word is none, or there is no such rank.
    """
    found = dict[int, float]()
    for word in options:
        rank, _, factor = word.partition("=")
        try:
            number, times = int(rank), float(factor)
        except ValueError:
            raise ConfigError(f"--straggler {word!r} must be RANK=FACTOR, such as 17=1.3") from None
        if not 0 <= number < num_ranks:
            raise ConfigError(f"--straggler {word}: ranks run from 0 to {num_ranks - 1}")
        if not 0 < times < float("inf"):
            raise ConfigError(f"--straggler {word}: the factor must be above 0; 1.3 computes 1.3 times as long")
        found[number] = max(times, found.get(number, times))
    return found


def check_jitter(value: float) -> float:
    """The spread of the times of actions.

    Raises:
        ConfigError: it is none.
    """
    if not 0 <= value <= 1:
        raise ConfigError(
            f"--jitter {value:g} must lie between 0 and 1: 0.05 makes the times of actions vary by about 5 %"
        )
    return value


def check_seed(args: argparse.Namespace) -> None:
    """A seed has something to draw.

    Raises:
        ConfigError: it has not.
    """
    if args.seed is not None and not args.jitter:
        raise ConfigError(
            f"--seed {args.seed} has no effect: --jitter 0 draws nothing; add --jitter 0.05, or leave --seed out"
        )
