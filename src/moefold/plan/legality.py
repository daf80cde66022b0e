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
from moefold.config.checks_dispatch import validate_deepep
from moefold.config.checks_offload import validate_offload, validate_offload_dir
from moefold.config.checks_overlap import validate_expert_overlap
from moefold.config.checks_parallel import (
    DEGREE_RULES,
    validate_batch_size,
    validate_degrees,
    validate_dispatcher,
    validate_least_loaded,
    validate_sequence_length,
)
from moefold.config.checks_pipeline import validate_micro_batch_count, validate_pipeline_layout, validate_schedule
from moefold.config.checks_range import validate_ranges
from moefold.config.checks_recompute import validate_recompute
from moefold.config.checks_routing import TRAINING_ONLY_RULES, validate_routing
from moefold.config.checks_train import validate_loss_chunk
from moefold.config.faults import raise_all
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.parallel.layout import fold

Rule = Callable[[Config], Iterator[str]]

AXIS_KEYS = {
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


AxisValues = Mapping[str, Any]


def _model_parallel_size(values: AxisValues) -> int:
    """The product that stands in the place of dp, ranks left out, as they are the same for all mappings."""
    return int(values["tp"] * values["cp"] * values["pp"])


def _samples_per_dispatch(values: AxisValues) -> tuple[int, int]:
    """Samples whose tokens meet in one dispatch, mbs*ep*etp / (cp*tp), as a reduced fraction."""
    above, below = values["mbs"] * values["ep"] * values["etp"], values["cp"] * values["tp"]
    common = gcd(above, below)
    return above // common, below // common


def _crosses_ranks(values: AxisValues) -> bool:
    """Whether tokens leave their rank for an expert."""
    return bool(values["ep"] * values["etp"] > 1)


def _samples_per_step(values: AxisValues) -> tuple[int, int]:
    """Samples of a step of all replicas with one micro-batch each, mbs/(tp*cp*pp), as a reduced fraction."""
    above, below = values["mbs"], _model_parallel_size(values)
    common = gcd(above, below)
    return above // common, below // common


DERIVED: dict[str, tuple[Callable[[AxisValues], Any], tuple[str, ...]]] = {
    "dp": (_model_parallel_size, ("tp", "cp", "pp")),
    "travels": (_crosses_ranks, ("ep", "etp")),
    "step": (_samples_per_step, ("mbs", "tp", "cp", "pp")),
    "exchanged": (_samples_per_dispatch, ("mbs", "ep", "etp", "cp", "tp")),
}
"""What rules read of several axes at once: the value, and the axes."""


@dataclass(frozen=True)
class MappingRule:
    """A rule of the runtime, and what it reads of a mapping: axes, and names of `DERIVED`."""

    validate: Rule
    reads: tuple[str, ...]
    applies_when: tuple[str, Any] = ("", "")
    """An axis with the one value at which the rule reads further and may refuse; it is among `reads`."""


def _validate_axis(name: str, cfg: Config) -> Iterator[str]:
    return DEGREE_RULES[name](cfg, getattr(cfg.parallel, name))


def _axis_rule(name: str, *reads: str) -> MappingRule:
    return MappingRule(partial(_validate_axis, name), reads)


TP_RULES = (_axis_rule("tp", "tp"),)
CP_RULES = (
    _axis_rule("cp", "tp", "cp"),
    MappingRule(validate_sequence_length, ("tp", "cp")),
    MappingRule(validate_routing, ("tp", "cp")),
)
EXPERT_RULES = (_axis_rule("ep", "ep"), _axis_rule("etp", "etp"))
BATCH_RULES = (MappingRule(validate_loss_chunk, ("cp", "mbs")),)
STAGE_RULES = (
    _axis_rule("pp", "pp", "vpp"),
    MappingRule(validate_schedule, ("pp", "schedule", "vpp")),
    MappingRule(validate_pipeline_layout, ("pp", "schedule", "vpp")),
)
PIPELINE_RULES = (
    MappingRule(validate_batch_size, ("dp", "pp", "mbs", "schedule")),
    MappingRule(validate_micro_batch_count, ("dp", "pp", "mbs", "schedule")),
)
DISPATCH_OVERLAP_RULES = (MappingRule(validate_deepep, ("ep", "etp", "dispatcher", "overlap")),)
DISPATCH_RULES = (
    MappingRule(validate_dispatcher, ("ep", "etp", "dispatcher")),
    *DISPATCH_OVERLAP_RULES,
    MappingRule(validate_least_loaded, ("dispatcher", "ep", "exchanged"), applies_when=("dispatcher", "leastloaded")),
)
OVERLAP_RULES = (
    MappingRule(
        validate_expert_overlap, ("travels", "schedule", "zero", "step", "overlap"), applies_when=("overlap", True)
    ),
)
OFFLOAD_RULES = (
    MappingRule(validate_offload, ("recompute", "offload")),
    MappingRule(validate_offload_dir, ("offload", "moments")),
)
RECOMPUTE_RULES = (MappingRule(validate_recompute, ("recompute",)),)

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
ALL_AXES_RULE = validate_degrees
"""The rule that yields what the functions of `DEGREE_RULES` yield, with a way out behind it."""


class MappingConstraints:
    """The runtime's answers for the mappings of one recipe.

    Args:
        cfg: a recipe; of its mapping only `world_size`, `order`, `moe_order`, `context` and `pipeline_layout` count.

    Raises:
        ConfigError: the recipe cannot run under any mapping.
    """

    def __init__(self, cfg: Config) -> None:
        raise_all(validate_ranges(cfg))
        read_mapping = {rule.validate for rule in MAPPING_RULES} | {ALL_AXES_RULE}
        raise_all(fault for rule in (*RULES, *TRAINING_ONLY_RULES) if rule not in read_mapping for fault in rule(cfg))
        uncut = replace(cfg, parallel=replace(cfg.parallel, tp=1, cp=1))
        raise_all(validate_routing(uncut))
        self.base_config = cfg
        self._cache: dict[tuple[Any, ...], bool] = {}

    def config_of(self, values: AxisValues) -> Config:
        """The recipe under another mapping; axes that are left out stay as they are."""
        changes: dict[str, dict[str, Any]] = {"parallel": {}, "train": {}}
        for axis, value in values.items():
            section, key = AXIS_KEYS[axis]
            changes[section][key] = value
        return replace(
            self.base_config,
            parallel=replace(self.base_config.parallel, **changes["parallel"]),
            train=replace(self.base_config.train, **changes["train"]),
        )

    def allows(self, rules: Iterable[MappingRule], values: AxisValues) -> bool:
        """Whether none of some rules refuses a mapping.

        Args:
            rules: all of one level.
            values: of every axis that the rules read, and of the levels above.
        """
        return all(self._is_satisfied(rule, values) for rule in rules)

    def can_fold(self, degrees: Mapping[str, int]) -> bool:
        """Whether the two views fold over each other under the recipe's orders of the ranks."""
        p = self.base_config.parallel
        try:
            fold(world_size=p.world_size, order=p.order, moe_order=p.moe_order, **degrees)
        except ConfigError:
            return False
        return True

    def _is_satisfied(self, rule: MappingRule, values: AxisValues) -> bool:
        axis, value = rule.applies_when
        if axis and values[axis] != value:
            return True
        key = (rule.validate, *(DERIVED[name][0](values) if name in DERIVED else values[name] for name in rule.reads))
        known = self._cache.get(key)
        if known is None:
            known = next(iter(rule.validate(self.config_of(values))), None) is None
            self._cache[key] = known
        return known
