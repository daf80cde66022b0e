"""Break one thing of a placement that moves tokens, and the comparison with the oracle must notice and name it."""

import pytest

from moefold.config.schema import Config
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.slow import slow
from tests.verify.oracle import errors_of_broken_run
from tests.verify.planned_cases import DOCUMENTS, TWO_SAMPLES
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity


def _run_with_local_counts(cfg: Config) -> DistributedRecord:
    """As if a balance loss of each sample knew only the tokens of its own rank."""
    from moefold.model.moe.dispatch import ShardedMicroBatch

    ShardedMicroBatch.sum_over_data_parallel = lambda self, x: x
    return run_distributed(cfg, 1)


def _run_with_positions_of_rows(cfg: Config) -> DistributedRecord:
    """As if the position of a token were the index of its row."""
    from moefold.model.moe.token_group import TokenPositions

    TokenPositions.keys = lambda self: (self.sample_ids_B, self.positions())
    return run_distributed(cfg, 1)


def _run_with_labels_of_another_slot(cfg: Config) -> DistributedRecord:
    """As if the labels stayed in the order of the samples."""
    from moefold.train.batch_placement import MicroBatchSetPlacer

    move_tokens = MicroBatchSetPlacer.move_tokens
    MicroBatchSetPlacer.move_tokens = lambda self, columns, bounds: move_tokens(
        self, columns | {"labels": columns["labels"][:, ::-1]}, bounds
    )
    return run_distributed(cfg, 1)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (_run_with_local_counts, "aux_loss"),
        *slow([(_run_with_positions_of_rows, "router"), (_run_with_labels_of_another_slot, "step 1 loss")]),
    ],
)
def test_a_broken_slot_is_noticed_and_named(fresh_pool, broken, named):
    cfg = tiny(
        model={"vocab_size": 8},
        moe={"aux_kind": "sequence", "aux_loss": 0.5, "input_jitter": 0.3},
        train=TWO_SAMPLES | {"global_batch_size": 4},
        data=DOCUMENTS,
        world_size=2,
        ep=2,
        context="planned",
        placement="balanced",
    )
    found = errors_of_broken_run(fresh_pool, broken, cfg)
    assert any(named in error.name and error.error > 1e-6 for error in found)
