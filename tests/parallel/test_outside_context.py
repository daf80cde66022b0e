"""Context parallelism that another package brings, in one class: trained and compared with one rank."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from moefold.cli.plan_outputs import describe_attention
from moefold.comm.collectives import all_gather
from moefold.comm.groups import Group
from moefold.config.base.part import make_part
from moefold.config.groups.context import ContextPart, MicroBatchSetPlan
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.errors import ConfigError
from moefold.launch.rank_pool import WorkerPool
from moefold.model.attention import CausalAttention
from moefold.planner.search.document_search import candidate_strategies
from moefold.validate.config import check_config
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity


class GatheringAttention:
    """Attention of all tokens on every rank, which keeps its own rows."""

    def __init__(self, cp: Group, window: int, chunk_size: int) -> None:
        self._cp = cp
        self._core = CausalAttention(window, chunk_size)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *masks: Any) -> Tensor:
        whole = self._core(*(all_gather(x.contiguous(), self._cp) for x in (q, k, v)), *masks)
        return whole.chunk(self._cp.size)[self._cp.rank]


@dataclass(frozen=True, kw_only=True)
class GatheringContext(ContextPart):
    """Contiguous parts of a sample, and attention of all of them on every rank."""

    kind: ClassVar[str] = "gathering"
    splits_in_chunks: ClassVar[bool] = False

    def build(self, cp: Group, window: int, chunk_size: int) -> GatheringAttention:
        return GatheringAttention(cp, window, chunk_size)


def _run(cfg: Config) -> DistributedRecord:
    check_config(cfg)
    return run_distributed(cfg, 2)


def test_outside_context_parallelism_equals_one_rank(pool: WorkerPool) -> None:
    one = tiny(model={"attention.num_kv_heads": 4}, train={"lr": 1e-2})
    [alone] = pool.run(1, _run, one)
    two = replace(one, parallel=ParallelConfig(world_size=2, cp=2, ep=2, context=GatheringContext()))
    record = pool.run(2, _run, two)[0]
    for found, expected in ((record.gradients, alone.gradients), (record.weights, alone.weights)):
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


@dataclass(frozen=True, kw_only=True)
class BalancingContext(GatheringContext):
    """Attention that the runtime plans, of documents that all ranks of a micro-batch set share."""

    kind: ClassVar[str] = "balancing"
    splits_in_chunks: ClassVar[bool] = True

    @property
    def plan(self) -> MicroBatchSetPlan:
        return MicroBatchSetPlan(placement="balanced")


def test_a_planning_context_moves_tokens_as_the_built_in_kind_does(pool: WorkerPool) -> None:
    base = tiny(model={"attention.num_kv_heads": 4, "vocab_size": 8}, data={"document_end": 2}, train={"lr": 1e-2})
    contexts = BalancingContext(), make_part("context", "planned", placement="balanced")
    runs = [replace(base, parallel=ParallelConfig(world_size=2, cp=2, ep=2, context=context)) for context in contexts]
    found, expected = (pool.run(2, _run, cfg)[0].gradients for cfg in runs)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert contexts[0] in candidate_strategies(contexts[0])
    assert describe_attention(contexts[0], 1.0).startswith("balancing attention (balanced, home hosts); ")
    linear = replace(runs[0], model=tiny(model={"layers": "linear, full"}).model)
    with pytest.raises(ConfigError, match="linear attention"):
        check_config(linear)
