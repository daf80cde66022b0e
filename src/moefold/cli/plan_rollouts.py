"""Mappings for sampling in `moefold plan`: options and table of reinforcement learning. Torch-free."""

import argparse
from collections.abc import Sequence

from rich.console import Console

from moefold.cli.screen import Column, numbers, print_columns
from moefold.config.rl import RLConfig, RolloutConfig
from moefold.config.train import TrainConfig
from moefold.errors import ConfigError
from moefold.planner.mapping import format_compact_degrees, format_seconds
from moefold.planner.rollout import RolloutPlan
from moefold.planner.rollout_cost import RolloutLengths, given_lengths

GIB = 2**30


def rollout_lengths(
    train: TrainConfig, rl: RLConfig, rollout: RolloutConfig, args: argparse.Namespace
) -> RolloutLengths | None:
    """Return the lengths to plan for; None without reinforcement learning, or with a vLLM server, which is not priced.

    Raises:
        ConfigError: an option is out of its range, or has no effect.
    """
    given = {"prompt": args.prompt_tokens, "new": args.new_tokens}
    for name, value in given.items():
        if value is not None and not rl.is_on:
            raise ConfigError(
                f"--{name}-tokens {value} has no effect: MODEL is no recipe with rl.group_size above 0; leave it out"
            )
        if value is not None and value < 1:
            raise ConfigError(f"--{name}-tokens {value} must be at least 1")
        if value is not None and rollout.uses_server:
            raise ConfigError(
                f"--{name}-tokens {value} has no effect: a server of rollout.engine='vllm' is not priced; leave it out"
            )
    if not rl.is_on or rollout.uses_server:
        return None
    return given_lengths(train, rollout, args.prompt_tokens, args.new_tokens)


def print_rollouts(console: Console, plans: Sequence[RolloutPlan], lengths: RolloutLengths) -> None:
    """Print a row for each pair of a training mapping and a mapping for sampling."""
    console.print()
    console.print(
        f"reinforcement learning, prompts of {lengths.prompt} and completions of {lengths.new} tokens: training and "
        "sampling on the same GPUs in turn, or on GPUs of their own at once (decoding is not calibrated)",
        style="bold",
    )
    columns = [
        Column(name="training", cells=[format_compact_degrees(plan.training.mapping) for plan in plans], wraps=True),
        Column(name="sampling", cells=[_sampling(plan) for plan in plans], wraps=True),
    ]
    parts = {
        "step, s": [plan.total_s for plan in plans],
        "train": [plan.times.train_s for plan in plans],
        "prefill": [plan.times.prefill_s for plan in plans],
        "decode": [plan.times.decode_s for plan in plans],
        "copy": [plan.times.copy_s for plan in plans],
    }
    columns += [numbers(name, [format_seconds(seconds) for seconds in times]) for name, times in parts.items()]
    gib = [f"{plan.memory_bytes / GIB:.1f}{'' if plan.fits else ' (too much)'}" for plan in plans]
    print_columns(console, [*columns, numbers("GiB", gib)])


def _sampling(plan: RolloutPlan) -> str:
    degrees = plan.degrees
    text = f"tp{degrees.tp} pp{degrees.pp} ep{degrees.ep} etp{degrees.etp} dp{degrees.dp}"
    if plan.ranks:
        return f"{plan.ranks} GPUs, {plan.rounds_ahead} round{'s' * (plan.rounds_ahead != 1)} ahead: {text}"
    return f"{text}, in place" if plan.is_in_place else text
