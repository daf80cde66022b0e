"""Outer optimizer of DiLoCo (arXiv:2311.08105) on this rank's shards; no communication.

The outer weights phi are those after the last round, equal on all sites. A site trains its own weights theta from them.
In a round the sites exchange their differences D = phi - theta; with g, the weighted mean of the differences,

    m = momentum * m + g;  phi = phi - lr * (g + momentum * m if nesterov else m)
    theta = keep_local * theta + (1 - keep_local) * phi.

With lr 1 and momentum 0, phi becomes the mean of the sites' weights. A residual e (error feedback) adds what coding
lost: a site sends code(residual * e + D), and e becomes the difference to what was decoded. Each fragment of the model
has rounds of its own (Streaming DiLoCo, arXiv:2501.18512).

In rounds of pairs (NoLoCo, arXiv:2506.10911, eq. 2 with the signs of its code), g is the mean of two sites, and the
outer weights differ between sites: g + phi - mean(phi) takes the place of g. The last round takes the mean of theta of
all sites.

Where a round is exchanged during the whole next one (CO2, arXiv:2401.16265), a site sets theta to phi when it sends D.
The outer step is then taken on phi and theta alike, so that phi - theta stays what the site has moved since. As phi
has taken an outer step since D was measured, g can be divided by 1 + |that step| / |g|.

Where sites own experts (`optim/owned_experts.py`), a site sends the differences of its own experts alone, and g of an
expert is the difference of its owner; 0 if the owner is no member of the round.

Every operation is element by element, so that shards of any mapping give the same result, but for the blocks of codes.
Each parameter begins a block, so that ranks with the same shard of a parameter decode the same values whatever else
they hold.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from moefold.comm.wire_codes import make_wire_code
from moefold.config.sites import SitesConfig
from moefold.model.local_param import local_tensor
from moefold.optim.outer_round import OuterNorms, PendingRound, bits_to_float, dot, exact_square, float_to_bits, mix
from moefold.optim.owned_experts import select_owned
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
        self.owned = frozenset(experts).intersection(parameters) if settings.owns_experts else frozenset()
        """Parameters of experts that sites own; empty: every site trains all experts."""
        # They come last in the vector of a round.
        self._parameters = {name: parameters[name] for name in sorted(parameters, key=self.owned.__contains__)}
        self._buffers = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self._settings = settings
        self._store = state_store
        self._num_fragments = num_fragments
        self._replicas = {} if replicas is None else replicas
        kinds = [True, settings.momentum > 0, settings.residual > 0]
        self._states = {
            kind: {
                # Of other sites' experts nothing is sent, so that no code loses anything of it.
                name: state_store.zeros(self._own(name, p.data) if kind == "residual" else p.data, p.dtype)
                for name, p in self._parameters.items()
            }
            if is_kept
            else {}
            for kind, is_kept in zip(STATES, kinds, strict=True)
        }
        first = next(iter(self._parameters.values()), None)
        self.dtype = torch.float64 if first is not None and first.dtype == torch.float64 else torch.float32
        """Type of the exchanged differences."""
        self.code = make_wire_code(settings.precision, self.dtype, density=settings.density, values=settings.values)
        """Code of the differences of weights."""
        self.num_rounds = 0
        """Rounds that all their members voted for."""
        self.tokens = [0] * num_fragments
        """Tokens of this site up to the last of these rounds, by fragment."""
        self.pending: PendingRound | None = None
        """A round that is certain and not applied yet; None: no such round."""
        self.last_update = 0.0
        """Norm of the last outer step over all ranks, if `sites.penalty` asks for it."""

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
        return sum(self._width(name) for name in self._names(fragments))

    def num_gathered(self, fragments: Sequence[int]) -> int:
        """Return the elements of owned experts, of which no mean is taken; they are the last of `num_coded`."""
        return sum(self._width(name) for name in self.owned_names(fragments))

    @torch.no_grad()
    def start(self) -> None:
        """Set the outer weights to the present weights, at the start of a run; local."""
        for name, (weights,) in self._visit(list(self._parameters), ["weights"]):
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
        for name, (weights, *residual) in self._visit(self._names(fragments), ["weights", "residual"]):
            value = self._own(name, weights) - self._own(name, local_tensor(self._parameters[name].data))
            if residual:
                value.add_(residual[0], alpha=self._settings.residual)
            flat[first : first + value.numel()].copy_(value.flatten())
            first += self._width(name)
        for buffer in buffers:
            flat[first : first + buffer.numel()].copy_(buffer.flatten())
            first += buffer.numel()
        return flat

    @torch.no_grad()
    def outer_vector(self, fragments: Sequence[int]) -> Tensor:
        """Return the outer weights, placed as the differences of `difference`, on the host [num_coded]."""
        flat = torch.zeros(self.num_coded(fragments), dtype=self.dtype)
        first = 0
        for name, (weights,) in self._visit(self._names(fragments), ["weights"]):
            flat[first : first + weights.numel()].copy_(weights.flatten())
            first += self._width(name)
        return flat

    @torch.no_grad()
    def local_vector(self, fragments: Sequence[int]) -> Tensor:
        """Return the weights theta and the buffers, placed as in `difference`, on the host."""
        flat = self.difference(fragments)
        first = 0
        for name in self._names(fragments):
            theta = local_tensor(self._parameters[name].data)
            flat[first : first + theta.numel()].copy_(theta.flatten())
            first += self._width(name)
        return flat

    @torch.no_grad()
    def merge(self, own: Tensor, mean: Tensor, fragments: Sequence[int]) -> OuterNorms:
        """Set outer weights and weights to a mean of the sites' weights, and the buffers to theirs; local.

        Args:
            own: what `difference` returned for the round.
            mean: the weighted mean of what `local_vector` returned on the sites.
            fragments: the fragments of the round.
        """
        sums = [0.0] * 5
        names = self._names(fragments)
        parts = zip(self._parts(names, own), self._parts(names, mean), strict=True)
        for (name, (weights,)), (own_d, merged) in zip(self._visit(names, ["weights"]), parts, strict=True):
            self._add_norms(sums, name, weights, own_d, weights - merged)
            weights.copy_(merged)
            local_tensor(self._parameters[name].data).copy_(merged)
        self._set_buffers(mean, fragments)
        difference, mean_square, product, outer, averaged = sums
        return OuterNorms(difference, mean_square, product, outer, averaged, 0.0)

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
        names = self._names(fragments)
        for (_, (residual,)), part in zip(self._visit(names, ["residual"]), self._parts(names, lost), strict=True):
            residual.copy_(part)

    def assemble(
        self, fragments: Sequence[int], mean: Tensor, of_members: Tensor | None, members: Sequence[int]
    ) -> Tensor:
        """Return g of a round, on the host, where sites own experts; else the mean itself.

        Args:
            fragments: the fragments of the round.
            mean: the weighted mean of the members' vectors; not read for owned experts.
            of_members: the decoded differences of each member's experts, [members, `num_gathered`]; zeros of a member
                that does not count. None: no experts are owned.
            members: the sites of the round.

        Returns:
            g of the parameters, each with zeros up to a whole block of the code, but of owned experts whole and without
            these zeros, then the means of the buffers.
        """
        if not self.owned or of_members is None:
            return mean
        num_coded = self.num_coded(fragments)
        found = [mean[: num_coded - self.num_gathered(fragments)]]
        first = 0
        for name in self.owned_names(fragments):
            theta = local_tensor(self._parameters[name].data)
            rows = torch.zeros(theta.shape, dtype=self.dtype)
            owned = rows[: len(rows) // self._settings.count]
            for member, values in zip(members, of_members, strict=True):
                part = values[first : first + owned.numel()].view(owned.shape)
                rows[member :: self._settings.count] = part
            first += self._width(name)
            found.append(rows.flatten())
        return torch.cat([*found, mean[num_coded:]])

    @torch.no_grad()
    def put_back(self, fragments: Sequence[int], sent: Tensor) -> None:
        """Move the weights by their difference again, as the round is not applied whose end set them to phi; local.

        Args:
            fragments: the fragments of the round.
            sent: what `difference` returned; the residual has not changed since.
        """
        names = self._names(fragments)
        for (name, residual), part in zip(self._visit(names, ["residual"]), self._parts(names, sent), strict=True):
            own_d = part.sub(residual[0], alpha=self._settings.residual) if residual else part
            local_tensor(self._parameters[name].data).sub_(own_d)

    @torch.no_grad()
    def step(
        self,
        own: Tensor,
        mean: Tensor,
        fragments: Sequence[int] = (0,),
        *,
        keep_local: float = 0.0,
        moves_both: bool = False,
        penalty: float = 1.0,
    ) -> OuterNorms:
        """Take the outer step of a round; local.

        Args:
            own: what `difference` returned for the round.
            mean: what `assemble` returned; `own` itself in a round of one site that owns no experts.
            fragments: the fragments of the round.
            keep_local: share of the present weights that stays; the rest becomes the outer weights.
            moves_both: move the weights as the outer weights are moved, and the buffers by what `mean` has for them.
            penalty: divisor of the mean.
        """
        settings = self._settings
        is_own = mean is own and not keep_local and not settings.residual and not moves_both
        sums = [0.0] * 5
        update_square = 0.0
        names = self._names(fragments)
        visits = self._visit(names, ["weights", "momentum"])
        parts = (self._parts(names, own), self._parts(names, mean, is_mean=True))
        for (name, (weights, *momentum)), own_d, mean_g in zip(visits, *parts, strict=True):
            theta = local_tensor(self._parameters[name].data)
            share = self._replicas.get(name, 1)
            self._add_norms(sums, name, weights, own_d, mean_g)
            if is_own and not settings.has_outer_step:
                # phi - (phi - theta) would round: the mean of one site is its weights.
                weights.copy_(theta)
                continue
            drift = weights - theta if moves_both else None
            update = self._update(mean_g * (1 / penalty) if penalty != 1 else mean_g, momentum)
            if share and settings.penalty:
                update_square += exact_square(settings.lr * update) / share
            weights.add_(update, alpha=-settings.lr)
            if drift is not None:
                theta.copy_(weights - drift)
            else:
                self._take_outer(name, theta, weights, keep_local)
        self._set_buffers(mean, fragments, keep_local, moves_both=moves_both)
        difference, mean_g_square, product, outer, averaged = sums
        return OuterNorms(difference, mean_g_square, product, outer, averaged, update_square)

    def _update(self, mean_g: Tensor, momentum: Sequence[Tensor]) -> Tensor:
        """Return the update of outer weights before the learning rate, and move their momentum, if there is one."""
        settings = self._settings
        if not momentum:
            return mean_g
        momentum[0].mul_(settings.momentum).add_(mean_g)
        if settings.clip:
            momentum[0].clamp_(-settings.clip, settings.clip)
        return mean_g.add(momentum[0], alpha=settings.momentum) if settings.nesterov else momentum[0]

    def owned_names(self, fragments: Sequence[int]) -> list[str]:
        """Return the parameters of experts that sites own, of some fragments."""
        return [name for name in self._names(fragments) if name in self.owned]

    def visit_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield names with this rank's outer weights on the device, to be changed in place."""
        for name, (weights,) in self._visit(names, ["weights"]):
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
        names = self._names(pending.fragments)
        visits = self._visit(names, ["weights"])
        parts = (self._parts(names, pending.own), self._parts(names, pending.mean, is_mean=True))
        for (name, (weights,)), own_d, mean_g in zip(visits, *parts, strict=True):
            yield name, own_d, self._own(name, mean_g), self._own(name, weights), self._replicas.get(name, 1)

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
            **({"last_update.bits": float_to_bits(self.last_update)} if self._settings.penalty else {}),
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
        self.last_update = bits_to_float(state.get("last_update.bits", 0))
        self.pending = None
        if "pending.due" in state:
            fragments = tuple(due(state["pending.step"]))
            entries = self._pending_entries(fragments)
            load(entries)
            mean = self.pending_mean(entries)
            own = self._own_part(fragments, mean)
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
        for _, residual in self._visit(names, ["residual"]):
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
        names = self._names(fragments)
        parts = (None,) * len(names) if mean is None else self._parts(names, mean, is_mean=True)
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
            padding = self._width(name, is_mean=True) - len(values) if name in self._parameters else 0
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

    def _add_norms(self, sums: list[float], name: str, weights: Tensor, own: Tensor, mean: Tensor) -> None:
        """Add the part of a parameter to the sums of `OuterNorms`, but for the update."""
        if share := self._replicas.get(name, 1):
            zero = own.new_zeros(1)
            d, g = (zero, zero) if name in self.owned else (own, mean)
            for index, (x, y) in enumerate(((own, own), (g, g), (d, g), (self._own(name, weights),) * 2, (d, d))):
                sums[index] += dot(x, y) / share

    def _set_buffers(
        self, mean: Tensor, fragments: Sequence[int], keep_local: float = 0.0, *, moves_both: bool = False
    ) -> None:
        first = self._num_in_mean(fragments)
        for _, buffer in self._buffers_of(fragments):
            part = mean[first : first + buffer.numel()].view(buffer.shape).to(buffer)
            first += buffer.numel()
            if moves_both:
                buffer.add_(part)
            else:
                mix(buffer, part, keep_local)

    def _owner_state(self) -> dict[str, int]:
        settings = self._settings
        return {EXPERT_OWNERS: settings.count, EXPERT_OWNER: settings.number} if settings.owns_experts else {}

    def _own(self, name: str, tensor: Tensor) -> Tensor:
        """Return the rows of this site's experts of a parameter that sites own; another one as it is."""
        return select_owned(tensor, self._settings.count, self._settings.number) if name in self.owned else tensor

    def _width(self, name: str, *, is_mean: bool = False) -> int:
        """Return the elements of a parameter in the vector of a round: whole blocks of the code.

        Args:
            name: name of the parameter.
            is_mean: the vector is what `assemble` returns, which has all owned experts.
        """
        local = local_tensor(self._parameters[name].data)
        if name in self.owned and is_mean:
            return local.numel()
        return -(-self._own(name, local).numel() // self.code.block) * self.code.block

    def _num_in_mean(self, fragments: Sequence[int]) -> int:
        """Return the elements of what `assemble` returns that are not of buffers."""
        return sum(self._width(name, is_mean=True) for name in self._names(fragments))

    def _own_part(self, fragments: Sequence[int], mean: Tensor) -> Tensor:
        """Return the elements of what `assemble` returned that this site would send."""
        if not self.owned:
            return mean.clone()
        names = self._names(fragments)
        found = []
        for name, part in zip(names, self._parts(names, mean, is_mean=True), strict=True):
            values = self._own(name, part).flatten().to("cpu", self.dtype)
            found += [values, values.new_zeros(self._width(name) - len(values))]
        return torch.cat([*found, mean[self._num_in_mean(fragments) :]])

    def _take_outer(self, name: str, theta: Tensor, weights: Tensor, keep_local: float) -> None:
        """Let the outer weights replace a share of the site's own; all of experts that it does not train."""
        kept = self._own(name, theta)
        if name in self.owned and keep_local:
            kept = kept.clone()
            theta.copy_(weights)
            mix(kept, self._own(name, weights), keep_local)
            self._own(name, theta).copy_(kept)
        else:
            mix(theta, weights, keep_local)

    def _names(self, fragments: Sequence[int]) -> list[str]:
        return [name for name in self._parameters if fragment_of(name, self._num_fragments) in fragments]

    def _buffers_of(self, fragments: Sequence[int]) -> list[tuple[str, Tensor]]:
        return [item for item in self._buffers.items() if fragment_of(item[0], self._num_fragments) in fragments]

    def _visit(self, names: Sequence[str], kinds: Sequence[str]) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield each parameter's name with its local states on the device, to be changed in place."""
        states = [[self._states[kind][name] for kind in kinds if self._states[kind]] for name in names]
        yield from zip(names, self._store.prefetch(states), strict=True)

    def _parts(self, names: Sequence[str], vector: Tensor, *, is_mean: bool = False) -> Iterator[Tensor]:
        """Yield the part of each parameter in the vector of a round, in the parameter's shape, type and device.

        Args:
            names: the parameters of the round.
            vector: what `difference` returned, with a site's own experts; with `is_mean`, what `assemble` returned.
            is_mean: see `vector`.
        """
        first = 0
        for name in names:
            theta = local_tensor(self._parameters[name].data)
            part = theta if is_mean else self._own(name, theta)
            yield vector[first : first + part.numel()].to(theta).view(part.shape)
            first += self._width(name, is_mean=is_mean)
