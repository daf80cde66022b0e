"""The [sites] section: training across jobs that exchange weights rarely, described in docs/sites.md."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from moefold.config.base.field import BELOW_ONE, POSITIVE, SAME_RUN, ZERO_TO_ONE, Bound, ReadIf, VerifyAs, at_least
from moefold.config.base.part import KindOf, Part, Section

DEFAULT_EVERY = 30
READ_IF_ROUNDS = ReadIf("sites.count sites.lr sites.momentum")


@dataclass(frozen=True, kw_only=True, slots=True)
class SitesConfig(Section):
    """Jobs that train one model and exchange weights every few steps, by an outer optimizer ([sites.md](sites.md))."""

    count: Annotated[int, Bound("must lie between 1 and 1024", lambda count: 1 <= count <= 1024), VerifyAs.FILES] = 1
    """Sites of the run. 1: no exchange. Method "diloco" still takes outer steps."""
    number: Annotated[
        int,
        Bound("must be at least 0, or -1 (all sites on this machine)", lambda n: n >= -1),
        ReadIf("sites.count"),
        VerifyAs.FILES,
    ] = -1
    """Number of this job's site, from 0. -1: `moefold train` starts all sites on this machine, each with the run folder
    run.dir/site-N."""
    meet: Annotated[str, ReadIf("sites.count"), VerifyAs.FILES, SAME_RUN] = ""
    """HOST:PORT of `moefold meet`, the meeting point of the sites. May be empty only with number -1."""
    secret: Annotated[str, ReadIf("sites.count"), ReadIf("sites.number"), VerifyAs.FILES, SAME_RUN] = ""
    """File with the shared secret that signs every message to and from the meeting point. Empty: the environment
    variable MOEFOLD_SITES_SECRET. Required unless the meeting point is on this machine."""
    method: Annotated[str | Part, KindOf("site_method"), READ_IF_ROUNDS] = "mean"
    """Operation of a round. It also sets keys that the recipe leaves out ([sites.md](sites.md#methods)). Further kinds
    are [experiments](experiments/index.md)."""
    every: Annotated[int, at_least(1), READ_IF_ROUNDS] = DEFAULT_EVERY
    """Steps between two rounds, in which the sites exchange the differences of their weights since the last round. It
    may differ between sites, in proportion to run.steps: a slow site takes fewer steps."""
    first: Annotated[int, at_least(0), READ_IF_ROUNDS] = 0
    """No round up to this step. run.steps: a single one, after the last step. The last step always ends with a
    round."""
    fragment_layers: Annotated[int, at_least(0, "0: all layers"), READ_IF_ROUNDS] = 0
    """Layers of a fragment, strided over the model. Each fragment has a round every `every` steps, at a different step.
    0: one fragment with all layers."""
    overlap: Annotated[int, at_least(0, "0: wait for each round"), READ_IF_ROUNDS] = 0
    """Steps of training during the exchange of a fragment: below every / fragments, and equal to every if the method
    exchanges a round during the whole next round (co2)."""
    keep_local: Annotated[float, ZERO_TO_ONE, ReadIf("sites.overlap")] = 0.0
    """Share of a site's own weights that stays when an exchanged fragment is applied (overlap above 0)."""
    precision: Annotated[Literal["float32", "bfloat16", "int8", "fp4"], ReadIf("sites.count")] = "float32"
    """Number format of sent values. int8 and fp4 (sign and exponent) have a float32 scale for each 256 values. Sums are
    float32. float32: float64 in runs of run.dtype float64."""
    residual: Annotated[float, ZERO_TO_ONE, ReadIf("sites.count")] = 0.0
    """Factor of the coding error that is added to the next round (error feedback). 0: no feedback."""
    lr: Annotated[float, POSITIVE] = 1.0
    """Learning rate of the outer step."""
    momentum: Annotated[float, BELOW_ONE] = 0.0
    """Momentum of the outer step. 0: none."""
    nesterov: Annotated[bool, ReadIf("sites.momentum")] = True
    """Nesterov momentum in the outer step. False: heavy-ball momentum."""
    moments: Annotated[Literal["keep", "average", "reset"], READ_IF_ROUNDS] = "keep"
    """Moments of the inner optimizer after a round: keep the site's own, average over the sites (sent in full), or
    reset to zero."""
    weigh: Annotated[Literal["tokens", "even"], ReadIf("sites.count")] = "tokens"
    """Weights of the sites in a mean: tokens since their last round, or equal weights."""
    quorum: Annotated[int, at_least(0, "0: more than half of sites.count"), ReadIf("sites.count"), VerifyAs.FILES] = 0
    """Minimum number of sites of a round, which is skipped if there are fewer. 0: more than half of count."""
    grace_s: Annotated[float, at_least(0, "0: from past rounds"), ReadIf("sites.count"), VerifyAs.FILES, SAME_RUN] = 0.0
    """Time that a round with a quorum waits for late sites, counted from the first site. The round then continues
    without them. 0: from the delays of past rounds, timeout_s in the first rounds. The last round waits timeout_s."""
    timeout_s: Annotated[float, POSITIVE, ReadIf("sites.count"), VerifyAs.FILES, SAME_RUN] = 60.0
    """Maximum wait for a site in a round, and for a stuck exchange. The round continues without it, or is skipped."""

    @property
    def is_active(self) -> bool:
        """Return whether the run has an outer step."""
        return self.count > 1 or self.has_outer_step

    @property
    def part(self) -> Any:
        """Method, a `SiteMethodPart`."""
        return self.method

    @property
    def has_outer_step(self) -> bool:
        """Return whether the outer step differs from the mean of the sites' weights."""
        return self.lr != 1.0 or self.momentum > 0 or bool(self.part.has_outer_step)

    @property
    def owns_experts(self) -> bool:
        """Return whether each site trains its own experts."""
        return self.count > 1 and bool(self.part.owns_experts)

    @property
    def num_expert_owners(self) -> int:
        """Return the number of sites among which the experts of a layer are divided. 1: each site trains all."""
        return self.count if self.owns_experts else 1

    @property
    def num_states(self) -> int:
        """Return the number of tensors that the outer optimizer keeps for each weight, without the residual."""
        return (1 + (self.momentum > 0)) * self.is_active

    @property
    def has_residual(self) -> bool:
        """Return whether the outer optimizer keeps a residual for each weight that the site trains."""
        return self.is_active and self.residual > 0

    @property
    def starts_all(self) -> bool:
        """Return whether this command starts every site of the run on this machine."""
        return self.count > 1 and self.number < 0

    @property
    def min_members(self) -> int:
        """Return the minimum number of sites of a round."""
        return self.quorum or self.count // 2 + 1
