"""Rules on parallel degrees and the sizes that they divide, on placement, and on overlapped communication.

Each axis has a function of (config, degree) that yields its violations, so that the legal values of a degree are found
by trials with all other settings unchanged.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from moefold.config.base.limits import MAX_MICRO_BATCHES
from moefold.config.base.param_spec import shard_rows
from moefold.config.base.part import describe_part
from moefold.config.base.part_registry import is_built_in, kinds_with
from moefold.config.base.pipeline_actions import find_deadlock
from moefold.config.chosen import chosen, chosen_in
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.groups.context import BALANCED, ContextPart
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.groups.drop import DropScopePart
from moefold.config.groups.router import ChoicePart
from moefold.config.groups.schedule import SchedulePart
from moefold.config.model import ModelConfig
from moefold.config.rule import apply_rule
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.train import AUTO_RECOMPUTE, TrainConfig
from moefold.cost.stage_balance import plan_stages, with_explicit_layout
from moefold.message_text import Problem, Setting, join_with_or, nearest_multiples, nearest_numbers
from moefold.topology.collective_order import RECOMPUTED_WITH_COMM, collective_sequence, order_mismatches
from moefold.topology.layout import divisors, fold_mapping
from moefold.topology.schedules import overlapped_schedules, runtime_slots
from moefold.validate.pipeline import PIPELINE_RULES, layers_setting, validate_micro_batch_count

WAY_OUT = "choose placement='samples'"


def validate_attention_pool(parallel: ParallelConfig) -> Iterator[Problem]:
    """Check that a pool holds several ranks and whole samples, and that pools divide the ranks of a round."""
    p = parallel
    plan = chosen_in(p, ContextPart).plan
    if not plan.pool or not plan.balances_compute_ranks:
        return
    pool = plan.pool
    ranks = p.dp * p.cp
    if pool == 1 < ranks and p.cp == 1:
        legal = ", ".join(map(str, divisors(ranks)[1:]))
        rule = "leaves all work on its rank, as hosts='home' does"
        yield Problem("parallel.context.pool", 1, rule, f"choose one of {legal}, 0 for all ranks, or hosts='home'")
    elif pool % p.cp or ranks % pool:
        legal = ", ".join(str(p.cp * count) for count in divisors(p.dp) if p.cp * count > 1)
        rule = f"must be a multiple of parallel.cp={p.cp} that divides dp*cp={ranks}"
        yield Problem("parallel.context.pool", pool, rule, f"choose one of {legal}, or 0 for all ranks")


def validate_placed_samples(parallel: ParallelConfig, data: DataConfig, rl: RLConfig) -> Iterator[Problem]:
    """Check that features that read whole samples are off."""
    plan = chosen_in(parallel, ContextPart).plan
    if not plan.moves_tokens:
        return
    name, way_out = Setting(f"{ContextPart.key}.placement", plan.placement), WAY_OUT
    if rl.is_on:
        yield name.problem("splits samples between ranks, and rollouts have columns of whole samples", way_out)
    elif data.kind in ("preference", "program"):
        rule = f"splits samples between ranks, and data.kind={data.kind!r} has losses and columns of whole samples"
        yield name.problem(rule, way_out)


def validate_placed_tokens(model: ModelConfig, parallel: ParallelConfig, moe: MoEConfig) -> Iterator[Problem]:
    """Check that features are off that need contiguous tokens or each micro-batch on one group of ranks."""
    plan = chosen_in(parallel, ContextPart).plan
    if not plan.moves_tokens:
        return
    name, way_out = Setting(f"{ContextPart.key}.placement", plan.placement), WAY_OUT
    if model.has_linear_attention:
        rule = (
            "splits samples into parts of documents, and linear attention (model.layers) needs contiguous "
            "segments of samples"
        )
        yield name.problem(rule, way_out)
    if model.has_moe_layers:
        yield from _validate_routing(moe, name, way_out, is_balanced=plan.placement == BALANCED)


def _validate_routing(moe: MoEConfig, name: Setting, way_out: str, *, is_balanced: bool) -> Iterator[Problem]:
    for key in ("capacity_factor", "eval_capacity_factor"):
        factor = getattr(moe, key)
        if factor > 0 and (is_balanced or not chosen_in(moe, DropScopePart).is_shared):
            counted = "a micro-batch, whose tokens are on all ranks" if is_balanced else "one rank's part of a sample"
            rule = (
                f"with moe.{key}={factor} would drop other tokens than placement='samples': a capacity counts {counted}"
            )
            yield name.problem(rule, f"set {key}=0.0 (dropless), or {way_out}")
    if is_balanced and chosen_in(moe, ChoicePart).reads_micro_batch:
        rule = (
            f"with moe.choice='{moe.choice}' would balance other tokens than placement='samples': it reads the "
            "tokens of a micro-batch, which are on all ranks"
        )
        yield name.problem(rule, f"choose moe.choice='topk', or {way_out}")


PLACEMENT_RULES = (validate_attention_pool, validate_placed_samples, validate_placed_tokens)


@dataclass(frozen=True)
class DegreeProblem(Problem):
    """Degree that does not fit the model. The way out also names sizes of the model."""

    legal: Sequence[int] = ()
    """Degrees that fit."""

    def without_model(self) -> Problem:
        """Return the problem with a way out that keeps the model."""
        return Problem(self.key, self.value, self.rule, f"choose {_nearest_degrees(self.key, self.value, self.legal)}")


def _nearest_degrees(key: str, degree: int, legal: Sequence[int]) -> str:
    return f"{Setting(key, nearest_numbers(degree, legal)):s}"


def _validate_divides(name: str, degree: int, key: str, size: int) -> Iterator[Problem]:
    """Check that `degree` divides the size. The message names the nearest legal sizes."""
    if size % degree:
        way_out = f"choose {key}={nearest_multiples(size, degree)}"
        yield DegreeProblem(f"parallel.{name}", degree, f"must divide {key}={size}", way_out, divisors(size))


def _validate_tp_degree(cfg: Config, tp: int) -> Iterator[Problem]:
    model = cfg.model
    for key, size in dict.fromkeys(layer.attention.tp_unit(model.hidden_size) for layer in model.distinct_kinds):
        yield from _validate_divides("tp", tp, key, size)
    for groups in {weight.tp_heads for layer in model.distinct_kinds for weight in layer.params} - {0}:
        if groups % tp and tp % groups:
            key = "model.attention.num_kv_heads"
            rule = f"must divide {key}={groups}, or be a multiple of it (key and value heads are then replicated)"
            way_out = f"choose {key}={nearest_multiples(groups, tp)}"
            yield DegreeProblem("parallel.tp", tp, rule, way_out, divisors(groups))
    yield from _validate_tp_of_outside(model, tp)
    for key, size in dict.fromkeys(layer.ffn.tp_unit for layer in model.distinct_kinds):
        yield from _validate_divides("tp", tp, key, size)
    # tp need not divide the vocabulary, but the last rank must have some of its rows.
    _, rows = shard_rows(model.vocab_size, tp, tp - 1)
    if not rows:
        fewest = (tp - 1) * shard_rows(model.vocab_size, tp, 0)[1] + 1
        rule = f"leaves the last rank without a row of model.vocab_size={model.vocab_size}"
        legal = [other for other in range(1, tp) if shard_rows(model.vocab_size, other, other - 1)[1]]
        yield DegreeProblem("parallel.tp", tp, rule, f"choose model.vocab_size={fewest}", legal)


def _validate_tp_of_outside(model: ModelConfig, tp: int) -> Iterator[Problem]:
    """Check that tp divides the sizes that parts of other packages shard. `tp_unit` covers built-in parts."""
    for layer in model.distinct_kinds:
        part = layer.attention
        if is_built_in(type(part)):
            continue
        core = layer.core
        if core.heads % tp:
            yield Problem("parallel.tp", tp, f"must divide the {core.heads} heads of {describe_part(part)}")
        for weight in layer.params:
            dim = weight.tp_shard_dim(tp)
            if dim is not None and (dim >= len(weight.shape) or weight.shape[dim] % tp):
                rule = (
                    f"must divide dim {dim} of {weight.name}, which has the shape {weight.shape}, of "
                    f"{describe_part(part)}"
                )
                yield Problem("parallel.tp", tp, rule)


def _validate_cp_degree(cfg: Config, cp: int) -> Iterator[Problem]:
    context = chosen(cfg, ContextPart)
    if cp > 1 and cfg.model.selected_keys and not (context.takes_selected_keys or context.is_planned):
        legal = kinds_with(context.group, "takes_selected_keys")
        rule = (
            f"with parallel.cp={cp} is incompatible with model.attention.indexer.top_k={cfg.model.selected_keys}, "
            "which selects among the keys of the whole sequence"
        )
        yield Problem(context.key, context.kind, rule, f"choose {join_with_or(list(map(repr, legal)))}")
    if not context.shards_heads or cp == 1:
        return
    tp = cfg.parallel.tp
    cores = [layer.core for layer in cfg.model.distinct_kinds]
    for heads, groups in dict.fromkeys((core.heads, core.kv_heads) for core in cores):
        if heads % tp == 0 and (groups % tp == 0 or tp % groups == 0) and heads // tp % cp:
            rule = (
                f"must divide num_heads/tp={heads // tp} with parallel.context={context.kind!r}, which gives each rank "
                "whole heads"
            )
            yield Problem("parallel.cp", cp, rule, "choose parallel.context='ring' or 'allgather'")


def _validate_ep_degree(cfg: Config, ep: int) -> Iterator[Problem]:
    if cfg.model.routed:
        yield from _validate_divides("ep", ep, "model.ffn.moe.num_experts", cfg.model.routed.num_experts)
    elif ep > 1:
        yield _missing_moe_layers("ep", ep, cfg.model)


def _validate_etp_degree(cfg: Config, etp: int) -> Iterator[Problem]:
    if part := cfg.model.routed:
        yield from _validate_divides("etp", etp, "model.ffn.moe.intermediate_size", part.intermediate_size)
        if part.bias:
            key = "ffn.moe.latent_size" if part.latent_size else "hidden_size"
            yield from _validate_divides("etp", etp, f"model.{key}", part.token_size(cfg.model.hidden_size))
    elif etp > 1:
        yield _missing_moe_layers("etp", etp, cfg.model)


def _validate_pp_degree(cfg: Config, pp: int) -> Iterator[Problem]:
    layers = cfg.model.num_layers
    chunks = cfg.parallel.virtual_stages
    if pp * chunks > layers and not cfg.parallel.pipeline_layout:
        factor = f"* parallel.virtual_stages={chunks} " if chunks > 1 else ""
        rule = f"{factor}must be at most the {layers} layers of the model, one for each stage"
        way_out = f"choose {layers_setting(cfg.model, pp * chunks)}"
        yield DegreeProblem("parallel.pp", pp, rule, way_out, range(1, max(1, layers // chunks) + 1))


def _missing_moe_layers(name: str, degree: int, model: ModelConfig) -> Problem:
    rule = f"needs MoE layers, and model.layers={model.layers!r} has none"
    return DegreeProblem(f"parallel.{name}", degree, rule, "name 'moe' in model.layers", (1,))


def _divisible_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Return the size that each degree must divide so that the ranks still fold with the other degrees unchanged."""
    stage = parallel.world_size // parallel.pp
    return {
        "tp": stage // parallel.cp,
        "cp": stage // parallel.tp,
        "ep": stage // parallel.etp,
        "etp": stage // parallel.ep,
        "pp": parallel.world_size // lcm(parallel.tp * parallel.cp, parallel.ep * parallel.etp),
    }


DEGREE_RULES: dict[str, Callable[[Config, int], Iterator[Problem]]] = {
    "tp": _validate_tp_degree,
    "cp": _validate_cp_degree,
    "ep": _validate_ep_degree,
    "etp": _validate_etp_degree,
    "pp": _validate_pp_degree,
}


def validate_degrees(cfg: Config) -> Iterator[Problem]:
    """Check that every degree divides the sizes that it shards. Messages end with its legal values."""
    for name, rule in DEGREE_RULES.items():
        degree = getattr(cfg.parallel, name)
        problems = list(rule(cfg, degree))
        if not problems:
            continue
        legal = [n for n in divisors(_divisible_sizes(cfg.parallel)[name]) if _fixes_violations(cfg, name, n)]
        nearest = [_nearest_degrees(f"parallel.{name}", degree, legal)] if legal else []
        for problem in problems:
            if legal and isinstance(problem, DegreeProblem):
                problem = replace(problem, legal=legal)
            yield replace(problem, way_out=", or ".join(filter(None, (problem.way_out, *nearest))))


def _fixes_violations(cfg: Config, name: str, degree: int) -> bool:
    """Return whether another degree of an axis removes the axis's violations without adding other violations."""
    before = _count_violations(cfg)
    change: dict[str, Any] = {name: degree}
    after = _count_violations(replace(cfg, parallel=replace(cfg.parallel, **change)))
    return after[name] == 0 and all(after[rule] <= before[rule] for rule in before)


def _count_violations(cfg: Config) -> dict[str, int]:
    """Count the violations of each axis, of the sequence and of the batch."""
    counts = {
        name: len(list(degree_rule(cfg, getattr(cfg.parallel, name)))) for name, degree_rule in DEGREE_RULES.items()
    }
    rules = (validate_sequence_length, validate_batch_size, validate_micro_batch_count)
    return counts | {rule.__name__: len(list(apply_rule(rule, cfg))) for rule in rules}


def validate_sequence_length(cfg: Config) -> Iterator[Problem]:
    """Check that cp*tp divides the sequence, and that 2*cp does if attention balances zigzag chunks."""
    tp = cfg.parallel.tp
    cp = cfg.parallel.cp
    seq_len = cfg.train.seq_len
    zigzag = cp > 1 and chosen(cfg, ContextPart).splits_in_chunks
    divisor = lcm(cp * tp, 2 * cp if zigzag else 1)
    if seq_len % divisor == 0:
        segment = seq_len // (2 * cp if zigzag else cp)
        cores = (layer.core for layer in cfg.model.decoder_layers)
        taps = max((core.conv_kernel for core in cores), default=1)
        if cp > 1 and segment < taps - 1:
            enough = divisor * -(-(taps - 1) * seq_len // segment // divisor)
            yield Problem(
                "train.seq_len",
                seq_len,
                f"gives segments of {segment} tokens with parallel.cp={cp} and "
                f"parallel.context='{cfg.parallel.context}', which must hold the {taps - 1} tokens before one of "
                f"model.linear_attention.conv_kernel={taps}",
                f"choose train.seq_len={enough}",
            )
        return
    if seq_len % (cp * tp):
        rule = f"divisible by cp*tp={cp}*{tp}={cp * tp}"
    else:
        rule = f"divisible by 2*cp={2 * cp}, the chunks that balance parallel.context='{cfg.parallel.context}'"
    yield Problem("train.seq_len", seq_len, f"must be {rule}", f"choose {nearest_multiples(seq_len, divisor)}")


def validate_mapping_is_resolved(parallel: ParallelConfig) -> Iterator[Problem]:
    """Check that the mapping is resolved: only `moefold train` plans it."""
    if parallel.mapping == "auto":
        rule = "is only planned by `moefold train`"
        way_out = "for this command give the degrees, as `moefold plan RECIPE --recipe OUT.toml` writes them"
        yield Problem("parallel.mapping", "auto", rule, way_out)


def validate_batch_size(cfg: Config) -> Iterator[Problem]:
    """Check that the global batch is a multiple of micro_batch_size*dp, and has not too many micro-batches.

    With `parallel.elastic` the last data-parallel ranks may have padding.
    """
    p = cfg.parallel
    batch = cfg.train.global_batch_size
    micro = cfg.train.micro_batch_size
    samples_per_pass = micro * p.dp
    if batch % samples_per_pass and p.may_pad_batch and batch % micro == 0 and p.dp <= batch // micro:
        yield from _padding_refusals(cfg)
    elif batch % samples_per_pass:
        rule = (
            f"must be divisible by train.micro_batch_size*dp={micro}*{p.dp}={samples_per_pass} (dp = "
            "world_size/(tp*cp*pp))"
        )
        way_out = f"choose {nearest_multiples(batch, samples_per_pass)}{_padding_hint(cfg.parallel, cfg.train)}"
        yield Problem("train.global_batch_size", batch, rule, way_out)
        return
    count = cfg.num_micro_batches
    if count > MAX_MICRO_BATCHES:
        rule = f"gives each data-parallel rank {count} micro-batches, more than {MAX_MICRO_BATCHES}"
        largest = MAX_MICRO_BATCHES * samples_per_pass
        way_out = f"choose train.global_batch_size={largest} or less, or raise train.micro_batch_size"
        yield Problem("train.global_batch_size", batch, rule, way_out)


def _padding_hint(parallel: ParallelConfig, train: TrainConfig) -> str:
    count, remainder = divmod(train.global_batch_size, train.micro_batch_size)
    fits = remainder == 0 and parallel.dp <= count and not parallel.may_pad_batch
    return ", or set parallel.elastic=true, which fills the last ranks up with padding" if fits else ""


def _padding_refusals(cfg: Config) -> Iterator[Problem]:
    """Yield the reasons why the last data-parallel ranks cannot have padding: settings that read whole batches."""
    p = cfg.parallel
    unsupported = {
        "run.cuda_graphs": cfg.run.uses_cuda_graphs,
        "moe.trace_every": cfg.moe.trace_every > 0,
        "moe.replay": bool(cfg.moe.replay),
        "align.method": chosen_in(cfg.align, AlignmentPart).preference is not None,
        "rl.group_size": cfg.is_rl,
    }
    batch = cfg.train.global_batch_size
    for key, is_set in unsupported.items():
        if is_set:
            rule = (
                f"is not a multiple of train.micro_batch_size*dp={cfg.train.micro_batch_size}*{p.dp}, and {key} "
                "is incompatible with the padding that fills it up"
            )
            way_out = f"choose {nearest_multiples(batch, cfg.train.micro_batch_size * p.dp)}, or leave {key} out"
            yield Problem("train.global_batch_size", batch, rule, way_out)


def validate_dispatch_kernels(cfg: Config) -> Iterator[Problem]:
    """Check that the dispatcher supports the settings if it spreads experts over ranks."""
    p = cfg.parallel
    part = chosen_in(p, DispatcherPart)
    for reason in apply_rule(part.unsupported, cfg) if p.ep * p.etp > 1 and cfg.model.has_moe_layers else ():
        yield Problem(part.key, part.kind, f"cannot run: {reason}", "choose 'alltoall', or 'auto'")


def validate_dispatcher(model: ModelConfig, parallel: ParallelConfig, moe: MoEConfig) -> Iterator[Problem]:
    """Check that the dispatcher can send tokens under ep and etp, and can pad to a capacity."""
    part = chosen_in(parallel, DispatcherPart)
    yield from part.mapping_problems(parallel, moe, has_experts=model.has_moe_layers)


PARALLEL_RULES = (
    validate_mapping_is_resolved,
    validate_degrees,
    validate_sequence_length,
    validate_batch_size,
    *PIPELINE_RULES,
    validate_dispatch_kernels,
    validate_dispatcher,
    *PLACEMENT_RULES,
)
OVERLAP_EXPERTS_SETTING = Setting("parallel.overlap_experts", True)


def validate_expert_overlap(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Check that `overlap_experts` has expert communication to hide, and a schedule and ZeRO stage that allow it."""
    if not parallel.overlap_experts:
        return
    if not model.has_moe_layers:
        rule = "hides the communication of experts, and no layer of model.layers is 'moe'"
        yield OVERLAP_EXPERTS_SETTING.problem(rule, "name 'moe' in model.layers, or overlap_experts=false")
        return
    if parallel.ep * parallel.etp == 1:
        rule = (
            f"hides the communication of experts, and with {Setting('parallel.ep', 1)} and "
            f"{Setting('parallel.etp', 1)} there is none"
        )
        yield OVERLAP_EXPERTS_SETTING.problem(rule, "choose ep=2 or more, or overlap_experts=false")
    if not (schedule := chosen_in(parallel, SchedulePart)).pairs_passes():
        *others, last = map(repr, overlapped_schedules())
        rule = (
            "needs a schedule with a phase of one forward and one backward pass, and "
            f"parallel.schedule={schedule.kind!r} has none"
        )
        way_out = f"choose schedule={', '.join(others)} or {last}, or overlap_experts=false"
        yield OVERLAP_EXPERTS_SETTING.problem(rule, way_out)
    if parallel.zero == 3:
        rule = "runs a layer for two micro-batches at a time, and parallel.zero=3 frees its parameters after one"
        yield OVERLAP_EXPERTS_SETTING.problem(rule, "choose zero=2, or overlap_experts=false")
    samples_per_pass = train.micro_batch_size * parallel.dp
    fits = train.global_batch_size % samples_per_pass == 0 or parallel.may_pad_batch
    if fits and train.num_micro_batches(parallel.dp) < 2:
        rule = (
            f"needs two micro-batches or more, and train.global_batch_size={train.global_batch_size} gives each "
            "data-parallel rank 1"
        )
        way_out = f"choose global_batch_size={2 * samples_per_pass}, or overlap_experts=false"
        yield OVERLAP_EXPERTS_SETTING.problem(rule, way_out)


def validate_collective_order(cfg: Config) -> Iterator[Problem]:
    """Check that ranks of a group start expert collectives in the same order, and that none deadlocks.

    The config has passed all other rules. The schedules guarantee both conditions: a violation is a bug of moefold.
    """
    p = cfg.parallel
    train = cfg.train
    if not p.overlap_experts or not cfg.model.has_moe_layers:
        return
    if AUTO_RECOMPUTE in train.recompute:
        # The parts are chosen later, for these stages. The order only depends on whether collectives are repeated.
        placed = with_explicit_layout(cfg)
        for parts in ((), RECOMPUTED_WITH_COMM[:1]):
            yield from validate_collective_order(replace(placed, train=replace(train, recompute=parts)))
        return
    rows = runtime_slots(cfg.model, cfg.parallel, cfg.train)
    if cycle := find_deadlock(rows):
        rule = f": pipeline rank {cycle[0]} would deadlock before {cycle[1][0]}"
        yield OVERLAP_EXPERTS_SETTING.problem(rule, "set it to false")
    layout = fold_mapping(p)
    plan = plan_stages(cfg)
    by_pp_rank = [
        collective_sequence(cfg.model, cfg.parallel, cfg.train, {s.index: s for s in plan.stages_of_rank(i)}, row)
        for i, row in enumerate(rows)
    ]
    by_rank = [by_pp_rank[layout.attention.coordinate(rank, "pp")] for rank in range(p.world_size)]
    for message in order_mismatches(by_rank, layout):
        yield OVERLAP_EXPERTS_SETTING.problem(f": {message}, so that they would deadlock", "set it to false")


def validate_tp_overlap(parallel: ParallelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Check that `overlap_tp` has no low-precision GEMMs: each partial GEMM would quantise the weight again."""
    if parallel.overlap_tp and train.quantizes_gemms:
        rule = (
            f"runs a GEMM for one tp rank's tokens at a time, in {Setting('run.dtype')}, and "
            f"train.precision={train.precision!r} runs one for all tokens"
        )
        yield Problem("parallel.overlap_tp", True, rule, "choose precision='dtype', or overlap_tp=false")


OVERLAP_RULES = (validate_expert_overlap, validate_tp_overlap)
