"""Keys without effect where attention is not planned, or has nothing to balance."""

from collections.abc import Iterable
from dataclasses import replace

from moefold.config.chosen import chosen, chosen_in, readers
from moefold.config.groups.context import ContextPart
from moefold.config.parallel import ParallelConfig
from moefold.config.part import flat_keys
from moefold.config.schema import Config
from moefold.config.suggestions import default_of
from moefold.validate.unused_rule import UnusedKeyRule, why_unread


def _is_planned(parallel: ParallelConfig) -> bool:
    return chosen_in(parallel, ContextPart).is_planned


PLANNED_KEYS = (
    "parallel.placement parallel.attention_hosts parallel.attention_block parallel.attention_tolerance "
    "parallel.attention_pool"
)

PLANNED_ATTENTION_RULES = (
    UnusedKeyRule(
        PLANNED_KEYS,
        lambda cfg: _is_planned(cfg.parallel) and not cfg.data.may_have_documents,
        "every sample is one document, so the ranks have equal attention work",
        "set data.document_end or data.document_index, or a data.kind with documents such as 'sft'",
    ),
    UnusedKeyRule(
        PLANNED_KEYS,
        lambda cfg: (
            _is_planned(cfg.parallel)
            and cfg.parallel.cp == 1
            and cfg.parallel.world_size == cfg.parallel.tp * cfg.parallel.pp
        ),
        "dp*cp=1 rank has all tokens of a round",
        "give the run more ranks in dp or cp",
    ),
    UnusedKeyRule(
        "parallel.placement",
        lambda cfg: _is_planned(cfg.parallel) and cfg.parallel.placement == "documents" and cfg.parallel.cp == 1,
        "parallel.cp=1 leaves every sample whole on its rank",
        "set parallel.cp above 1, or parallel.placement='balanced'",
    ),
)
"""Rules on placements and hosts come first: others depend on them."""


def without_idle_attention_keys(cfg: Config) -> Config:
    """Return a recipe whose keys of planned attention without effect have their defaults."""
    part = chosen(cfg, ContextPart)
    read = {str(key) for _, key in flat_keys(part.group, part.kind)}
    idle = [key for key, owners in readers().items() if owners[0][0] is ContextPart and key not in read]
    cfg = _with_defaults(cfg, idle)
    for rule in PLANNED_ATTENTION_RULES:
        if rule.condition(cfg):
            cfg = _with_defaults(cfg, rule.keys.split())
    return _with_defaults(cfg, [key for key in read if why_unread(cfg, key)])


def _with_defaults(cfg: Config, keys: Iterable[str]) -> Config:
    names = [key.removeprefix("parallel.") for key in keys]
    return replace(cfg, parallel=replace(cfg.parallel, **{name: default_of("parallel", name) for name in names}))
