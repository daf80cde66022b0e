"""Which mappings are legal: the runtime's own rules, asked once for each combination of what they read. Torch-free.

No rule is written here. A rule of `config/checks.py` that looks at the mapping looks at a few of its axes only, so a
search over millions of mappings asks it some thousand times. `MAPPING_RULES` says which axes those are; a test runs
every rule on a config that notes what is read, and compares.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

from moefold.config.checks import RULES
from moefold.config.checks_dispatch import deepep_faults
from moefold.config.checks_offload import offload_faults, place_faults
from moefold.config.checks_overlap import overlap_faults
from moefold.config.checks_parallel import (
    AXIS_CUTS,
    batch_faults,
    cut_faults,
    dispatcher_faults,
    leastloaded_faults,
    sequence_faults,
)
from moefold.config.checks_pipeline import pipeline_layout_faults, rounds_faults, schedule_faults
from moefold.config.checks_range import range_faults
from moefold.config.checks_recompute import recompute_faults
from moefold.config.checks_routing import LEARNING_RULES, routing_faults
from moefold.config.checks_train import chunk_faults
from moefold.config.faults import refuse
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.parallel.layout import fold

Rule = Callable[[Config], Iterator[str]]

AXES = {
    "tp": ("parallel", "tp"),
    "cp": ("parallel", "cp"),
    "pp": ("parallel", "pp"),
    "ep": ("parallel", "ep"),
    "etp": ("parallel", "etp"),
    "mbs": ("train", "micro_batch_size"),
    "schedule": ("parallel", "schedule"),
    "vpp": ("parallel", "virtual_stages"),
    "zero": ("parallel", "zero"),
    "dispatcher": ("parallel", "dispatcher"),
    "recompute": ("train", "recompute"),
    "overlap": ("parallel", "overlap_experts"),
    "offload": ("train", "offload"),
    "moments": ("train", "offload_optimizer"),
}
"""What a mapping sets, and the key of a recipe for it."""


Values = Mapping[str, Any]


def _dp(values: Values) -> int:
    """The product that stands in the place of dp, ranks left out, as they are the same for all mappings."""
    return int(values["tp"] * values["cp"] * values["pp"])


def _exchanged(values: Values) -> tuple[int, int]:
    """Samples whose tokens meet in one dispatch, mbs*ep*etp / (cp*tp), as a reduced fraction."""
    above, below = values["mbs"] * values["ep"] * values["etp"], values["cp"] * values["tp"]
    common = gcd(above, below)
    return above // common, below // common


def _travels(values: Values) -> bool:
    """Whether tokens leave their rank for an expert."""
    return bool(values["ep"] * values["etp"] > 1)


def _step(values: Values) -> tuple[int, int]:
    """Samples of a step of all replicas with one micro-batch each, mbs/(tp*cp*pp), as a reduced fraction."""
    above, below = values["mbs"], _dp(values)
    common = gcd(above, below)
    return above // common, below // common


DERIVED: dict[str, tuple[Callable[[Values], Any], tuple[str, ...]]] = {
    "dp": (_dp, ("tp", "cp", "pp")),
    "travels": (_travels, ("ep", "etp")),
    "step": (_step, ("mbs", "tp", "cp", "pp")),
    "exchanged": (_exchanged, ("mbs", "ep", "etp", "cp", "tp")),
}
"""What rules read of several axes at once: the value, and the axes."""


@dataclass(frozen=True)
class MappingRule:
    """A rule of the runtime, and what it reads of a mapping: axes, and names of `DERIVED`."""

    faults: Rule
    reads: tuple[str, ...]
    only: tuple[str, Any] = ("", "")
    """An axis with the one value at which the rule reads further and may refuse; it is among `reads`."""


def _axis_faults(name: str, cfg: Config) -> Iterator[str]:
    return AXIS_CUTS[name](cfg, getattr(cfg.parallel, name))


def _cut(name: str, *reads: str) -> MappingRule:
    return MappingRule(partial(_axis_faults, name), reads)


TP_RULES = (_cut("tp", "tp"),)
CP_RULES = (
    _cut("cp", "tp", "cp"),
    MappingRule(sequence_faults, ("tp", "cp")),
    MappingRule(routing_faults, ("tp", "cp")),
)
EXPERT_RULES = (_cut("ep", "ep"), _cut("etp", "etp"))
BATCH_RULES = (MappingRule(chunk_faults, ("cp", "mbs")),)
STAGE_RULES = (
    _cut("pp", "pp", "vpp"),
    MappingRule(schedule_faults, ("pp", "schedule", "vpp")),
    MappingRule(pipeline_layout_faults, ("pp", "schedule", "vpp")),
)
PIPELINE_RULES = (
    MappingRule(batch_faults, ("dp", "pp", "mbs", "schedule")),
    MappingRule(rounds_faults, ("dp", "pp", "mbs", "schedule")),
)
EXCHANGE_RULES = (MappingRule(deepep_faults, ("ep", "etp", "dispatcher", "overlap")),)
DISPATCH_RULES = (
    MappingRule(dispatcher_faults, ("ep", "etp", "dispatcher")),
    *EXCHANGE_RULES,
    MappingRule(leastloaded_faults, ("dispatcher", "ep", "exchanged"), only=("dispatcher", "leastloaded")),
)
OVERLAP_RULES = (
    MappingRule(overlap_faults, ("travels", "schedule", "zero", "step", "overlap"), only=("overlap", True)),
)
OFFLOAD_RULES = (
    MappingRule(offload_faults, ("recompute", "offload")),
    MappingRule(place_faults, ("offload", "moments")),
)
RECOMPUTE_RULES = (MappingRule(recompute_faults, ("recompute",)),)

MAPPING_RULES = (
    *TP_RULES,
    *CP_RULES,
    *EXPERT_RULES,
    *BATCH_RULES,
    *STAGE_RULES,
    *PIPELINE_RULES,
    *DISPATCH_RULES,
    *RECOMPUTE_RULES,
    *OVERLAP_RULES,
    *OFFLOAD_RULES,
)
OF_CUTS = cut_faults
"""The rule that yields what the functions of `AXIS_CUTS` yield, with a way out behind it."""


class Legality:
    """The runtime's answers for the mappings of one recipe.

    Args:
        cfg: a recipe; of its mapping only `world_size`, `order`, `moe_order`, `context` and `pipeline_layout` count.

    Raises:
        ConfigError: the recipe cannot run under any mapping.
    """

    def __init__(self, cfg: Config) -> None:
        refuse(range_faults(cfg))
        read_mapping = {rule.faults for rule in MAPPING_RULES} | {OF_CUTS}
        refuse(fault for rule in (*RULES, *LEARNING_RULES) if rule not in read_mapping for fault in rule(cfg))
        uncut = replace(cfg, parallel=replace(cfg.parallel, tp=1, cp=1))
        refuse(routing_faults(uncut))
        self.base = cfg
        self._known: dict[tuple[Any, ...], bool] = {}

    def config_of(self, values: Values) -> Config:
        """The recipe under another mapping; axes that are left out stay as they are."""
        changes: dict[str, dict[str, Any]] = {"parallel": {}, "train": {}}
        for axis, value in values.items():
            section, key = AXES[axis]
            changes[section][key] = value
        return replace(
            self.base,
            parallel=replace(self.base.parallel, **changes["parallel"]),
            train=replace(self.base.train, **changes["train"]),
        )

    def allows(self, rules: Iterable[MappingRule], values: Values) -> bool:
        """Whether none of some rules refuses a mapping.

        Args:
            rules: all of one level.
            values: of every axis that the rules read, and of the levels above.
        """
        return all(self._holds(rule, values) for rule in rules)

    def folds(self, degrees: Mapping[str, int]) -> bool:
        """Whether the two views fold over each other under the recipe's orders of the ranks."""
        p = self.base.parallel
        try:
            fold(world_size=p.world_size, order=p.order, moe_order=p.moe_order, **degrees)
        except ConfigError:
            return False
        return True

    def _holds(self, rule: MappingRule, values: Values) -> bool:
        axis, value = rule.only
        if axis and values[axis] != value:
            return True
        key = (rule.faults, *(DERIVED[name][0](values) if name in DERIVED else values[name] for name in rule.reads))
        known = self._known.get(key)
        if known is None:
            known = next(iter(rule.faults(self.config_of(values))), None) is None
            self._known[key] = known
        return known
