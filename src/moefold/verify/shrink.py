"""A small recipe with the mapping of a large one: the same axes and code paths, sizes that a laptop can prove."""

from dataclasses import replace
from math import lcm

from moefold.config.checks import check_config
from moefold.config.schema import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig

HEAD_SIZE = 8
WIDTH_OF_A_SHARD = 8
ROWS_OF_A_SHARD = 32


def shrink(cfg: Config) -> Config:
    """Make everything as small as the mapping allows.

    All degrees but dp and edp stay, and so do the kinds of layers, routing, dropping, context, dispatcher and
    schedule. The data becomes synthetic, so that a recipe can be proved where its data is not, and no trace is
    replayed, as it is one of the large model.

    Raises:
        ConfigError: the recipe is not legal to begin with.
    """
    check_config(cfg)
    parallel = _parallel(cfg.parallel)
    small = replace(
        cfg,
        parallel=parallel,
        model=_model(cfg.model, parallel),
        moe=replace(cfg.moe, replay=""),
        train=_train(cfg.train, parallel),
        data=DataConfig(kind="synthetic"),
    )
    if parallel.dispatcher == "leastloaded":
        # No expert of the small recipe has as many copies as one of the large.
        small = replace(small, moe=replace(small.moe, llep_min_tokens=1))
    check_config(small)
    return small


def _parallel(p: ParallelConfig) -> ParallelConfig:
    return replace(p, world_size=p.pp * lcm(p.tp * p.cp, p.ep * p.etp))


def _model(model: ModelConfig, p: ParallelConfig) -> ModelConfig:
    num_layers = min(model.num_layers, max(2, p.pp * p.virtual_stages))
    groups = p.tp if model.num_query_groups % p.tp == 0 else model.num_query_groups
    if p.context == "ulysses":
        groups = lcm(groups, p.cp * p.tp) if model.num_query_groups % (p.cp * p.tp) == 0 else groups
    heads = lcm(groups, p.tp * p.cp) * min(2, model.num_attention_heads // model.num_query_groups)
    num_experts = _num_experts(model, p)
    return replace(
        model,
        preset="",
        num_layers=num_layers,
        layer_pattern=_pattern(model.layer_kinds, num_layers),
        hidden_size=HEAD_SIZE * 4,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=HEAD_SIZE,
        ffn_hidden_size=WIDTH_OF_A_SHARD * p.tp,
        vocab_size=ROWS_OF_A_SHARD * p.tp,
        num_experts=num_experts,
        moe_ffn_hidden_size=WIDTH_OF_A_SHARD * p.etp,
        shared_expert_ffn_hidden_size=WIDTH_OF_A_SHARD * p.tp if model.shared_expert_ffn_hidden_size else 0,
        init_std=0.2,
    )


def _num_experts(model: ModelConfig, p: ParallelConfig) -> int:
    """Enough for top_k out of the open groups, two for each rank, and, if there are groups, two for each of them."""
    step = lcm(p.ep, model.num_groups)
    in_groups = 2 * model.num_groups if model.num_groups > 1 else 1
    of_groups = -(-model.top_k * model.num_groups // model.top_groups)
    return min(model.num_experts, step * -(-max(of_groups, in_groups, 2 * p.ep) // step))


def _pattern(kinds: tuple[str, ...], num_layers: int) -> str:
    """As many of each kind as fit, both present where the large model has both."""
    picked = [kinds[i * len(kinds) // num_layers] for i in range(num_layers)]
    if num_layers > 1 and len(set(kinds)) == 2 and len(set(picked)) == 1:
        picked[0] = "D" if picked[0] == "M" else "M"
    return "".join(picked)


def _train(train: TrainConfig, p: ParallelConfig) -> TrainConfig:
    micro = min(train.micro_batch_size, 2)
    return replace(
        train,
        seq_len=4 * p.cp * p.tp,
        micro_batch_size=micro,
        global_batch_size=micro * p.dp * 2 * p.pp,
    )
