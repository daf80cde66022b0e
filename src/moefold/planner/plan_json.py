"""Results of a plan as dicts, the form of `moefold plan --json`."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moefold.planner.lengths.balance import DocumentLoads
from moefold.planner.mapping_families import STATED_ERROR, FamilyBest, best_of_families
from moefold.planner.planner import Planner
from moefold.planner.search.search import PlannedMapping
from moefold.units import GIB

DEFAULT_MAPPINGS = 10
"""Mappings of a result, unless another number is asked for."""


def result_as_dict(
    planner: Planner, count: int | None = None, families: Sequence[FamilyBest] | None = None
) -> dict[str, Any]:
    """Return the result in the form of `moefold plan --json`: the best mappings, best first, and each family's.

    Args:
        count: number of mappings, each of another fold. None: `DEFAULT_MAPPINGS`.
        families: the best mapping of each family. None: they are searched.
    """
    request = planner.request
    return (
        {
            "model": request.model_spec.name,
            "gpu": request.device.name,
            "gpu_memory_gib": request.device.memory_gib,
            "memory_reserve_gib": request.reserve_gib,
            "num_gpus": request.num_gpus,
            "seq_len": request.workload.seq_len,
            "global_batch_size": request.workload.global_batch_size,
            "assumed": dict(request.assumed),
            "precision": request.workload.gemm_precision,
            "imbalance": request.workload.imbalance,
            "method": request.restriction.method,
            "flop_convention": "causal" if request.workload.counts_causal_attention else "full",
            "mtp_flops": "with" if request.workload.counts_mtp else "without",
            "num_legal": planner.space.count(),
            "num_folds": planner.num_folds,
            "stated_error": asdict(STATED_ERROR),
            "unmeasured_constants": list(request.device.unmeasured),
            "beam_gap": planner.search.gap,
            "mappings": [
                plan_as_dict(plan) for plan in planner.top_plans(DEFAULT_MAPPINGS if count is None else count)
            ],
        }
        | documents_as_dict(request.workload.attention)
        | ({} if planner.site_plan is None else {"sites": planner.site_plan.as_dict()})
        | {"families": _families_as_dict(best_of_families(planner) if families is None else families)}
    )


def _families_as_dict(families: Sequence[FamilyBest]) -> dict[str, Any]:
    return {
        one.name: plan_as_dict(one.plan)
        | {
            "is_tie": one.is_tie,
            "fastest_step_time_s": one.fastest.time.total_s,
            "nearest_measured": one.nearest.case,
            "nearest_source": one.nearest.source,
            "differs": list(one.nearest.differences),
            "unmeasured": list(one.unmeasured),
        }
        for one in families
    }


def documents_as_dict(loads: DocumentLoads | None) -> dict[str, Any]:
    """Return the lengths that were planned for, ready for JSON, or nothing where a sample is one document."""
    return {} if loads is None else {"lengths": loads.samples.name, "effective_length": loads.effective_length}


def plan_as_dict(plan: PlannedMapping) -> dict[str, Any]:
    """Return one mapping with its predicted time and memory, ready for JSON."""
    found = plan.mapping.as_dict() | {
        "step_time_s": plan.time.total_s,
        "mfu": plan.time.mfu,
        "tflops_per_gpu": plan.time.tflops_per_gpu,
        "tokens_per_s_per_gpu": plan.time.tokens_per_s_per_gpu,
        "num_micro_batches": plan.time.num_micro_batches,
        "memory_gib": plan.memory.total / GIB,
        "memory_parts_gib": {part: size / GIB for part, size in plan.memory.parts.items()},
        "time_parts_s": plan.time.parts,
        "binding": plan.bottleneck,
        "fits": plan.memory.fits,
    }
    if (context := plan.attention) is not None:
        shared = {"placement": context.plan.placement, "attention_hosts": context.plan.hosts}
        found["attention"] = {"context": context.kind, **shared}
    return found
