"""The loss by chunks of tokens under every axis that cuts tokens or vocabulary equals the oracle."""

from dataclasses import replace

import pytest

from moefold.config.schema import DataConfig
from tests.verify.recipes import tiny
from tests.verify.test_parity import assert_equals_oracle

pytestmark = pytest.mark.parity

FAST = [
    ({"tie_embeddings": True, "mtp_layers": 2}, {"world_size": 4, "tp": 2, "pp": 2, "ep": 2}),
    ({}, {"world_size": 4, "tp": 2, "cp": 2, "etp": 2, "zero": 3}),
]
WIDE = [
    ({"mtp_layers": 1}, {"world_size": 1}),
    ({"tie_embeddings": True}, {"world_size": 4, "tp": 4, "zero": 2}),
    ({}, {"world_size": 4, "cp": 2, "pp": 2, "zero": 3}),
    ({"mtp_layers": 1}, {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}),
]


@pytest.mark.parametrize(
    ("model", "mapping"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in WIDE)], ids=str
)
def test_chunks_do_not_change_the_result(pool, model, mapping):
    train = {"loss_chunk": 3, "micro_batch_size": 2, "global_batch_size": 8}
    cfg = tiny(model=model, train=train, **mapping)
    # Samples of several documents: the first token of each counts for nothing.
    assert_equals_oracle(pool, replace(cfg, data=DataConfig(kind="synthetic", document_end=0)))
