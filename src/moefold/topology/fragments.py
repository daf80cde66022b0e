"""Fragments of a model: the parts that the sites exchange at different steps (Streaming DiLoCo, arXiv:2501.18512)."""

import re
from bisect import bisect_left
from dataclasses import dataclass

from moefold.config.model import ModelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig

PROBED_ROUNDS = 10
"""Rounds from one comparison of the routing to the next."""
_LAYER = re.compile(r"layers\.(\d+)\.")


def num_fragments(num_layers: int, fragment_layers: int) -> int:
    """Return the number of fragments. With `fragment_layers` of 0 there is one."""
    return -(-num_layers // fragment_layers) if fragment_layers else 1


def fragment_of(name: str, count: int) -> int:
    """Return the fragment of a parameter or buffer.

    Layers, multi-token prediction layers included, are strided, layer l in fragment l mod count, so that each fragment
    has early and late layers. Embedding and head are in the last fragment, which has the fewest layers.
    """
    layer = _LAYER.match(name)
    return int(layer[1]) % count if layer else count - 1


def recipe_fragments(model: ModelConfig, sites: SitesConfig) -> int:
    """Return the number of fragments of a recipe."""
    return num_fragments(model.num_layers, sites.fragment_layers)


@dataclass(frozen=True)
class RoundCalendar:
    """Steps after which the sites of a run exchange fragments."""

    run: RunConfig
    model: ModelConfig
    sites: SitesConfig

    def fragments_due(self, step: int) -> tuple[int, ...]:
        """Return the fragments of the round after a step, counted from 1, or empty if there is no round.

        Fragment p of P has a round every `sites.every` steps, at an offset of p * every // P steps. After the last step
        of the run, all fragments have a round.
        """
        count = recipe_fragments(self.model, self.sites)
        if not self.sites.is_active:
            return ()
        if step == self.run.steps:
            return tuple(range(count))
        if step <= self.sites.first:
            return ()
        return tuple(p for p in range(count) if step % self.sites.every == p * self.sites.every // count)

    def rounds_until(self, step: int) -> int:
        """Return the number of rounds up to a step, including the round after the step."""
        if not self.sites.is_active:
            return 0
        count = recipe_fragments(self.model, self.sites)
        last = min(step, self.run.steps - 1)
        num_rounds = 0
        if last > self.sites.first:
            for offset in (p * self.sites.every // count for p in range(count)):
                num_rounds += (last - offset) // self.sites.every - (self.sites.first - offset) // self.sites.every
        return num_rounds + (step >= self.run.steps)

    def step_of_round(self, index: int) -> int:
        """Return the step after which a round is due on this site, with rounds counted from 1. 0: before all rounds."""
        return bisect_left(range(self.run.steps + 1), index, key=self.rounds_until)

    def round_order(self) -> list[int]:
        """Return what sites must agree on for equal rounds: their number, and the first round's fragments."""
        first = self.fragments_due(self.step_of_round(1))
        return [self.rounds_until(self.run.steps), *first]

    def is_probed(self, step: int) -> bool:
        """Return whether the sites compare their routing in the round after a step.

        They do in the first round of fragment 0, in every `PROBED_ROUNDS`-th after it, and after the last step.
        """
        if 0 not in self.fragments_due(step) or not self.model.has_moe_layers or self.sites.count == 1:
            return False
        # Rounds are counted, as sites may take other numbers of steps between them.
        return (
            step == self.run.steps
            or (self.rounds_until(step) - 1) // recipe_fragments(self.model, self.sites) % PROBED_ROUNDS == 0
        )


def shortest_gap(count: int, interval: int) -> int:
    """Return the fewest steps between the rounds of two fragments."""
    return interval // count
