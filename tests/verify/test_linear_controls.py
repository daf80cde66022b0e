"""Break one rule of linear attention, and the comparison with the oracle must notice it."""

from collections.abc import Callable

import pytest
import torch

from moefold.config.schema import Config
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.verify.linear_cases import DOCUMENTS, HYBRID
from tests.verify.oracle import errors_of_broken_run
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity


def _run_without_states_of_other_ranks(cfg: Config) -> DistributedRecord:
    """As if each segment started from a state of zeros."""
    from moefold.parallel.context_parallel import ContextShards

    compose = ContextShards._compose
    ContextShards._compose = lambda self, transition, update: 0.0 * compose(self, transition, update)
    return run_distributed(cfg, 1)


def _run_without_tokens_of_other_ranks(cfg: Config) -> DistributedRecord:
    """As if the convolutions of each segment started from zeros."""
    from moefold.parallel.context_parallel import ContextShards

    previous = ContextShards.previous_tokens
    ContextShards.previous_tokens = lambda self, x, count: 0.0 * previous(self, x, count)
    return run_distributed(cfg, 1)


def _run_with_states_of_earlier_documents(cfg: Config) -> DistributedRecord:
    """As if a state went on from one document to the next."""
    from moefold.ops import linear_attention

    linear_attention._documents = lambda is_start_SB, size: None
    return run_distributed(cfg, 1)


def _run_without_states_of_other_chunks(cfg: Config) -> DistributedRecord:
    """As if each chunk of 4 tokens started from a state of zeros."""
    from moefold.ops.linear_attention import ChunkedLinearAttention

    whole = ChunkedLinearAttention.__call__

    def broken(self: object, *tensors: object, is_start_SB: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        count = -(-len(tensors[0]) // 4)
        parts = zip(*([None] * count if x is None else x.split(4) for x in tensors), strict=True)
        outs = [whole(ChunkedLinearAttention(4), *part) for part in parts]
        return torch.cat([out for out, _ in outs]), outs[-1][1]

    ChunkedLinearAttention.__call__ = broken
    return run_distributed(cfg, 1)


GLA = {"linear_attention": "gla"}
CONVOLUTION = {"linear_attention": "short_convolution"}
TWO_PARTS = {"world_size": 2, "cp": 2}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("broken", "mapping", "kind", "parameter"),
    [
        (_run_without_states_of_other_ranks, TWO_PARTS, {}, "a_log"),
        pytest.param(_run_without_tokens_of_other_ranks, TWO_PARTS, {}, "a_log", marks=slow),
        (_run_with_states_of_earlier_documents, {"data": DOCUMENTS}, {}, "a_log"),
        pytest.param(_run_without_states_of_other_chunks, {}, {}, "a_log", marks=slow),
        pytest.param(_run_without_states_of_other_ranks, TWO_PARTS, GLA, "ba", marks=slow),
        pytest.param(_run_with_states_of_earlier_documents, {"data": DOCUMENTS}, GLA, "ba", marks=slow),
        pytest.param(_run_without_states_of_other_chunks, {}, GLA, "ba", marks=slow),
        pytest.param(_run_without_tokens_of_other_ranks, TWO_PARTS, CONVOLUTION, "conv", marks=slow),
    ],
)
def test_a_state_or_token_that_is_lost_or_kept_is_noticed(
    fresh_pool,
    broken: Callable[[Config], DistributedRecord],
    mapping: dict[str, object],
    kind: dict[str, object],
    parameter: str,
):
    cfg = tiny(model=HYBRID | kind | {"vocab_size": 8}, **mapping)
    names = [
        error.name for error in errors_of_broken_run(fresh_pool, broken, cfg) if error.name.startswith("gradients")
    ]
    assert any(name.endswith(f".attention.{parameter}") for name in names)
