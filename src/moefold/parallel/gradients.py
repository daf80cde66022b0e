"""Gradients of a step: reduction over tp, global norm over both views, and clipping."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefold.comm.collectives import all_reduce_sum_
from moefold.comm.groups import Group
from moefold.comm.private_torch import foreach_mul_, foreach_norm, local_tensor

NORM_EPS = 1e-6
"""Added to the norm in the clip factor, as in torch.nn.utils.clip_grad_norm_."""


@torch.no_grad()
def sum_replicated_gradients(parameters: Mapping[str, nn.Parameter], group: Group, axis: str = "tp") -> None:
    """Sum over tp or etp the gradients of parameters that are replicated over it and were computed in parts.

    Under sequence parallelism each tp rank has a partial gradient, from its tokens or heads, of norms, the router, K/V
    of few groups and adapters. Under expert tensor parallelism each etp rank has a partial gradient, from its columns,
    of the experts' adapters. One all-reduce for each step. Every rank of the group calls it after all micro-batches and
    the data-parallel reduction.

    Args:
        axis: "tp" or "etp", the last dim of the device mesh of the parameters.
    """
    if group.size == 1:
        return
    grads = [local_tensor(p.grad) for p in parameters.values() if p.grad is not None and _is_replicated(p.grad, axis)]
    if not grads:
        # A stage with only the embedding or the output head has none, on every rank of the group.
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    all_reduce_sum_(flat, group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def local_norm_sq(parameters: Mapping[str, nn.Parameter], *, skip: frozenset[str] = frozenset()) -> Tensor:
    """Return this rank's summand of the squared gradient norm of the whole model, without communication.

    A gradient replicated on n ranks contributes 1/n of its square on each of them: summed over the world, each logical
    element counts once.

    Args:
        parameters: parameters of this rank by name, with reduced gradients.
        skip: names whose gradient another pipeline rank counts (the second copy of a tied embedding).

    Returns:
        0-dim tensor in float64.
    """
    grads_by_replicas: dict[int, list[Tensor]] = {}
    for name, parameter in parameters.items():
        if name not in skip and parameter.grad is not None:
            grads_by_replicas.setdefault(num_replicas(parameter.grad), []).append(local_tensor(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=next(iter(parameters.values())).device)
    for replicas, grads in grads_by_replicas.items():
        norms = torch.stack(foreach_norm(grads)).double()
        total += norms.square().sum() / replicas
    return total


def needs_clip(norm: float, max_norm: float) -> bool:
    """Return whether the norm exceeds max_norm or is not finite. If not, a pass over all gradients is saved."""
    return not norm + NORM_EPS <= max_norm


@torch.no_grad()
def clip_gradients(parameters: Mapping[str, nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by max_norm/norm if norm exceeds max_norm. 0 means no clipping."""
    if max_norm <= 0:
        return
    grads = [local_tensor(p.grad) for p in parameters.values() if p.grad is not None]
    # Clamping on the device avoids a host synchronisation.
    factor = (max_norm / (norm + NORM_EPS)).clamp(max=1.0)
    foreach_mul_(grads, factor.to(grads[0].dtype))


def _is_replicated(grad: Tensor, axis: str) -> bool:
    if not isinstance(grad, DTensor):
        return False
    names = grad.device_mesh.mesh_dim_names
    assert names is not None
    return names[-1] == axis and grad.placements[-1].is_replicate()


def num_replicas(tensor: Tensor) -> int:
    """Return the number of ranks in the mesh of a reduced gradient or a weight that hold the same values."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for axis, placement in enumerate(tensor.placements):
        assert not placement.is_partial(), "the gradient is not reduced yet"
        if placement.is_replicate():
            count *= tensor.device_mesh.size(axis)
    return count
