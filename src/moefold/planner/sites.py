"""Plan of sites: how often, in how many bits and how far overlapped they exchange weights over a link.

A site is an ordinary job of step time t. Its fragments take turns, and each has a round every H steps:

    exchange = (R - 1) * (messages * latency + bytes / bandwidth) + coding
    exposed  = 4 * latency + max(0, exchange - overlap * t)
    utilisation = H * t / (H * t + sum of exposed over the fragments)

where R sites exchange with each other (2 in pairs). Bytes are summed over all ranks of a site. Messages and coding are
counted on its fullest rank. A round asks the meeting point twice, for its members and for the vote. Not counted: copies
to the host and the outer step.

Data parallelism over the same link sends all gradients in every step. Its steps are priced as if they were overlapped
with the whole step, max(t, exchange), which no implementation reaches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, cast

from moefold.config.base.part import Part
from moefold.config.groups.site_method import SiteMethodPart
from moefold.config.schema import Config
from moefold.config.sections.sites import SitesConfig
from moefold.cost.hardware import Device, SiteLink
from moefold.cost.site_traffic import num_trained, recipe_format, site_traffic
from moefold.cost.state_bytes import master_dtype_bytes
from moefold.errors import ConfigError
from moefold.message_text import Setting

TARGET = 0.95
"""Utilisation that settings are chosen for."""
MAX_OVERLAP = 5
"""Largest overlap that is chosen, in steps: up to it the loss of Streaming DiLoCo changes by less than 0.2 %
(arXiv:2501.18512)."""
NEAR = 1.1
"""Maximum factor over the lowest `every` that is accepted for less overlap or for more bits."""
MAX_PUBLISHED_EVERY = 500
"""Largest `every` of published runs (arXiv:2311.08105)."""
KEEP_LOCAL = 0.5
"""Share of a site's own weights that stays if rounds overlap, as in Streaming DiLoCo."""
CODING_S = MappingProxyType(
    {
        "float32": (0.0, 0.5e-9),
        "bfloat16": (0.5e-9, 0.6e-9),
        "int8": (3e-9, 1.2e-9),
        "fp4": (7e-9, 4e-9),
    }
)
"""Seconds to encode an element, and to decode and add it, on one core of a host, by sites.precision, from the most to
the fewest bits (docs/log.md#2026-11-26-exchanges-between-two-sites-over-a-slow-link)."""
MEETING_MESSAGES = 4
"""Messages between a site and the meeting point in a round, one after the other: two questions and their answers."""
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class RoundVolume:
    """Content of a round of one fragment, from a site to one other site."""

    num_bytes: float
    """Bytes of all ranks of the site."""
    messages: int = 1
    """Messages of a rank, one after the other."""
    coding_s: float = 0.0
    """Seconds that a rank needs to encode its vector and to decode the vectors of all members."""


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """Keys of [sites] that the planner chooses."""

    precision: str
    every: int
    overlap: int
    """Equal to `every`: a round is exchanged during the whole next one."""


@dataclass(frozen=True, slots=True)
class SiteRate:
    """Predicted speed of a site under some settings."""

    settings: RoundSettings
    exchanges_s: tuple[float, ...]
    """Seconds of the exchange of each fragment."""
    exposed_s: float
    """Seconds of a period of `every` steps that a site does not train, because of its rounds."""
    utilisation: float
    """Share of the time that a site trains."""
    bytes_per_day: float
    """Bytes that a site sends in a day. It receives equally many."""

    @property
    def reaches_target(self) -> bool:
        """Return whether the utilisation is at least `TARGET`, which the least `every` reaches but for rounding."""
        return self.utilisation >= TARGET * (1 - 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        rates = {key: getattr(self, key) for key in ("exposed_s", "utilisation", "bytes_per_day")}
        return asdict(self.settings) | {"exchange_s": list(self.exchanges_s)} | rates


@dataclass(frozen=True, slots=True)
class DataParallelRate:
    """Predicted speed of data parallelism across the sites, at best."""

    step_time_s: float
    utilisation: float
    bytes_per_day: float


class SiteCost:
    """Cost model of the rounds between sites.

    Args:
        volumes: content of the rounds of each fragment, by precision.
        in_pairs: a site exchanges with one other site in a round, and not with all.
    """

    def __init__(
        self,
        link: SiteLink,
        count: int,
        step_s: float,
        volumes: Mapping[str, Sequence[RoundVolume]],
        *,
        in_pairs: bool = False,
    ) -> None:
        self.link = link
        self.count = count
        self.peers = 1 if in_pairs else count - 1
        """Sites that a site sends to in a round."""
        self.step_s = step_s
        self.volumes = volumes

    def exchange_s(self, volume: RoundVolume) -> float:
        """Return the seconds of the exchange of a fragment: each site sends its vectors to the others."""
        transfer_s = volume.messages * self.link.latency_s + volume.num_bytes / self.link.bytes_per_s
        return self.peers * transfer_s + volume.coding_s

    def exposed_s(self, precision: str, overlap: int) -> float:
        """Return the seconds that a site does not train, because of one round of every fragment."""
        hidden_s = overlap * self.step_s
        return sum(
            MEETING_MESSAGES * self.link.latency_s + max(0.0, self.exchange_s(volume) - hidden_s)
            for volume in self.volumes[precision]
        )

    def rate(self, settings: RoundSettings) -> SiteRate:
        """Return the speed of a site under some settings."""
        volumes = self.volumes[settings.precision]
        exposed_s = self.exposed_s(settings.precision, settings.overlap)
        training_s = settings.every * self.step_s
        sent = self.peers * sum(volume.num_bytes for volume in volumes)
        return SiteRate(
            settings,
            tuple(self.exchange_s(volume) for volume in volumes),
            exposed_s,
            training_s / (training_s + exposed_s),
            sent * DAY_S / (training_s + exposed_s),
        )

    def least_every(self, precision: str, overlap: int, target: float = TARGET) -> int:
        """Return the fewest steps between the rounds of a fragment that allow a site a utilisation."""
        fewest = round_up(target / (1 - target) * self.exposed_s(precision, overlap) / self.step_s)
        # Fragments have separate rounds, and the exchange of one ends before the next begins.
        return max(fewest, len(self.volumes[precision]) * (overlap + 1))

    def data_parallel(self, num_bytes: float) -> DataParallelRate:
        """Return the speed of data parallelism at best: a ring all-reduce of the gradients overlaps with the step."""
        sent = 2 * (self.count - 1) / self.count * num_bytes
        exchange_s = 2 * (self.count - 1) * self.link.latency_s + sent / self.link.bytes_per_s
        step_s = max(self.step_s, exchange_s)
        return DataParallelRate(step_s, self.step_s / step_s, sent * DAY_S / step_s)


@dataclass(frozen=True, kw_only=True)
class SitePlan:
    """Settings of sites over a link, for a site under one mapping."""

    cost: SiteCost
    method: SiteMethodPart
    recipe: SiteRate
    """Speed under the recipe's own settings."""
    options: tuple[tuple[SiteRate, SiteRate], ...]
    """Speeds at the least `every` that reaches `TARGET`, for each precision: with the least overlap that may be chosen
    (usually none), and with the most."""
    chosen: SiteRate
    further: Mapping[str, Any]
    """Other keys of [sites] that change with the chosen settings."""
    data_parallel: DataParallelRate

    def as_dict(self) -> dict[str, Any]:
        """Return the plan, ready for JSON."""
        cost = self.cost
        return {
            "count": cost.count,
            "bytes_per_s": cost.link.bytes_per_s,
            "latency_s": cost.link.latency_s,
            "step_time_s": cost.step_s,
            "fragments": len(self.recipe.exchanges_s),
            "recipe": self.recipe.as_dict(),
            "chosen": self.chosen.as_dict()
            | {key: value.as_table() if isinstance(value, Part) else value for key, value in self.further.items()},
            "options": [rate.as_dict() for pair in self.options for rate in dict.fromkeys(pair)],
            "data_parallel": asdict(self.data_parallel),
        }


def site_volumes(cfg: Config, precision: str | None = None) -> tuple[RoundVolume, ...]:
    """Return the content of the rounds of a recipe's fragments.

    Args:
        cfg: a recipe with sites that passed `check_config`.
        precision: another `sites.precision`, in which all differences are sent. None: the recipe's settings.
    """
    sites = cfg.sites
    code = recipe_format(cfg.run, cfg.sites, precision)
    name = precision or sites.precision
    of_method = precision is None and sites.part.wire_format(master_dtype_bytes(cfg.run)) is not None
    encode_s, decode_s = sites.part.coding_s if of_method else CODING_S[name]
    # A site also decodes its own vector, if its code is lossy.
    num_members = 2 if sites.part.in_pairs else sites.count
    num_decoded = num_members + (of_method or name != "float32")
    return tuple(
        RoundVolume(part.num_bytes(code), part.messages, part.rank_coded * (encode_s + num_decoded * decode_s))
        for part in site_traffic(cfg, precision)
    )


def plan_sites(cfg: Config, link: SiteLink, step_s: float) -> SitePlan:
    """Return settings of sites that reach `TARGET`.

    If the recipe's settings reach it, they are chosen. Otherwise the recipe's `every` stays if it can be enough, with
    the least overlap and then the most bits. If it cannot, an `every` near the lowest is chosen. If rounds overlap in
    the chosen settings and not in the recipe, half of a site's own weights stays. A code or an overlap that the method
    prescribes, and averaged moments, do not change.

    Args:
        cfg: a recipe with sites under a mapping that `check_config` passed.
    """
    sites = cfg.sites
    has_code = sites.part.wire_format(master_dtype_bytes(cfg.run)) is not None
    # A residual is the error of a code, and float32 has none.
    choosable = [name for name in CODING_S if name != "float32" or not sites.residual]
    precisions = [sites.precision] if has_code else choosable
    volumes = {name: site_volumes(cfg, None if has_code else name) for name in precisions}
    cost = SiteCost(link, sites.count, step_s, volumes, in_pairs=sites.part.in_pairs)
    recipe = cost.rate(RoundSettings(sites.precision, sites.every, sites.overlap))
    overlaps = _overlaps(sites)
    choices = {
        (overlap, name): _least_settings(sites.part, cost, name, overlap)
        for overlap, name in product(overlaps, precisions)
    }
    options = tuple(
        (cost.rate(choices[overlaps[0], name]), cost.rate(choices[overlaps[-1], name])) for name in precisions
    )
    enough = [_with_every(choice, sites.every) for choice in choices.values() if choice.every <= sites.every]
    fewest = min(choice.every for choice in choices.values())
    near = [choice for choice in choices.values() if choice.every <= NEAR * fewest]
    chosen = recipe if recipe.reaches_target else cost.rate((enough or near)[0])
    return SitePlan(
        cost=cost,
        method=sites.part,
        recipe=recipe,
        options=options,
        chosen=chosen,
        further=_further_keys(sites, chosen.settings),
        data_parallel=cost.data_parallel(num_trained(cfg.model, cfg.train, cfg.lora) * master_dtype_bytes(cfg.run)),
    )


def _further_keys(sites: SitesConfig, chosen: RoundSettings) -> dict[str, Any]:
    """Return the keys that follow from chosen settings, where they differ from the recipe's."""
    keys: dict[str, Any] = {"keep_local": KEEP_LOCAL} if chosen.overlap > sites.overlap == 0 else {}
    method = sites.part.with_every(chosen.every)
    return keys if method == sites.part else keys | {"method": method}


def _overlaps(sites: SitesConfig) -> range:
    """Return the values of sites.overlap to choose from."""
    if sites.moments == "average" or not sites.part.may_overlap or sites.part.overlaps_whole_round:
        return range(1)
    # Only an overlap keeps a share of the local weights.
    return range(1 if sites.keep_local else 0, max(MAX_OVERLAP, sites.overlap) + 1)


def _least_settings(method: SiteMethodPart, cost: SiteCost, precision: str, overlap: int) -> RoundSettings:
    if every := method.least_every(cost, precision):
        return RoundSettings(precision, every, every)
    return RoundSettings(precision, cost.least_every(precision, overlap), overlap)


def _with_every(settings: RoundSettings, every: int) -> RoundSettings:
    overlap = every if settings.overlap == settings.every else settings.overlap
    return replace(settings, every=every, overlap=overlap)


def round_up(steps: float) -> int:
    """Round up, with a tolerance for floating-point errors."""
    return math.ceil(steps * (1 - 1e-12))


def with_site_settings(cfg: Config, plan: SitePlan) -> Config:
    """Return a recipe with the chosen settings.

    Raises:
        ConfigError: with these settings the run has no round before its last.
    """
    settings = plan.chosen.settings
    if settings.every > cfg.run.steps:
        raise ConfigError(
            f"a utilisation of {TARGET:.0%} needs sites.every={settings.every}, which is above "
            f"run.steps={cfg.run.steps}; raise run.steps, take a faster {Setting('--site-link')}, or merge once after "
            "the last step by sites.first=run.steps"
        )
    sites = replace(
        cfg.sites,
        every=settings.every,
        overlap=settings.overlap,
        precision=cast(Any, settings.precision),
        **cast(Any, plan.further),
    )
    return replace(cfg, sites=sites)


def resolve_sites(
    cfg: Config, device: Device, count: int | None, bytes_per_s: float | None, latency_s: float | None
) -> tuple[Config, SiteLink | None]:
    """Return a recipe with the sites to plan for, and their link, or None if no link is given, or there is one site.

    Args:
        device: its device, whose link is the default.
        count: `--sites`. None: the recipe's sites.count.

    Raises:
        ConfigError: an option is out of its range, or has no effect.
    """
    _check_options(count, bytes_per_s, latency_s)
    number = cfg.sites.count if count is None else count
    link = device.site_link
    if bytes_per_s is not None:
        link = SiteLink(bytes_per_s=bytes_per_s, latency_s=0.0 if link is None else link.latency_s)
    if link is not None and latency_s is not None:
        link = replace(link, latency_s=latency_s)
    if link is None and (count is not None or latency_s is not None):
        option = str(Setting("--sites", count)) if count is not None else f"{Setting('--site-latency', latency_s):g}"
        raise ConfigError(
            f"{option} needs the bandwidth between sites: add {Setting('--site-link')} BYTES_PER_S, or [site_link] "
            "with bytes_per_s and latency_s to the device's file"
        )
    if number == 1:
        for option, value in (("--site-link", bytes_per_s), ("--site-latency", latency_s)):
            if value is not None:
                raise ConfigError(
                    f"{Setting(option, value):g} has no effect: sites.count=1 has no other site; add "
                    f"{Setting('--sites')}"
                )
        return cfg, None
    # A recipe without rounds gets one at the latest at its end.
    every = cfg.sites.every if cfg.sites.is_active else min(cfg.sites.every, cfg.run.steps)
    return replace(cfg, sites=replace(cfg.sites, count=number, every=every)), link


def _check_options(count: int | None, bytes_per_s: float | None, latency_s: float | None) -> None:
    if count is not None and count < 2:
        raise ConfigError(f"{Setting('--sites', count)} must be at least 2: one site has nothing to exchange")
    if bytes_per_s is not None and not 0 < bytes_per_s < math.inf:
        raise ConfigError(f"{Setting('--site-link', bytes_per_s):g} must be above 0: bytes a second, one way")
    if latency_s is not None and not 0 <= latency_s < math.inf:
        raise ConfigError(f"{Setting('--site-latency', latency_s):g} must be at least 0: seconds of a message, one way")
