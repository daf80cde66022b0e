"""Metrics of planned attention: balance of the work, rows that moved, and bytes."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moefold.config.chosen import chosen_in
from moefold.config.groups.context import ContextPart
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.attention import SelfAttention
from moefold.parallel.parallel_model import ParallelModel

if TYPE_CHECKING:
    from moefold.parallel.planned_attention import AttentionPlanner
    from moefold.parallel.replica_check import HostFact


class AttentionMeter:
    """Reads the statistics of the planned attention of a rank, and computes the metrics from all ranks' statistics."""

    def __init__(self, model: ParallelModel, parallel: ParallelConfig, train: TrainConfig) -> None:
        plan = chosen_in(parallel, ContextPart).plan
        self._planners = _planners(model)
        self._groups = model.groups
        # Equal on all ranks, including ranks without softmax attention.
        self._num_sets = train.num_micro_batches(parallel.dp) if parallel.dp * parallel.cp > 1 else 0
        self._plan_axes = ("stage",) if plan.balances_compute_ranks or plan.moves_tokens else ("tp", "cp")

    def begin_step(self) -> None:
        """Forget earlier passes."""
        for planner in self._planners:
            planner.statistics.reset()

    def host_facts(self) -> "list[HostFact]":
        """Return the checksums of the plans of this step, for the replica check."""
        if not self._num_sets:
            return []
        from moefold.parallel.replica_check import HostFact

        checksums = [planner.statistics.plans_crc for planner in self._planners]
        return [HostFact("the attention plan", str(checksums), self._plan_axes)]

    def local_statistics(self, device: torch.device) -> Tensor:
        """Return this rank's summands, [ranks + 1, micro-batches]: pairs in its row, moved rows and bytes in the last.

        Micro-batch sets share entries if a step has more micro-batches than the recipe. [0] if no attention is planned.
        """
        if not self._num_sets:
            return torch.zeros(0, dtype=torch.float64, device=device)
        world = self._groups.world
        numbers = torch.zeros(world.size + 1, max(2, self._num_sets), dtype=torch.float64)
        # The stages of a rank may run the same micro-batches in different orders.
        indices: dict[int, int] = {}
        for planner in self._planners:
            for bounds, pairs in zip(planner.statistics.sets, planner.statistics.pairs, strict=True):
                index = indices.setdefault(id(bounds), len(indices))
                numbers[world.rank, index % self._num_sets] += pairs
            if self._groups.attn.tp.rank == 0:
                numbers[-1, 0] += planner.statistics.moved_rows
            numbers[-1, 1] += planner.statistics.sent_bytes
        return numbers.to(device, non_blocking=True)

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Compute the metrics from the sums of `local_statistics` over all ranks, or empty if nothing was counted."""
        if not sums.numel() or not sums[:-1].any():
            return {}
        groups = [list(members) for members in self._groups.layout.attention.groups("dp", "cp")]
        pairs = sums[:-1][torch.tensor(groups)]
        return {
            "attention_max_over_mean": float(pairs.amax(1).sum() / pairs.mean(1).sum()),
            "attention_moved_rows": int(sums[-1, 0]),
            "attention_bytes": int(sums[-1, 1]),
        }


def _planners(model: ParallelModel) -> "list[AttentionPlanner]":
    """Return the attention planners of the layers of this rank, without duplicates."""
    from moefold.parallel.planned_attention import PlannedAttention

    modules = (module for stage in model.stages for module in stage.modules() if isinstance(module, SelfAttention))
    cores = (module.core_attention for module in modules)
    planners = {id(core.planner): core.planner for core in cores if isinstance(core, PlannedAttention)}
    return list(planners.values())
