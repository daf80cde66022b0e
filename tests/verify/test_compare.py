from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from moefold.train.train_step import StepResult
from moefold.verify.compare import OracleRecord, compare_records, run_oracle, token_chunks
from moefold.verify.distributed_run import DistributedRecord
from tests.verify.recipes import tiny


@pytest.fixture(scope="module")
def oracle() -> OracleRecord:
    return run_oracle(tiny(model={"mtp_layers": 1, "index_topk": 5, "index_heads": 3, "index_head_dim": 6}), 2)


def perfect(oracle: OracleRecord) -> DistributedRecord:
    """The record of a rank that computed exactly what the oracle did."""
    steps = tuple(
        StepResult(
            loss=step.loss,
            aux_loss=step.aux_loss,
            z_loss=step.z_loss,
            mtp_loss=step.mtp_loss,
            indexer_loss=step.indexer_loss,
            grad_norm=step.grad_norm,
            lr=0.0,
            expert_load=(),
            expert_counts=np.zeros((0, 0), dtype=np.int64),
            dropped_fraction=0.0,
            moe_layers=step.moe_layers,
            flags=(),
            peak_memory_gib=0.0,
        )
        for step in oracle.steps
    )
    return DistributedRecord(
        dict(oracle.initial), dict(oracle.gradients), dict(oracle.weights), steps, oracle.eval_loss
    )


def test_equal_sides_have_no_difference(oracle):
    found = compare_records(oracle, [perfect(oracle)])
    assert {d.error for d in found} == {0.0}
    of_layers = sum(len(fields(layer)) for step in oracle.steps for layer in step.moe_layers)
    assert len(found) == 3 * len(oracle.weights) + 2 * 6 + of_layers + 1


@pytest.mark.parametrize("term", ["loss", "aux_loss", "z_loss", "mtp_loss", "indexer_loss", "grad_norm"])
def test_a_number_of_any_step_counts(oracle, term):
    record = perfect(oracle)
    wrong = replace(record.steps[1], **{term: getattr(record.steps[1], term) * 1.5})
    worst = compare_records(oracle, [replace(record, steps=(record.steps[0], wrong))])[0]
    assert worst.name == f"step 2 {term} (rank 0)"
    assert worst.error == pytest.approx(0.5)


def test_the_evaluation_counts(oracle):
    worst = compare_records(oracle, [replace(perfect(oracle), eval_loss=oracle.eval_loss * 2)])[0]
    assert (worst.name, worst.error) == ("eval_loss (rank 0)", pytest.approx(1.0))


def test_the_error_of_a_tensor_is_relative_to_its_largest_element(oracle):
    record = perfect(oracle)
    changed = record.weights["head.weight"].clone()
    changed[0, 0] += 0.5 * changed.abs().max()
    record.weights["head.weight"] = changed
    worst = compare_records(oracle, [record])[0]
    assert (worst.name, worst.error) == ("weights head.weight", pytest.approx(0.5))


def test_a_wrong_copy_on_any_rank_counts(oracle):
    good, bad = perfect(oracle), perfect(oracle)
    bad.gradients["head.weight"] = bad.gradients["head.weight"] * 2
    found = [d for d in compare_records(oracle, [good, bad]) if d.error > 0]
    assert [(d.name, d.error) for d in found] == [("gradients head.weight", pytest.approx(1.0))]


@pytest.mark.parametrize(
    "broken",
    [
        lambda tensor: tensor[:-1],
        lambda tensor: torch.full_like(tensor, torch.nan),
    ],
    ids=["shape", "not a number"],
)
def test_what_cannot_be_compared_is_infinitely_wrong(oracle, broken):
    record = perfect(oracle)
    record.weights["head.weight"] = broken(record.weights["head.weight"])
    worst = compare_records(oracle, [record])[0]
    assert (worst.name, worst.error) == ("weights head.weight", float("inf"))


def test_a_tensor_that_one_side_lacks_is_infinitely_wrong(oracle):
    record = perfect(oracle)
    record.weights["another"] = record.weights.pop("head.weight")
    found = [d for d in compare_records(oracle, [record]) if d.error > 0]
    assert {d.name for d in found} == {
        "weights another (missing on one side)",
        "weights head.weight (missing on one side)",
    }
    assert {d.error for d in found} == {float("inf")}


def test_chunks_are_the_positions_of_each_rank_of_a_sample():
    assert token_chunks(tiny(world_size=2, tp=2)) == [list(range(8)), list(range(8, 16))]
    zigzag = token_chunks(tiny(world_size=2, cp=2))
    assert zigzag == [[0, 1, 2, 3, 12, 13, 14, 15], list(range(4, 12))]
    assert sorted(sum(token_chunks(tiny(world_size=4, cp=2, tp=2)), [])) == list(range(16))
