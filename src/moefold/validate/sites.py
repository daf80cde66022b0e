"""Rules on sites: jobs that exchange weights every few steps."""

from collections.abc import Iterator

from moefold.config.base.part_registry import find_part, kinds
from moefold.config.chosen import chosen_in
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.groups.site_method import SiteMethodPart
from moefold.config.model import ModelConfig
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.message_text import Problem
from moefold.remote_path import is_remote
from moefold.topology.fragments import recipe_fragments, shortest_gap


def validate_site_number(checkpoint: CheckpointConfig, sites: SitesConfig) -> Iterator[Problem]:
    """Check that the number of the site is in range, and that a separate site names the meeting point."""
    if sites.number >= sites.count > 1:
        rule = f"must be below sites.count={sites.count}"
        way_out = (
            f"sites are numbered from 0 (choose 0 to {sites.count - 1}, or -1 to start all of them on this machine)"
        )
        yield Problem("sites.number", sites.number, rule, way_out)
    if sites.count > 1 and sites.number >= 0 and not sites.meet:
        rule = "needs sites.meet, the HOST:PORT of `moefold meet`"
        way_out = "set it, or sites.number=-1 to start all sites on this machine"
        yield Problem("sites.number", sites.number, rule, way_out)
    folder = checkpoint.dir
    if sites.count > 1 and sites.number >= 0 and checkpoint.saves and is_remote(folder):
        name = f"site-{sites.number}"
        if folder.rstrip("/").rpartition("/")[2] != name:
            rule = f"must end with {name!r}, as sites that write to one folder of a store would mix their checkpoints"
            yield Problem("checkpoint.dir", folder, rule, f"set checkpoint.dir={folder.rstrip('/') + '/' + name!r}")
    if sites.count > 1 and sites.number < 0 and sites.meet:
        rule = "needs sites.number, the number of this site from 0"
        way_out = "set it, or leave sites.meet out to start all sites on this machine"
        yield Problem("sites.meet", sites.meet, rule, way_out)


def validate_rounds(run: RunConfig, model: ModelConfig, faults: FaultsConfig, sites: SitesConfig) -> Iterator[Problem]:
    """Check quorum, first round and timeout."""
    if not sites.is_active:
        return

    if sites.quorum > sites.count:
        rule = f"must be at most sites.count={sites.count}"
        yield Problem("sites.quorum", sites.quorum, rule, "0 is more than half of them")
    if sites.first > run.steps:
        rule = f"must be at most run.steps={run.steps}"
        yield Problem("sites.first", sites.first, rule, "run.steps means one round, after the last step")
    if sites.every > run.steps and sites.first < run.steps:
        rule = f"is above run.steps={run.steps}, so that only the round after the last step is left"
        way_out = f"set sites.first={run.steps} if that is meant, or a lower sites.every"
        yield Problem("sites.every", sites.every, rule, way_out)
    count = recipe_fragments(model, sites)
    if sites.every < count:
        rule = (
            f"must be at least the {count} fragments of sites.fragment_layers={sites.fragment_layers}, each of "
            "which has a round of its own"
        )
        yield Problem("sites.every", sites.every, rule, f"choose every={count}, or larger fragments")
    elif sites.overlap >= shortest_gap(count, sites.every) and not sites.part.overlaps_whole_round:
        gap = shortest_gap(count, sites.every)
        whole = _whole_round_methods() if sites.overlap == gap and count == 1 else ""
        rule = (
            f"must be below the {gap} steps between two rounds (sites.every={sites.every} over {count} "
            f"fragment{'s' if count > 1 else ''})"
        )
        yield Problem("sites.overlap", sites.overlap, rule, f"choose at most {gap - 1}{whole}")
    if sites.fragment_layers > model.num_layers:
        rule = f"must be at most model.layers={model.num_layers}"
        way_out = "choose fewer layers, or 0 for all layers in one fragment"
        yield Problem("sites.fragment_layers", sites.fragment_layers, rule, way_out)
    if sites.grace_s > sites.timeout_s:
        rule = f"must be at most sites.timeout_s={sites.timeout_s}, after which a round goes on in any case"
        yield Problem("sites.grace_s", sites.grace_s, rule, "lower it, or raise sites.timeout_s")
    if sites.keep_local == 1:
        yield Problem("sites.keep_local", 1, "never takes the outer weights", "choose a share below 1, such as 0.5")
    if sites.count > 1 and sites.timeout_s > faults.timeout_s / 2:
        limit = f"must be at most half of faults.timeout_s={faults.timeout_s}"
        rule = f"{limit}, or a wait for another site would count as a hang"
        yield Problem("sites.timeout_s", sites.timeout_s, rule, "lower it, or raise faults.timeout_s")


def _whole_round_methods() -> str:
    """Return a way out that names the installed methods of sites that overlap a whole round, or empty without one."""
    group = SiteMethodPart.group
    names = [f"{kind!r}" for kind in kinds(group) if find_part(group, kind).overlaps_whole_round]
    return f", or sites.method={' or '.join(names)}, which overlaps a whole round" if names else ""


def validate_codes_and_moments(model: ModelConfig, sites: SitesConfig) -> Iterator[Problem]:
    """Check that the settings of sent values and of inner moments are consistent."""
    if sites.moments == "average" and sites.overlap:
        rule = f"would replace moments by the moments of sites.overlap={sites.overlap} steps ago"
        yield Problem("sites.moments", "average", rule, "choose overlap=0, or moments='keep'")
    if sites.moments == "reset":
        if recipe_fragments(model, sites) == 1:
            return
        rule = (
            f"resets the moments of all layers, and sites.fragment_layers={sites.fragment_layers} has a round for "
            "a part of them"
        )
        yield Problem("sites.moments", "reset", rule, "choose fragment_layers=0, or moments='keep'")


def validate_site_shards(parallel: ParallelConfig, sites: SitesConfig) -> Iterator[Problem]:
    """Check that no two data-parallel ranks hold the same weights."""
    if sites.is_active and parallel.world_size > 1 and parallel.zero == 0:
        rule = "holds all weights on every data-parallel rank, and each would send them to the other sites"
        yield Problem("parallel.zero", 0, rule, "choose parallel.zero=1")


def validate_site_training(
    parallel: ParallelConfig, moe: MoEConfig, faults: FaultsConfig, sites: SitesConfig
) -> Iterator[Problem]:
    """Check settings of ranks that sites do not support."""
    if sites.count == 1:
        return
    if parallel.elastic:
        rule = "changes the shards of a site, which must be equal on all sites"
        yield Problem("parallel.elastic", True, rule, "set parallel.elastic=false")
    for key in ("nonfinite", "spike"):
        if getattr(faults, key) == "rollback":
            rule = "goes back to weights of an earlier round than the other sites have"
            yield Problem(f"faults.{key}", "rollback", rule, "choose 'skip' or 'stop'")
    if moe.trace_every or moe.replay:
        rule = "moe.trace_every and moe.replay store the routing of one job's samples"
        yield Problem("", None, rule, "set sites.count=1, or leave them out")


def validate_site_method(align: AlignConfig, rl: RLConfig, sites: SitesConfig) -> Iterator[Problem]:
    """Refuse training methods that keep the order of all samples in one job."""
    if sites.count == 1:
        return
    if rl.is_on:
        rule = f"samples prompts by the state of one job, and sites.count={sites.count} divides samples between jobs"
        yield Problem("rl.group_size", rl.group_size, rule, "set sites.count=1")
    if chosen_in(align, AlignmentPart).has_reference:
        rule = (
            "stores the log-probabilities of the reference by the order of one job's samples, and "
            f"sites.count={sites.count} divides them"
        )
        yield Problem("align.method", str(align.method), rule, "set sites.count=1")


SITES_RULES = (
    validate_site_number,
    validate_rounds,
    validate_codes_and_moments,
    validate_site_shards,
    validate_site_training,
    validate_site_method,
)
