"""Rules on the experts of sampling ranks (`rollout.experts`): fetched from peers, or whole on each rank."""

from collections.abc import Iterator

from moefold.config.parallel import ParallelConfig
from moefold.config.rl import RLConfig, RolloutConfig
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting
from moefold.topology.layout import fold_mapping
from moefold.topology.rollout_mapping import FETCH, fetches_experts, rollout_degrees


def validate_rollout_experts(parallel: ParallelConfig, rl: RLConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """Check that the mapping of sampling supports the value of rollout.experts."""
    if not rl.is_on:
        return
    degrees = rollout_degrees(parallel, rollout)
    if fetches_experts(rollout):
        yield from fetch_violations(degrees, "rollout")
    if rollout.experts == "whole":
        for axis in ("ep", "etp"):
            if degrees[axis] > 1:
                rule = f"splits the experts, and {Setting('rollout.experts', 'whole')} holds all of them on each rank"
                way_out = f"leave {axis} out, or choose {Setting('rollout.experts', 'exchange')}"
                yield Problem(f"rollout.{axis}", degrees[axis], rule, way_out)


def fetch_violations(degrees: dict[str, int], section: str) -> Iterator[Problem]:
    """Yield a message for each degree with which ranks cannot read each other's experts.

    The section of the recipe that sets the degrees is for the messages.
    """
    for axis in ("tp", "etp"):
        if degrees[axis] > 1:
            rule = f"reads whole experts for whole tokens, and {axis}={degrees[axis]} splits them"
            yield FETCH.problem(rule, f"set {section}.{axis}=1, or choose 'exchange'")
    if degrees["ep"] == 1:
        rule = "has no effect with ep=1: each rank holds all experts"
        yield FETCH.problem(rule, f"set {section}.ep above 1, or leave it out")


def check_fetching_ranks(
    parallel: ParallelConfig, rollout: RolloutConfig, device_type: str, ranks_per_machine: int, first_rank: int = 0
) -> None:
    """Check that ranks can read each other's experts: they must be processes of one machine, on the CPU.

    Args:
        parallel: the mapping of the model that samples.
        ranks_per_machine: consecutive ranks of a machine, counted from rank 0 of the job.
        first_rank: rank of the job that is rank 0 of the config.

    Raises:
        ConfigError: the ranks cannot read each other's experts.
    """
    if not fetches_experts(rollout):
        return
    if device_type != "cpu":
        rule = f"reads experts from the memory of a machine, which is not implemented for the device {device_type!r}"
        raise ConfigError(FETCH.problem(rule, f"choose 'exchange' or 'whole', or {Setting('run.device', 'cpu')}"))
    layout = fold_mapping(parallel)
    for first in range(parallel.world_size):
        ranks = [first_rank + rank for rank in layout.moe.group(first, "ep")]
        if len({rank // ranks_per_machine for rank in ranks}) > 1:
            rule = (
                f"reads experts from the memory of a machine, and ranks {', '.join(map(str, ranks))} share "
                f"experts, with {ranks_per_machine} ranks on a machine"
            )
            raise ConfigError(FETCH.problem(rule, "choose a smaller ep, or 'exchange'"))
