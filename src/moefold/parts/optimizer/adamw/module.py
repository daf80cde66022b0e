"""AdamW (arXiv:1711.05101) over local shards: fused over all parameters, or one by one with offloaded moments."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from moefold.comm.private_torch import zeros_like_shard
from moefold.model.local_param import local_tensor
from moefold.optim.build import OptimizerRun
from moefold.optim.states import StateStore, group_by_decay
from moefold.parts.optimizer.adamw.part import MOMENTS, AdamW


class LocalShardAdamW(torch.optim.AdamW):
    """torch.optim.AdamW over the local shards instead of DTensors.

    AdamW is element-wise, so the numbers are the same, and a step has no DTensor dispatch overhead.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. It does not communicate."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in parameters]
            first, second = ([local_tensor(state[name]) for state in states] for name in MOMENTS)
            counts = [state["step"] for state in states]
            grads = [local_tensor(p.grad) for p in parameters]
            _fused_adamw([local_tensor(p) for p in parameters], grads, first, second, counts, group)


class OffloadableAdamW(torch.optim.Optimizer):
    """AdamW, one parameter after the other, with low-precision or offloaded moments.

    With moments in the type of the weights it equals torch.optim.AdamW bit for bit. With moments in lower precision a
    step upcasts and updates them, updates the weights with them, and rounds them for the next step. As bfloat16 has 8
    significant bits, a step with a beta above 0.98 would add less than a moment can represent. Such a recipe is
    refused.

    Args:
        groups: param groups as for torch.optim.AdamW, each with lr, weight_decay, betas and eps.
        moment_dtype: type of the moments. None: the type of each parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], moment_dtype: torch.dtype | None, state_store: StateStore) -> None:
        super().__init__(groups, {})
        self.state_store = state_store
        for group in self.param_groups:
            for parameter in group["params"]:
                kind = moment_dtype or parameter.dtype
                counter = parameter.device if kind == parameter.dtype else "cpu"
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=counter),
                    **{name: state_store.zeros(parameter, kind) for name in MOMENTS},
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. It does not communicate."""
        assert closure is None
        pairs = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        prefetched = self.state_store.prefetch([[self.state[p][name] for name in MOMENTS] for p, _ in pairs])
        for (parameter, group), moments in zip(pairs, prefetched, strict=True):
            weight = local_tensor(parameter)
            grad = local_tensor(parameter.grad)
            update = _update if moments[0].dtype == weight.dtype else _update_low_precision
            update(weight, grad, moments, self.state[parameter]["step"], group)


def _update(weight: Tensor, grad: Tensor, moments: list[Tensor], count: Tensor, group: dict[str, Any]) -> None:
    first, second = moments
    _fused_adamw([weight], [grad], [first], [second], [count], group)


def _fused_adamw(
    weights: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    counts: list[Tensor],
    group: dict[str, Any],
) -> None:
    weights, grads, first, second, counts = _split_views(weights, grads, first, second, counts)
    assert all(_have_same_strides(w, g) for w, g in zip(weights, grads, strict=True))
    beta1, beta2 = group["betas"]
    rates = {key: group[key] for key in ("lr", "weight_decay", "eps")}
    adamw(
        weights,
        grads,
        first,
        second,
        [],
        counts,
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        **rates,
    )


def _split_views(*lists: list[Tensor]) -> tuple[list[Tensor], ...]:
    """Split weights that are every n-th row of a tensor into their rows: the fused kernel needs dense memory.

    Args:
        lists: weights, gradients, first and second moments, and step counts.

    Returns:
        The same lists, with rows instead of such weights. Their first row has the step count itself, other rows have
        copies.
    """
    columns_of_views: tuple[list[Tensor], ...] = ([], [], [], [], [])
    for weight, grad, first, second, count in zip(*lists, strict=True):
        columns: tuple[Sequence[Tensor], ...] = ([weight], [grad], [first], [second], [count])
        if not _have_same_strides(weight, first):
            tensors = [tensor.unbind() for tensor in (weight, grad, first, second)]
            columns = (*tensors, [count, *count.repeat(len(weight) - 1).unbind()])
        for total, column in zip(columns_of_views, columns, strict=True):
            total.extend(column)
    return columns_of_views


def _have_same_strides(weight: Tensor, grad: Tensor) -> bool:
    """Return whether weight and gradient have the same memory layout, as the fused kernel assumes."""
    strides = zip(weight.shape, weight.stride(), grad.stride(), strict=True)
    return all(size < 2 or weight_stride == grad_stride for size, weight_stride, grad_stride in strides)


def _update_low_precision(
    weight: Tensor, grad: Tensor, moments: list[Tensor], count: Tensor, group: dict[str, Any]
) -> None:
    count += 1
    rate, decay, eps = (group[key] for key in ("lr", "weight_decay", "eps"))
    beta1, beta2 = group["betas"]
    first = moments[0].to(weight.dtype, copy=True).mul_(beta1).add_(grad, alpha=1 - beta1)
    second = moments[1].to(weight.dtype, copy=True).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    for moment, updated in zip(moments, (first, second), strict=True):
        moment.copy_(updated)
    steps = float(count)
    denominator = second.div_(1 - beta2**steps).sqrt_().add_(eps)
    weight.mul_(1 - rate * decay).addcdiv_(first, denominator, value=-rate / (1 - beta1**steps))


def build_adamw(part: AdamW, parameters: Mapping[str, nn.Parameter], run: OptimizerRun) -> torch.optim.Optimizer:
    """Build AdamW with two param groups: weight decay skips norms, sinks and biases.

    The moments are allocated here, so that a checkpoint can be loaded into them.

    Args:
        run: learning rate, and the store of the moments.

    Raises:
        ConfigError: there is not enough memory or disk space for the moments.
    """
    groups = group_by_decay(parameters, run.weights)
    options = {"lr": run.lr, "betas": (part.beta1, part.beta2), "eps": part.eps}
    param_groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": part.weight_decay if decays else 0.0, **options}
        for decays, params in groups.items()
    ]
    dtype = torch.bfloat16 if part.has_bf16_moments else None
    if dtype or run.state_store:
        return OffloadableAdamW(param_groups, dtype, run.store)
    optimizer = LocalShardAdamW(param_groups)
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: zeros_like_shard(parameter, parameter.dtype) for moment in MOMENTS},
        }
    return optimizer
