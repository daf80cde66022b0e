"""Legality of mappings, by the runtime's own rules, each cached by the axes that it reads.

No rule is defined here. A rule of `validate/config.py` that reads the mapping reads few of its axes, so a search over
millions of mappings evaluates it some thousand times. `MAPPING_RULES` lists those axes. A test runs every rule on a
config that records its reads, and compares. `Restriction` fixes axes, or selects one of the five methods of
arXiv:2504.14960.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from moefold.config.base.part import Part, kind_or_part
from moefold.config.chosen import chosen
from moefold.config.groups.dispatcher import DispatcherPart, overrides_any
from moefold.config.groups.drop import DropPart, DropScopePart
from moefold.config.keys.annotations import range_problems
from moefold.config.rule import Rule, apply_rule
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.errors import ConfigError, raise_all
from moefold.message_text import Problem
from moefold.topology.layout import DEGREES, fold
from moefold.validate.config import RULES, check_rollout_mapping, validate_layer_words
from moefold.validate.memory_savings import validate_offload, validate_offload_dir, validate_recompute
from moefold.validate.moe import TRAINING_ONLY_RULES, shortcut_stage_errors, validate_shortcut
from moefold.validate.parallel import (
    DEGREE_RULES,
    validate_attention_pool,
    validate_batch_size,
    validate_degrees,
    validate_dispatch_kernels,
    validate_dispatcher,
    validate_expert_overlap,
    validate_sequence_length,
)
from moefold.validate.pipeline import (
    auto_layout_errors,
    validate_micro_batch_count,
    validate_pipeline_layout,
    validate_schedule,
)
from moefold.validate.rl import validate_rollout_experts
from moefold.validate.sites import validate_site_shards
from moefold.validate.sparse import selection_stage_errors, validate_selection_stages
from moefold.validate.train import validate_loss_chunk

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
"""Recipe section and key of each axis of a mapping."""


AxisValues = Mapping[str, Any]


def _samples_per_dispatch(values: AxisValues) -> float:
    """Return the samples of one dispatch, mbs*ep*etp / (cp*tp). Equal ratios of integers give the same number.

    It is 0 for a dispatcher without its own rules, which alone may read the tokens of a dispatch.
    """
    if not overrides_any(values["dispatcher"], "check"):
        return 0.0
    return float(values["mbs"] * values["ep"] * values["etp"] / (values["cp"] * values["tp"]))


DERIVED_VALUES: dict[str, tuple[Callable[[AxisValues], Any], tuple[str, ...]]] = {
    "dp": (lambda values: values["tp"] * values["cp"] * values["pp"], ("tp", "cp", "pp")),
    "crosses_ranks": (lambda values: values["ep"] * values["etp"] > 1, ("ep", "etp")),
    "step": (
        lambda values: values["mbs"] / (values["tp"] * values["cp"] * values["pp"]),
        ("mbs", "tp", "cp", "pp"),
    ),
    "samples_per_dispatch": (_samples_per_dispatch, ("mbs", "ep", "etp", "cp", "tp", "dispatcher")),
}
"""Values that rules derive from several axes: the function, and the axes. tp*cp*pp stands for dp, as the world size is
the same for all mappings. `step` are the samples of a micro-batch on all replicas."""


def _validate_axis(name: str, cfg: Config) -> Iterator[Problem]:
    return DEGREE_RULES[name](cfg, getattr(cfg.parallel, name))


def _validate_split(cfg: Config) -> Iterator[Problem]:
    """Check that layers of one selection or shortcut fit into stages, chosen by the planner if the recipe has none."""
    layout = cfg.parallel.pipeline_layout or "auto"
    yield from shortcut_stage_errors(cfg.model, cfg.parallel, layout)
    yield from selection_stage_errors(cfg.model, cfg.parallel, layout)


def _validate_stage_count(cfg: Config) -> Iterator[Problem]:
    """Check that each stage has a layer, the embedding or the loss: the planner writes the layout out."""
    return iter(()) if cfg.parallel.pipeline_layout else auto_layout_errors(cfg.model, cfg.parallel)


def _validate_part(group: type[Part], cfg: Config) -> Iterator[str]:
    """Check the part of a group, as `check_config` does."""
    return map(str, apply_rule(chosen(cfg, group).check, cfg))


MAPPING_RULES: dict[str, dict[Rule, tuple[str, ...]]] = {
    "tp": {partial(_validate_axis, "tp"): ("tp",)},
    "cp": {
        partial(_validate_axis, "cp"): ("tp", "cp"),
        validate_sequence_length: ("tp", "cp"),
        partial(_validate_part, DropScopePart): ("tp", "cp"),
        validate_attention_pool: ("dp", "cp"),
    },
    "experts": {partial(_validate_axis, "ep"): ("ep",), partial(_validate_axis, "etp"): ("etp",)},
    "batch": {validate_loss_chunk: ("cp", "mbs")},
    "stages": {
        _validate_stage_count: ("pp", "vpp"),
        validate_schedule: ("pp", "schedule", "vpp"),
        validate_pipeline_layout: ("pp", "schedule", "vpp"),
        _validate_split: ("pp", "vpp"),
    },
    "pipeline": {
        validate_batch_size: ("dp", "mbs"),
        validate_micro_batch_count: ("step", "pp", "schedule"),
    },
    "kernels": {validate_dispatch_kernels: ("ep", "etp", "dispatcher", "overlap")},
    "dispatcher": {
        validate_dispatcher: ("ep", "etp", "dispatcher"),
        partial(_validate_part, DispatcherPart): ("ep", "etp", "dispatcher", "samples_per_dispatch"),
    },
    "overlap": {validate_expert_overlap: ("crosses_ranks", "schedule", "zero", "step", "overlap")},
    "recompute": {validate_recompute: ("recompute",)},
    "offload": {validate_offload: ("recompute", "offload"), validate_offload_dir: ("offload", "moments")},
    "zero": {validate_site_shards: ("zero",)},
}
"""The runtime's rules at each level of the space, with the axes, or names of `DERIVED_VALUES`, that each reads."""
ALL_AXES_RULE = validate_degrees
"""The rule that yields the errors of `DEGREE_RULES`, each with a suggestion appended."""


class MappingConstraints:
    """Cached results of the runtime's rules for the mappings of one recipe.

    Args:
        cfg: a recipe. Its mapping gives only `world_size`, `order`, `moe_order`, `context` and `pipeline_layout`.

    Raises:
        ConfigError: the recipe cannot run under any mapping.
    """

    def __init__(self, cfg: Config) -> None:
        raise_all(range_problems(cfg))
        raise_all(validate_layer_words(cfg.model))
        read_mapping = {ALL_AXES_RULE, validate_selection_stages, validate_shortcut}.union(*MAPPING_RULES.values())
        raise_all(
            e for rule in (*RULES, *TRAINING_ONLY_RULES) if rule not in read_mapping for e in apply_rule(rule, cfg)
        )
        raise_all(_validate_part(DropPart, cfg))
        self.base_config = cfg
        self._cache: dict[tuple[Any, ...], bool] = {}

    def config_with(self, values: AxisValues) -> Config:
        """Return the recipe with another mapping. Axes that are left out stay unchanged."""
        changes: dict[str, dict[str, Any]] = {}
        for axis, value in values.items():
            section, key = AXIS_KEYS[axis]
            own = getattr(getattr(self.base_config, section), key)
            # A kind stands for the recipe's part of this kind, with its settings.
            changes.setdefault(section, {})[key] = own if isinstance(own, Part) and own.kind == value else value
        sections = {name: replace(getattr(self.base_config, name), **keys) for name, keys in changes.items()}
        return replace(self.base_config, **sections)

    def allows(self, level: str, values: AxisValues) -> bool:
        """Return whether a mapping satisfies the rules of a level of `MAPPING_RULES`, given the axes that they read."""
        return all(self._is_satisfied(rule, reads, values) for rule, reads in MAPPING_RULES[level].items())

    def can_fold(self, degrees: Mapping[str, int]) -> bool:
        """Return whether both views fold over each other under the recipe's rank orders, and the result can sample."""
        p = self.base_config.parallel
        try:
            fold(world_size=p.world_size, order=p.order, moe_order=p.moe_order, **degrees)
        except ConfigError:
            return False
        return not self.sampling_error(degrees)

    def sampling_error(self, degrees: Mapping[str, int]) -> str:
        """Return why the recipe's rollouts cannot be sampled next to a training mapping, or "" if they can."""
        if not self.base_config.is_rl:
            return ""
        cfg = self.config_with(degrees)
        try:
            raise_all(validate_rollout_experts(cfg.parallel, cfg.rl, cfg.rollout))
            check_rollout_mapping(cfg)
        except ConfigError as error:
            return " ".join(str(error).split())
        return ""

    def _is_satisfied(self, rule: Rule, reads: tuple[str, ...], values: AxisValues) -> bool:
        key = rule, *(DERIVED_VALUES[name][0](values) if name in DERIVED_VALUES else values[name] for name in reads)
        known = self._cache.get(key)
        if known is None:
            known = next(iter(apply_rule(rule, self.config_with(values))), None) is None
            self._cache[key] = known
        return known


class Fold(NamedTuple):
    """The degrees of both views."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int

    @property
    def values(self) -> dict[str, int]:
        """The degrees that determine the fold. dp and edp follow."""
        return {axis: getattr(self, axis) for axis in DEGREES}


FOLD_DEGREES = Fold._fields


@dataclass(frozen=True)
class MappingMethod:
    """A mapping method of other frameworks, as a subset of the space."""

    summary: str
    accepts: Callable[[Fold], bool]
    zero: int | None = None
    """ZeRO stage of the mappings. None: any."""
    ep_may_span_cp: bool = False
    """True if ep may span cp ranks: ep neighbours are then etp ranks apart. Otherwise the ranks of tp and cp lie
    between them."""


def _is_coupled(degrees: Fold) -> bool:
    """Return whether experts are sharded like attention and ep lies within dp, as before folding."""
    return degrees.etp == degrees.tp and degrees.dp % degrees.ep == 0


FOLDED = "folding"
"""The method without a restriction."""

COUPLED = "coupled"
"""Without folding, as arXiv:2504.14960 describes its methods."""

COUPLED_WITH_CP = "coupled+cp"
"""The largest space without folding, with the mappings that arXiv:2504.14960 measured with context parallelism: their
EP4 lies on DP2 x CP4, which `coupled` cannot express."""

METHODS = {
    FOLDED: MappingMethod("any ep and etp that fold over the ranks of a stage", lambda d: True, ep_may_span_cp=True),
    COUPLED: MappingMethod("etp = tp, and ep divides dp (Megatron-Core without folding)", _is_coupled),
    COUPLED_WITH_CP: MappingMethod(
        "etp = tp, and ep divides dp*cp (without folding, as measured)",
        lambda d: d.etp == d.tp and (d.dp * d.cp) % d.ep == 0,
        ep_may_span_cp=True,
    ),
    "fsdp": MappingMethod("pp = ep = 1, etp = tp, zero = 3", lambda d: _is_coupled(d) and d.pp == d.ep == 1, 3),
    "fsdp+ep": MappingMethod(
        "pp = 1, ep of 2 or more divides dp, etp = tp, zero = 3",
        lambda d: _is_coupled(d) and d.pp == 1 and d.ep > 1,
        3,
    ),
    "tp+ep+dp": MappingMethod("pp = 1, ep divides dp, etp = tp, zero = 1", lambda d: _is_coupled(d) and d.pp == 1, 1),
}
"""Restrictions of the search by their name in `moefold plan --method`, after the methods of the paper (sec. 4.1)."""


@dataclass(frozen=True)
class Restriction:
    """The mappings of a method with some axes fixed."""

    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fixed value by axis: tp cp dp pp ep etp edp mbs schedule vpp zero dispatcher recompute offload moments
    overlap."""
    method: str = FOLDED
    """A key of `METHODS`."""
    offload: bool = False
    """True if offload of activations and moments is searched. A fixed or the recipe's own offload is searched too."""

    def allows_fold(self, degrees: Fold) -> bool:
        """Return whether the degrees match the fixed ones and the method."""
        is_as_fixed = all(getattr(degrees, axis) == value for axis, value in self.fixed.items() if axis in FOLD_DEGREES)
        return is_as_fixed and METHODS[self.method].accepts(degrees)

    def with_parts_of(self, parallel: ParallelConfig) -> "Restriction":
        """Return the restriction with the recipe's external part in place of a fixed kind that the recipe has."""
        parts = {
            axis: kind_or_part(getattr(parallel, axis)) for axis in ("schedule", "dispatcher") if axis in self.fixed
        }
        chosen = {axis: part for axis, part in parts.items() if str(part) == self.fixed[axis]}
        return replace(self, fixed={**self.fixed, **chosen})

    def allows(self, axis: str, value: Any) -> bool:
        """Return whether an axis other than the degrees may have a value."""
        method = METHODS[self.method]
        if axis == "zero" and method.zero not in (None, value):
            return False
        return axis not in self.fixed or bool(self.fixed[axis] == value)
