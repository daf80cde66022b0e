"""A short cut for the sharding of DTensors by operators that keep it, which torch works out once for each shape.

FSDP detaches each parameter and adds to each gradient. For each shape torch makes a fake tensor, with the source lines
of its stack, and weighs all placements: a twentieth of a second in each rank, a third of the additional time of a tiny
model's first step. `test_same_sharding.py` asserts that the answers are torch's, and `make parity-core` runs without
the short cut.
"""

import os
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

KEEPS = torch.ops.aten.detach.default
ADDS = torch.ops.aten.add_.Tensor
ASK_TORCH = "MOEFOLD_TESTS_ASK_TORCH"
"""Environment variable; set to 1, torch works out every sharding."""


def shorten_sharding() -> None:
    """Answer for these operators immediately in this process and its forks, unless `ASK_TORCH` is set."""
    if os.environ.get(ASK_TORCH) != "1":
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached = short_or_general


def short_or_general(schema: OpSchema) -> OutputSharding:
    """Return the sharding of an operator's result."""
    return same_sharding(schema) or general_sharding(schema)


def general_sharding(schema: OpSchema) -> OutputSharding:
    """Return torch's own answer."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    return type(propagator).propagate_op_sharding_non_cached(propagator, schema)


def same_sharding(schema: OpSchema) -> OutputSharding | None:
    """Return the sharding of the first argument, if the operator keeps it; None: torch has to work it out."""
    spec, *others = schema.args_schema
    keeps = schema.op == KEEPS or (schema.op == ADDS and others == [spec] and not _has_partial_sums(spec))
    if not keeps or schema.kwargs_schema:
        return None
    return OutputSharding(spec.shallow_copy_with_tensor_meta(spec.tensor_meta))


def _has_partial_sums(spec: Any) -> bool:
    return any(placement.is_partial() for placement in spec.placements)
