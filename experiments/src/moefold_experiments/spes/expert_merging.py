"""Merging of similar experts in the warm-up of sites that own experts (SPES, arXiv:2602.11543).

Each expert E of a layer becomes E + share * mean(E_d - E) over the 4 other experts E_d whose w_gate is most similar to
its own, by the cosine. Its other matrices and its biases move towards the matrices and biases of the same E_d.

Experts are divided among ranks. For one matrix of one layer after the other, an all-to-all exchanges whole experts for
parts of all experts, so that a rank needs the memory of its own shard three times, and no rank has all experts whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_sum, all_to_all
from moefold.comm.groups import Group
from moefold_experiments.spes.part import NUM_SIMILAR

if TYPE_CHECKING:
    from moefold_experiments.spes.module import OuterOfOwners

GATE = ".w_gate"
"""End of the name of the matrix by which experts are compared."""


@dataclass(frozen=True)
class ExpertMerging:
    """Merging of the outer weights of experts, and of the site's own weights with them; collective over the stage.

    It follows a round after which the site's weights are the outer weights.
    """

    ep: Group
    edp: Group
    stage: Group
    """The ranks that together have the experts of a layer."""

    @torch.no_grad()
    def run(self, outer: "OuterOfOwners", fragments: Sequence[int], share: float) -> None:
        """Merge the experts of fragments.

        Args:
            outer: has the outer weights.
            fragments: the fragments.
            share: alpha, in [0, 1].
        """
        names = outer.owned_names(fragments)
        for gate in [name for name in names if name.endswith(GATE)]:
            num_experts = outer.weights[gate].shape[0]
            for _, weights in outer.visit_weights([gate]):
                similar_EK = self._similar(weights, num_experts)
            layer = gate.removesuffix(GATE)
            in_layer = [name for name in names if name.rpartition(".")[0] == layer]
            for _, weights in outer.visit_weights(in_layer):
                parts_EN = self._to_parts(weights, num_experts)
                mean_EN = torch.zeros_like(parts_EN)
                for column_E in similar_EK.unbind(1):
                    mean_EN.add_(parts_EN[column_E], alpha=1 / NUM_SIMILAR)
                self._from_parts(parts_EN.lerp_(mean_EN, share), weights)
            outer.take_weights(in_layer)

    def _similar(self, weights: Tensor, num_experts: int) -> Tensor:
        """Return the experts most similar to each, ascending, int64 [E, NUM_SIMILAR], equal on all ranks."""
        parts_EN = self._to_parts(weights, num_experts).double()
        dots_EE = all_reduce_sum(parts_EN @ parts_EN.T, self.stage)
        norms_E = dots_EE.diagonal().sqrt()
        # An expert of zeros has no direction: its cosine counts 0.
        cosines_EE = dots_EE / (norms_E[:, None] * norms_E).clamp(min=torch.finfo(torch.float64).tiny)
        return cosines_EE.fill_diagonal_(-torch.inf).topk(NUM_SIMILAR, 1).indices.sort(1).values

    def _groups(self, weights: Tensor, num_experts: int) -> tuple[Group, ...]:
        """Return the groups among whose members the experts are divided, the innermost first."""
        return (self.ep,) if len(weights) * self.ep.size == num_experts else (self.edp, self.ep)

    def _to_parts(self, weights: Tensor, num_experts: int) -> Tensor:
        """Exchange this rank's experts, [E/n, ...], for its part of the elements of all experts, [E, elements/n]."""
        parts = weights.flatten(1)
        for group in self._groups(weights, num_experts):
            num_rows, width = parts.shape
            padded = torch.nn.functional.pad(parts, (0, -width % group.size))
            by_member = padded.view(num_rows, group.size, -1).transpose(0, 1).contiguous()
            parts = all_to_all(by_member, group, [1] * group.size, [1] * group.size).flatten(0, 1)
        return parts

    def _from_parts(self, parts: Tensor, weights: Tensor) -> None:
        """Write the elements of all experts back to the ranks that have the experts whole."""
        groups = self._groups(weights, len(parts))
        widths = [weights[0].numel()]
        for group in groups[:-1]:
            widths.append(-(-widths[-1] // group.size))
        for group, width in zip(reversed(groups), reversed(widths), strict=True):
            by_member = parts.view(group.size, len(parts) // group.size, -1)
            received = all_to_all(by_member, group, [1] * group.size, [1] * group.size)
            parts = received.transpose(0, 1).flatten(1)[:, :width].contiguous()
        weights.copy_(parts.view(weights.shape))
