"""Rules of `parallel.overlap_experts` and `overlap_tp`: what can hide the exchanges of a layer."""

from collections.abc import Iterator
from dataclasses import replace

from moefold.config.checks_model import has_moe_layers
from moefold.config.checks_recompute import AUTO
from moefold.config.paired_schedule import OVERLAPPED_SCHEDULES, overlapped_rows, to_slot_row
from moefold.config.schedule_walk import find_deadlock
from moefold.config.schema import Config
from moefold.parallel.exchange_order import RECOMPUTED_WITH_COMM, collective_sequence, order_mismatches
from moefold.parallel.layout import fold
from moefold.parallel.stage_plan import plan_stages, with_explicit_layout

OVERLAP_EXPERTS_SETTING = "parallel.overlap_experts=true"


def validate_expert_overlap(cfg: Config) -> Iterator[str]:
    """There are exchanges to hide, a backward and a forward pass to hide them, and parameters that stay for both."""
    p = cfg.parallel
    if not p.overlap_experts:
        return
    if not has_moe_layers(cfg.model):
        yield (
            f"{OVERLAP_EXPERTS_SETTING} hides the exchanges of experts, and no layer of model.layer_pattern is M; choose a pattern with M, "
            "or overlap_experts=false"
        )
        return
    if p.ep * p.etp == 1:
        yield (
            f"{OVERLAP_EXPERTS_SETTING} hides the exchanges of experts, and with parallel.ep=1 and parallel.etp=1 there are none; "
            "choose ep=2 or more, or overlap_experts=false"
        )
    if p.schedule not in OVERLAPPED_SCHEDULES:
        *others, last = map(repr, OVERLAPPED_SCHEDULES)
        yield (
            f"{OVERLAP_EXPERTS_SETTING} needs a schedule with a phase of one forward and one backward pass, and "
            f"parallel.schedule={p.schedule!r} has none; choose schedule={', '.join(others)} or {last}, or "
            "overlap_experts=false"
        )
    if p.zero == 3:
        yield (
            f"{OVERLAP_EXPERTS_SETTING} works on a layer for two micro-batches at a time, and parallel.zero=3 frees its parameters for "
            "one; choose zero=2, or overlap_experts=false"
        )
    step = cfg.train.micro_batch_size * p.dp
    if cfg.train.global_batch_size % step == 0 and cfg.num_micro_batches < 2:
        yield (
            f"{OVERLAP_EXPERTS_SETTING} needs two micro-batches or more, and train.global_batch_size={cfg.train.global_batch_size} gives "
            f"each data-parallel rank 1; choose global_batch_size={2 * step}, or overlap_experts=false"
        )


def validate_collective_order(cfg: Config) -> Iterator[str]:
    """All ranks that share a group begin the exchanges of their experts in one order, and no rank waits for ever.

    For a config that is sound otherwise. Both follow from how rows and pairs are made; a fault here is one of moefold.
    """
    p, train = cfg.parallel, cfg.train
    if not p.overlap_experts or not has_moe_layers(cfg.model):
        return
    if AUTO in train.recompute:
        # The choice comes later, for the stages as they stand; to the order it matters whether exchanges run again.
        placed = with_explicit_layout(cfg)
        for chosen in ((), RECOMPUTED_WITH_COMM[:1]):
            yield from validate_collective_order(replace(placed, train=replace(train, recompute=chosen)))
        return
    rows = overlapped_rows(p.schedule, p.pp, p.virtual_stages, cfg.num_micro_batches)
    if found := find_deadlock(list(map(to_slot_row, rows))):
        yield f"{OVERLAP_EXPERTS_SETTING}: pipeline rank {found[0]} would wait for ever before {found[1][0]}; set it to false"
    layout = fold(
        world_size=p.world_size, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order, moe_order=p.moe_order
    )
    plan = plan_stages(cfg)
    of_stage = [
        collective_sequence(cfg, {stage.number: stage for stage in plan.of_rank(i)}, row) for i, row in enumerate(rows)
    ]
    programs = [of_stage[layout.attention.coordinate(rank, "pp")] for rank in range(p.world_size)]
    for fault in order_mismatches(programs, layout):
        yield f"{OVERLAP_EXPERTS_SETTING}: {fault}, so that they would wait for each other for ever; set it to false"


def validate_tp_overlap(cfg: Config) -> Iterator[str]:
    """A product in parts would make the 8-bit copies of its weight once for each."""
    if cfg.parallel.overlap_tp and cfg.train.precision != "dtype":
        yield (
            f"parallel.overlap_tp=true multiplies the tokens of one tp rank at a time, in the type of run.dtype, and "
            f"train.precision={cfg.train.precision!r} multiplies all at once; choose precision='dtype', or "
            "overlap_tp=false"
        )


OVERLAP_RULES = (validate_expert_overlap, validate_tp_overlap)
