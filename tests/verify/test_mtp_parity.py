"""Multi-token prediction under every axis: equal to the one-process float64 oracle."""

import pytest

from moefold.config.schema import Config
from moefold.verify.compare import run_oracle
from tests.verify.recipes import few_samples, tiny, without_mapping
from tests.verify.test_parity import assert_equals_oracle

MODELS = {
    "one": {"mtp_layers": 1},
    "two-dense-tied": {"mtp_layers": 2, "layer_pattern": "MD", "tie_embeddings": True},
    "two-latent": {
        "mtp_layers": 2,
        "attention": "mla",
        "kv_lora_rank": 6,
        "q_lora_rank": 5,
        "v_head_dim": 6,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "expert_bias": True,
        "router_score": "sigmoid",
    },
}


def _id(value: object) -> str:
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _recipe(kind: str, mapping: dict[str, object]) -> Config:
    moe = {"capacity_factor": 0.75} if kind == "one" else {}
    return tiny(model=MODELS[kind], moe=moe, train={"global_batch_size": few_samples(8, mapping)}, **mapping)


CASES: list[tuple[str, dict[str, object]]] = [
    ("two-latent", {"world_size": 1}),
    ("one", {"world_size": 2, "tp": 2}),
    ("two-latent", {"world_size": 2, "cp": 2, "context": "ring"}),
    ("two-dense-tied", {"world_size": 2, "cp": 2, "context": "allgather"}),
    ("one", {"world_size": 2, "cp": 2, "context": "ulysses"}),
    ("two-latent", {"world_size": 2, "pp": 2, "zero": 2}),
    ("two-dense-tied", {"world_size": 2, "pp": 2, "zero": 3}),
    ("one", {"world_size": 2, "ep": 2, "zero": 3}),
]


@pytest.mark.parity
@pytest.mark.parametrize(("kind", "mapping"), CASES, ids=_id)
def test_each_axis(pool, kind, mapping):
    assert_equals_oracle(pool, _recipe(kind, mapping))


@pytest.mark.parity
def test_one_folded_mapping_of_eight_ranks(pool):
    assert_equals_oracle(pool, _recipe("two-latent", {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 4, "pp": 2, "virtual_stages": 2, "schedule": "interleaved", "ep": 2},
        {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2, "zero": 3},
        {"world_size": 8, "tp": 4, "cp": 2, "ep": 8, "context": "allgather"},
    ],
    ids=_id,
)
def test_folded_mappings(pool, kind, mapping):
    assert_equals_oracle(pool, _recipe(kind, mapping))


def test_the_loss_is_the_same_whatever_the_micro_batch():
    def loss(size: int) -> float:
        train = {"global_batch_size": 4, "micro_batch_size": size}
        return run_oracle(without_mapping(tiny(model={"mtp_layers": 2}, train=train)), 1).steps[0].mtp_loss

    assert loss(1) == pytest.approx(loss(4), rel=1e-12)
