"""Shrink a recipe for `moefold verify`: the same parallel axes and code paths with sizes that fit a laptop."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import lcm, prod
from typing import Any

from moefold.config.base.layer_words import spell_layers
from moefold.config.base.small_sizes import SmallSizes
from moefold.config.chosen import chosen_in, chosen_parts, with_part
from moefold.config.groups.attention import AttentionPart, SpanPart
from moefold.config.groups.context import ContextPart
from moefold.config.groups.schedule import SchedulePart
from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RewardConfig, RLConfig, RolloutConfig
from moefold.config.sections.sites import SitesConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.adapter_spec import adapted_weights
from moefold.topology.layout import DEGREES, divisors
from moefold.topology.pipeline_layout import format_layout, parse_layout
from moefold.topology.selection_groups import shares_selections
from moefold.validate.config import check_config, is_legal

VOCAB_SHARD_SIZE = 32
MIN_SEQ_LEN = 16
LEARNING_RATE = 1e-2
"""Learning rate, so large that three steps change every weight."""
MAX_LORA_RANK = 2
"""Limit of the rank of adapters."""
MAX_LAYERS_PER_STAGE = 2
MAX_MTP_LAYERS = 2
"""Limit of the MTP layers of a small recipe."""
MAX_RANKS = 16
"""Limit of the ranks of a small recipe, if its mapping allows so few."""
MAX_STAGES = 8
"""Limit of the pipeline stages over all ranks. Above it the number of virtual stages is reduced."""
AXES = (*DEGREES, "dp", "edp", "virtual_stages")


def shrink(cfg: Config, max_ranks: int = MAX_RANKS) -> Config:
    """Shrink a recipe to the smallest sizes that its mapping allows.

    Every axis above 1, dp and edp included, stays at 2 or more if that is legal. Degrees are unchanged if they need at
    most `max_ranks`. Otherwise as few as possible are lowered to divisors. Layer kinds, routing, token dropping,
    context parallelism, dispatcher and schedule are unchanged. The data becomes synthetic, so that a recipe can be
    verified without its data. Alignment, reinforcement learning and router replay, whose trace belongs to the large
    model, are turned off. The learning rate is high, so that the first steps change the weights.

    Raises:
        ConfigError: the recipe is invalid.
    """
    check_config(cfg)
    for parallel in _parallel_candidates(cfg.parallel, max_ranks):
        small = _shrink_config(cfg, parallel)
        # Some rank orders can be folded only for certain numbers of ranks.
        if is_legal(small):
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
    multiple = p.pp * lcm(p.tp * p.cp, p.ep * p.etp)
    if p.world_size % multiple == 0:
        yield from (multiple * replicas for replicas in divisors(p.world_size // multiple))


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


def _shrink_config(cfg: Config, parallel: ParallelConfig) -> Config:
    model = _small_layers(cfg.model, parallel)
    train = _shrink_train(cfg.parallel, cfg.train, parallel)
    small_sizes = SmallSizes(
        tp=parallel.tp,
        cp=parallel.cp,
        dp=parallel.dp,
        ep=parallel.ep,
        etp=parallel.etp,
        shards_heads=chosen_in(parallel, ContextPart).shards_heads,
        num_groups=model.ffn.moe.router.num_groups,
        top_groups=model.ffn.moe.router.top_groups,
        large_seq_len=cfg.train.seq_len,
        seq_len=train.seq_len,
        lr=train.lr,
    )
    model = replace(
        model,
        preset="",
        hidden_size=lcm(small_sizes.head_dim * 4, parallel.etp, parallel.tp),
        # A vocabulary that tp does not divide keeps this property.
        vocab_size=VOCAB_SHARD_SIZE * parallel.tp - (model.vocab_size % cfg.parallel.tp > 0),
        mtp_layers=min(model.mtp_layers, MAX_MTP_LAYERS),
        init_std=0.2,
    )
    small = replace(
        cfg,
        parallel=parallel,
        model=model,
        moe=replace(cfg.moe, replay=""),
        train=train,
        data=DataConfig(kind="synthetic", document_end=0 if cfg.data.has_documents else -1),
        align=AlignConfig(),
        rl=RLConfig(),
        rollout=RolloutConfig(),
        reward=RewardConfig(),
        sites=SitesConfig(),
    )
    small = replace(small, model=_small_parts(small.model, small_sizes))
    small_sizes = replace(small_sizes, rotary_dim=small.model.rope_settings.rotary_dim)
    for part in chosen_parts(small):
        # Parts inside the experts shrink with the experts.
        if not part.key.startswith("model.ffn."):
            small = with_part(small, part.shrink(small_sizes))
    small = replace(small, lora=_shrink_adapters(cfg.lora, small.model))
    moe = small.moe
    max_factor = small.model.num_router_choices / small.model.ffn.moe.top_k
    if not moe.pad_to_capacity:
        # With few experts the capacity factors of the large recipe may drop nothing, which validation refuses.
        factor, eval_factor = (1.0 if f >= max_factor else f for f in (moe.capacity_factor, moe.eval_capacity_factor))
        small = replace(small, moe=replace(moe, capacity_factor=factor, eval_capacity_factor=eval_factor))
    return small


def _shrink_adapters(lora: LoraConfig, model: ModelConfig) -> LoraConfig:
    """Return adapters whose rank fits every matrix of the small model, such as the gates of a single head [1, H]."""
    sides = (min(weight.shape[-2:]) for weight in adapted_weights(model, lora).values())
    rank = min(lora.rank, MAX_LORA_RANK, *sides) if lora.rank else 0
    return replace(lora, rank=rank, init_from="")


def _small_layers(model: ModelConfig, p: ParallelConfig) -> ModelConfig:
    """Return a model with few of the layers, with each kind at least once if the pipeline layout has room."""
    attentions = [layer.attention for layer in model.decoder_layers]
    kinds = [(type(part), part.span, part.has_rope) for part in attentions]
    stages = p.pp * p.virtual_stages
    # An uneven split into stages is kept uneven.
    num_layers = min(model.num_layers, max(2, stages + (model.num_layers % stages > 0)))
    num_layers += stages * -(-max(0, len(set(kinds)) - num_layers) // stages)
    if model.has_shortcut or shares_selections(model):
        # Each stage keeps a pair of layers.
        num_layers = 2 * stages
    stage_sizes = [2] * stages
    if p.pipeline_layout not in ("", "auto"):
        stage_sizes = [len(stage.layers) for stage in parse_layout(p.pipeline_layout)]
        num_layers = sum(stage_sizes)
    kept_layers = _keep_kinds(kinds, num_layers)
    is_shared = [False] * num_layers
    if shares_selections(model):
        is_shared = _shared_selections([attentions[number] for number in kept_layers], stage_sizes)
    # The routed experts of a layer need the dense layer after it.
    networks = list(range(num_layers)) if model.has_shortcut else _spread_kinds(model.decoder_layers, num_layers)
    words = model.layer_words
    rows = [
        words[attention]._replace(ffn=words[network].ffn, selection="shared" if shares else "own")
        for attention, network, shares in zip(kept_layers, networks, is_shared, strict=True)
    ]
    return replace(model, layers=spell_layers(rows))


def _keep_kinds(kinds: Sequence[Any], count: int) -> list[int]:
    """Return the numbers of the first layers, then of a layer of each missing kind.

    Full and windowed layers alternate quickly. Linear layers and layers without RoPE may come after several others.
    """
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    for length in range(count, 0, -1):
        missing = [number for number in firsts if number >= length]
        if length + len(missing) <= count:
            return [number % len(kinds) for number in range(length)] + missing
    return firsts[:count]


def _spread_kinds(layers: Sequence[Layer], count: int) -> list[int]:
    """Return layers whose feed-forward networks have the model's proportions, and both kinds if the model has both."""
    networks = [layer.ffn for layer in layers]
    picked_layers = [i * len(networks) // count for i in range(count)]
    other_layers = [number for number, network in enumerate(networks) if network != networks[picked_layers[0]]]
    if count > 1 and other_layers and len({networks[number] for number in picked_layers}) == 1:
        picked_layers[0] = other_layers[0]
    return picked_layers


def _shared_selections(attentions: Sequence[AttentionPart], stage_sizes: Sequence[int]) -> list[bool]:
    """Return whether each layer shares the selection of an earlier layer with the same span on its stage."""
    shares: list[bool] = []
    for size in stage_sizes:
        spans: list[SpanPart | None] = []
        for attention in attentions[len(shares) : len(shares) + size]:
            shares.append(not attention.is_recurrent and attention.span in spans)
            spans = spans if attention.is_recurrent else [attention.span]
    return shares


def _small_parts(model: ModelConfig, small_sizes: SmallSizes) -> ModelConfig:
    """Return a model with small sizes for all kinds of layers, even kinds that it does not have."""
    return replace(
        model,
        attention=model.softmax_attention.shrink(small_sizes),
        linear_attention=model.linear_attention.shrink(small_sizes),
        ffn=replace(model.ffn, dense=model.ffn.dense.shrink(small_sizes), moe=model.ffn.moe.shrink(small_sizes)),
        sliding_window=min(model.sliding_window, small_sizes.span),
        attention_chunk_size=min(model.attention_chunk_size, small_sizes.span),
    )


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
        warmup_steps=0,
        # A rank of the small recipe has at least two samples of four tokens.
        loss_chunk=min(train.loss_chunk, 3),
        offload_min_kib=0,
    )
