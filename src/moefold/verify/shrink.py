"""Shrink a recipe for `moefold verify`: the same parallel axes and code paths with sizes that fit a laptop."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import lcm, prod

from moefold.config.align import AlignConfig
from moefold.config.chosen import RoutingSections, chosen, chosen_in, with_part
from moefold.config.data import DataConfig
from moefold.config.groups.context import ContextPart
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.groups.rope_scaling import RopeScalingPart
from moefold.config.groups.router_score import RouterScorePart
from moefold.config.groups.schedule import SchedulePart
from moefold.config.lora import LoraConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.patterns import ATTENTION_KINDS, LAYER_KINDS, ROPE_KINDS, spell
from moefold.config.rl import RewardConfig, RLConfig, RolloutConfig
from moefold.config.schema import Config
from moefold.config.sites import SitesConfig
from moefold.config.train import TrainConfig
from moefold.cost.adapter_spec import adapted_weights
from moefold.errors import ConfigError
from moefold.topology.layout import divisors
from moefold.topology.pipeline_layout import format_layout, parse_layout
from moefold.topology.selection_groups import shares_selections
from moefold.validate.config import check_config

HEAD_SIZE = 8
SHARD_WIDTH = 8
VOCAB_SHARD_SIZE = 32
MIN_SEQ_LEN = 16
MAX_ATTENTION_BLOCK = 2
"""Documents of small recipes have about as many tokens as the vocabulary."""
MAX_WINDOW = 5
"""Limit of the sliding window: well below the shortest sequence, and no divisor of it."""
MAX_INDEX_TOPK = MAX_WINDOW - 1
"""Limit of the selected keys: below the sliding window, so that a selection in a window leaves keys out."""
MIN_MIXER_JITTER = 0.6
"""Least sparsemixer_jitter: random logits differ by more than a trained router's, and few would be close."""
MAX_CONV_KERNEL = 3
"""Limit of the convolution of linear attention: a segment of the shortest sequence holds all earlier tokens of it."""
LEARNING_RATE = 1e-2
"""Learning rate; large enough that three steps change every weight."""
MAX_LORA_RANK = 2
"""Limit of the rank of adapters."""
MAX_LAYERS_PER_STAGE = 2
MAX_MTP_LAYERS = 2
"""Limit of the MTP layers of a small recipe."""
MAX_RANKS = 16
"""Limit of the ranks of a small recipe, if its mapping allows it."""
MAX_STAGES = 8
"""Limit of the pipeline stages over all ranks; above it the number of virtual stages is reduced."""
DEGREES = ("tp", "cp", "pp", "ep", "etp")
"""Degrees that a recipe sets; dp and edp follow from the number of ranks."""
AXES = (*DEGREES, "dp", "edp", "virtual_stages")


def shrink(cfg: Config, max_ranks: int = MAX_RANKS) -> Config:
    """Shrink a recipe to the smallest sizes that its mapping allows.

    Every axis above 1, dp and edp included, stays at 2 or more wherever that is legal. Degrees are unchanged if that
    needs at most `max_ranks`; else as few of them as possible are lowered to divisors. Layer kinds, routing, token
    dropping, context parallelism, dispatcher and schedule are unchanged. The data becomes synthetic, so that a recipe
    can be verified without its data: there is no alignment, no reinforcement learning, and no router replay, as the
    trace belongs to the large model. The learning rate is high, so that the first steps change the weights.

    Raises:
        ConfigError: the recipe is invalid.
    """
    check_config(cfg)
    for parallel in _parallel_candidates(cfg.parallel, max_ranks):
        small = _shrink_config(cfg, parallel)
        if _is_legal(small):
            return small
    raise AssertionError(f"no small recipe has this mapping: {cfg.parallel}")


def changed_axes(large: ParallelConfig, small: ParallelConfig) -> tuple[list[str], list[str]]:
    """Return the lowered axes, as "ep 8 -> 2", and the axes that became 1."""
    degrees = [(axis, getattr(large, axis), getattr(small, axis)) for axis in AXES]
    lowered = [f"{axis} {before} -> {after}" for axis, before, after in degrees if before > after]
    return lowered, [axis for axis, before, after in degrees if before > 1 and after == 1]


def _parallel_candidates(p: ParallelConfig, max_ranks: int) -> Iterator[ParallelConfig]:
    """Yield candidates, best first: with all axes and few ranks, with all axes, with the given degrees."""
    complete = [candidate for candidate in _lowered_degrees(p) if not changed_axes(p, candidate)[1]]
    small = [candidate for candidate in complete if candidate.world_size <= max_ranks]
    yield from sorted(small, key=lambda candidate: (*_distance(p, candidate), candidate.world_size))
    yield from sorted(complete, key=lambda candidate: (candidate.world_size, *_distance(p, candidate)))
    p = _limit_virtual_stages(replace(p, pipeline_layout=_shrink_pipeline_layout(p.pipeline_layout)))
    yield from (replace(p, world_size=size) for size in _world_sizes(p))


def _distance(large: ParallelConfig, small: ParallelConfig) -> tuple[int, int]:
    """Return the number of degrees that differ, and the product of their ratios."""
    factors = [getattr(large, axis) // getattr(small, axis) for axis in DEGREES]
    return sum(factor > 1 for factor in factors), prod(factors)


def _lowered_degrees(p: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yield all ways to lower degrees to divisors of at least 2, with all fitting numbers of ranks."""
    layout = _shrink_pipeline_layout(p.pipeline_layout)
    # An explicit layout or a schedule from a file fixes the number of stages.
    has_fixed_stages = layout not in ("", "auto") or chosen_in(p, SchedulePart).is_for_one_mapping
    choices = [
        [degree]
        if degree == 1 or (axis == "pp" and has_fixed_stages)
        else [divisor for divisor in divisors(degree) if divisor > 1]
        for axis, degree in ((axis, getattr(p, axis)) for axis in DEGREES)
    ]
    for degrees in product(*choices):
        small = replace(p, pipeline_layout=layout, **dict(zip(DEGREES, degrees, strict=True)))
        small = small if has_fixed_stages else _limit_virtual_stages(small)
        yield from (replace(small, world_size=size) for size in _world_sizes(small))


def _limit_virtual_stages(p: ParallelConfig) -> ParallelConfig:
    if p.virtual_stages == 1 or p.pipeline_layout not in ("", "auto") or chosen_in(p, SchedulePart).is_for_one_mapping:
        return p
    fitting = [n for n in divisors(p.virtual_stages) if n > 1 and p.pp * n <= MAX_STAGES]
    return replace(p, virtual_stages=max(fitting, default=divisors(p.virtual_stages)[1]))


def _world_sizes(p: ParallelConfig) -> Iterator[int]:
    """Yield the world sizes that divide the recipe's and fit its degrees, ascending."""
    least = p.pp * lcm(p.tp * p.cp, p.ep * p.etp)
    if p.world_size % least == 0:
        yield from (least * replicas for replicas in divisors(p.world_size // least))


def _shrink_pipeline_layout(text: str) -> str:
    """Limit each stage of a layout to two layers and two MTP layers."""
    if text in ("", "auto"):
        return text
    stages = parse_layout(text)
    return format_layout(
        tuple(
            replace(
                stage,
                layers=stage.layers[:MAX_LAYERS_PER_STAGE],
                num_mtp_layers=min(stage.num_mtp_layers, MAX_MTP_LAYERS),
            )
            for stage in stages
        )
    )


def _is_legal(cfg: Config) -> bool:
    # Some rank orders can be folded only for certain numbers of ranks.
    try:
        check_config(cfg)
    except ConfigError:
        return False
    return True


def _shrink_config(cfg: Config, parallel: ParallelConfig) -> Config:
    small = replace(
        cfg,
        parallel=_shrink_attention_plan(parallel),
        model=_shrink_model(cfg.model, parallel, tp=cfg.parallel.tp),
        moe=replace(cfg.moe, replay=""),
        train=_shrink_train(cfg.parallel, cfg.train, parallel),
        data=DataConfig(kind="synthetic", document_end=0 if cfg.data.has_documents else -1),
        align=AlignConfig(),
        rl=RLConfig(),
        rollout=RolloutConfig(),
        reward=RewardConfig(),
        sites=SitesConfig(),
    )
    scaling = chosen(small, RopeScalingPart).shrink(small.model.rotary_dim, cfg.train.seq_len, small.train.seq_len)
    small = with_part(replace(small, lora=_shrink_adapters(cfg.lora, small.model)), scaling)
    moe = small.moe
    max_factor = small.model.num_router_choices / small.model.top_k
    if not moe.pad_to_capacity:
        # With few experts the capacity factors of the large recipe may drop nothing, which validation rejects.
        factor, eval_factor = (1.0 if f >= max_factor else f for f in (moe.capacity_factor, moe.eval_capacity_factor))
        small = replace(small, moe=replace(moe, capacity_factor=factor, eval_capacity_factor=eval_factor))
    return with_part(small, chosen(small, DispatcherPart).shrink())


def _shrink_adapters(lora: LoraConfig, model: ModelConfig) -> LoraConfig:
    """Return adapters whose rank fits every matrix of the small model, such as the gates of a single head [1, H]."""
    sides = (min(weight.shape[-2:]) for weight in adapted_weights(model, lora).values())
    rank = min(lora.rank, MAX_LORA_RANK, *sides) if lora.rank else 0
    return replace(lora, rank=rank, init_from="")


def _shrink_attention_plan(p: ParallelConfig) -> ParallelConfig:
    """Make documents of few tokens divisible, and pools legal for lowered degrees, so that work still moves."""
    is_legal_pool = p.attention_pool % p.cp == 0 and p.attention_pool and p.dp * p.cp % p.attention_pool == 0
    return replace(
        p,
        attention_block=min(p.attention_block, MAX_ATTENTION_BLOCK),
        attention_pool=p.attention_pool if is_legal_pool else 0,
    )


def _shrink_model(model: ModelConfig, p: ParallelConfig, tp: int) -> ModelConfig:
    stages = p.pp * p.virtual_stages
    # An uneven split into stages stays uneven.
    num_layers = min(model.num_layers, max(2, stages + (model.num_layers % stages > 0)))
    if model.moe_shortcut or shares_selections(model):
        # Each stage keeps a pair of layers.
        num_layers = 2 * stages
    stage_sizes = [2] * stages
    if p.pipeline_layout not in ("", "auto"):
        stage_sizes = [len(stage.layers) for stage in parse_layout(p.pipeline_layout)]
        num_layers = sum(stage_sizes)
    attention_pattern = _keep_kinds(spell(model.attention_pattern, ATTENTION_KINDS, model.num_layers), num_layers)
    weights = model.softmax_attention.params(model.hidden_size)
    key_value_heads = max(weight.tp_heads for weight in weights) or model.num_attention_heads
    groups = p.tp if key_value_heads % p.tp == 0 else key_value_heads
    if chosen_in(p, ContextPart).shards_heads:
        groups = lcm(groups, p.cp * p.tp) if key_value_heads % (p.cp * p.tp) == 0 else groups
    heads = lcm(groups, p.tp * p.cp) * min(2, model.num_attention_heads // key_value_heads)
    num_experts = _num_experts(model, p)
    return replace(
        model,
        sparsemixer_jitter=max(model.sparsemixer_jitter, MIN_MIXER_JITTER)
        if chosen(RoutingSections(model, MoEConfig()), RouterScorePart).chooses
        else model.sparsemixer_jitter,
        preset="",
        num_layers=num_layers,
        layer_pattern="MD" if model.moe_shortcut else _shrink_layer_pattern(model, num_layers),
        hidden_size=lcm(HEAD_SIZE * 4, p.etp, p.tp),
        attention_pattern=attention_pattern,
        sliding_window=min(model.sliding_window, MAX_WINDOW),
        attention_chunk_size=min(model.attention_chunk_size, MAX_WINDOW),
        rope_pattern=_keep_kinds(spell(model.rope_pattern, ROPE_KINDS, model.num_layers), num_layers),
        nope_temperature_tokens=min(model.nope_temperature_tokens, MAX_WINDOW),
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=HEAD_SIZE,
        q_lora_rank=HEAD_SIZE + 4 if model.q_lora_rank else 0,
        kv_lora_rank=HEAD_SIZE + 2,
        qk_nope_head_dim=HEAD_SIZE - 2,
        qk_rope_head_dim=HEAD_SIZE // 2,
        v_head_dim=HEAD_SIZE,
        linear_num_key_heads=p.tp,
        linear_num_value_heads=p.tp * min(2, model.linear_num_value_heads // model.linear_num_key_heads),
        linear_key_head_dim=HEAD_SIZE,
        linear_value_head_dim=HEAD_SIZE + 2,
        linear_conv_kernel=min(model.linear_conv_kernel, MAX_CONV_KERNEL),
        index_topk=min(model.index_topk, MAX_INDEX_TOPK),
        index_heads=min(model.index_heads, 3),
        index_pattern=_shrink_index_pattern(attention_pattern, stage_sizes) if shares_selections(model) else "F",
        index_head_dim=HEAD_SIZE + 2,
        linear_gate_rank=min(model.linear_gate_rank, HEAD_SIZE),
        ffn_hidden_size=SHARD_WIDTH * p.tp,
        # A vocabulary that tp does not divide stays one.
        vocab_size=VOCAB_SHARD_SIZE * p.tp - (model.vocab_size % tp > 0),
        mtp_layers=min(model.mtp_layers, MAX_MTP_LAYERS),
        num_experts=num_experts,
        zero_experts=min(model.zero_experts, num_experts),
        moe_ffn_hidden_size=SHARD_WIDTH * p.etp,
        moe_hidden_size=lcm(HEAD_SIZE, p.etp) if model.moe_hidden_size else 0,
        shared_expert_ffn_hidden_size=SHARD_WIDTH * p.tp if model.shared_expert_ffn_hidden_size else 0,
        init_std=0.2,
    )


def _num_experts(model: ModelConfig, p: ParallelConfig) -> int:
    """Return the number of experts: enough for top_k of the selected groups, two per ep rank and two per group."""
    step = lcm(p.ep, model.num_groups)
    for_groups = 2 * model.num_groups if model.num_groups > 1 else 1
    # Without groups 2 * top_k, so that the router has a choice.
    for_top_k = -(-model.top_k * model.num_groups // model.top_groups) if model.num_groups > 1 else 2 * model.top_k
    return min(model.num_experts, step * -(-max(for_top_k, for_groups, 2 * p.ep) // step))


def _shrink_layer_pattern(model: ModelConfig, num_layers: int) -> str:
    """Return a pattern of dense and MoE layers in the model's proportions, with both kinds if the model has both."""
    kinds = spell(model.layer_pattern, LAYER_KINDS, model.num_layers)
    picked = [kinds[i * len(kinds) // num_layers] for i in range(num_layers)]
    if num_layers > 1 and len(set(kinds)) == 2 and len(set(picked)) == 1:
        picked[0] = next(letter for letter in kinds if letter != picked[0])
    return "".join(picked)


def _shrink_index_pattern(letters: str, stage_sizes: list[int]) -> str:
    """Return a pattern in which layers share the selection of one with the same window before them on their stage."""
    pattern = ""
    for size in stage_sizes:
        source = ""
        for letter in letters[len(pattern) : len(pattern) + size]:
            pattern += "S" if letter == source else "F"
            source = source if letter == "L" else letter
    return pattern


def _keep_kinds(letters: str, num_layers: int) -> str:
    """Return the letters of the first layers, at least one of each kind if there are enough layers.

    Patterns of F and W alternate quickly; those with L or N may begin with several layers of one kind.
    """
    kept = letters[:num_layers]
    missing = "".join(letter for letter in dict.fromkeys(letters) if letter not in kept)
    return kept[: num_layers - len(missing)] + missing if len(missing) < num_layers else kept


def _shrink_train(parallel: ParallelConfig, train: TrainConfig, p: ParallelConfig) -> TrainConfig:
    # A schedule from a file fixes the number of micro-batches.
    count = train.num_micro_batches(parallel.dp) if chosen_in(p, SchedulePart).is_for_one_mapping else 2 * p.pp
    micro = min(train.micro_batch_size, 2)
    unit = 4 * p.cp * p.tp
    return replace(
        train,
        seq_len=unit * -(-MIN_SEQ_LEN // unit),
        micro_batch_size=micro,
        global_batch_size=micro * p.dp * count,
        lr=LEARNING_RATE,
        min_lr=min(train.min_lr, LEARNING_RATE),
        warmup_steps=0,
        # A rank of the small recipe has at least two samples of four tokens.
        loss_chunk=min(train.loss_chunk, 3),
        offload_min_kib=0,
    )
