import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config

GROUPS = ["model.num_groups=4", "model.top_groups=2"]
CASES = [
    (
        ["moe.replay=runs/a", "moe.choice=sinkhorn"],
        "moe.replay='runs/a' has chosen the experts already, and moe.choice='sinkhorn' would choose others; "
        "choose moe.choice='topk', or leave replay out",
    ),
    (
        ["model.top_k=1"],
        'model.top_k=1 with model.router_softmax="post" weighs every choice with 1, so the router gets',
    ),
    (
        ["model.top_k=1", "model.router_score=sigmoid"],
        "model.top_k=1 with model.router_normalize=true weighs every choice with 1, so the router gets no gradient",
    ),
    (["model.top_k=9"], "model.top_k=9 must be at most model.num_experts=8; choose 1 to 8"),
    (
        ["model.num_groups=3", "model.top_groups=2"],
        "model.num_groups=3 must divide model.num_experts=8; choose 1, 2, 4 or 8, or model.num_experts=6 or 9",
    ),
    (["model.top_groups=2"], "model.top_groups=2 must be at most model.num_groups=1; choose 1 to 1"),
    (
        ["model.num_groups=4", "model.top_groups=1", "model.top_k=4"],
        "model.top_groups=1 groups of 2 experts are fewer than model.top_k=4 experts; choose top_groups of 2 or more, "
        "or top_k of 2 or less",
    ),
    (
        ["model.num_groups=4", "model.top_groups=4"],
        "model.top_groups=4 of model.num_groups=4 limits nothing; choose top_groups below 4, or leave both out",
    ),
    (
        ["model.num_groups=8", "model.top_groups=4", "model.router_score=sigmoid"],
        "model.router_score='sigmoid' scores a group by its two best experts, and model.num_groups=8 makes groups of "
        "one; choose num_groups of 4 or less",
    ),
    (
        ["moe.choice=quantile"],
        "moe.choice='quantile' stores its thresholds in the expert bias, with which evaluation and generation route, "
        "and model.expert_bias=false; set model.expert_bias=true",
    ),
    (
        ["moe.choice=quantile", "model.expert_bias=true", "model.top_k=8"],
        "moe.choice='quantile' has nothing to balance: model.top_k=8 is every expert; choose top_k of at most 7",
    ),
    (
        ["moe.choice=sinkhorn", "model.expert_bias=true"],
        "model.expert_bias=true contradicts moe.choice='sinkhorn', which balances the experts by itself; "
        "choose expert_bias=false, or choice='topk'",
    ),
    (
        ["moe.choice=round_robin", "model.expert_bias=true"],
        "model.expert_bias=true contradicts moe.choice='round_robin', which reads no score",
    ),
    (
        ["moe.choice=sinkhorn", *GROUPS],
        "model.num_groups=4 contradicts moe.choice='sinkhorn', which balances the experts by itself; "
        "leave num_groups and top_groups out, or choose choice='topk'",
    ),
    (["moe.choice=skewed", *GROUPS], "model.num_groups=4 contradicts moe.choice='skewed', which reads no score"),
    (
        ["moe.choice=skewed", "model.top_k=8"],
        "moe.choice='skewed' assigns all other experts to the remaining tokens, so model.top_k=8 must be below "
        "model.num_experts=8; choose top_k of at most 7",
    ),
    (
        ["moe.choice=skewed", "model.top_k=1", "model.num_experts=1", "model.router_softmax=pre"],
        "moe.choice='skewed' needs more experts than expert 0, and model.num_experts=1; choose 2 or more",
    ),
    (
        ["moe.capacity_factor=0.4"],
        "moe.capacity_factor=0.4 with model.top_k=2 gives all experts together a capacity below the number of "
        "tokens, so some would reach no expert; choose 0.5 or more, or 0.0 (dropless)",
    ),
    (
        ["moe.eval_capacity_factor=0.3", "model.top_k=3", "train.eval_every=5"],
        "moe.eval_capacity_factor=0.3 with model.top_k=3 gives all experts together a capacity below the number "
        "of tokens, so some would reach no expert; choose 0.34 or more, or 0.0 (dropless)",
    ),
    (
        ["moe.capacity_factor=4.0"],
        "moe.capacity_factor=4.0 lets every expert take every token, and so drops nothing; choose less than "
        "num_experts/top_k=4, or 0.0 (dropless)",
    ),
    (
        ["moe.eval_capacity_factor=5.0", "train.eval_every=5"],
        "moe.eval_capacity_factor=5.0 lets every expert take every token, and so drops nothing; choose less than",
    ),
    (
        [
            "moe.capacity_factor=1.0",
            "moe.pad_to_capacity=true",
            "parallel.world_size=8",
            "parallel.cp=2",
            "parallel.tp=4",
        ],
        "moe.pad_to_capacity=true with moe.drop_scope='full_sequence' would pad to cp*tp=8 times the rows: the ranks "
        "share one capacity, and each would need a buffer for all of it; choose drop_scope='sub_sequence', or "
        "pad_to_capacity=false",
    ),
    (
        ["moe.pad_to_capacity=true"],
        "moe.pad_to_capacity=true needs a capacity, and moe.capacity_factor=0.0 sets none; set moe.capacity_factor=1.0",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), CASES, ids=["+".join(words) for words, _ in CASES])
def test_routing_that_contradicts_itself_is_refused_with_a_way_out(overrides, message):
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, overrides))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.top_k=8"],
        GROUPS,
        ["model.num_groups=8", "model.top_groups=4"],
        [*GROUPS, "model.router_score=sigmoid", "model.expert_bias=true", "moe.aux_kind=sequence"],
        [*GROUPS, "moe.choice=quantile", "model.expert_bias=true"],
        ["model.expert_bias=true", "moe.aux_loss=0.0"],
        ["moe.choice=sinkhorn", "moe.sinkhorn_iterations=1"],
        ["moe.choice=round_robin"],
        ["moe.choice=skewed", "moe.skew=1.0", "model.top_k=7"],
        ["moe.capacity_factor=0.5"],
        ["moe.capacity_factor=3.9"],
        ["moe.capacity_factor=4.0", "moe.pad_to_capacity=true"],
        [
            "moe.capacity_factor=1.0",
            "moe.pad_to_capacity=true",
            "moe.drop_scope=sub_sequence",
            "parallel.world_size=2",
            "parallel.tp=2",
        ],
        ["moe.capacity_factor=1.0", "moe.pad_to_capacity=true", "moe.drop_policy=position"],
        ["moe.eval_capacity_factor=1.0", "train.eval_every=5", "moe.drop_policy=position"],
        ["moe.input_jitter=0.01", "moe.router_dtype=float64"],
        ["model.layer_pattern=D"],
    ],
    ids="+".join,
)
def test_legal_routing_is_accepted(overrides):
    check_config(load_config(None, overrides))
