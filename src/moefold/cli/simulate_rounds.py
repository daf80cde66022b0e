"""Rounds of reinforcement learning in `moefold simulate`: options, prices, numbers. Torch-free."""

import argparse
import math
from dataclasses import replace

from moefold.config.parallel import ParallelConfig
from moefold.config.rl import RLConfig, RolloutConfig
from moefold.config.schema import Config
from moefold.cost.hardware import Device
from moefold.errors import ConfigError
from moefold.planner.rollout_cost import (
    copy_seconds,
    given_lengths,
    packed_fraction,
    received_bytes,
    sampling_seconds,
)
from moefold.planner.simulator.rounds import RoundTimeline, RoundTimes, simulate_rounds
from moefold.planner.simulator.timeline import Timeline

MIN_SPLIT_ROUNDS = 4
"""Rounds of a timeline with ranks that only sample: the first ones differ from the others."""
MAX_ROUNDS = 1000


def add_round_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of recipes with reinforcement learning."""
    group = parser.add_argument_group("reinforcement learning", "for recipes with rl.group_size above 0")
    group.add_argument("--prompt-tokens", type=int, metavar="N", help="mean prompt (default: what train.seq_len holds)")
    group.add_argument("--new-tokens", type=int, metavar="N", help="mean completion (default: rollout.max_tokens)")
    group.add_argument("--reward-s", type=float, metavar="S", help="seconds of scoring a round (default 0)")
    group.add_argument("--rounds", type=int, metavar="N", help="rounds of the timeline (default: 1, or 4 with ranks)")


def check_round_options(rl: RLConfig, rollout: RolloutConfig, args: argparse.Namespace) -> None:
    """Check the options.

    Raises:
        ConfigError: an option is out of its range, or has no effect.
    """
    if rl.is_on and rollout.uses_server:
        raise ConfigError(
            "rollout.engine='vllm' samples on a server, whose time is not simulated; leave out rollout.engine, url, "
            "folder and timeout_s to simulate the own engine"
        )
    for option, value, least, most in (
        ("--prompt-tokens", args.prompt_tokens, 1, math.inf),
        ("--new-tokens", args.new_tokens, 1, math.inf),
        ("--reward-s", args.reward_s, 0, math.inf),
        ("--rounds", args.rounds, 1, MAX_ROUNDS),
    ):
        if value is None:
            continue
        if not rl.is_on:
            raise ConfigError(f"{option} {value:g} has no effect: the recipe has rl.group_size=0; leave it out")
        if not least <= value <= most or not math.isfinite(value):
            bounds = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise ConfigError(f"{option} {value:g} must be {bounds}")
    if args.rounds is not None and not (args.timeline or args.json):
        raise ConfigError(
            f"--rounds {args.rounds} has no effect without --timeline and --json, which show the rounds; add one of "
            "them, or leave --rounds out"
        )


def with_packed_batch(cfg: Config, args: argparse.Namespace) -> Config:
    """Return the recipe with the samples that the rollouts of a step are packed into as its batch."""
    unit = cfg.train.micro_batch_size * cfg.parallel.dp
    fraction = packed_fraction(
        cfg.parallel, cfg.train, given_lengths(cfg.train, cfg.rollout, args.prompt_tokens, args.new_tokens)
    )
    count = max(1, math.ceil(cfg.train.global_batch_size * fraction / unit))
    return replace(cfg, train=replace(cfg.train, global_batch_size=count * unit))


def simulate_recipe_rounds(cfg: Config, device: Device, args: argparse.Namespace, step: Timeline) -> RoundTimeline:
    """Simulate rounds of a recipe.

    Args:
        cfg: the recipe.
        device: the device of all ranks.
        args: the options.
        step: the simulated training step, of `with_packed_batch`.
    """
    lengths = given_lengths(cfg.train, cfg.rollout, args.prompt_tokens, args.new_tokens)
    prefill_s, decode_s = sampling_seconds(cfg, device, lengths)
    times = RoundTimes(
        copy_s=copy_seconds(cfg.parallel, cfg.rollout, device, received_bytes(cfg)),
        prefill_s=prefill_s,
        decode_s=decode_s,
        reward_s=args.reward_s or 0.0,
        train_s=step.total_s,
        updates=cfg.rl.updates,
    )
    rounds_ahead = cfg.rl.staleness // cfg.rl.updates if cfg.rollout.ranks else None
    default = 1 if rounds_ahead is None else max(MIN_SPLIT_ROUNDS, 2 * (rounds_ahead + 1))
    return simulate_rounds(times, args.rounds or default, rounds_ahead)


def rounds_as_dict(rounds: RoundTimeline) -> dict[str, object]:
    """Return the rounds in the form that `--json` prints."""
    times = rounds.times
    return {
        "calibrated": False,
        "step_time_s": rounds.step_s,
        "updates": times.updates,
        **{key: getattr(times, key) for key in ("copy_s", "prefill_s", "decode_s", "reward_s")},
        "train_s": times.training_s,
        "rounds_ahead": rounds.rounds_ahead,
        "idle_share": {
            "training": rounds.idle_share(is_training=True),
            "sampling": rounds.idle_share(is_training=False),
        },
        "phases": [
            {"part": phase.part, "round": phase.round_number, "start_s": phase.start_s, "end_s": phase.end_s}
            for phase in rounds.phases
        ],
    }


def describe_rounds(parallel: ParallelConfig, rollout: RolloutConfig, rounds: RoundTimeline) -> str:
    """Return the numbers of the rounds in two lines."""
    times = rounds.times
    parts = {
        "copy of the weights": times.copy_s,
        "prompts": times.prefill_s,
        "decoding": times.decode_s,
        "rewards": times.reward_s,
        "training": times.training_s,
    }
    seconds = ", ".join(f"{name} {value:.4g} s" for name, value in parts.items() if value)
    how = "in turn on the same ranks"
    if rounds.rounds_ahead is not None:
        idle = [f"idle {rounds.idle_share(is_training=is_training):.1%}" for is_training in (True, False)]
        how = (
            f"at once on {parallel.world_size} ranks that train ({idle[0]}) and {rollout.ranks} that sample ({idle[1]})"
        )
    updates = f" of {times.updates} updates" if times.updates > 1 else ""
    return (
        f"reinforcement learning: {rounds.step_s:.4g} s a step, {how}; decoding is not calibrated\n"
        f"a round{updates}: {seconds}"
    )
