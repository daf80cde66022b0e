"""Break one rule of sparse attention, and the comparison with the oracle must notice it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.verify.oracle import errors_of_broken_run
from tests.verify.recipes import tiny
from tests.verify.sparse_cases import SPARSE

pytestmark = pytest.mark.parity


def _run_with_the_loss_on_the_model(cfg: Config) -> DistributedRecord:
    """As if the gradient of the indexer's loss reached the input of the layer."""
    from moefold.model.indexer import LightningIndexer

    project = LightningIndexer._project_own

    def leaking(self: LightningIndexer, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        detach, Tensor.detach = Tensor.detach, lambda tensor: tensor
        try:
            return project(self, x, source)
        finally:
            Tensor.detach = detach

    LightningIndexer._project_own = leaking
    return run_distributed(cfg, 1)


def _run_with_ties_to_the_last_key(cfg: Config) -> DistributedRecord:
    """As if the highest position won ties: the keys in reverse order."""
    from moefold.ops import sparse_attention

    exact = sparse_attention.exact_topk

    def reversed_topk(scores: Tensor, k: int, *, starts: Tensor, stops: Tensor) -> Tensor:
        last = scores.shape[1]
        found = exact(scores.flip(1).contiguous(), k, starts=(last - stops).int(), stops=(last - starts).int())
        positions = torch.where(found < 0, last, last - 1 - found).sort(1).values
        return torch.where(positions == last, -1, positions).int()

    sparse_attention.exact_topk = reversed_topk
    return run_distributed(cfg, 1)


def _run_with_the_target_of_own_heads(cfg: Config) -> DistributedRecord:
    """As if the probabilities were summed over the heads of only one rank."""
    from moefold.parallel.tensor_parallel import SequenceParallelTokens

    scatter = SequenceParallelTokens.scatter

    def local(self: SequenceParallelTokens, x: Tensor) -> Tensor:
        is_target = x.dim() == 3 and x.shape[2] == cfg.model.attention.indexer.top_k
        return self.local_rows(x) if is_target else scatter(self, x)

    SequenceParallelTokens.scatter = local
    return run_distributed(cfg, 1)


def _run_without_keys_of_other_ranks(cfg: Config) -> DistributedRecord:
    """As if each rank selected with index keys of zeros in place of other ranks' keys."""
    from moefold.parallel.context_parallel import ContextShards

    gather = ContextShards.gather

    def own_only(self: ContextShards, x: Tensor) -> Tensor:
        gathered = gather(self, x)
        if x.dim() == 4:
            return gathered
        keep = torch.zeros(len(gathered), 1, 1, dtype=gathered.dtype)
        keep[self.positions(len(x), x.device)] = 1.0
        return gathered * keep

    ContextShards.gather = own_only
    return run_distributed(cfg, 1)


def _run_with_the_selection_of_another_layer(cfg: Config) -> DistributedRecord:
    """As if a layer attended to the keys that the first layer selected, not the nearest one with an indexer."""
    from moefold.model import transformer
    from moefold.model.indexer import Selection

    class FirstSelections(transformer.Selections):
        def __init__(self) -> None:
            self._found: list[Selection] = []

        def of(self, block: transformer.Block) -> Selection | None:
            if getattr(block.attention, "indexer", None) is None:
                return self._found[0]
            self._found.append(Selection())
            return self._found[-1]

    transformer.Selections = FirstSelections
    return run_distributed(cfg, 1)


@pytest.mark.parametrize(
    ("broken", "settings", "wrong"),
    [
        (_run_with_the_loss_on_the_model, {}, "embedding.weight"),
        (_run_with_ties_to_the_last_key, {}, "attention.wk"),
        (_run_with_the_target_of_own_heads, {"world_size": 2, "tp": 2}, "attention.indexer.wq"),
        (
            _run_with_the_selection_of_another_layer,
            {"model": {"layers": 3, "layers.selection": "2 own, shared"}},
            "2.attention.wk",
        ),
        pytest.param(
            _run_without_keys_of_other_ranks,
            {"world_size": 2, "cp": 2, "context": "allgather"},
            "attention.indexer.wk",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_broken_rule_is_noticed(
    fresh_pool, broken: Callable[[Config], DistributedRecord], settings: dict[str, Any], wrong: str
):
    # With one head and few tokens, many scores are exactly 0: the tie is broken by the position.
    model = SPARSE | {"attention.indexer.num_heads": 1, "vocab_size": 8}
    cfg = tiny(**settings | {"model": model | settings.get("model", {})})
    names = [
        error.name for error in errors_of_broken_run(fresh_pool, broken, cfg) if error.name.startswith("gradients")
    ]
    assert any(wrong in name for name in names), names
