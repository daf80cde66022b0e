"""`moefold verify`: prove on CPU that a recipe's mapping computes the same numbers as one process."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from moefold.cli.command_parser import CommandParser, recipe_and_overrides
from moefold.config.base.part import describe_part, parts_in
from moefold.config.chosen import chosen_in
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.groups.router import aux_loss_depends_on_dp
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.sites import SitesConfig
from moefold.config.sections.train import AUTO_RECOMPUTE, TrainConfig
from moefold.cost.flops import count_parameters
from moefold.data.dataset import DataRequest
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError
from moefold.host.memory import available_host_memory
from moefold.progress import ProgressCallback, WorkProgress
from moefold.recipe import load_config
from moefold.terminal import print_escaped
from moefold.train.machine_checks import check_replay, check_replay_content
from moefold.validate.config import check_config
from moefold.validate.moe import check_dispatch_device
from moefold.validate.pipeline import check_schedule_file

if TYPE_CHECKING:
    from moefold.verify.compare import NamedError, OracleRecord
    from moefold.verify.distributed_run import DistributedRecord

TOLERANCE = 1e-9
"""Largest relative error that counts as equal, in float64."""

RANK_GIB = 0.35
"""Resident memory of one small CPU rank, torch included."""

MODEL_COPIES = 12
"""Float64 copies of the model in memory at once: weights, gradients, moments and records of both sides."""

RANKS_TIMEOUT_S = 6 * 3600.0

MAX_LISTED_DIFFERENCES = 10
"""Maximum number of differences to list, worst first."""

SITES_NOTE = "NOT covered: the rounds of [sites]; the steps belong to one site, between two rounds"
"""Note on a recipe of sites."""

RL_NOTE = "NOT covered: the rollouts and the loss of [rl]; the steps predict the next tokens"
"""Note on a recipe of reinforcement learning."""

ALIGN_NOTE = "NOT covered: [align], as --shrink replaces the data; the steps predict the next tokens"
"""Note on a shrunk recipe of alignment."""

ONE_RANK = "one-rank"
"""Value of --against for a comparison of the mapping with one rank instead of the oracle."""

ONE_RANK_NOTE = (
    "NOT judged by the oracle: the mapping is compared with one rank of the same code, so that an error of the code on "
    "both sides is not found"
)
"""Note on a comparison with one rank."""

OUTSIDE_NOTE = "NOT checked: whether the formulas from outside share code with what they judge"
"""Note on external parts with their own formula. The names of the parts follow it."""

RunDistributed = Callable[[Config, int, ProgressCallback], Sequence["DistributedRecord"]]
"""Trains some steps of a recipe on its ranks with a progress callback, and returns the record of each rank."""


def run(argv: list[str]) -> int:
    """Run `moefold verify` and return 0 if the mapping equals the oracle, 1 if not.

    Raises:
        NoFormulaError: the oracle cannot judge the recipe (exit status 3).
    """
    args = _parser().parse_intermixed_args(argv)
    cfg = load_config(*recipe_and_overrides(args.recipe, args.overrides))
    check_config(cfg)
    if AUTO_RECOMPUTE in cfg.train.recompute:
        raise ConfigError(
            f"train.recompute=['{AUTO_RECOMPUTE}'] depends on the memory of the real run: name the parts that the log "
            'of the run names, such as train.recompute=["norms"] train.memory_budget_gib=0'
        )
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps} must be at least 1")
    message = ""
    notes = _notes(cfg.align, cfg.rl, cfg.sites, is_shrunk=args.shrink)
    if args.ranks is not None and (not args.shrink or args.ranks < 1):
        raise ConfigError(f"--ranks {args.ranks} is the most ranks of a shrunk recipe: give at least 1, with --shrink")
    if args.shrink:
        from moefold.verify.shrink import MAX_RANKS, shrink

        large = cfg
        cfg = shrink(large, MAX_RANKS if args.ranks is None else args.ranks)
        message = _describe_shrinking(large.parallel, cfg.parallel)
    _check_memory(cfg.model, cfg.parallel)
    check_schedule_file(cfg.model, cfg.moe, cfg.parallel, cfg.train)
    check_data(DataRequest.of(cfg))
    steps = max(cfg.run.steps, args.steps)
    run = replace(cfg.run, dtype="float64", device="cpu", steps=steps, kernels="plain", cuda_graphs="none")
    cfg = replace(cfg, run=run)
    # In float64, moments are float64 too, and the oracle has no low-precision GEMM.
    optimizer = chosen_in(cfg.train, OptimizerPart).with_moment_dtype("float32")
    cfg = replace(cfg, train=replace(cfg.train, optimizer=optimizer, precision="dtype"))
    replayed = replace(cfg, run=replace(cfg.run, steps=args.steps))
    check_replay(replayed.run, replayed.model, replayed.moe, replayed.train)
    check_replay_content(replayed.run, replayed.moe)
    check_dispatch_device(cfg.model, cfg.parallel, "cpu")
    return verify(cfg, args.steps, _run_on_ranks, message, notes, against_one_rank=args.against == ONE_RANK)


def verify(
    cfg: Config,
    steps: int,
    run_distributed: RunDistributed,
    message: str = "",
    notes: Sequence[str] = (),
    *,
    against_one_rank: bool = False,
) -> int:
    """Train with the oracle and under the mapping, and print the comparison. Return 0 if they are equal, 1 if not.

    Args:
        cfg: the recipe, in float64 on the CPU.
        message: description of how the recipe was shrunk.
        notes: parts of the recipe that are not compared.
        against_one_rank: compare with one rank of the same code instead of the oracle.
    """
    from moefold.verify.compare import compare_records, one_rank_record, run_oracle, sort_by_cause, zero_gradients

    base = replace(cfg, parallel=ParallelConfig()) if against_one_rank else None
    if base is not None:
        try:
            check_config(base)
        except ConfigError as error:
            raise error.with_start("--against one-rank: ") from error
    parts = (part for section in fields(cfg) for part in parts_in(getattr(cfg, section.name)))
    outside = {describe_part(part): None for part in parts if not type(part).formula.__module__.startswith("moefold.")}
    notes = (*notes, ONE_RANK_NOTE if base else f"{OUTSIDE_NOTE}: {', '.join(outside)}") if base or outside else notes
    print_escaped(_header(cfg.model, cfg.parallel, cfg.moe, cfg.train, message, notes), flush=True)
    DataRequest.of(cfg).prepare()
    with WorkProgress("verify") as progress:
        if base is not None:
            [alone] = run_distributed(base, steps, progress.report)
            oracle = one_rank_record(cfg.train, alone)
        else:
            oracle = run_oracle(cfg, steps, progress.report)
        progress.report(f"mapping on {cfg.parallel.world_size} ranks, starting them")
        ranks = run_distributed(cfg, steps, progress.report)
        progress.report("comparing")
        errors = compare_records(oracle, ranks)
    print_escaped(_format_steps(oracle, ranks, "one rank" if base else "oracle"))
    print_escaped(_format_worst(errors, steps))
    if zeros := zero_gradients(oracle.gradients):
        print_escaped(_format_zeros(zeros))
    causes = sort_by_cause((difference for difference in errors if difference.error > TOLERANCE), oracle.initial)
    if not causes:
        print_escaped(f"equal: all {len(errors)} numbers and tensors agree within {TOLERANCE:.0e}")
        return 0
    print_escaped(f"NOT equal: {len(causes)} of {len(errors)} numbers and tensors differ by more than {TOLERANCE:.0e}")
    print_escaped(
        "\n".join(f"  {difference.error:8.1e}  {difference.name}" for difference in causes[:MAX_LISTED_DIFFERENCES])
    )
    if len(causes) > MAX_LISTED_DIFFERENCES:
        print_escaped(f"  and {len(causes) - MAX_LISTED_DIFFERENCES} more")
    return 1


def _notes(align: AlignConfig, rl: RLConfig, sites: SitesConfig, *, is_shrunk: bool) -> tuple[str, ...]:
    """Return notes on the parts of a recipe that are not compared."""
    notes = {
        SITES_NOTE: sites.is_active,
        RL_NOTE: rl.is_on,
        ALIGN_NOTE: is_shrunk and chosen_in(align, AlignmentPart).changes_training,
    }
    return tuple(note for note, applies in notes.items() if applies)


def _run_on_ranks(cfg: Config, steps: int, on_progress: ProgressCallback) -> Sequence["DistributedRecord"]:
    from moefold.launch.rank_pool import WorkerPool
    from moefold.verify import PRELOAD
    from moefold.verify.distributed_run import run_distributed

    return WorkerPool(PRELOAD).run(
        cfg.parallel.world_size, run_distributed, cfg, steps, timeout_s=RANKS_TIMEOUT_S, on_progress=on_progress
    )


def _describe_shrinking(large: ParallelConfig, small: ParallelConfig) -> str:
    """Describe the axes of the recipe that are smaller or missing in the shrunk recipe."""
    from moefold.verify.shrink import changed_axes

    lowered, missing = changed_axes(large, small)
    ranks = f"{large.world_size} ranks as in the recipe"
    if large.world_size > small.world_size:
        ranks = f"{large.world_size} -> {small.world_size} ranks"
    left_out = (
        f"NOT covered, as no small mapping is legal with it: {', '.join(missing)} above 1"
        if missing
        else "every axis above 1 is still 2 or more"
    )
    return f"{', '.join((ranks, *lowered))}; {left_out}"


def _header(
    model: ModelConfig,
    p: ParallelConfig,
    moe: MoEConfig,
    train: TrainConfig,
    message: str = "",
    notes: Sequence[str] = (),
) -> str:
    degrees = {
        f"zero {p.zero}": p.world_size,
        f"dispatcher {chosen_in(p, DispatcherPart).kind}": p.ep * p.etp,
        f"context {p.context}": p.cp,
        f"schedule {p.schedule}": p.pp,
    }
    ranks = "1 rank" if p.world_size == 1 else f"{p.world_size} ranks"
    rows: tuple[tuple[str, str], ...] = (
        ("mapping", ", ".join([ranks, *(choice for choice, degree in degrees.items() if degree > 1)])),
        ("  attention", f"tp={p.tp} cp={p.cp} dp={p.dp} pp={p.pp}, order {p.order}"),
        ("  experts", f"etp={p.etp} ep={p.ep} edp={p.edp} pp={p.pp}, order {p.moe_order}"),
        (
            "model",
            f"{model.num_layers} layers, hidden {model.hidden_size}, {model.ffn.moe.num_experts} experts, top "
            f"{model.ffn.moe.top_k}, "
            f"{count_parameters(model).total:,} parameters in float64",
        ),
        ("batch", f"{train.global_batch_size} samples of {train.seq_len} tokens, {train.micro_batch_size} at a time"),
    )
    if message:
        rows = (rows[0], ("  shrunk", message), *rows[1:])
    if model.has_moe_layers and aux_loss_depends_on_dp(moe):
        rows += (("note", f"moe.aux_kind='global_batch' depends on dp: the oracle takes the recipe's, dp={p.dp}"),)
    rows += tuple(("note", note) for note in notes)
    return "\n".join(f"{name:13}{text}" for name, text in rows) + "\n"


def _format_steps(oracle: "OracleRecord", ranks: Sequence["DistributedRecord"], reference: str) -> str:
    lines = [f"{'':8}{'loss':16}{reference:20}{'gradient norm':16}{reference}"]
    for i, (rank_step, oracle_step) in enumerate(zip(ranks[0].steps, oracle.steps, strict=True)):
        losses = f"{rank_step.loss:<16.12f}{oracle_step.loss:<20.12f}"
        lines.append(f"step {i + 1:<3}{losses}{rank_step.grad_norm:<16.12f}{oracle_step.grad_norm:.12f}")
    return "\n".join(lines) + "\n"


def _format_worst(errors: Sequence["NamedError"], steps: int) -> str:
    rows = []
    for kind, title in (("gradients", "worst gradient"), ("weights", f"worst weight after step {steps}")):
        worst = next((difference for difference in errors if difference.name.startswith(kind)), None)
        if worst is None:
            # An optimizer without gradients.
            continue
        rows.append(f"{title:28}{worst.error:.1e}  {worst.name.removeprefix(kind + ' ')}")
    return "\n".join(rows)


def _format_zeros(names: Sequence[str]) -> str:
    """List the parameters whose gradient is zero, exactly or up to rounding."""
    suffix = f" and {len(names) - MAX_LISTED_DIFFERENCES} more" if len(names) > MAX_LISTED_DIFFERENCES else ""
    return (
        f"{'gradients that are zero':28}{', '.join(names[:MAX_LISTED_DIFFERENCES])}{suffix}: compared with the largest "
        "gradient and weight of the layer"
    )


def _check_memory(model: ModelConfig, parallel: ParallelConfig) -> None:
    available = available_host_memory()
    world_size = parallel.world_size
    num_parameters = count_parameters(model).total
    ranks_gib = world_size * RANK_GIB
    model_gib = num_parameters * 8 * MODEL_COPIES / 2**30
    if ranks_gib + model_gib > available.size / 2**30:
        raise ConfigError(
            f"parallel.world_size={world_size} ranks take {ranks_gib:.1f} GiB and {num_parameters:,} parameters in "
            f"float64, on both sides, {model_gib:.1f} GiB: more than the {available.size / 2**30:.1f} GiB "
            f"{available.description}; add --shrink, which makes the model and the mapping small, or lower the degrees"
        )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold verify",
        "Train some steps in float64 on this machine's CPU, once in one process with plain maths (the "
        "oracle) and once under the recipe's mapping, and compare every loss, gradient and weight. "
        "A gradient that is zero, exactly or but for rounding, is compared with the largest one of its layer, and is "
        "listed. Exit 0: equal. Exit 1: not. Exit 3: cannot judge, as the oracle has no formula for a kind, a key or a "
        "parameter, which the message names.",
    )
    parser.recipe("the recipe whose mapping to verify")
    parser.flag(
        "--shrink",
        "make the model and the mapping small, on synthetic data; every axis of the recipe that is above 1 stays "
        "at 2 or more, and the output lists the axes that are smaller than in the recipe, or left out",
    )
    parser.option(
        "--ranks", int, "N", "with --shrink: lower degrees only if the mapping takes more ranks than this (default 16)"
    )
    parser.option(
        "--against",
        "oracle",
        None,
        "one-rank: train the same code on one rank instead of the oracle, for parts from outside without a "
        "formula; this compares the code with itself (oracle)",
        choices=("oracle", ONE_RANK),
    )
    parser.option("--steps", 3, None, "optimizer steps (default 3)")
    return parser
