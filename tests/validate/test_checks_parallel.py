import itertools
import re

import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config


def ranks(world_size: int, **degrees: object) -> list[str]:
    return [f"parallel.world_size={world_size}", *(f"parallel.{key}={value}" for key, value in degrees.items())]


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, overrides))
    return str(error.value)


def accepts(*overrides: str) -> bool:
    try:
        check_config(load_config(None, overrides))
    except ConfigError:
        return False
    return True


CASES = [
    (
        [*ranks(4, etp=4), "model.hidden_size=66", "model.head_dim=8", "model.moe_bias=true"],
        "parallel.etp=4 must divide model.hidden_size=66; choose model.hidden_size=64 or 68, or parallel.etp=1 or 2",
    ),
    (
        [*ranks(8, tp=8), "model.num_attention_heads=12", "model.num_query_groups=2", "model.head_dim=32"],
        "parallel.tp=8 must divide model.num_attention_heads=12; "
        "choose model.num_attention_heads=8 or 16, or parallel.tp=1, 2 or 4",
    ),
    (
        [*ranks(4, tp=4), "model.num_attention_heads=24", "model.num_query_groups=6", "model.head_dim=32"],
        "parallel.tp=4 must divide model.num_query_groups=6, or be a multiple of it (key and value heads are then "
        "replicated); choose model.num_query_groups=4 or 8, or parallel.tp=1 or 2",
    ),
    (
        [*ranks(4, tp=4), "model.layer_pattern=DM", "model.ffn_hidden_size=1022"],
        "parallel.tp=4 must divide model.ffn_hidden_size=1022; "
        "choose model.ffn_hidden_size=1020 or 1024, or parallel.tp=1 or 2",
    ),
    (
        [*ranks(4, tp=4), "model.shared_expert_ffn_hidden_size=6"],
        "parallel.tp=4 must divide model.shared_expert_ffn_hidden_size=6; "
        "choose model.shared_expert_ffn_hidden_size=4 or 8, or parallel.tp=1 or 2",
    ),
    (
        [*ranks(2, tp=2), "model.vocab_size=257"],
        "parallel.tp=2 must divide model.vocab_size=257; choose model.vocab_size=258, or parallel.tp=1",
    ),
    (
        [*ranks(8, cp=8, context="ulysses"), "model.num_attention_heads=4", "model.head_dim=32"],
        "parallel.cp=8 must divide num_attention_heads/tp=4 with parallel.context='ulysses', which gives each rank "
        "whole heads; choose parallel.context='ring' or 'allgather', or parallel.cp=1, 2 or 4",
    ),
    (
        [*ranks(8, ep=8), "model.num_experts=6"],
        "parallel.ep=8 must divide model.num_experts=6; choose model.num_experts=8, or parallel.ep=1 or 2",
    ),
    (
        [*ranks(4, etp=4), "model.moe_ffn_hidden_size=510"],
        "parallel.etp=4 must divide model.moe_ffn_hidden_size=510; "
        "choose model.moe_ffn_hidden_size=508 or 512, or parallel.etp=1 or 2",
    ),
    (
        [*ranks(2, ep=2), "model.layer_pattern=D"],
        "parallel.ep=2 needs MoE layers, and model.layer_pattern='D' has none; choose a pattern with M, "
        "or parallel.ep=1",
    ),
    (
        [*ranks(2, etp=2), "model.layer_pattern=D"],
        "parallel.etp=2 needs MoE layers, and model.layer_pattern='D' has none; choose a pattern with M, "
        "or parallel.etp=1",
    ),
    (
        ranks(8, pp=8),
        "parallel.pp=8 must be at most model.num_layers=4, one layer for each stage; "
        "choose model.num_layers=8, or parallel.pp=1, 2 or 4",
    ),
    (
        ranks(4, pp=4, schedule="interleaved", virtual_stages=2),
        "parallel.pp=4 * parallel.virtual_stages=2 must be at most model.num_layers=4, one layer for each stage; "
        "choose model.num_layers=8, or parallel.pp=1 or 2",
    ),
    (
        [*ranks(4, tp=2, cp=2), "train.seq_len=254"],
        "train.seq_len=254 must be divisible by cp*tp=2*2=4; choose 252 or 256",
    ),
    (
        [*ranks(2, tp=2), "train.seq_len=1"],
        "train.seq_len=1 must be divisible by cp*tp=1*2=2; choose 2",
    ),
    (
        [*ranks(8, cp=8), "train.seq_len=248"],
        "train.seq_len=248 must be divisible by 2*cp=16, the chunks that balance parallel.context='ring'; "
        "choose 240 or 256",
    ),
    (
        [*ranks(2, cp=2, context="allgather"), "train.seq_len=6"],
        "train.seq_len=6 must be divisible by 2*cp=4, the chunks that balance parallel.context='allgather'; "
        "choose 4 or 8",
    ),
    (
        ranks(4, ep=2, etp=2, dispatcher="local"),
        "parallel.dispatcher='local' needs ep=etp=1, and parallel.ep=2, parallel.etp=2; "
        "choose 'alltoall' or 'allgather'",
    ),
    (
        ranks(2, tp=2, dispatcher="allgather"),
        "parallel.dispatcher='allgather' sends tokens between the ranks of ep and etp, and parallel.ep=1, "
        "parallel.etp=1; choose 'alltoall' or 'auto', or ep or etp of 2 or more",
    ),
    (
        ranks(1, dispatcher="deepep"),
        "parallel.dispatcher='deepep' sends tokens between the ranks of ep and etp, and parallel.ep=1",
    ),
    (
        ranks(2, etp=2, dispatcher="leastloaded"),
        "parallel.dispatcher='leastloaded' moves routed tokens between the ranks of ep, and parallel.ep=1; "
        "choose 'alltoall', or ep of 2 or more",
    ),
    (
        [*ranks(2, ep=2, dispatcher="leastloaded"), "moe.capacity_factor=1.0", "moe.pad_to_capacity=true"],
        "moe.pad_to_capacity=true gives every rank the same load, so parallel.dispatcher='leastloaded' would move "
        "nothing; choose pad_to_capacity=false, or dispatcher='alltoall'",
    ),
    (
        [*ranks(2, ep=2, dispatcher="leastloaded"), "moe.llep_threshold=2.0"],
        "moe.llep_threshold=2.0 must be below parallel.ep=2, the most mean loads that one rank can have",
    ),
    (
        [*ranks(4, ep=4, dispatcher="leastloaded"), "moe.llep_capacity=1.5"],
        "moe.llep_capacity=1.5 must be at most moe.llep_threshold=1.3: what a rank may keep needs no relief; "
        "choose llep_capacity of 1.0 to 1.3",
    ),
    (
        # 4 ranks of 256 tokens with 2 copies each: the mean is 512, its limit 564.
        [*ranks(4, ep=4, dispatcher="leastloaded"), "moe.llep_min_tokens=1000"],
        "moe.llep_min_tokens=1000 must be at most 564, the most routed tokens of one expert that a rank could take "
        "over of the 1024 tokens of ep*etp=4 ranks; choose 1 to 564",
    ),
    (
        # No expert gets a token twice.
        [*ranks(2, tp=2, ep=2, dispatcher="leastloaded"), "model.top_k=4", "moe.llep_min_tokens=257"],
        "moe.llep_min_tokens=257 must be at most 256",
    ),
    (
        ranks(2, pp=2, schedule="interleaved"),
        "parallel.schedule='interleaved' needs parallel.virtual_stages of 2 or more, and it is 1; "
        "choose virtual_stages=2",
    ),
    (
        ranks(2, pp=2, virtual_stages=2),
        "parallel.virtual_stages=2 needs parallel.schedule='interleaved', and it is '1f1b'; "
        "choose schedule='interleaved'",
    ),
    (
        ranks(1, schedule="interleaved", virtual_stages=2),
        "parallel.schedule='interleaved' needs parallel.pp of 2 or more, and it is 1; choose schedule='1f1b'",
    ),
    (
        [*ranks(4, tp=2), "train.micro_batch_size=2", "train.global_batch_size=10"],
        "train.global_batch_size=10 must be divisible by train.micro_batch_size*dp=2*2=4 (dp = world_size/(tp*cp*pp)); "
        "choose 8 or 12",
    ),
    (
        [*ranks(4, pp=4), "train.micro_batch_size=4"],
        "parallel.schedule='1f1b' needs at least pp=4 micro-batches, and train.global_batch_size=8 gives each "
        "data-parallel rank 2; choose train.global_batch_size=16, micro_batch_size=2, or schedule='gpipe'",
    ),
    (
        [*ranks(4, pp=4), "train.global_batch_size=3"],
        "parallel.schedule='1f1b' needs at least pp=4 micro-batches, and train.global_batch_size=3 gives each "
        "data-parallel rank 3; choose train.global_batch_size=4, or schedule='gpipe'",
    ),
    (
        [*ranks(4, pp=2, schedule="interleaved", virtual_stages=2), "train.global_batch_size=10"],
        "parallel.schedule='interleaved' with pp=2 runs micro-batches in 2 equal rounds, and "
        "train.global_batch_size=10 gives each data-parallel rank 5; choose train.global_batch_size=8 or 12",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), CASES, ids=["+".join(words) for words, _ in CASES])
def test_a_mapping_that_does_not_fit_the_model_is_refused_with_the_nearest_that_does(overrides, message):
    assert refused(*overrides).startswith(message)
    assert "\n" not in refused(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ranks(8, tp=8),  # Twice as many ranks as query groups.
        ranks(8, tp=2, cp=2, context="ulysses"),
        ranks(8, cp=8, context="ulysses"),  # Twice as many ranks as key/value heads.
        [  # Six key/value heads on four ranks: the exchange repeats them.
            *ranks(4, cp=4, context="ulysses"),
            "model.num_attention_heads=24",
            "model.num_query_groups=6",
            "model.head_dim=32",
        ],
        [*ranks(2, cp=2, context="ulysses"), "train.seq_len=6"],  # Ulysses needs no zigzag.
        ranks(4, pp=4),
        [*ranks(4, pp=4, schedule="gpipe"), "train.global_batch_size=1"],
        [*ranks(2, pp=2, schedule="interleaved", virtual_stages=2), "train.global_batch_size=1"],
        ranks(8, tp=2, ep=2, etp=2, dispatcher="allgather"),
        [*ranks(8, tp=2, ep=2, etp=2, dispatcher="leastloaded"), "moe.capacity_factor=1.0"],
        [*ranks(4, ep=4, dispatcher="leastloaded"), "moe.llep_min_tokens=564"],
        ranks(1, dispatcher="local", context="ulysses", zero=3, schedule="gpipe"),
        [*ranks(4, tp=4), "model.ffn_hidden_size=1024", "model.layer_pattern=D"],
        [*ranks(2, etp=1), "model.moe_ffn_hidden_size=511"],
    ],
    ids="+".join,
)
def test_legal_mappings_are_accepted(overrides):
    check_config(load_config(None, overrides))


def test_the_width_of_dense_layers_does_not_matter_without_them():
    # The preset brings a width of 128 that 3 ranks do not divide, for layers that its pattern has not.
    overrides = [*ranks(3, tp=3), "model.preset=tiny", "model.num_attention_heads=6", "model.num_query_groups=3"]
    sizes = ["model.hidden_size=96", "model.vocab_size=258", "train.seq_len=255", "train.global_batch_size=3"]
    assert accepts(*overrides, *sizes)
    assert "model.ffn_hidden_size=128" in refused(*overrides, *sizes, "model.layer_pattern=DM")


@pytest.mark.parametrize(("pp", "count", "legal"), [(4, 10, True), (4, 3, True), (4, 9, False), (4, 8, True)])
def test_interleaved_rounds_are_those_of_torch(pp, count, legal):
    # The first two are the examples that torch.distributed.pipelining.ScheduleInterleaved1F1B gives itself.
    overrides = ranks(pp, pp=pp, schedule="interleaved", virtual_stages=2)
    assert accepts(*overrides, "model.num_layers=8", f"train.global_batch_size={count}") == legal


def test_degrees_offered_in_errors_are_legal():
    offered = 0
    models = [
        ["model.num_attention_heads=12", "model.num_query_groups=6", "model.head_dim=16"],
        ["model.num_experts=12"],
    ]
    for model, tp, cp, ep, etp in itertools.product(models, (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), (1, 2)):
        mapping = {"tp": tp, "cp": cp, "ep": ep, "etp": etp, "context": "ulysses"}
        words = [*model, "train.global_batch_size=64"]
        try:
            check_config(load_config(None, [*words, *ranks(8, **mapping)]))
            continue
        except ConfigError as error:
            found = re.search(r", or parallel\.(\w+)=([0-9, or]+)$", str(error))
        if found is None:
            continue
        for value in re.findall(r"[0-9]+", found[2]):
            offered += 1
            assert accepts(*words, *ranks(8, **{**mapping, found[1]: value})), (mapping, found[0])
    assert offered > 50


def test_one_forward_one_backward_needs_a_micro_batch_for_each_stage():
    for pp, count in itertools.product((2, 3, 4), range(1, 14)):
        overrides = [*ranks(pp, pp=pp), "model.num_layers=8", f"train.global_batch_size={count}"]
        assert accepts(*overrides) == (count >= pp)
        assert accepts(*overrides, "parallel.schedule=gpipe")
