"""The record of a rank without any error."""

import numpy as np

from moefold.train.step_meter import StepResult
from moefold.verify.compare import OracleRecord
from moefold.verify.distributed_run import DistributedRecord


def perfect(oracle: OracleRecord) -> DistributedRecord:
    """Return the record of a rank that computed exactly the oracle's numbers."""
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
