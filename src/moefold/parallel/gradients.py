"""Gradients between backward and optimizer: the last sum, the global norm over both views, and clipping."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefold.comm.collectives import all_reduce_sum_
from moefold.comm.groups import Group

NORM_EPS = 1e-6
"""Added to the norm that gradients are divided by, as torch.nn.utils.clip_grad_norm_ does."""


@torch.no_grad()
def sum_replicated_gradients(parameters: Mapping[str, nn.Parameter], tp: Group) -> None:
    """Add up over tp the gradients of parameters that its ranks hold whole: norms, router, K/V of few groups.

    Under sequence parallelism each tp rank has a part of them (other tokens, other heads). One all-reduce a step;
    every rank of a tensor-parallel group calls it once all micro-batches are through and data parallelism has
    reduced.
    """
    if tp.size == 1:
        return
    grads = [_to_local(p.grad) for p in parameters.values() if p.grad is not None and _is_tp_replicated(p.grad)]
    if not grads:
        # A stage of the embedding or of the output head alone has none, on every rank of the group.
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    all_reduce_sum_(flat, tp)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def local_norm_sq(parameters: Mapping[str, nn.Parameter], *, skip: frozenset[str] = frozenset()) -> Tensor:
    """My part of the squared Euclidean norm of the gradient of the whole model; no communication.

    A gradient that n ranks hold alike contributes 1/n of its square on each of them: summed over the world, each
    logical element counts once.

    Args:
        parameters: of this rank, by name, with reduced gradients.
        skip: names whose gradient another pipeline rank counts (the second copy of a tied embedding).

    Returns:
        0-dim tensor in float64.
    """
    shares: dict[int, list[Tensor]] = {}
    for name, parameter in parameters.items():
        if name not in skip and parameter.grad is not None:
            shares.setdefault(_num_replicas(parameter.grad), []).append(_to_local(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=next(iter(parameters.values())).device)
    for copies, grads in shares.items():
        norms = torch.stack(torch._foreach_norm(grads)).double()
        total += norms.square().sum() / copies
    return total


def needs_clip(norm: float, max_norm: float) -> bool:
    """Whether `clip_gradients` would change anything: where the host knows the norm, a pass over all gradients less."""
    return not norm + NORM_EPS <= max_norm


@torch.no_grad()
def clip_gradients(parameters: Mapping[str, nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by limit/norm where norm exceeds the limit; a limit of 0 leaves them."""
    if max_norm <= 0:
        return
    grads = [_to_local(p.grad) for p in parameters.values() if p.grad is not None]
    # No host sync is needed.
    factor = (max_norm / (norm + NORM_EPS)).clamp(max=1.0)
    torch._foreach_mul_(grads, factor.to(grads[0].dtype))


def _to_local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _is_tp_replicated(grad: Tensor) -> bool:
    if not isinstance(grad, DTensor):
        return False
    names = grad.device_mesh.mesh_dim_names
    assert names is not None
    return names[-1] == "tp" and grad.placements[-1].is_replicate()


def _num_replicas(grad: Tensor) -> int:
    """Ranks of the gradient's mesh that hold the same values."""
    if not isinstance(grad, DTensor):
        return 1
    copies = 1
    for axis, placement in enumerate(grad.placements):
        assert not placement.is_partial(), "the gradient is not reduced yet"
        if placement.is_replicate():
            copies *= grad.device_mesh.size(axis)
    return copies
