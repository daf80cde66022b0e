"""Outer optimizer of DiLoCo (arXiv:2311.08105) on this rank's shards; no communication.

The outer weights phi are those after the last round, equal on all sites. A site trains its own weights theta from them.
In a round the sites exchange their differences D = phi - theta; with g, the weighted mean of the differences,

    m = momentum * m + g;  phi = phi - lr * (g + momentum * m if nesterov else m)
    theta = keep_local * theta + (1 - keep_local) * phi.

With lr 1 and momentum 0, phi becomes the mean of the sites' weights. A residual e (error feedback) adds what coding
lost: a site sends code(residual * e + D), and e becomes the difference to what was decoded. Each fragment of the model
has rounds of its own (Streaming DiLoCo, arXiv:2501.18512).

A method of sites may derive from `OuterOptimizer`, and replace what is sent, received and applied.

Every operation is element by element, so that shards of any mapping give the same result, but for the blocks of codes.
Each parameter begins a block, so that ranks with the same shard of a parameter decode the same values whatever else
they hold.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moefold.comm.site_links import Exchanged
from moefold.comm.wire_codes import make_wire_code
from moefold.config.sites import SitesConfig
from moefold.model.local_param import local_tensor
from moefold.optim.outer_round import OuterNorms, PendingRound, Sent, dot, mix
from moefold.optim.states import StateStore
from moefold.topology.fragments import fragment_of

STATES = ("weights", "momentum", "residual")
"""Names of the states in checkpoints."""
FragmentsDue = Callable[[int], Sequence[int]]
PENDING = "outer.pending."
"""Prefix of the checkpoint entries of a mean that is received and not applied yet."""
EXPERT_OWNERS = "experts.owners"
"""Key of `OuterOptimizer.state`: the number of sites that own experts."""
EXPERT_OWNER = "experts.owner"
"""Key of `OuterOptimizer.state`: the site whose experts have moments and residual in the checkpoint."""


class OuterOptimizer:
    """Outer weights, momentum and residual of the trained parameters, and the step of a round.

    Floating-point buffers (the expert bias) have no outer weights: the sites take their mean. Integer buffers (token
    counts of the last batch) stay as they are, like the moments of the optimizer.

    Args:
        parameters: the trained parameters of this rank, by name.
        buffers: the buffers of this rank, by name.
        settings: the section [sites].
        state_store: memory of the states between rounds.
        num_fragments: fragments of the model.
        replicas: number of ranks that hold the same shard of a parameter, by name; 1 if absent. 0: another rank counts
            the parameter.
        experts: names of the parameters of routed experts.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        settings: SitesConfig,
        state_store: StateStore,
        *,
        num_fragments: int = 1,
        replicas: Mapping[str, int] | None = None,
        experts: Collection[str] = (),
    ) -> None:
        self.experts = frozenset(experts).intersection(parameters)
        """The parameters of routed experts."""
        self._parameters = dict(parameters)
        self._buffers = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self._settings = settings
        self._store = state_store
        self._num_fragments = num_fragments
        self._replicas = {} if replicas is None else replicas
        kinds = [True, settings.momentum > 0, settings.residual > 0]
        self._states = {
            kind: {
                # Of what is not sent no code loses anything.
                name: state_store.zeros(self.select(name, p.data) if kind == "residual" else p.data, p.dtype)
                for name, p in self._parameters.items()
            }
            if is_kept
            else {}
            for kind, is_kept in zip(STATES, kinds, strict=True)
        }
        first = next(iter(self._parameters.values()), None)
        self.dtype = torch.float64 if first is not None and first.dtype == torch.float64 else torch.float32
        """Type of the exchanged differences."""
        self.code = settings.part.wire_code(self.dtype) or make_wire_code(settings.precision, self.dtype)
        """Code of the differences of weights."""
        self.num_rounds = 0
        """Rounds that all their members voted for."""
        self.tokens = [0] * num_fragments
        """Tokens of this site up to the last of these rounds, by fragment."""
        self.pending: PendingRound | None = None
        """A round that is certain and not applied yet; None: no such round."""

    def select(self, name: str, tensor: Tensor) -> Tensor:
        """Return a view of the rows of a parameter that this site trains and sends: all of them."""
        return tensor

    def send(self, fragments: Sequence[int], own: Tensor, *, is_last: bool) -> Sent:
        """Return what this site sends in a round.

        Args:
            fragments: the fragments of the round.
            own: what `difference` returned.
            is_last: the round is the one after the last step.
        """
        return Sent(own, self.num_coded(fragments))

    def receive(self, round_: PendingRound, sent: Sent, exchanged: Exchanged, members: Sequence[int]) -> PendingRound:
        """Return a round that is certain with what its members have exchanged; changes nothing.

        Args:
            round_: the round, with the weighted mean of the members' vectors.
            sent: what `send` returned.
            exchanged: the result of the exchange.
            members: the sites of the round.
        """
        return round_

    def begin_next(self) -> None:
        """Begin the next round of training after the exchange has begun that goes on meanwhile; local."""

    def cancel(self, fragments: Sequence[int], own: Tensor) -> None:
        """Undo `begin_next`, as the exchange has failed and the round is not applied; local.

        Args:
            fragments: the fragments of the round.
            own: what `difference` returned; the residual has not changed since.
        """

    def apply(self, round_: PendingRound, groups: Any, *, is_overlapped: bool) -> tuple[OuterNorms, dict[str, float]]:
        """Take the outer step of a round; may be collective over the site.

        Args:
            round_: the round.
            groups: the `comm.groups.ParallelGroups` of this rank.
            is_overlapped: the site has trained since the differences were taken.

        Returns:
            The norms, and further metrics of the round by name.
        """
        keep_local = self._settings.keep_local if is_overlapped else 0.0
        return self.step(round_.own, round_.mean, round_.fragments, keep_local=keep_local), {}

    def skip(self) -> None:
        """Note that there is no outer step where one would have been; local."""

    @property
    def carried(self) -> int:
        """A number of 64 bits that a site which joins takes over from another one."""
        return 0

    @carried.setter
    def carried(self, number: int) -> None:
        assert number == 0

    @property
    def weights(self) -> dict[str, Tensor]:
        """Outer weights phi by parameter, sharded as the parameter."""
        return self._states["weights"]

    @property
    def residual(self) -> dict[str, Tensor]:
        """Residual e by parameter, of the site's own experts only; empty without one."""
        return self._states["residual"]

    def num_coded(self, fragments: Sequence[int]) -> int:
        """Return the elements of this rank's differences of weights, which come first in the vector of a round."""
        return sum(self.width(name) for name in self.names(fragments))

    @torch.no_grad()
    def start(self) -> None:
        """Set the outer weights to the present weights, at the start of a run; local."""
        for name, (weights,) in self.visit(list(self._parameters), ["weights"]):
            weights.copy_(local_tensor(self._parameters[name].data))

    @torch.no_grad()
    def difference(self, fragments: Sequence[int] = (0,)) -> Tensor:
        """Return what this site sends in a round of fragments, on the host; changes nothing.

        Returns:
            D = phi - theta of the parameters (of experts that sites own: of the site's own), plus the decayed residual,
            each with zeros up to a whole block of the code, then the buffers, [elements of this rank].
        """
        num_coded = self.num_coded(fragments)
        buffers = [buffer for _, buffer in self._buffers_of(fragments)]
        flat = torch.zeros(num_coded + sum(buffer.numel() for buffer in buffers), dtype=self.dtype)
        first = 0
        for name, (weights, *residual) in self.visit(self.names(fragments), ["weights", "residual"]):
            value = self.select(name, weights) - self.select(name, local_tensor(self._parameters[name].data))
            if residual:
                value.add_(residual[0], alpha=self._settings.residual)
            flat[first : first + value.numel()].copy_(value.flatten())
            first += self.width(name)
        for buffer in buffers:
            flat[first : first + buffer.numel()].copy_(buffer.flatten())
            first += buffer.numel()
        return flat

    @torch.no_grad()
    def keep_residual(self, fragments: Sequence[int], sent: Tensor, decoded: Tensor) -> None:
        """Set the residual to what the code of a round has lost, once the round is certain; local.

        Args:
            fragments: the fragments of the round.
            sent: what `difference` returned.
            decoded: what the sites decoded of it.
        """
        lost = sent - decoded
        # Of weights that are not finite, which the sites do not read, nothing is left for the next round.
        lost = torch.where(lost.isfinite(), lost, 0.0)
        names = self.names(fragments)
        for (_, (residual,)), part in zip(self.visit(names, ["residual"]), self.parts(names, lost), strict=True):
            residual.copy_(part)

    @torch.no_grad()
    def step(
        self,
        own: Tensor,
        mean: Tensor,
        fragments: Sequence[int] = (0,),
        *,
        keep_local: float = 0.0,
    ) -> OuterNorms:
        """Take the outer step of a round; local.

        Args:
            own: what `difference` returned for the round.
            mean: the mean of a round; `own` itself in a round of one site.
            fragments: the fragments of the round.
            keep_local: share of the present weights that stays; the rest becomes the outer weights.
        """
        is_own = mean is own and not keep_local and not self._settings.residual
        sums = [0.0] * 5
        names = self.names(fragments)
        visits = self.visit(names, ["weights", "momentum"])
        parts = (self.parts(names, own), self.parts(names, mean, is_mean=True))
        for (name, (weights, *momentum)), own_d, mean_g in zip(visits, *parts, strict=True):
            theta = local_tensor(self._parameters[name].data)
            self.add_norms(sums, name, weights, own_d, mean_g)
            if is_own and not self._settings.has_outer_step:
                # phi - (phi - theta) would round: the mean of one site is its weights.
                weights.copy_(theta)
                continue
            update = self.update(name, mean_g, momentum)
            self.move(name, theta, weights, update, keep_local)
        self.set_buffers(mean, fragments, keep_local)
        return OuterNorms(*sums)

    def move(self, name: str, theta: Tensor, weights: Tensor, update: Tensor, keep_local: float) -> None:
        """Move the outer weights of a parameter by an update, and let them replace a share of its weights theta."""
        weights.add_(update, alpha=-self._settings.lr)
        mix(theta, weights, keep_local)

    def update(self, name: str, mean_g: Tensor, momentum: Sequence[Tensor]) -> Tensor:
        """Return the update of the outer weights of a parameter before the learning rate, and move their momentum.

        Args:
            name: name of the parameter.
            mean_g: g.
            momentum: one tensor; none without momentum.
        """
        settings = self._settings
        if not momentum:
            return mean_g
        self.move_momentum(momentum[0], mean_g)
        return mean_g.add(momentum[0], alpha=settings.momentum) if settings.nesterov else momentum[0]

    def move_momentum(self, momentum: Tensor, mean_g: Tensor) -> None:
        """Add g to the momentum of a parameter."""
        momentum.mul_(self._settings.momentum).add_(mean_g)

    def visit_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield names with this rank's outer weights on the device, to be changed in place."""
        for name, (weights,) in self.visit(names, ["weights"]):
            yield name, weights

    @torch.no_grad()
    def take_weights(self, names: Sequence[str]) -> None:
        """Set parameters to their outer weights; local."""
        for name, weights in self.visit_weights(names):
            local_tensor(self._parameters[name].data).copy_(weights)

    def visit_round(self, pending: PendingRound) -> Iterator[tuple[str, Tensor, Tensor, Tensor, int]]:
        """Yield what a round does to each parameter, before its outer step.

        Yields:
            Its name, D of this site, g and phi, of the rows that this site sends; and the number of ranks with the same
            shard, 0 if another rank counts it.
        """
        names = self.names(pending.fragments)
        visits = self.visit(names, ["weights"])
        parts = (self.parts(names, pending.own), self.parts(names, pending.mean, is_mean=True))
        for (name, (weights,)), own_d, mean_g in zip(visits, *parts, strict=True):
            yield name, own_d, self.select(name, mean_g), self.select(name, weights), self._replicas.get(name, 1)

    @torch.no_grad()
    def swap_weights(self) -> bool:
        """Exchange weights and outer weights, to evaluate these; return whether one of them differed; local."""
        differs = False
        for name, weights in self.visit_weights(list(self._parameters)):
            theta = local_tensor(self._parameters[name].data)
            differs |= not torch.equal(theta, weights)
            present = theta.clone()
            theta.copy_(weights)
            weights.copy_(present)
        return differs

    def checkpoint_entries(self) -> dict[str, Tensor]:
        """Return this rank's shards of all checkpoint entries, entries of a pending round included."""
        pending = self.pending
        return self.entries() | ({} if pending is None else self._pending_entries(pending.fragments, pending.mean))

    def state(self) -> dict[str, int]:
        """Return the part of the state that is no tensor."""
        tokens = {f"tokens.{fragment}": count for fragment, count in enumerate(self.tokens)}
        return {
            "rounds": self.num_rounds,
            **tokens,
            **{kind: 1 for kind in STATES if self._states[kind]},
            **self._owner_state(),
            **({} if self.pending is None else {"pending.step": self.pending.step, "pending.due": self.pending.due}),
        }

    def restore(self, state: Mapping[str, int], load: Callable[[dict[str, Tensor]], None], due: FragmentsDue) -> None:
        """Restore the state of a checkpoint; collective if `load` is.

        A state that the checkpoint lacks begins as at the start of a run.

        Args:
            state: what `state` returned.
            load: loads entries of the checkpoint.
            due: returns the fragments of the round after a step.
        """
        load(self.entries([kind for kind in STATES if kind in state]))
        self.num_rounds = state["rounds"]
        self.tokens = [state.get(f"tokens.{fragment}", 0) for fragment in range(self._num_fragments)]
        self.pending = None
        if "pending.due" in state:
            fragments = tuple(due(state["pending.step"]))
            entries = self._pending_entries(fragments)
            load(entries)
            mean = self.pending_mean(entries)
            own = self.own_part(fragments, mean)
            self.pending = PendingRound(state["pending.step"], state["pending.due"], fragments, own, mean)

    @torch.no_grad()
    def adopt(self, num_rounds: int, tokens: int) -> None:
        """Go on from outer weights and momentum that were just written: the weights become the outer weights; local.

        Args:
            num_rounds: rounds of these outer weights.
            tokens: tokens that this site has trained on.
        """
        names = list(self._parameters)
        self.take_weights(names)
        for _, residual in self.visit(names, ["residual"]):
            for tensor in residual:
                tensor.zero_()
        self.num_rounds = num_rounds
        self.tokens = [tokens] * self._num_fragments
        self.pending = None

    def _pending_entries(self, fragments: Sequence[int], mean: Tensor | None = None) -> dict[str, Tensor]:
        """Return the checkpoint entries of a mean that is not applied yet, sharded as the parameters.

        Args:
            fragments: the fragments of the round.
            mean: the mean; None: entries to load a checkpoint into.
        """
        entries = {}
        names = self.names(fragments)
        parts = (None,) * len(names) if mean is None else self.parts(names, mean, is_mean=True)
        for name, part in zip(names, parts, strict=True):
            tensor = torch.zeros_like(self._parameters[name].data)
            if part is not None:
                local_tensor(tensor).copy_(part)
            entries[f"{PENDING}{name}"] = tensor
        first = self._num_in_mean(fragments)
        for name, buffer in self._buffers_of(fragments):
            tensor = torch.zeros(buffer.shape, dtype=self.dtype)
            if mean is not None:
                tensor.copy_(mean[first : first + buffer.numel()].view(buffer.shape))
            first += buffer.numel()
            entries[f"{PENDING}{name}"] = tensor
        return entries

    def pending_mean(self, entries: Mapping[str, Tensor]) -> Tensor:
        """Return the mean of loaded entries, on the host."""
        parts = [torch.empty(0, dtype=self.dtype)]
        for entry, tensor in entries.items():
            values = local_tensor(tensor).flatten().to("cpu", self.dtype)
            name = entry.removeprefix(PENDING)
            padding = self.width(name, is_mean=True) - len(values) if name in self._parameters else 0
            parts += [values, values.new_zeros(padding)]
        return torch.cat(parts)

    def entries(self, kinds: Sequence[str] = STATES) -> dict[str, Tensor]:
        """Return this rank's shards of the checkpoint entries, by mapping-independent names; copies nothing.

        Args:
            kinds: names of the states.
        """
        return {f"outer.{kind}.{name}": tensor for kind in kinds for name, tensor in self._states[kind].items()}

    def states_on_device(self) -> list[Tensor]:
        """Return the states that are on the device between rounds."""
        return [tensor for tensor in self.entries().values() if not self._store.is_offloaded(tensor)]

    def add_norms(self, sums: list[float], name: str, weights: Tensor, own: Tensor, mean: Tensor) -> None:
        """Add the part of a parameter to the sums of `OuterNorms`."""
        if share := self._replicas.get(name, 1):
            d, g = (own, mean) if self.is_averaged(name) else (own.new_zeros(1),) * 2
            for index, (x, y) in enumerate(((own, own), (g, g), (d, g), (self.select(name, weights),) * 2, (d, d))):
                sums[index] += dot(x, y) / share

    def is_averaged(self, name: str) -> bool:
        """Return whether the sites take a mean of a parameter."""
        return True

    def set_buffers(self, mean: Tensor, fragments: Sequence[int], keep_local: float = 0.0) -> None:
        """Let the means of buffers, which follow the parameters in `mean`, replace a share of the buffers; local."""
        for buffer, part in self.parts_of_buffers(mean, fragments):
            mix(buffer, part, keep_local)

    def parts_of_buffers(self, mean: Tensor, fragments: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each buffer with its part of the mean of a round."""
        first = self._num_in_mean(fragments)
        for _, buffer in self._buffers_of(fragments):
            yield buffer, mean[first : first + buffer.numel()].view(buffer.shape).to(buffer)
            first += buffer.numel()

    def _owner_state(self) -> dict[str, int]:
        settings = self._settings
        return {EXPERT_OWNERS: settings.count, EXPERT_OWNER: settings.number} if settings.owns_experts else {}

    def width(self, name: str, *, is_mean: bool = False) -> int:
        """Return the elements of a parameter in the vector of a round: whole blocks of the code.

        Args:
            name: name of the parameter.
            is_mean: the vector is the mean of a `PendingRound`.
        """
        numel = self.select(name, local_tensor(self._parameters[name].data)).numel()
        return -(-numel // self.code.block) * self.code.block

    def _num_in_mean(self, fragments: Sequence[int]) -> int:
        """Return the elements of the mean of a round that are not of buffers."""
        return sum(self.width(name, is_mean=True) for name in self.names(fragments))

    def own_part(self, fragments: Sequence[int], mean: Tensor) -> Tensor:
        """Return the elements of the mean of a round that this site would send."""
        return mean.clone()

    def names(self, fragments: Sequence[int]) -> list[str]:
        """Return the parameters of some fragments, in the order of the vector of a round."""
        return [name for name in self._parameters if fragment_of(name, self._num_fragments) in fragments]

    def _buffers_of(self, fragments: Sequence[int]) -> list[tuple[str, Tensor]]:
        return [item for item in self._buffers.items() if fragment_of(item[0], self._num_fragments) in fragments]

    def visit(self, names: Sequence[str], kinds: Sequence[str]) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield each parameter's name with its local states on the device, to be changed in place."""
        states = [[self._states[kind][name] for kind in kinds if self._states[kind]] for name in names]
        yield from zip(names, self._store.prefetch(states), strict=True)

    def parts(self, names: Sequence[str], vector: Tensor, *, is_mean: bool = False) -> Iterator[Tensor]:
        """Yield the part of each parameter in the vector of a round, in the parameter's shape, type and device.

        Args:
            names: the parameters of the round.
            vector: what `difference` returned; with `is_mean`, the mean of a `PendingRound`.
            is_mean: see `vector`.
        """
        first = 0
        for name in names:
            theta = local_tensor(self._parameters[name].data)
            part = theta if is_mean else self.select(name, theta)
            yield vector[first : first + part.numel()].to(theta).view(part.shape)
            first += self.width(name, is_mean=is_mean)
