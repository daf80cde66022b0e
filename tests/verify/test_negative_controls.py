"""Break one thing, and the comparison must notice and name it: proof that the parity tests can fail."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from moefold.config.schema import Config
from moefold.verify.compare import NamedError, compare_records, run_oracle
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.verify.recipes import tiny, without_mapping

pytestmark = pytest.mark.parity


def _run_with_halved_expert_gradients(cfg: Config) -> DistributedRecord:
    """As if expert gradients were averaged over edp = 2 instead of summed."""
    from moefold.parallel import parallelize

    whole = parallelize.shard_data_parallel

    def broken(stage, groups, cfg):
        whole(stage, groups, cfg)
        for layer in stage.moe_layers().values():
            assert isinstance(layer.experts, FSDPModule)
            layer.experts.set_gradient_divide_factor(2.0)

    parallelize.shard_data_parallel = broken
    return run_distributed(cfg, 1)


def _run_without_replicated_sum(cfg: Config) -> DistributedRecord:
    """As if sequence parallelism forgot to add the norm gradients of its ranks."""
    from moefold.parallel import parallelize

    parallelize.sum_replicated_gradients = lambda parameters, tp: None
    return run_distributed(cfg, 1)


def _run_with_norm_counted_twice(cfg: Config) -> DistributedRecord:
    """As if replicated gradients counted on every rank that holds them."""
    from moefold.parallel import gradients

    gradients._num_replicas = lambda grad: 1
    return run_distributed(cfg, 1)


def _run_with_local_routing_counts(cfg: Config) -> DistributedRecord:
    """As if the balance loss knew the tokens of its own rank alone."""
    from moefold.model.moe.dispatch import ShardedMicroBatch

    ShardedMicroBatch.sum = lambda self, x: x * self.size
    return run_distributed(cfg, 1)


def _run_with_own_gradient_of_a_sum(cfg: Config) -> DistributedRecord:
    """As if a sum over the heads of all ranks were used by this rank alone."""
    from moefold.comm import collectives

    collectives._AllReduce.backward = staticmethod(lambda ctx, grad: (grad, None))
    return run_distributed(cfg, 1)


def _run_without_embedding_exchange(cfg: Config) -> DistributedRecord:
    """As if the last stage's use of the embedding stayed its own."""
    from moefold.parallel import parallelize

    parallelize.allreduce_tied_embedding_grad = lambda stages, plan, pp: None
    return run_distributed(cfg, 1)


def _worst(pool, broken, **parallel: object) -> list[NamedError]:
    cfg = tiny(world_size=4, **parallel)
    return [d for d in compare_records(run_oracle(without_mapping(cfg), 1), pool.run(4, broken, cfg)) if d.error > 1e-9]


def test_wrong_scale_of_expert_gradients_is_named(pool):
    names = [d.name for d in _worst(pool, _run_with_halved_expert_gradients, ep=2) if d.name.startswith("gradients")]
    assert all(".experts." in name for name in names)
    assert len(names) == 2 * 3


def test_missing_sum_of_replicated_gradients_is_named(pool):
    names = [d.name for d in _worst(pool, _run_without_replicated_sum, tp=2) if d.name.startswith("gradients")]
    assert {name.split(".")[-2] for name in names} == {"attention_norm", "ffn_norm", "router", "norm"}


def test_norm_that_counts_replicas_twice_is_noticed(pool):
    names = {d.name for d in _worst(pool, _run_with_norm_counted_twice, tp=2)}
    assert "step 1 grad_norm (rank 0)" in names
    assert not any(name.startswith("gradients") for name in names)


def test_balance_loss_of_local_counts_is_noticed(pool):
    names = {d.name for d in _worst(pool, _run_with_local_routing_counts, cp=2, tp=2)}
    assert "step 1 aux_loss (rank 0)" in names
    assert any("router" in name for name in names)


def test_norm_over_all_heads_without_the_gradient_of_its_sum_is_named(pool):
    model = {"qk_norm": True, "qk_norm_width": "all_heads"}
    names = {d.name for d in _worst(pool, _run_with_own_gradient_of_a_sum, tp=2, model=model)}
    assert "gradients layers.1.attention.wq" in names
    assert not any("step 1 loss" in name or "head." in name for name in names if not name.startswith("weights"))


def test_embedding_gradients_of_one_stage_alone_are_named(pool):
    names = {d.name for d in _worst(pool, _run_without_embedding_exchange, pp=2, model={"mtp_layers": 1})}
    assert {name for name in names if name.startswith("gradients")} == {"gradients embedding.weight"}


def test_missing_tensor_is_an_infinite_difference(pool):
    cfg = tiny()
    record = pool.run(1, run_distributed, cfg, 1)[0]
    del record.weights["layers.1.ffn.experts.w_up"]
    worst = compare_records(run_oracle(cfg, 1), [record])[0]
    assert "layers.1.ffn.experts.w_up" in worst.name
    assert worst.error == float("inf")


def test_not_a_number_is_an_infinite_difference(pool):
    cfg = tiny()
    record = pool.run(1, run_distributed, cfg, 1)[0]
    record.gradients["head.norm.weight"][0] = torch.nan
    worst = compare_records(run_oracle(cfg, 1), [record])[0]
    assert worst.name == "gradients head.norm.weight"
    assert worst.error == float("inf")
