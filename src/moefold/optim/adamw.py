"""AdamW (arXiv:1711.05101) over local shards: fused over all parameters, or one by one with offloaded moments."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from moefold.config.schema import TrainConfig
from moefold.model.local_param import local_tensor
from moefold.optim.state_offload import StateStore

MOMENTS = ("exp_avg", "exp_avg_sq")
PENDING_GRADIENT = "pending_gradient"
"""State key of the gradient that `train.gradient_delay` applies in the next step."""
LAST_UPDATE = "last_update"
"""State key of what the optimizer subtracted in the last step, for `train.delay_correction`."""


class LocalShardAdamW(torch.optim.AdamW):
    """torch.optim.AdamW over the local shards instead of DTensors.

    AdamW is element-wise, so the numbers are the same, and a step has no DTensor dispatch overhead.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; local."""
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
    step upcasts and updates them, updates the weights with them, and rounds them for the next step. bfloat16 has 8
    significant bits: with a beta beyond 0.98 a step would add less than a moment can represent, so such a recipe is
    rejected.

    Args:
        groups: as of torch.optim.AdamW, each with lr, weight_decay, betas and eps.
        moment_dtype: type of the moments; None: the type of each parameter.
        state_store: store of the moments.
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
        """Update every parameter that has a gradient; local."""
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
        The same lists, with rows in the place of such weights. Their first row has the step count itself, the others
        have copies of it.
    """
    found: tuple[list[Tensor], ...] = ([], [], [], [], [])
    for weight, grad, first, second, count in zip(*lists, strict=True):
        columns: tuple[Sequence[Tensor], ...] = ([weight], [grad], [first], [second], [count])
        if not _have_same_strides(weight, first):
            tensors = [tensor.unbind() for tensor in (weight, grad, first, second)]
            columns = (*tensors, [count, *count.repeat(len(weight) - 1).unbind()])
        for total, column in zip(found, columns, strict=True):
            total.extend(column)
    return found


def _have_same_strides(weight: Tensor, grad: Tensor) -> bool:
    """Return whether weight and gradient have the same memory layout, as the fused kernel assumes."""
    strides = zip(weight.shape, weight.stride(), grad.stride(), strict=True)
    return all(size < 2 or of_weight == of_grad for size, of_weight, of_grad in strides)


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


EXPERT_BIASES = ("experts.b_gate", "experts.b_up", "experts.b_down")
MOMENTUM = "momentum"
"""State key of Muon's momentum."""


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], cfg: TrainConfig, state_store: StateStore | None = None
) -> torch.optim.Optimizer:
    """Build AdamW with two param groups: weight decay skips norms, sinks and biases.

    The moments are allocated here, so that a checkpoint can be loaded into them.

    Args:
        parameters: parameters of this rank, by name.
        cfg: training section of the recipe.
        state_store: store of the moments; None: on the device.

    Raises:
        ConfigError: there is not enough memory or disk space for the moments.
    """
    groups = group_by_decay(parameters)
    options = {"lr": cfg.lr, "betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
    param_groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": cfg.weight_decay if decays else 0.0, **options}
        for decays, params in groups.items()
    ]
    dtype = torch.bfloat16 if cfg.moment_dtype == "bfloat16" else None
    if dtype or state_store:
        return OffloadableAdamW(param_groups, dtype, state_store or StateStore())
    optimizer = LocalShardAdamW(param_groups)
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
        }
    return optimizer


def group_by_decay(parameters: Mapping[str, nn.Parameter]) -> dict[bool, list[nn.Parameter]]:
    """Return the parameters with weight decay (True), and norms, sinks and biases (False); never without a group."""
    groups: dict[bool, list[nn.Parameter]] = {}
    if not parameters:
        # A pipeline stage may have none, in the warm-up of indexers, but torch requires a group.
        groups[False] = []
    for name, parameter in parameters.items():
        # Biases of experts have two dims: one row per expert.
        decays = parameter.dim() > 1 and not name.endswith(EXPERT_BIASES)
        groups.setdefault(decays, []).append(parameter)
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all param groups for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def named_moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the state tensors by name.

    `<parameter>.exp_avg` and `<parameter>.exp_avg_sq`, Muon's `<parameter>.momentum`, and the names of delayed
    gradients.
    """
    return {
        f"{name}.{moment}": value
        for name, parameter in parameters.items()
        for moment, value in optimizer.state[parameter].items()
        if moment != "step"
    }


@torch.no_grad()
def reset_moments(optimizer: torch.optim.Optimizer) -> None:
    """Zero the moments of every parameter, and the step count of the bias correction, in place; local.

    The next step is as in a new optimizer. Offloaded moments are zeroed where they are stored. A pending gradient and
    the last update are not moments, and stay.
    """
    state_store = getattr(optimizer, "state_store", StateStore())
    for state in optimizer.state.values():
        for name, value in state.items():
            if name == "step":
                value.zero_()
            elif name not in (PENDING_GRADIENT, LAST_UPDATE):
                state_store.zero(value)


def step_counts(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """Return the step count of the moments of each parameter that has one, by name."""
    states = {name: optimizer.state[parameter] for name, parameter in parameters.items() if parameter.requires_grad}
    return {name: float(state["step"]) for name, state in states.items() if "step" in state}


def set_step_count(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the step count of the moments, for the bias correction after a resume."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)
