"""Outer optimizer of DiLoCo (arXiv:2311.08105) on this rank's shards; no communication.

The outer weights phi are those after the last round, equal on all sites. A site trains its own weights theta from them.
In a round the sites exchange their differences D = phi - theta; with g, the weighted mean of the differences,

    m = momentum * m + g;  phi = phi - lr * (g + momentum * m if nesterov else m);  theta = phi.

With lr 1 and momentum 0, phi becomes the mean of the sites' weights. Every operation is element by element, so that
shards of any mapping give the same result.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moefold.config.sites import SitesConfig
from moefold.model.local_param import local_tensor
from moefold.optim.state_offload import StateStore

WEIGHTS = "weights"
MOMENTUM = "momentum"


@dataclass(frozen=True)
class OuterNorms:
    """Sums of squares of one round over this rank's shards; a tensor on n ranks counts 1/n of its own."""

    difference: float
    """Of this site's difference D."""
    mean: float
    """Of the mean difference g."""
    product: float
    """Dot product of D and g."""
    weights: float
    """Of the outer weights before the step."""

    def to_tensor(self) -> Tensor:
        """Return the four sums, float64 [4]."""
        return torch.tensor([self.difference, self.mean, self.product, self.weights], dtype=torch.float64)


class OuterOptimizer:
    """Outer weights and momentum of the trained parameters, and the step of a round.

    Floating-point buffers (the expert bias) have no outer weights: the sites take their mean. Integer buffers (token
    counts of the last batch) stay as they are, like the moments of the optimizer.

    Args:
        parameters: the trained parameters of this rank, by name.
        buffers: the buffers of this rank, by name.
        settings: the section [sites].
        state_store: memory of the outer weights and momentum, between rounds.
        replicas: number of ranks that hold the same shard of a parameter, by name; 1 if absent. 0: another rank counts
            the parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        settings: SitesConfig,
        state_store: StateStore,
        replicas: Mapping[str, int],
    ) -> None:
        self._parameters = dict(parameters)
        self._buffers = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self._settings = settings
        self._store = state_store
        self._replicas = replicas
        self.weights = {name: state_store.zeros(p.data, p.dtype) for name, p in self._parameters.items()}
        """Outer weights phi by parameter, sharded as the parameter."""
        self.momentum: dict[str, Tensor] = {}
        """Momentum m by parameter; empty without momentum."""
        if settings.momentum:
            self.momentum = {name: state_store.zeros(p.data, p.dtype) for name, p in self._parameters.items()}
        first = next(iter(self._parameters.values()), None)
        self.dtype = torch.float64 if first is not None and first.dtype == torch.float64 else torch.float32
        """Type of the exchanged differences."""
        self.num_rounds = 0
        """Rounds applied."""
        self.tokens = 0
        """Tokens of this site up to the last round applied."""

    @property
    def numel(self) -> int:
        """Number of elements that this rank exchanges in a round: differences of weights, and buffers."""
        tensors = [*self._parameters.values(), *self._buffers.values()]
        return sum(local_tensor(tensor.data).numel() for tensor in tensors)

    @torch.no_grad()
    def start(self) -> None:
        """Set the outer weights to the present weights, at the start of a run; local."""
        for parameter, (weights,) in self._states([self.weights]):
            weights.copy_(local_tensor(parameter.data))

    @torch.no_grad()
    def difference(self) -> Tensor:
        """Return D = phi - theta of all parameters, then the buffers, on the host, [numel]; local."""
        flat = torch.empty(self.numel, dtype=self.dtype)
        first = 0
        for parameter, (weights,) in self._states([self.weights]):
            theta = local_tensor(parameter.data)
            flat[first : first + theta.numel()].copy_((weights - theta).flatten())
            first += theta.numel()
        for buffer in self._buffers.values():
            flat[first : first + buffer.numel()].copy_(buffer.flatten())
            first += buffer.numel()
        return flat

    @torch.no_grad()
    def step(self, own: Tensor, mean: Tensor) -> OuterNorms:
        """Take the outer step of a round and set the weights to the outer weights; local.

        Args:
            own: what `difference` returned for the round, [numel].
            mean: the weighted mean of the sites' differences, [numel]; `own` itself in a round of one site.
        """
        settings = self._settings
        is_own = mean is own
        sums = [0.0] * 4
        first = 0
        names = iter(self._parameters)
        for parameter, (weights, *momentum) in self._states([self.weights, self.momentum]):
            theta = local_tensor(parameter.data)
            part = slice(first, first + theta.numel())
            first = part.stop
            mean_g = mean[part].to(theta).view_as(theta)
            own_d = own[part].to(theta).view_as(theta)
            share = self._replicas.get(next(names), 1)
            if share:
                pairs = ((own_d, own_d), (mean_g, mean_g), (own_d, mean_g), (weights, weights))
                sums = [total + _dot(x, y) / share for total, (x, y) in zip(sums, pairs, strict=True)]
            if is_own and not settings.has_outer_step:
                # phi - (phi - theta) would round: the mean of one site is its weights.
                weights.copy_(theta)
                continue
            update = mean_g
            if momentum:
                momentum[0].mul_(settings.momentum).add_(mean_g)
                update = mean_g.add(momentum[0], alpha=settings.momentum) if settings.nesterov else momentum[0]
            weights.add_(update, alpha=-settings.lr)
            theta.copy_(weights)
        for buffer in self._buffers.values():
            part = slice(first, first + buffer.numel())
            first = part.stop
            buffer.copy_(mean[part].view(buffer.shape))
        self.num_rounds += 1
        return OuterNorms(*sums)

    def entries(self, *, with_momentum: bool = True) -> dict[str, Tensor]:
        """Return this rank's shards of the checkpoint entries, by mapping-independent names; copies nothing.

        Args:
            with_momentum: False: without the momentum, which a checkpoint of a run without it lacks.
        """
        momentum = self.momentum if with_momentum else {}
        return {
            f"outer.{kind}.{name}": tensor
            for kind, tensors in ((WEIGHTS, self.weights), (MOMENTUM, momentum))
            for name, tensor in tensors.items()
        }

    def states_on_device(self) -> list[Tensor]:
        """Return the outer weights and momentum that are on the device between rounds."""
        return [tensor for tensor in self.entries().values() if not self._store.is_offloaded(tensor)]

    def state(self) -> dict[str, int]:
        """Return the JSON-serialisable part of the state."""
        return {"rounds": self.num_rounds, "tokens": self.tokens, "momentum": int(bool(self.momentum))}

    def restore(self, state: Mapping[str, int]) -> None:
        """Restore what `state` returned; the entries are loaded by the caller."""
        self.num_rounds = state["rounds"]
        self.tokens = state["tokens"]

    def _states(self, kinds: list[dict[str, Tensor]]) -> Iterator[tuple[nn.Parameter, list[Tensor]]]:
        """Yield each parameter with its local states on the device, to be changed in place."""
        states = [[tensors[name] for tensors in kinds if tensors] for name in self._parameters]
        yield from zip(self._parameters.values(), self._store.prefetch(states), strict=True)


def _dot(x: Tensor, y: Tensor) -> float:
    return float((x.double() * y.double()).sum())
