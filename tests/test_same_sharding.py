"""The sharding that ranks of the tests are told immediately is torch's, and torch is asked for all other operators."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard

from tests.e2e.command import ROOT
from tests.same_sharding import (
    ADDS,
    ASK_TORCH,
    KEEPS,
    general_sharding,
    same_sharding,
    short_or_general,
    shorten_sharding,
)

PLACEMENTS = (
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(1), Shard(0)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (Partial(), Shard(0)),
)
META = torch.float64
SIZES = (torch.Size((6, 4)), torch.Size((5, 3)))


def _differing() -> list[str]:
    """Return the differences of this rank's short answers from torch's, and answers that must not be short."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    metas = [TensorMeta(size, (size[1], 1), META) for size in SIZES] + [TensorMeta(SIZES[0], (1, 6), META)]
    specs = [DTensorSpec(mesh, placements, meta) for placements in PLACEMENTS for meta in metas]
    found = []
    for spec in specs:
        is_partial = spec.placements[0].is_partial()
        for schema, answers in (
            (OpSchema(KEEPS, (spec,), {}), True),
            (OpSchema(ADDS, (spec, spec), {}), not is_partial),
            (OpSchema(ADDS, (spec, spec), {"alpha": 2}), False),
            (OpSchema(torch.ops.aten.neg.default, (spec,), {}), False),
        ):
            short = same_sharding(schema)
            if (short is not None) != answers:
                found.append(f"{schema}: {short}")
            if short is not None and short != general_sharding(schema):
                found.append(f"{schema}: {short}, torch: {general_sharding(schema)}")
    replicated, sharded = specs[0], specs[3]
    other = OpSchema(ADDS, (sharded, replicated), {})
    if same_sharding(other) is not None or not short_or_general(other).needs_redistribute:
        found.append(f"{other}: {same_sharding(other)}")
    propagate = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached
    return found + ([] if propagate is short_or_general else ["the ranks ask torch"])


@pytest.mark.parity
def test_the_short_answers_equal_torch(pool):
    assert pool.run(2, _differing) == [[], []]


def test_ranks_of_the_core_of_parity_ask_torch(monkeypatch):
    propagator = DTensor._op_dispatcher.sharding_propagator
    monkeypatch.setattr(propagator, "propagate_op_sharding_non_cached", general_sharding)
    monkeypatch.setenv(ASK_TORCH, "1")
    shorten_sharding()
    assert propagator.propagate_op_sharding_non_cached == general_sharding
    monkeypatch.delenv(ASK_TORCH)
    shorten_sharding()
    assert propagator.propagate_op_sharding_non_cached is short_or_general
    recipe = (ROOT / "Makefile").read_text().partition("\nparity-core:")[2].partition("\n\n")[0]
    assert f"\n\t{ASK_TORCH}=1 $(PYTEST) " in recipe
