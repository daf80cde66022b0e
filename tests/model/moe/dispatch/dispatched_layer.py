"""A layer of experts between dispatch and combine of any dispatcher."""

from typing import Any

import torch
from torch import Tensor

from moefold.comm.groups import ParallelGroups
from moefold.model.moe.dispatch import RoutingMap
from moefold.ops.expert_ops import ExpertOptions, ExpertWeights
from tests.model.moe.reference_experts import reference_experts

E, K, H, F, T = 8, 3, 6, 4, 7
LAYOUTS = [
    {"world_size": 2, "ep": 2},
    {"world_size": 4, "tp": 2, "cp": 2, "ep": 4},
    {"world_size": 4, "ep": 2},
    {"world_size": 4, "ep": 2, "moe_order": "pp-ep-edp-etp"},
]
CASES = ("spread", "dropped", "all dropped on one rank", "one expert each", "empty rank")


def draw_routing(case: str, rank: int, generator: torch.Generator) -> RoutingMap:
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    kept = None
    match case:
        case "dropped":
            kept = torch.rand(T, K, generator=generator) < 0.5
        case "all dropped on one rank":
            kept = torch.full((T, K), rank != 1)
        case "one expert each":
            ids = torch.tensor([5, 1, 4]).expand(T, K).contiguous()
        case "empty rank":
            ids = torch.tensor([0, 1, 2]).expand(T, K).contiguous()
    probs = torch.rand(T, K, dtype=torch.float64, generator=generator).requires_grad_()
    return RoutingMap(ids, probs, kept)


def run_layer(
    dispatcher: Any, case: str, groups: ParallelGroups, weighs_early: bool = False, hidden_size: int = H
) -> dict[str, Tensor]:
    """Dispatch, apply experts and combine on this rank's tokens. The result and every gradient."""
    generator = torch.Generator().manual_seed(100 + groups.rank)
    assignment = draw_routing(case, groups.rank, generator)
    x = torch.randn(T, hidden_size, dtype=torch.float64, generator=generator).requires_grad_()
    grad = torch.randn(T, hidden_size, dtype=torch.float64, generator=generator)
    weights = torch.randn(3, E, hidden_size, F, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    size = E // groups.moe.ep.size
    mine = weights[:, groups.moe.ep.rank * size :][:, :size].clone().requires_grad_()
    rows, plan = dispatcher.dispatch(x, assignment)
    counts, weights_R = plan.tokens_per_expert, None
    if weighs_early:
        weights_R, plan = dispatcher.dispatch_probs(plan)
    y = reference_experts(rows, ExpertWeights(mine[0], mine[1], mine[2].mT), ExpertOptions(counts), weights_R)
    home = dispatcher.combine(y, plan)
    inputs = (x, assignment.probs_TK, mine)
    x_grad, probs_grad, weights_grad = torch.autograd.grad(home, inputs, grad)
    results = {"y": home.detach(), "x": x_grad, "probs": probs_grad, "weights": weights_grad}
    return results | {"rows": torch.tensor(plan.tokens_per_expert)}
