"""Break one thing, and the comparison must notice and name it: proof that the parity tests can fail."""

from dataclasses import replace

import pytest
import torch

from moefold.config.schema import Config
from moefold.verify.compare import NamedError, compare_records, run_oracle
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.models import edit_model
from tests.verify.feature_cases import FP8_ROWS, MUON, MUON_MODEL, TIED, gpt_oss
from tests.verify.oracle import STEPS, TOLERANCE, errors_of_broken_run, forget_the_adjoint_of_sums, oracle_of
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity


def _run_with_halved_expert_gradients(cfg: Config) -> DistributedRecord:
    """As if expert gradients were averaged over edp = 2 instead of summed."""
    from moefold.parallel.fsdp_hooks import PerRankGradDots

    whole = PerRankGradDots._reduce_by_exchange

    def broken(dots, *call):
        reduced = whole(dots, *call)
        return [grad / 2 for grad in reduced] if dots.group.size == 2 else reduced

    PerRankGradDots._reduce_by_exchange = broken
    return run_distributed(cfg, 1)


def _run_without_replicated_sum(cfg: Config) -> DistributedRecord:
    """As if sequence parallelism forgot to add the norm gradients of its ranks."""
    from moefold.parallel import parallel_model

    parallel_model.sum_replicated_gradients = lambda parameters, tp: None
    return run_distributed(cfg, 1)


def _run_with_norm_counted_twice(cfg: Config) -> DistributedRecord:
    """As if replicated gradients counted on every rank that holds them."""
    from moefold.parallel import gradients

    gradients.num_replicas = lambda grad: 1
    return run_distributed(cfg, 1)


def _run_with_local_routing_counts(cfg: Config) -> DistributedRecord:
    """As if the balance loss knew only the tokens of its own rank."""
    from moefold.model.moe.dispatch import ShardedMicroBatch

    ShardedMicroBatch.sum = lambda self, x: x * self.size
    return run_distributed(cfg, 1)


def _run_with_own_gradient_of_a_sum(cfg: Config) -> DistributedRecord:
    """As if only this rank used a sum over the heads of all ranks."""
    forget_the_adjoint_of_sums()
    return run_distributed(cfg, 1)


def _run_without_embedding_exchange(cfg: Config) -> DistributedRecord:
    """As if the last stage's use of the embedding stayed its own."""
    from moefold.parallel import tied_embedding

    tied_embedding.allreduce_tied_embedding_grad = lambda stages, plan, pp: None
    return run_distributed(cfg, 1)


def _worst(fresh_pool, broken, world_size: int = 2, **parallel: object) -> list[NamedError]:
    return errors_of_broken_run(fresh_pool, broken, tiny(world_size=world_size, **parallel))


def test_wrong_scale_of_expert_gradients_is_named(fresh_pool):
    names = [
        d.name for d in _worst(fresh_pool, _run_with_halved_expert_gradients, 4, ep=2) if d.name.startswith("gradients")
    ]
    assert all(".experts." in name for name in names)
    assert len(names) == 2 * 3


def test_missing_sum_of_replicated_gradients_is_named(fresh_pool):
    names = [d.name for d in _worst(fresh_pool, _run_without_replicated_sum, tp=2) if d.name.startswith("gradients")]
    assert {name.split(".")[-2] for name in names} == {"attention_norm", "ffn_norm", "router", "norm"}


def test_norm_that_counts_replicas_twice_is_noticed(fresh_pool):
    names = {d.name for d in _worst(fresh_pool, _run_with_norm_counted_twice, tp=2)}
    assert "step 1 grad_norm (rank 0)" in names
    assert not any(name.startswith("gradients") for name in names)


def test_balance_loss_of_local_counts_is_noticed(fresh_pool):
    names = {d.name for d in _worst(fresh_pool, _run_with_local_routing_counts, cp=2)}
    assert "step 1 aux_loss (rank 0)" in names
    assert any("router" in name for name in names)


def test_norm_over_all_heads_without_the_gradient_of_its_sum_is_named(fresh_pool):
    model = {"attention.qk_norm": {}, "attention.qk_norm.over": "all_heads"}
    names = {d.name for d in _worst(fresh_pool, _run_with_own_gradient_of_a_sum, tp=2, model=model)}
    assert "gradients layers.1.attention.wq" in names
    assert not any("step 1 loss" in name or "head." in name for name in names if not name.startswith("weights"))


def test_embedding_gradients_of_only_one_stage_are_named(fresh_pool):
    names = {d.name for d in _worst(fresh_pool, _run_without_embedding_exchange, pp=2, model={"mtp_layers": 1})}
    assert {name for name in names if name.startswith("gradients")} == {"gradients embedding.weight"}


def test_missing_tensor_is_an_infinite_difference(fresh_pool):
    cfg = tiny()
    record = fresh_pool.run(1, run_distributed, cfg, 1)[0]
    del record.weights["layers.1.ffn.experts.w_up"]
    worst = compare_records(run_oracle(cfg, 1), [record])[0]
    assert "layers.1.ffn.experts.w_up" in worst.name
    assert worst.error == float("inf")


def test_not_a_number_is_an_infinite_difference(fresh_pool):
    cfg = tiny()
    record = fresh_pool.run(1, run_distributed, cfg, 1)[0]
    record.gradients["head.norm.weight"][0] = torch.nan
    worst = compare_records(run_oracle(cfg, 1), [record])[0]
    assert worst.name == "gradients head.norm.weight"
    assert worst.error == float("inf")


def _run_without_postponed_gradients(cfg: Config) -> DistributedRecord:
    """As if the last of the gradients that a backward pass postponed were forgotten."""
    from moefold.parallel.wgrad_store import WeightGradStore

    whole = WeightGradStore.__call__

    def broken(self: WeightGradStore):
        self._pending = self._pending[:-1]
        return whole(self)

    WeightGradStore.__call__ = broken
    return run_distributed(cfg, 1)


def _run_with_stale_copy(cfg: Config) -> DistributedRecord:
    """As if the embedding of the last stage never changed."""
    from moefold.parallel import pipeline

    pipeline.sync_tied_embedding = lambda stages: None
    return run_distributed(cfg, 2)


def test_a_forgotten_weight_gradient_is_noticed(fresh_pool):
    cfg = tiny(train={"global_batch_size": 8}, schedule="zero-bubble", world_size=2, pp=2)
    with pytest.raises(RuntimeError, match="has no gradient"):
        errors_of_broken_run(fresh_pool, _run_without_postponed_gradients, cfg)


def test_a_stale_copy_of_the_embedding_is_noticed(fresh_pool):
    cfg = tiny(TIED, train={"global_batch_size": 8}, schedule="zbv", virtual_stages=2, world_size=2, pp=2)
    names = [d.name for d in errors_of_broken_run(fresh_pool, _run_with_stale_copy, cfg, 2)]
    assert any(name.startswith("step 2 loss") for name in names)
    assert not any(name.startswith(("step 1", "gradients")) for name in names)


def _run_with_shards_for_matrices(cfg: Config) -> DistributedRecord:
    """As if each rank made its shard of a matrix orthogonal by itself."""
    from moefold.parts.optimizer.muon import redistribute

    def by_shards(self, source, work, sink):
        for name, parameter in self.of_rank.items():
            key, values = redistribute.MatrixKey(name), parameter.to_local()
            for place in range(len(values) if values.dim() == 3 else 1):
                if values.numel():
                    sink(key, place, work(key, source(key, place)))

    def remember(self, group, tensors):
        self.of_rank = tensors

    redistribute.MatrixRedistributor.__init__, redistribute.MatrixRedistributor.run = remember, by_shards
    return run_distributed(cfg, 1)


def test_shards_made_orthogonal_by_themselves_are_noticed(fresh_pool):
    cfg = tiny(model=MUON_MODEL, train=MUON, world_size=2, tp=2, ep=2)
    found = compare_records(oracle_of(cfg, 1), fresh_pool.run(2, _run_with_shards_for_matrices, cfg))
    errors = {difference.name: difference.error for difference in found}
    assert errors["weights layers.0.attention.wq"] > 1e-3
    assert errors["weights layers.0.ffn.w_down"] > 1e-3
    # Experts are whole on their ranks.
    assert errors["weights layers.1.ffn.experts.w_up"] < 1e-9


def test_an_oracle_that_does_not_round_rows_to_8_bits_differs(fresh_pool):
    cfg = tiny(**FP8_ROWS[0])
    exact = replace(cfg, moe=replace(cfg.moe, dispatch_precision="dtype"))
    ranks = fresh_pool.run(2, run_distributed, cfg, STEPS)
    assert compare_records(oracle_of(exact), ranks)[0].error > 1e6 * TOLERANCE


def test_a_model_that_differs_a_little_is_noticed(fresh_pool):
    cfg = tiny(**gpt_oss(world_size=2, etp=2))
    ranks = fresh_pool.run(2, run_distributed, cfg, 1)
    assert compare_records(oracle_of(cfg, 1), ranks)[0].error < TOLERANCE
    for change in ({"sliding_window": 6}, {"layers.attention": "full, window"}, {"ffn.moe.activation.limit": 0.31}):
        other = replace(cfg, model=edit_model(cfg.model, change))
        assert compare_records(oracle_of(other, 1), ranks)[0].error > 1e-4, change
