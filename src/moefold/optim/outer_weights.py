"""States of an outer optimizer on this rank's shards: their places in the vector of a round, and in checkpoints."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from moefold.comm.wire_codes import make_wire_code
from moefold.config.sections.sites import SitesConfig
from moefold.model.local_param import local_tensor
from moefold.optim.outer_round import PendingRound
from moefold.optim.states import StateStore
from moefold.topology.fragments import fragment_of

STATES = ("weights", "momentum", "residual")
"""Names of the states in checkpoints."""
FragmentsDue = Callable[[int], Sequence[int]]
PENDING = "outer.pending."
"""Prefix of the checkpoint entries of a mean that is received and not applied yet."""
EXPERT_OWNERS = "experts.owners"
"""Key of `OuterWeights.state`: the number of sites that own experts."""
EXPERT_OWNER = "experts.owner"
"""Key of `OuterWeights.state`: the site whose experts have moments and residual in the checkpoint."""


class OuterWeights:
    """Outer weights, momentum and residual of the trained parameters. All methods are local.

    Floating-point buffers (the expert bias) have no outer weights: the sites take their mean. Integer buffers (token
    counts of the last batch) stay unchanged, like the moments of the optimizer.

    Args:
        parameters: the trained parameters of this rank, by name.
        buffers: the buffers of this rank, by name.
        settings: the section [sites].
        state_store: memory of the states between rounds.
        replicas: number of ranks that hold the same shard of a parameter, by name, or 1 if absent. 0: another rank
            counts the parameter.
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
                # Values that are not sent have no coding error.
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
        """A round that is certain and not applied yet, or None."""

    def select(self, name: str, tensor: Tensor) -> Tensor:
        """Return a view of the rows of a parameter that this site trains and sends: all of them."""
        return tensor

    @property
    def weights(self) -> dict[str, Tensor]:
        """Outer weights phi by parameter, sharded as the parameter."""
        return self._states["weights"]

    @property
    def residual(self) -> dict[str, Tensor]:
        """Residual e by parameter, only for the site's own experts, or empty without a residual."""
        return self._states["residual"]

    @torch.no_grad()
    def start(self) -> None:
        """Set the outer weights to the present weights, at the start of a run. It does not communicate."""
        for name, (weights,) in self.visit(list(self._parameters), ["weights"]):
            weights.copy_(local_tensor(self._parameters[name].data))

    def num_coded(self, fragments: Sequence[int]) -> int:
        """Return the elements of this rank's differences of weights, which come first in the vector of a round."""
        return sum(self.width(name) for name in self.names(fragments))

    def names(self, fragments: Sequence[int]) -> list[str]:
        """Return the parameters of some fragments, in the order of the vector of a round."""
        return [name for name in self._parameters if fragment_of(name, self._num_fragments) in fragments]

    def _buffers_of(self, fragments: Sequence[int]) -> list[tuple[str, Tensor]]:
        return [item for item in self._buffers.items() if fragment_of(item[0], self._num_fragments) in fragments]

    def width(self, name: str, *, is_mean: bool = False) -> int:
        """Return the number of elements of a parameter in the vector of a round: whole blocks of the code.

        Args:
            is_mean: True: the vector is the mean of a `PendingRound`. False: it is the result of `difference`.
        """
        numel = self.select(name, local_tensor(self._parameters[name].data)).numel()
        return -(-numel // self.code.block) * self.code.block

    def _num_in_mean(self, fragments: Sequence[int]) -> int:
        """Return the number of elements of the mean of a round without buffers."""
        return sum(self.width(name, is_mean=True) for name in self.names(fragments))

    def own_part(self, fragments: Sequence[int], mean: Tensor) -> Tensor:
        """Return the elements of the mean of a round that this site would send."""
        return mean.clone()

    def visit(self, names: Sequence[str], kinds: Sequence[str]) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the name of each parameter and its local states on the device, which the caller changes in place."""
        states = [[self._states[kind][name] for kind in kinds if self._states[kind]] for name in names]
        yield from zip(names, self._store.prefetch(states), strict=True)

    def vector_slices(self, names: Sequence[str], vector: Tensor, *, is_mean: bool = False) -> Iterator[Tensor]:
        """Yield the slice of each parameter in the vector of a round, in the parameter's shape, type and device.

        Args:
            is_mean: True: the vector is the mean of a `PendingRound`. False: it is the result of `difference`.
        """
        first = 0
        for name in names:
            theta = local_tensor(self._parameters[name].data)
            like = theta if is_mean else self.select(name, theta)
            yield vector[first : first + like.numel()].to(theta).view(like.shape)
            first += self.width(name, is_mean=is_mean)

    def buffer_slices(self, mean: Tensor, fragments: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each buffer with its slice of the mean of a round."""
        first = self._num_in_mean(fragments)
        for _, buffer in self._buffers_of(fragments):
            yield buffer, mean[first : first + buffer.numel()].view(buffer.shape).to(buffer)
            first += buffer.numel()

    def visit_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield names with this rank's outer weights on the device, to be changed in place."""
        for name, (weights,) in self.visit(names, ["weights"]):
            yield name, weights

    @torch.no_grad()
    def take_weights(self, names: Sequence[str]) -> None:
        """Set parameters to their outer weights. It does not communicate."""
        for name, weights in self.visit_weights(names):
            local_tensor(self._parameters[name].data).copy_(weights)

    @torch.no_grad()
    def swap_weights(self) -> bool:
        """Exchange weights and outer weights, to evaluate the outer weights. Return whether any differed."""
        differs = False
        for name, weights in self.visit_weights(list(self._parameters)):
            theta = local_tensor(self._parameters[name].data)
            differs |= not torch.equal(theta, weights)
            present = theta.clone()
            theta.copy_(weights)
            weights.copy_(present)
        return differs

    def state(self) -> dict[str, int]:
        """Return the part of the state that is not a tensor."""
        tokens = {f"tokens.{fragment}": count for fragment, count in enumerate(self.tokens)}
        owner = {EXPERT_OWNERS: self._settings.count, EXPERT_OWNER: self._settings.number}
        return {
            "rounds": self.num_rounds,
            **tokens,
            **{kind: 1 for kind in STATES if self._states[kind]},
            **(owner if self._settings.owns_experts else {}),
            **({} if self.pending is None else {"pending.step": self.pending.step, "pending.due": self.pending.due}),
        }

    def restore(self, state: Mapping[str, int], load: Callable[[dict[str, Tensor]], None], due: FragmentsDue) -> None:
        """Restore the state of a checkpoint. Collective if `load` is.

        A state that the checkpoint lacks begins as at the start of a run.

        Args:
            state: result of `state`.
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
            delta = self.own_part(fragments, mean)
            self.pending = PendingRound(state["pending.step"], state["pending.due"], fragments, delta, mean)

    @torch.no_grad()
    def adopt(self, num_rounds: int, tokens: int) -> None:
        """Continue from outer weights and momentum that were just written, without communication.

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

    def checkpoint_entries(self) -> dict[str, Tensor]:
        """Return this rank's shards of all checkpoint entries, entries of a pending round included."""
        pending = self.pending
        return self.entries() | ({} if pending is None else self._pending_entries(pending.fragments, pending.mean))

    def entries(self, kinds: Sequence[str] = STATES) -> dict[str, Tensor]:
        """Return this rank's shards of the checkpoint entries, by mapping-independent names. It copies nothing.

        Args:
            kinds: names of the states.
        """
        return {f"outer.{kind}.{name}": tensor for kind in kinds for name, tensor in self._states[kind].items()}

    def states_on_device(self) -> list[Tensor]:
        """Return the states that are on the device between rounds."""
        return [tensor for tensor in self.entries().values() if not self._store.is_offloaded(tensor)]

    def pending_mean(self, entries: Mapping[str, Tensor]) -> Tensor:
        """Return the mean of loaded entries, on the host."""
        pieces = [torch.empty(0, dtype=self.dtype)]
        for entry, tensor in entries.items():
            values = local_tensor(tensor).flatten().to("cpu", self.dtype)
            name = entry.removeprefix(PENDING)
            padding = self.width(name, is_mean=True) - len(values) if name in self._parameters else 0
            pieces += [values, values.new_zeros(padding)]
        return torch.cat(pieces)

    def _pending_entries(self, fragments: Sequence[int], mean: Tensor | None = None) -> dict[str, Tensor]:
        """Return the checkpoint entries of a mean that is not applied yet, sharded as the parameters.

        Args:
            fragments: the fragments of the round.
            mean: the mean. None means entries to load a checkpoint into.
        """
        entries = {}
        names = self.names(fragments)
        pieces = (None,) * len(names) if mean is None else self.vector_slices(names, mean, is_mean=True)
        for name, values in zip(names, pieces, strict=True):
            tensor = torch.zeros_like(self._parameters[name].data)
            if values is not None:
                local_tensor(tensor).copy_(values)
            entries[f"{PENDING}{name}"] = tensor
        first = self._num_in_mean(fragments)
        for name, buffer in self._buffers_of(fragments):
            tensor = torch.zeros(buffer.shape, dtype=self.dtype)
            if mean is not None:
                tensor.copy_(mean[first : first + buffer.numel()].view(buffer.shape))
            first += buffer.numel()
            entries[f"{PENDING}{name}"] = tensor
        return entries
