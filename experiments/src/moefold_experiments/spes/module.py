"""Outer optimizer of sites that own experts (SPES, arXiv:2602.11543).

A site sends the differences of its own experts alone (`owned_experts.py`), and g of an expert is the difference of its
owner; 0 if the owner is no member of the round.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moefold.comm.site_links import ExchangeResult
from moefold.config.sections.sites import SitesConfig
from moefold.model.local_param import local_tensor
from moefold.optim.outer import OuterOptimizer
from moefold.optim.outer_round import OuterNorms, PendingRound, SentVector, mix
from moefold.optim.states import StateStore
from moefold_experiments.spes.expert_merging import ExpertMerging
from moefold_experiments.spes.owned_experts import select_owned
from moefold_experiments.spes.part import SPES


class OuterOfOwners(OuterOptimizer):
    """Outer weights of all experts, and momentum and residual; see the base class.

    `owned` has the names of the parameters of experts, which come last in the vector of a round.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        settings: SitesConfig,
        state_store: StateStore,
        *,
        experts: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        assert isinstance(settings.method, SPES)
        self._method = settings.method
        self.owned = frozenset(experts).intersection(parameters) if settings.owns_experts else frozenset()
        ordered = {name: parameters[name] for name in sorted(parameters, key=self.owned.__contains__)}
        super().__init__(ordered, buffers, settings, state_store, experts=experts, **kwargs)

    def select(self, name: str, tensor: Tensor) -> Tensor:
        """Return a view of the rows of this site's experts. Other parameters are returned unchanged."""
        return select_owned(tensor, self._settings.count, self._settings.number) if name in self.owned else tensor

    def width(self, name: str, *, is_mean: bool = False) -> int:
        """Return the elements of a parameter in the vector of a round; the mean has all experts, without zeros."""
        if name in self.owned and is_mean:
            return local_tensor(self._parameters[name].data).numel()
        return super().width(name)

    def is_averaged(self, name: str) -> bool:
        """Return whether the sites take a mean of a parameter: not of experts."""
        return name not in self.owned

    def owned_names(self, fragments: Sequence[int]) -> list[str]:
        """Return the parameters of experts that sites own, of some fragments."""
        return [name for name in self.names(fragments) if name in self.owned]

    def num_gathered(self, fragments: Sequence[int]) -> int:
        """Return the elements of owned experts, of which no mean is taken; they are the last of `num_coded`."""
        return sum(self.width(name) for name in self.owned_names(fragments))

    def vector_to_send(self, fragments: Sequence[int], delta: Tensor, *, is_last: bool) -> SentVector:
        """Return the differences that the site sends. For experts, only the owned ones."""
        return SentVector(delta, self.num_coded(fragments), self.num_gathered(fragments))

    def with_received_values(
        self, round_: PendingRound, sent: SentVector, exchanged: ExchangeResult, members: Sequence[int]
    ) -> PendingRound:
        """Return the round with the differences of each expert's owner."""
        mean = self.assemble(round_.fragments, exchanged.mean, exchanged.of_members, members)
        return replace(round_, mean=mean)

    def assemble(
        self, fragments: Sequence[int], mean: Tensor, of_members: Tensor | None, members: Sequence[int]
    ) -> Tensor:
        """Return g of a round, on the host.

        Args:
            fragments: the fragments of the round.
            mean: the weighted mean of the members' vectors; not read for owned experts.
            of_members: the decoded differences of each member's experts, [members, `num_gathered`]; zeros of a member
                that does not count. None: this rank holds no experts.
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
            first += self.width(name)
            found.append(rows.flatten())
        return torch.cat([*found, mean[num_coded:]])

    def own_part(self, fragments: Sequence[int], mean: Tensor) -> Tensor:
        """Return the elements of the mean of a round that this site would send."""
        names = self.names(fragments)
        found = []
        for name, part in zip(names, self.vector_slices(names, mean, is_mean=True), strict=True):
            values = self.select(name, part).flatten().to("cpu", self.dtype)
            found += [values, values.new_zeros(self.width(name) - len(values))]
        return torch.cat([*found, mean[sum(self.width(name, is_mean=True) for name in names) :]])

    def move(self, name: str, theta: Tensor, weights: Tensor, update: Tensor, keep_local: float) -> None:
        """Move the outer weights.

        They replace a share of the weights of the site's own experts, and the whole weights of other experts.
        """
        if name not in self.owned or not keep_local:
            super().move(name, theta, weights, update, keep_local)
            return
        kept = self.select(name, theta).clone()
        weights.add_(update, alpha=-self._settings.lr)
        theta.copy_(weights)
        mix(kept, self.select(name, weights), keep_local)
        self.select(name, theta).copy_(kept)

    def apply(self, round_: PendingRound, groups: Any, *, is_overlapped: bool) -> tuple[OuterNorms, dict[str, float]]:
        """Take the outer step, and merge similar experts if that is due; collective over the stage then."""
        norms, metrics = super().apply(round_, groups, is_overlapped=is_overlapped)
        if fragments := self.merged_fragments(round_):
            share = self.merge_share(round_.step)
            ExpertMerging(groups.moe.ep, groups.moe.edp, groups.attn.stage).run(self, fragments, share)
            metrics["merged"] = share
        return norms, metrics

    def merged_fragments(self, round_: PendingRound) -> tuple[int, ...]:
        """Return the fragments whose experts are merged after a round; empty if the share is 0."""
        if self.merge_share(round_.step) == 0:
            return ()
        every, count = self._settings.every, self._num_fragments
        return tuple(p for p in round_.fragments if (round_.step - p * every // count) % self._method.merge_every == 0)

    def merge_share(self, step: int) -> float:
        """Return the share of the merging of experts after a step, which falls linearly to 0 at `merge_until`."""
        method = self._method
        return method.merge_experts * max(0.0, 1 - step / method.merge_until) * self._settings.owns_experts
