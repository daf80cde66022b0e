"""`moefold memory`: show the memory of a step on each rank by part, measured, by formula, or both compared."""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moefold.cli.command_parser import CommandParser, recipe_and_overrides
from moefold.cli.screen import Column, numbers, open_console, print_columns, print_prose
from moefold.config.chosen import chosen
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.groups.layer_sizes import KernelProfile
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import AUTO_RECOMPUTE
from moefold.cost.auto_recompute import choose_recompute, with_recompute
from moefold.cost.peak_memory import RankMemory, compute_rank_memory
from moefold.cost.peer_snapshot_memory import snapshot_bytes
from moefold.cost.rollout_memory import further_weights, min_sampling_memory, sampling_rank_memory
from moefold.cost.saved_tensors import KERNEL_PROFILES, BytesByPart
from moefold.data.dataset import DataRequest
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError
from moefold.launch.memory_check import check_training
from moefold.planner.plan_request import check_imbalance
from moefold.progress import SHOW_AFTER_S, WorkProgress
from moefold.recipe import load_config
from moefold.terminal import print_escaped
from moefold.topology.layout import Layout
from moefold.train.machine_checks import check_device, check_offload_folder
from moefold.units import GIB, format_bytes
from moefold.validate.config import check_config
from moefold.validate.memory_need import SNAPSHOT_PART

if TYPE_CHECKING:
    from moefold.cost.state_bytes import StateBytes
    from moefold.train.memory_profile import MeasuredMemory


MAX_MEASURED_RANKS = 64
"""Maximum number of ranks to start on one machine."""
RANKS_TIMEOUT_S = 3600.0
STATE_PARTS = {"weights": "weights", "gathered": "gathered weights", "optimizer": "optimizer", "buffers": "buffers"}

EPILOG = """Measured, the recipe's ranks run one step on this machine's CPU, and a memory tracker assigns every
tensor to the part of the step that allocated it. A column shows the memory peak of a rank. With --dry
nothing runs: weights and optimizer states are read from the sharded model of the first rank of each
pipeline stage, built without memory, for any world size; gradients and activations come from formulas.
The first rank of a stage needs as much memory as its other ranks.

examples:
  moefold memory recipes/quickstart.toml
  moefold memory recipes/quickstart.toml --dry parallel.world_size=64 train.global_batch_size=128
  moefold memory recipes/mixtral-8x7b.toml --dry --device cuda --imbalance 1.2
"""


def run(argv: list[str]) -> int:
    """Print the memory of each rank and return 0, or 1 if the built model and the formulas disagree."""
    args = _parser().parse_intermixed_args(argv)
    cfg = load_config(*recipe_and_overrides(args.recipe, args.overrides))
    layout = check_config(cfg)
    check_imbalance(args.imbalance, cfg.model.ffn.moe.num_experts)
    if not args.dry and (args.device or args.imbalance != 1):
        raise ConfigError("--device and --imbalance are for formulas: add --dry, or leave them out")
    device = args.device or ("cpu" if cfg.run.device == "cpu" or not args.dry else "cuda")
    cfg, message = _resolve_recompute(cfg, KERNEL_PROFILES[device], args.imbalance)
    offload = cfg.train.offload if args.dry else ()
    if offload:
        message = f"train.offload={list(offload)!r} as if every copy were in time, as train.offload_waits=true makes it"
    formulas = compute_rank_memory(cfg, offload=offload, kernels=KERNEL_PROFILES[device], imbalance=args.imbalance)
    if args.dry:
        report = _formula_report(cfg, layout, formulas, device)
        if args.json:
            print(json.dumps(report.as_dict(message)))
        else:
            report.print(message, layout.world_size)
        return bool(report.faults)
    return _report_measured(cfg, layout, message=message, as_json=args.json)


def _resolve_recompute(cfg: Config, kernels: KernelProfile, imbalance: float) -> tuple[Config, str]:
    """Return the config with train.recompute "auto" resolved, and a description of the choice."""
    if AUTO_RECOMPUTE not in cfg.train.recompute:
        return cfg, ""
    if not cfg.train.memory_budget_gib:
        raise ConfigError(
            f"train.recompute=['{AUTO_RECOMPUTE}'] needs train.memory_budget_gib here: the memory of no GPU is queried"
        )
    budget = round(cfg.train.memory_budget_gib * GIB)
    choice = choose_recompute(cfg, budget, kernels, imbalance)
    return with_recompute(cfg, choice.parts), choice.describe(budget)


@dataclass(frozen=True)
class FormulaReport:
    """Memory by formula of the first rank of each pipeline stage, compared with the built model."""

    ranks: tuple[int, ...]
    formulas: tuple[RankMemory, ...]
    further: tuple[BytesByPart, ...]
    """Weights of further models of reinforcement learning."""
    snapshots: tuple[int, ...]
    sampling: tuple[BytesByPart, ...]
    """Minimum while rollouts are sampled, where the ranks of training sample."""
    sampling_ranks: tuple[BytesByPart, ...]
    """Minimum of the ranks of rollout.ranks, by pipeline stage of sampling."""
    faults: list[str]
    """Differences between the formulas and the built model."""

    def as_dict(self, note: str) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        ranks = [
            {"rank": rank, **asdict(memory), "total": memory.total + models.total(), "further_weights": dict(models)}
            | ({"host_snapshots": snapshot} if snapshot else {})
            for rank, memory, models, snapshot in zip(
                self.ranks, self.formulas, self.further, self.snapshots, strict=True
            )
        ]
        for record, parts in zip(ranks, self.sampling, strict=False):
            record["sampling"] = dict(parts)
        extra = {"sampling_ranks": [dict(parts) for parts in self.sampling_ranks]} if self.sampling_ranks else {}
        return {"dry": True, "note": note, "ranks": ranks, **extra, "faults": self.faults}

    def print(self, note: str, world_size: int) -> None:
        """Print the report as tables."""
        rows = {
            rank: _formula_row(memory) | dict(models)
            for rank, memory, models in zip(self.ranks, self.formulas, self.further, strict=True)
        }
        print_parts(rows, "by formula, first rank of each pipeline stage")
        _print_snapshots(dict(zip(self.ranks, self.snapshots, strict=True)))
        if self.sampling:
            print()
            print_parts(dict(zip(self.ranks, self.sampling, strict=True)), "at least, while rollouts are sampled")
        if self.sampling_ranks:
            print()
            title = "at least, a rank of rollout.ranks, by pipeline stage of sampling"
            print_parts(dict(enumerate(self.sampling_ranks)), title)
        print_escaped(f"\n{note}\n" if note else "")
        if self.faults:
            faults = "\n  ".join(self.faults)
            print_escaped(f"the weights or optimizer states of the built model differ from the formulas:\n  {faults}")
        else:
            print_escaped(f"weights, moments and buffers match the sharded model, of {world_size} ranks, to the byte")


def _formula_report(cfg: Config, layout: Layout, formulas: tuple[RankMemory, ...], device_type: str) -> FormulaReport:
    """Build the model of the first rank of each stage, without memory, and compare it with the formulas."""
    from moefold.train.memory_profile import sharded_state_bytes

    stages = [layout.attention.coordinate(rank, "pp") for rank in range(layout.world_size)]
    first = tuple(stages.index(pp_rank) for pp_rank in range(layout.pp))
    built: list[StateBytes] = []
    started_s = time.monotonic()
    for rank in first:
        # Each model is built in a forked process, and no thread may print during a fork: `WorkProgress` has one.
        if time.monotonic() - started_s > SHOW_AFTER_S:
            print_escaped(f"memory: {len(built)} of {layout.pp} pipeline stages built", file=sys.stderr, flush=True)
            started_s = time.monotonic()
        built.append(sharded_state_bytes(cfg, rank))
    faults = [
        fault
        for memory, states in zip(formulas, built, strict=True)
        for fault in _validate_states(cfg.parallel, memory, states)
    ]
    further = further_weights(cfg) if cfg.is_rl else tuple(BytesByPart() for _ in formulas)
    sampling: tuple[BytesByPart, ...] = ()
    sampling_ranks = sampling_rank_memory(cfg, device_type) if cfg.is_rl else ()
    if cfg.is_rl and not sampling_ranks:
        sampling = tuple(
            own + models for own, models in zip(min_sampling_memory(cfg, device_type), further, strict=True)
        )
    return FormulaReport(first, formulas, further, snapshot_bytes(cfg), sampling, sampling_ranks, faults)


def _print_snapshots(num_snapshots: Mapping[int, int]) -> None:
    """Print the snapshots of ranks by formula, if there are any."""
    if any(num_snapshots.values()):
        print()
        rows = {rank: {SNAPSHOT_PART: size} for rank, size in num_snapshots.items()}
        print_parts(rows, "and in host memory, by formula, for checkpoint.peer_every")


def _validate_states(parallel: ParallelConfig, memory: RankMemory, sharded: "StateBytes") -> Iterable[str]:
    """Yield the differences between the formulas and the sharded model."""
    for name, part in STATE_PARTS.items():
        if name == "gathered" and parallel.zero == 3:
            continue
        expected = getattr(memory.states, name)
        built = getattr(sharded, name)
        if expected != built:
            yield f"pipeline rank {memory.pp_rank}: {part} {built:,} bytes, by formula {expected:,}"


def _report_measured(cfg: Config, layout: Layout, *, message: str, as_json: bool) -> int:
    if cfg.run.device == "cuda":
        raise ConfigError("run.device='cuda': a step is measured on the CPU only; add --dry, or run.device=cpu")
    if cfg.parallel.world_size > MAX_MEASURED_RANKS:
        raise ConfigError(
            f"parallel.world_size={cfg.parallel.world_size} is more than the {MAX_MEASURED_RANKS} ranks that are "
            "started on one machine; add --dry"
        )
    check_data(DataRequest.of(cfg))
    check_device(cfg, "cpu")
    check_offload_folder(cfg.train)
    check_training(cfg, "cpu", None)
    from moefold.launch.rank_pool import WorkerPool
    from moefold.train.memory_profile import measure_rank
    from moefold.verify import PRELOAD

    DataRequest.of(cfg).prepare()
    world_size = cfg.parallel.world_size
    with WorkProgress("memory") as progress:
        progress.report(f"starting {world_size} ranks")
        pool = WorkerPool(PRELOAD)
        ranks = pool.run(world_size, measure_rank, cfg, timeout_s=RANKS_TIMEOUT_S, on_progress=progress.report)
    if as_json:
        print(json.dumps({"dry": False, "note": message, "ranks": [asdict(rank) for rank in ranks]}))
        return 0
    print_parts({rank.rank: rank.peak for rank in ranks}, "measured on the CPU, at the memory peak of each rank")
    by_stage = snapshot_bytes(cfg)
    _print_snapshots({rank.rank: by_stage[rank.pp_rank] for rank in ranks})
    if message:
        print_escaped(f"\n{message}")
    print_comparison(cfg, layout, ranks, KERNEL_PROFILES["cpu"])
    if cfg.train.offload and not cfg.train.offload_waits:
        print(
            "how much was offloaded depends on the speed of the disk, so another run differs; train.offload_waits=true "
            "waits for the disk"
        )
    return 0


def _formula_row(memory: RankMemory) -> dict[str, int]:
    states = memory.states
    row = {label: getattr(states, name) for name, label in STATE_PARTS.items()}
    row["gradients"] = max(states.gradients, states.gradient_sums)
    return (
        row
        | memory.activations.by_part
        | {"moments to update": memory.optimizer_in_transit}
        | {"CUDA graphs": memory.graphs}
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold memory",
        "Show what a step has in memory on each rank: weights, gradients, optimizer, activations by part.",
        EPILOG,
    )
    parser.recipe("the recipe")
    parser.flag("--dry", "use formulas and a model that is only built, not run; any world size")
    parser.option(
        "--device",
        str,
        None,
        "with --dry: device of the kernels (default: the recipe's, or cuda)",
        choices=tuple(KERNEL_PROFILES),
    )
    parser.option("--imbalance", 1.0, "X", "with --dry: rows of the busiest rank over the mean")
    parser.flag("--json", "print bytes as one JSON object")
    return parser


def print_parts(rows: Mapping[int, Mapping[str, int]], title: str) -> None:
    """Print a column for each rank, a row for each part that any rank has, and the total."""
    console = open_console()
    console.print(f"{title}\n", style="bold")
    parts = list(dict.fromkeys(part for row in rows.values() for part, size in row.items() if size))
    columns = [Column(name="part", cells=[*parts, "total"])]
    for rank, row in rows.items():
        cells = [*(format_size(row.get(part, 0)) for part in parts), format_size(sum(row.values()))]
        columns.append(numbers(f"rank {rank}", cells))
    print_columns(console, columns)


def print_comparison(cfg: Config, layout: Layout, ranks: Sequence["MeasuredMemory"], kernels: KernelProfile) -> None:
    """Print measured activations next to the formulas, with even experts and with the rows of the measured step."""
    console = open_console()
    imbalances = [rank_imbalance(layout, ranks, i) for i in range(len(ranks))]
    even = compute_rank_memory(cfg, kernels=kernels)
    columns = [
        numbers("rank", [str(rank.rank) for rank in ranks]),
        numbers("measured", [format_size(rank.activations) for rank in ranks]),
        *_formula_columns("formula", ranks, [even[rank.pp_rank].activations.total for rank in ranks]),
    ]
    # Where ranks take over tokens from other ranks, the router does not determine a rank's rows by itself.
    uneven = any(x is not None for x in imbalances) and not chosen(cfg, DispatcherPart).moves_experts
    if uneven:
        by_imbalance = {x: compute_rank_memory(cfg, kernels=kernels, imbalance=x) for x in set(imbalances) if x}
        routed = [
            (by_imbalance[x] if x else even)[rank.pp_rank].activations.total
            for rank, x in zip(ranks, imbalances, strict=True)
        ]
        columns.append(numbers("rows", ["-" if x is None else f"{x:.2f}x" for x in imbalances]))
        columns += _formula_columns("with rows", ranks, routed)
    console.print("\nactivations at their peak, measured and by formula\n", style="bold")
    print_columns(console, columns)
    console.print()
    if cfg.train.offload:
        print_prose(console, "formula", "as if nothing were offloaded")
    print_prose(console, "why", _explanation(uneven=uneven))


def rank_imbalance(layout: Layout, ranks: Sequence["MeasuredMemory"], rank: int) -> float | None:
    """Return the rows of a rank's experts over the mean of its ep and etp group, or None without experts.

    Rows of an expert are sent to all etp ranks of the ep rank that owns it.
    """
    group = layout.moe.group(rank, "ep", "etp")
    counts: list[int] = [sum(column) for column in zip(*(ranks[member].routed for member in group), strict=True)]
    if not sum(counts):
        return None
    num_local_experts = len(counts) // layout.ep
    ep_rank = layout.moe.coordinate(rank, "ep")
    rank_tokens: int = sum(counts[ep_rank * num_local_experts : (ep_rank + 1) * num_local_experts])
    return rank_tokens * layout.ep / sum(counts)


def format_size(size: int) -> str:
    """Return a number of bytes in a suitable unit, or "-" for zero."""
    return format_bytes(size) if size else "-"


def _formula_columns(name: str, ranks: Sequence["MeasuredMemory"], sizes: Sequence[int]) -> list[Column]:
    shares = [
        f"{100 * (size / rank.activations - 1):+.1f}%" if rank.activations else "-"
        for rank, size in zip(ranks, sizes, strict=True)
    ]
    return [numbers(name, [format_size(size) for size in sizes]), numbers("off by", shares)]


def _explanation(*, uneven: bool) -> str:
    accuracy = "within 10 % for even experts on one thread (docs/memory.md)"
    if not uneven:
        return f"the formula is {accuracy}."
    return (
        "`formula` assumes even experts, but a rank saves activations for the rows that the router sends to its "
        "experts. `rows` is their number in this step over the mean of the ep group, and `with rows` is the formula "
        f"with it. What remains is the error of the formula, {accuracy}, and differences of the rows between layers "
        "and micro-batches."
    )
