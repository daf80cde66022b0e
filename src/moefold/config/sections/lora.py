"""The [lora] section: low-rank adapters, described in docs/lora.md."""

from dataclasses import dataclass
from typing import Annotated

from moefold.config.base.field import POSITIVE, VerifyAs, at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters of frozen weights ([lora.md](lora.md), arXiv:2106.09685)."""

    rank: Annotated[int, at_least(0, "0: no adapters")] = 0
    """Rank of the adapters, the only trained weights: W x + (alpha / rank) B A x for each matrix W of `targets`. All
    other weights are frozen. 0: no adapters, all weights are trained."""
    alpha: Annotated[float, POSITIVE] = 16.0
    """Scale of the adapters: B A is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], VerifyAs.START] = ("all",)
    """Matrices with adapters. A part of the model: "attention", "dense_mlp", "shared_experts", "experts" (an adapter
    for each expert). A matrix: "wq", "w_up". A matrix of a part: "experts.w_up". "all": every matrix of these parts."""
    init_from: Annotated[str, VerifyAs.START] = ""
    """Initial adapters: a checkpoint with adapters of the same rank and targets, or a run (its newest checkpoint).
    Empty: new adapters, which initially change nothing (B is zero)."""

    @property
    def trains_adapters_only(self) -> bool:
        """Return whether only low-rank adapters learn."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor of B A: alpha / rank."""
        return self.alpha / self.rank
