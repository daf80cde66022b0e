"""Keys without effect where attention is not planned, or has nothing to balance."""

from dataclasses import replace

from moefold.config.schema import Config
from moefold.config.suggestions import default_of
from moefold.validate.cuda_graphs import has_documents
from moefold.validate.unused_rule import UnusedKeyRule

PLANNED_ATTENTION_RULES = (
    UnusedKeyRule(
        "parallel.placement parallel.attention_hosts",
        lambda cfg: cfg.parallel.context != "planned",
        "only parallel.context='planned' reads it",
        "choose parallel.context='planned'",
    ),
    UnusedKeyRule(
        "parallel.placement parallel.attention_hosts",
        lambda cfg: not has_documents(cfg),
        "every sample is one document, so the ranks have equal attention work",
        "set data.document_end or data.document_index, or a data.kind with documents such as 'sft'",
    ),
    UnusedKeyRule(
        "parallel.placement parallel.attention_hosts",
        lambda cfg: cfg.parallel.cp == 1 and cfg.parallel.world_size == cfg.parallel.tp * cfg.parallel.pp,
        "dp*cp=1 rank has all tokens of a round",
        "give the run more ranks in dp or cp",
    ),
    UnusedKeyRule(
        "parallel.placement",
        lambda cfg: cfg.parallel.placement == "documents" and cfg.parallel.cp == 1,
        "parallel.cp=1 leaves every sample whole on its rank",
        "set parallel.cp above 1, or parallel.placement='balanced'",
    ),
    UnusedKeyRule(
        "parallel.attention_tolerance parallel.attention_pool",
        lambda cfg: cfg.parallel.attention_hosts != "balanced",
        "only parallel.attention_hosts='balanced' reads it",
        "choose parallel.attention_hosts='balanced'",
    ),
    UnusedKeyRule(
        "parallel.attention_block",
        lambda cfg: cfg.parallel.attention_hosts != "balanced" and cfg.parallel.placement != "documents",
        "only parallel.attention_hosts='balanced' and parallel.placement='documents' read it",
        "choose one of these",
    ),
)
"""Rules on placements and hosts come first: others depend on them."""


def without_idle_attention_keys(cfg: Config) -> Config:
    """Return a recipe whose keys of planned attention without effect have their defaults."""
    for rule in PLANNED_ATTENTION_RULES:
        if rule.condition(cfg):
            keys = [key.removeprefix("parallel.") for key in rule.keys.split()]
            defaults = {key: default_of("parallel", key) for key in keys}
            cfg = replace(cfg, parallel=replace(cfg.parallel, **defaults))
    return cfg
