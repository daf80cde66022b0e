"""SparseLoCo (arXiv:2508.15706), where every is 15 to 250: few differences in few bits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from moefold.config.base.field import Bound, VerifyAs
from moefold.config.groups.site_method import SiteMethodPart
from moefold.message_text import Problem

if TYPE_CHECKING:
    import torch

    from moefold.config.sections.sites import SitesConfig
    from moefold.cost.site_traffic import CodedSize
    from moefold_experiments.sparseloco.module import SparseCode

CHUNK = 4096
"""Elements of which the largest are sent; an index has 12 bits."""
NUM_BINS = 4
"""Bins of values of 2 bits, whose means are sent for each chunk."""


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(SiteMethodPart):
    """Send the largest 64 of 4096 differences in 2 bits, and add the others to the next round."""

    interface: ClassVar[int] = 1
    coding_s: ClassVar[tuple[float, float]] = (10e-9, 0.7e-9)

    density: Annotated[
        float, Bound("must lie between 1/4096 and 1", lambda part: 1 / 4096 <= part <= 1), VerifyAs.ROUNDS
    ] = 1 / 64
    """Share of each 4096 differences that is sent, the differences of the largest magnitudes (top-k), with indices of
    12 bits."""
    bits: Annotated[Literal[32, 8, 2], VerifyAs.ROUNDS] = 2
    """Bits of a value that is sent. 32: float32 (float64 in runs of run.dtype float64); 8: int8 with a scale for each
    4096; 2: the mean of one of four bins."""

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {"lr": 1.0, "momentum": 0.0, "residual": 0.95}

    def check(self, sites: "SitesConfig") -> Iterator[Problem]:  # type: ignore[override]
        """Yield what is incompatible with the code."""
        if sites.precision != "float32":
            yield Problem(
                "sites.precision",
                sites.precision,
                f"is not what sites.method='sparseloco' sends, which are values of {self.bits} bits",
                f"leave it out, and choose {self.key}.bits=8 or 2",
            )
        if sites.residual and sites.momentum:
            yield Problem(
                "sites.momentum",
                sites.momentum,
                f"and sites.residual={sites.residual:g} with sites.method='sparseloco' would count a difference twice, "
                "as the residual is sent later",
                "choose momentum=0",
            )

    @property
    def num_kept(self) -> int:
        """Return the elements of a chunk that are sent."""
        return max(1, round(self.density * CHUNK))

    def wire_format(self, itemsize: int) -> "CodedSize":
        """Return the size of indices, values and table of each chunk."""
        from moefold.cost.site_traffic import SCALE_BYTES, CodedSize

        kept = self.num_kept
        index_bytes = 3 * -(-kept // 2)
        sizes = {32: itemsize * kept, 8: kept + SCALE_BYTES, 2: -(-kept // 4) + SCALE_BYTES * NUM_BINS}
        return CodedSize(0, CHUNK, index_bytes + sizes[self.bits])

    def wire_code(self, dtype: "torch.dtype") -> "SparseCode":
        """Return the code of the differences."""
        from moefold_experiments.sparseloco.module import SparseCode

        return SparseCode(self, dtype)
