"""Kernels that are chosen by time: from the record in the cache, or from measurements of all ranks."""

import math
from collections import defaultdict

import torch

from moefold.comm.collectives import all_gather_objects
from moefold.comm.groups import Group
from moefold.ops.autotune import Autotuner, Times
from moefold.ops.kernel_times import Environment, add_times, kernel_environment, read_times


def recall_choices(autotuner: Autotuner, device: torch.device, world: Group) -> str:
    """Let all ranks choose by the times that rank 0 finds in its cache, and return the line to log. It is collective.

    Args:
        autotuner: autotuner of this rank. It is enabled on all ranks or on no rank.
    """
    if not autotuner.is_enabled:
        return ""
    environment = kernel_environment(device)
    times = read_times(environment) if world.rank == 0 else {}
    (first, recorded), *other_records = all_gather_objects((environment, times), world)
    if difference := _difference(first, [choices for choices, _ in other_records]):
        return f"recorded kernel times are not used, as ranks differ in {difference}"
    autotuner.recall(recorded)
    num_shapes = sum(map(len, recorded.values()))
    return f"kernels by {num_shapes} recorded times of {environment['device']}" if num_shapes else ""


def settle_choices(autotuner: Autotuner, device: torch.device, world: Group) -> str:
    """Let all ranks choose by measured times, record them, and return the line to log. It is collective.

    Each candidate counts with its time on the slowest rank.

    Args:
        autotuner: see `recall_choices`.
    """
    if not autotuner.is_enabled:
        return ""
    environment = kernel_environment(device)
    environments = all_gather_objects(environment, world)
    measured = autotuner.settle(lambda times: all_gather_objects(times, world))
    if world.rank != 0:
        return ""
    message = f"kernels by measured time: {_describe(autotuner)}"
    if skipped := _skipped(measured):
        message += f"; not used, as they raise: {skipped}"
    if not measured:
        return message
    if difference := _difference(environment, environments):
        return f"{message}; not recorded, as ranks differ in {difference}"
    path = add_times(environment, measured)
    return f"{message}; recorded in {path}" if path is not None else message


def _difference(first: Environment, rest: list[Environment]) -> str:
    """Return the differences between the environments of the ranks, "" without differences."""
    return ", ".join(key for key, value in first.items() if any(e.get(key) != value for e in rest))


def _describe(autotuner: Autotuner) -> str:
    """Return the candidates that each operation uses, and their numbers of rows."""
    rows: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for key, name in autotuner.choices.items():
        rows[key.op][name].add(key.num_rows + 1)
    if not rows:
        return "no operation has several candidates"
    operations = []
    for op, names in sorted(rows.items()):
        uses = [f"{name} (below {', '.join(map(str, sorted(counts)))} rows)" for name, counts in sorted(names.items())]
        operations.append(f"{op} by {' and '.join(uses)}")
    return "; ".join(operations)


def _skipped(measured: Times) -> str:
    """Return the candidates that raised on a rank."""
    reasons = {
        f"{operation.partition(':')[0]} by {name}"
        for operation, by_octave in measured.items()
        for times in by_octave.values()
        for name, ms in times.items()
        if math.isinf(ms)
    }
    return ", ".join(sorted(reasons))
