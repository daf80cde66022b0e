"""Rules on sites: jobs that exchange weights every few steps."""

from collections.abc import Iterator

from moefold.config.align import AlignConfig
from moefold.config.checkpoint import CheckpointConfig
from moefold.config.chosen import chosen_in
from moefold.config.faults import FaultsConfig
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.lora import LoraConfig
from moefold.config.model import ModelConfig, has_moe_layers
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.param_spec import expert_dp_dim
from moefold.config.rl import RLConfig
from moefold.config.run import RunConfig
from moefold.config.sites import NUM_SIMILAR, SitesConfig
from moefold.config.train import TrainConfig
from moefold.cost.adapter_spec import expert_names, training_weights
from moefold.remote_path import is_remote
from moefold.validate.unused_rule import UnusedKeyRule


def validate_site_number(checkpoint: CheckpointConfig, sites: SitesConfig) -> Iterator[str]:
    """Check that the site is one of the run, and that a site of its own names the meeting point."""
    if sites.number >= sites.count > 1:
        yield (
            f"sites.number={sites.number} must be below sites.count={sites.count}; sites are numbered from 0 "
            f"(choose 0 to {sites.count - 1}, or -1 to start all of them on this machine)"
        )
    if sites.count > 1 and sites.number >= 0 and not sites.meet:
        yield (
            f"sites.number={sites.number} needs sites.meet, the HOST:PORT of `moefold meet`; set it, or "
            "sites.number=-1 to start all sites on this machine"
        )
    folder = checkpoint.dir
    if sites.count > 1 and sites.number >= 0 and checkpoint.saves and is_remote(folder):
        name = f"site-{sites.number}"
        if folder.rstrip("/").rpartition("/")[2] != name:
            yield (
                f"checkpoint.dir={folder!r} must end with {name!r}, as sites that write to one folder of a store would "
                f"mix their checkpoints; set checkpoint.dir={folder.rstrip('/') + '/' + name!r}"
            )
    if sites.count > 1 and sites.number < 0 and sites.meet:
        yield (
            f"sites.meet={sites.meet!r} needs sites.number, the number of this site from 0; set it, or leave "
            "sites.meet out to start all sites on this machine"
        )


def validate_rounds(run: RunConfig, model: ModelConfig, faults: FaultsConfig, sites: SitesConfig) -> Iterator[str]:
    """Check quorum, first round and timeout."""
    if not sites.is_active:
        return
    from moefold.topology.fragments import recipe_fragments, shortest_gap

    if sites.in_pairs and sites.count == 1:
        yield (
            f"sites.topology='pairs' (sites.method='{sites.method}') exchanges between two sites, and sites.count=1; "
            "set sites.count, or choose sites.method='diloco'"
        )
    if sites.in_pairs and sites.owns_experts:
        yield (
            "sites.topology='pairs' exchanges with one other site, and sites.experts='own' needs the experts of all "
            "sites; choose topology='all', or experts='average'"
        )
    if sites.in_pairs and sites.overlaps_whole_round:
        yield (
            f"sites.topology='pairs' needs a sites.overlap below sites.every={sites.every}, as the pull between the "
            "outer weights of a pair is the pull of one round; choose a lower overlap, or topology='all'"
        )
    if sites.quorum > sites.count:
        yield f"sites.quorum={sites.quorum} must be at most sites.count={sites.count}; 0 is more than half of them"
    if sites.first > run.steps:
        yield (
            f"sites.first={sites.first} must be at most run.steps={run.steps}; run.steps means one round, after "
            "the last step"
        )
    if sites.every > run.steps and sites.first < run.steps:
        yield (
            f"sites.every={sites.every} is above run.steps={run.steps}, so that only the round after the last "
            f"step is left; set sites.first={run.steps} if that is meant, or a lower sites.every"
        )
    count = recipe_fragments(model, sites)
    if sites.every < count:
        yield (
            f"sites.every={sites.every} must be at least the {count} fragments of sites.fragment_layers="
            f"{sites.fragment_layers}, each of which has a round of its own; choose every={count}, or larger fragments"
        )
    elif sites.overlap >= shortest_gap(count, sites.every) and not (count == 1 and sites.overlaps_whole_round):
        gap = shortest_gap(count, sites.every)
        whole = f", or {sites.every} to exchange a round during the whole next one" if count == 1 else ""
        yield (
            f"sites.overlap={sites.overlap} must be below the {gap} steps between two rounds (sites.every="
            f"{sites.every} over {count} fragment{'s' if count > 1 else ''}); choose at most {gap - 1}{whole}"
        )
    if sites.fragment_layers > model.num_layers:
        yield (
            f"sites.fragment_layers={sites.fragment_layers} must be at most model.layers={model.num_layers}; "
            "choose fewer layers, or 0 for all layers in one fragment"
        )
    if sites.grace_s > sites.timeout_s:
        yield (
            f"sites.grace_s={sites.grace_s:g} must be at most sites.timeout_s={sites.timeout_s:g}, after which a round "
            "goes on in any case; lower it, or raise sites.timeout_s"
        )
    if sites.keep_local == 1:
        yield "sites.keep_local=1 never takes the outer weights; choose a share below 1, such as 0.5"
    if sites.count > 1 and sites.timeout_s > faults.timeout_s / 2:
        yield (
            f"sites.timeout_s={sites.timeout_s:g} must be at most half of faults.timeout_s={faults.timeout_s:g}, "
            "or a wait for another site would count as a hang; lower it, or raise faults.timeout_s"
        )


def validate_codes_and_moments(model: ModelConfig, sites: SitesConfig) -> Iterator[str]:
    """Check that the settings of what is sent, and of the inner moments, fit together."""
    if sites.density < 1 and sites.precision != "float32":
        yield (
            f"sites.density={sites.density:g} sends values of sites.values bits, and not in sites.precision="
            f"{sites.precision!r}; leave precision out, and choose values=8 or 2"
        )
    if sites.density < 1 and sites.residual and sites.momentum:
        yield (
            f"sites.momentum={sites.momentum:g} and sites.residual={sites.residual:g} with sites.density="
            f"{sites.density:g} would count a difference twice, as the residual is sent later; choose momentum=0"
        )
    if sites.moments == "average" and sites.overlap:
        yield (
            f"sites.moments='average' would replace moments by the moments of sites.overlap={sites.overlap} steps ago; "
            "choose overlap=0, or moments='keep'"
        )
    if sites.moments == "reset":
        from moefold.topology.fragments import recipe_fragments

        if recipe_fragments(model, sites) == 1:
            return
        yield (
            f"sites.moments='reset' resets the moments of all layers, and sites.fragment_layers={sites.fragment_layers}"
            " has a round for a part of them; choose fragment_layers=0, or moments='keep'"
        )


def validate_site_shards(parallel: ParallelConfig, sites: SitesConfig) -> Iterator[str]:
    """Check that no two data-parallel ranks hold the same weights."""
    if sites.is_active and parallel.world_size > 1 and parallel.zero == 0:
        yield (
            "parallel.zero=0 holds all weights on every data-parallel rank, and each would send them to the other "
            "sites; choose parallel.zero=1"
        )


def validate_site_training(
    parallel: ParallelConfig, moe: MoEConfig, faults: FaultsConfig, sites: SitesConfig
) -> Iterator[str]:
    """Check settings of ranks that sites cannot take."""
    if sites.count == 1:
        return
    if parallel.elastic:
        yield (
            "parallel.elastic=true changes the shards of a site, which must be equal on all sites; set "
            "parallel.elastic=false"
        )
    for key in ("nonfinite", "spike"):
        if getattr(faults, key) == "rollback":
            yield (
                f"faults.{key}='rollback' goes back to weights of an earlier round than the other sites have; "
                "choose 'skip' or 'stop'"
            )
    if moe.trace_every or moe.replay:
        yield (
            "moe.trace_every and moe.replay store the routing of one job's samples; set sites.count=1, or leave them "
            "out"
        )


def validate_site_method(align: AlignConfig, rl: RLConfig, sites: SitesConfig) -> Iterator[str]:
    """Check that no method keeps the order of all samples in one job."""
    if sites.count == 1:
        return
    if rl.is_on:
        yield (
            f"rl.group_size={rl.group_size} samples prompts by the state of one job, and sites.count="
            f"{sites.count} divides samples between jobs; set sites.count=1"
        )
    if chosen_in(align, AlignmentPart).has_reference:
        yield (
            f"align.method='{align.method}' stores the log-probabilities of the reference by the order of one "
            f"job's samples, and sites.count={sites.count} divides them; set sites.count=1"
        )


def validate_owned_experts(model: ModelConfig, train: TrainConfig, sites: SitesConfig) -> Iterator[str]:
    """Check that experts of each site learn, from the outer weights of their routers."""
    if not sites.owns_experts:
        return
    if not has_moe_layers(model):
        yield 'sites.experts="own" needs MoE layers, and the model has none; choose sites.experts="average"'
        return
    if train.trains_indexers_only(model):
        yield (
            'sites.experts="own" divides the training of experts, and train.indexer_stage="warmup" freezes them; '
            'choose sites.experts="average"'
        )
    if sites.overlaps_whole_round:
        yield (
            f"sites.overlap={sites.overlap} exchanges a round during the whole next one, for which the experts of "
            "other sites would be older than their routers by a round; set a lower sites.overlap, or "
            'sites.experts="average"'
        )
    if sites.moments == "average":
        yield (
            "sites.moments='average' needs moments of the same experts on all sites, and sites.experts=\"own\" has "
            "moments of each site's own; choose moments='keep' or 'reset'"
        )


def validate_expert_rows(
    model: ModelConfig, parallel: ParallelConfig, lora: LoraConfig, sites: SitesConfig
) -> Iterator[str]:
    """Check that every rank has experts of each site."""
    if not sites.owns_experts or not has_moe_layers(model):
        return
    for rows, where in sorted(set(_expert_rows(model, parallel, lora))):
        if rows % sites.count:
            yield (
                f"sites.count={sites.count} must divide the {rows} experts {where}, so that each rank has experts of "
                "every site; choose another sites.count, model.ffn.moe.num_experts or parallel.ep, or "
                'sites.experts="average"'
            )
            break


def validate_merged_experts(model: ModelConfig, lora: LoraConfig, sites: SitesConfig) -> Iterator[str]:
    """Check the settings of the merging of experts."""
    if not sites.owns_experts or not has_moe_layers(model) or not sites.merge_experts:
        return
    if model.experts.num_experts <= NUM_SIMILAR:
        yield (
            f"sites.merge_experts={sites.merge_experts:g} merges each expert with the {NUM_SIMILAR} most similar ones, "
            f"and model.ffn.moe.num_experts={model.experts.num_experts}; set sites.merge_experts=0"
        )
    if sites.merge_every % sites.every:
        above = -(-sites.merge_every // sites.every) * sites.every
        yield (
            f"sites.merge_every={sites.merge_every} must be a multiple of sites.every={sites.every}, as experts are "
            f"merged after a round; choose {above}"
        )
    if sites.overlap:
        yield (
            f"sites.overlap={sites.overlap}: sites.merge_experts changes the weights of a round, which training goes "
            "on from; set overlap=0 or merge_experts=0"
        )
    if lora.rank:
        yield f"lora.rank={lora.rank} freezes the experts that sites.merge_experts would merge; set merge_experts=0"


def _expert_rows(model: ModelConfig, p: ParallelConfig, lora: LoraConfig) -> Iterator[tuple[int, str]]:
    """Yield the number of experts of which each rank holds whole shards, for each parameter of experts; and where."""
    for name, weight in training_weights(model, lora).items():
        if name in expert_names(model, lora):
            shape = weight.shard(p.tp, p.ep, p.etp).shape
            is_by_expert = p.edp > 1 and expert_dp_dim(shape, p.edp) == 0
            if is_by_expert and shape[0] % p.edp == 0:
                yield shape[0] // p.edp, f"of a rank (parallel.ep={p.ep}, sharded over {p.edp} data-parallel ranks)"
            elif is_by_expert:
                yield 1, f"of a rank, which {p.edp} data-parallel ranks share unevenly"
            else:
                yield shape[0], f"of a rank (parallel.ep={p.ep})"


SITES_RULES = (
    validate_site_number,
    validate_rounds,
    validate_codes_and_moments,
    validate_site_shards,
    validate_site_training,
    validate_site_method,
    validate_owned_experts,
    validate_expert_rows,
    validate_merged_experts,
)

UNUSED_SITES_KEYS = (
    UnusedKeyRule(
        "sites.moments",
        lambda cfg: cfg.sites.count == 1 and cfg.sites.moments == "average",
        "sites.count=1 exchanges no moments",
        "set sites.count",
    ),
    UnusedKeyRule(
        "sites.penalty",
        lambda cfg: not cfg.sites.overlaps_whole_round,
        "the outer weights stay the same during sites.overlap steps, unless it is equal to sites.every",
        "set sites.overlap to the value of sites.every",
    ),
    UnusedKeyRule(
        "sites.keep_local",
        lambda cfg: cfg.sites.overlaps_whole_round,
        "with sites.overlap equal to sites.every, a site begins each round at the outer weights",
        "choose a lower sites.overlap",
    ),
)
