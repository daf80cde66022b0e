"""What runs again in the backward pass gives the same bits: losses, counts, gradients, and weights after steps."""

from dataclasses import replace

import pytest

from moefold.config.schema import Config
from tests.verify.recipes import LATENT, tiny
from tests.verify.same_bits import assert_same_bits
from tests.verify.test_parity import assert_equals_oracle

pytestmark = pytest.mark.parity

MODEL = {
    "layer_pattern": "DM",
    "shared_expert_ffn_hidden_size": 16,
    "shared_expert_gate": True,
    "expert_bias": True,
    "router_score": "sigmoid",
}
MOE = {"input_jitter": 0.1, "capacity_factor": 1.0, "bias_update_rate": 0.1}
TRAIN = {"micro_batch_size": 2, "global_batch_size": 8}
CHEAP = ("norms", "core_attention", "dense_mlp", "expert_activation", "shared_experts")
WHOLE = ("moe", "dense_mlp", "norms", "core_attention")


def _assert_same_bits(pool, cfg: Config, parts: tuple[str, ...]) -> None:
    assert_same_bits(pool, cfg, replace(cfg, train=replace(cfg.train, recompute=parts)))


@pytest.mark.parametrize("part", ["norms", "core_attention", "dense_mlp", "expert_activation", "shared_experts", "moe"])
def test_each_part_on_one_rank(pool, part):
    _assert_same_bits(pool, tiny(model=MODEL, moe=MOE, train=TRAIN), (part,))


FAST = [
    (CHEAP, {"world_size": 4, "tp": 2, "cp": 2, "ep": 2, "etp": 2, "zero": 3}),
    (WHOLE, {"world_size": 4, "tp": 2, "pp": 2, "ep": 2, "dispatcher": "allgather", "zero": 2}),
    (("layer",), {"world_size": 4, "cp": 2, "ep": 4, "zero": 3}),
]
WIDE = [
    (("layer",), {"world_size": 1}),
    (("layer",), {"world_size": 4, "pp": 2, "etp": 2, "schedule": "interleaved", "virtual_stages": 2, "zero": 1}),
    (("layer",), {"world_size": 4, "tp": 2, "cp": 2, "ep": 2, "etp": 2, "context": "ulysses", "zero": 0}),
    (CHEAP, {"world_size": 4, "tp": 4, "ep": 4, "dispatcher": "allgather"}),
    (CHEAP, {"world_size": 4, "pp": 2, "cp": 2, "ep": 2, "schedule": "gpipe", "zero": 3, "context": "allgather"}),
    (WHOLE, {"world_size": 4, "ep": 2, "zero": 3}),
    (WHOLE, {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4, "zero": 2}),
    (("layer",), {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2, "zero": 3}),
]


SPLIT = [
    ((*CHEAP, "mla_up"), {"world_size": 2, "schedule": "zero-bubble", "zero": 2}),
    (("layer",), {"world_size": 2, "schedule": "zbv", "virtual_stages": 2, "zero": 3}),
    ((*WHOLE, "mla_up"), {"world_size": 4, "schedule": "dualpipev", "virtual_stages": 2, "tp": 2, "ep": 2}),
]


@pytest.mark.parametrize(
    ("parts", "mapping"), [SPLIT[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in SPLIT[1:])], ids=str
)
def test_with_a_backward_pass_in_two_parts(pool, parts, mapping):
    """What is made again does not postpone its weight gradients, or postpones those of what was made first."""
    model = MODEL | LATENT | {"num_layers": 4}
    assert_equals_oracle(pool, tiny(model=model, train=TRAIN | {"recompute": parts}, pp=2, **mapping))


@pytest.mark.parametrize(
    ("parts", "mapping"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in WIDE)], ids=str
)
def test_under_a_mapping(pool, parts, mapping):
    _assert_same_bits(pool, tiny(model=MODEL, moe=MOE, train=TRAIN, **mapping), parts)


@pytest.mark.parametrize(
    ("parts", "mapping"),
    [
        (("mla_up", "norms", "core_attention"), {"world_size": 2, "tp": 2, "ep": 2}),
        pytest.param(("mla_up",), {"world_size": 2, "cp": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param(("layer",), {"world_size": 2, "pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_latent_attention_and_further_tokens(pool, parts, mapping):
    _assert_same_bits(pool, tiny(model=LATENT | {"mtp_layers": 1}, train=TRAIN, **mapping), parts)


LOAN = {"choice": "skewed", "llep_min_tokens": 1, "llep_threshold": 1.0, "llep_capacity": 1.0}
KINDS = [
    ({**LOAN, "weight_in_expert": True}, "leastloaded", ("moe",)),
    ({"aux_kind": "global_batch", "aux_loss": 0.5}, "alltoall", ("layer",)),
    ({"choice": "sinkhorn"}, "alltoall", ("moe",)),
    ({"weight_in_expert": True, "aux_loss": 0.0, "z_loss": 0.0}, "alltoall", ("moe", "norms")),
    ({"weight_in_expert": True}, "alltoall", ("expert_activation",)),
]


@pytest.mark.parametrize(
    ("moe", "dispatcher", "parts"),
    [KINDS[0], *(pytest.param(*kind, marks=pytest.mark.slow) for kind in KINDS[1:])],
    ids=str,
)
def test_kinds_of_routing(pool, moe, dispatcher, parts):
    mapping = {"world_size": 4, "cp": 2, "ep": 2, "etp": 2, "dispatcher": dispatcher, "zero": 2}
    _assert_same_bits(pool, tiny(moe=moe, train=TRAIN, **mapping), parts)
