"""Options of the planner's commands: the plan request, and uneven work on a simulated machine."""

import argparse
from collections.abc import Sequence
from dataclasses import fields

from moefold.config.sections.parallel import ParallelConfig
from moefold.errors import ConfigError
from moefold.message_text import Setting
from moefold.planner.axis_words import parse_axes
from moefold.planner.plan_request import PlanOptions, plan_request
from moefold.planner.planner import PlanRequest
from moefold.planner.simulator.simulate import Noise
from moefold.topology.layout import fold_mapping


def request_from_args(args: argparse.Namespace) -> PlanRequest:
    """Build the plan request from the options."""
    if args.top is not None and args.top < 1:
        raise ConfigError(f"--top {args.top} must be at least 1")
    options = {field.name: getattr(args, field.name) for field in fields(PlanOptions)}
    fixed = parse_axes(args.fix, "--fix") if args.fix else {}
    return plan_request(args.model, args.gpu, PlanOptions(**options | {"fix": fixed}))


def add_noise_options(parser: argparse.ArgumentParser, help_prefix: str = "") -> None:
    """Add --straggler, --jitter and --seed."""
    add = parser.add_argument
    straggler = f"{help_prefix}a rank that computes slower; repeatable"
    add("--straggler", action="append", default=[], metavar="RANK=FACTOR", help=straggler)
    jitter = f"{help_prefix}spread of the times of actions, such as 0.05 (default 0)"
    add("--jitter", type=float, default=0.0, metavar="S", help=jitter)
    add("--seed", type=int, help="seed of --jitter (default 0)")


def noise_of(parallel: ParallelConfig, args: argparse.Namespace) -> Noise:
    """Return the noise of the options."""
    check_jitter_options(args)
    return Noise(parse_stragglers(parallel, args.straggler), args.jitter, args.seed or 0)


def parse_stragglers(parallel: ParallelConfig, options: Sequence[str]) -> dict[int, float]:
    """Return the slowdown of each pipeline rank with a straggler, from options such as `17=1.3`.

    A stage waits for the slowest of its ranks.
    """
    layout = fold_mapping(parallel)
    ranks = parse_straggler_factors(options, layout.world_size)
    factors = dict[int, float]()
    for pp_rank in dict.fromkeys(layout.attention.coordinate(rank, "pp") for rank in ranks):
        stage = [rank for rank in range(layout.world_size) if layout.attention.coordinate(rank, "pp") == pp_rank]
        factors[pp_rank] = max(ranks.get(rank, 1.0) for rank in stage)
        fast = next((rank for rank in stage if ranks.get(rank, 1.0) < 1), None)
        if fast is not None and factors[pp_rank] == 1:
            raise ConfigError(
                f"--straggler {fast}={ranks[fast]:g}: its stage has {len(stage)} ranks and waits for the slowest one, "
                "so a single faster rank changes nothing; name all of them, or choose a factor of at least 1"
            )
    return factors


def parse_straggler_factors(options: Sequence[str], num_ranks: int) -> dict[int, float]:
    """Parse options such as `17=1.3` into the slowdown of each named rank. The largest value of a rank counts."""
    factors = dict[int, float]()
    for word in options:
        rank, _, factor = word.partition("=")
        try:
            number = int(rank)
            times = float(factor)
        except ValueError:
            raise ConfigError(f"{Setting('--straggler', word)} must be RANK=FACTOR, such as 17=1.3") from None
        if not 0 <= number < num_ranks:
            raise ConfigError(f"--straggler {word}: ranks run from 0 to {num_ranks - 1}")
        if not 0 < times < float("inf"):
            raise ConfigError(f"--straggler {word}: the factor must be above 0; 1.3 computes 1.3 times as long")
        factors[number] = max(times, factors.get(number, times))
    return factors


def check_jitter_options(args: argparse.Namespace) -> None:
    """Check that --jitter is a small spread, and that --seed has an effect."""
    if not 0 <= args.jitter <= 1:
        raise ConfigError(
            f"--jitter {args.jitter:g} must lie between 0 and 1: 0.05 makes the times of actions vary by about 5 %"
        )
    if args.seed is not None and not args.jitter:
        raise ConfigError(
            f"--seed {args.seed} has no effect: --jitter 0 draws nothing; add --jitter 0.05, or leave --seed out"
        )
