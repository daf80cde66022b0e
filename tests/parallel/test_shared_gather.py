"""Ranks that share memory train with the numbers of FSDP's own gathering and reduction, bit for bit."""

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch

from moefold.comm.private_torch import fsdp_param_group, fsdp_parameters, local_tensor
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.parallel import fsdp, fsdp_hooks
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.verify.distributed_run import create_groups
from tests.slow import slow
from tests.verify.recipes import tiny
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity


def _train(cfg: Config, shares: bool):
    """Return the number of shared parameters, and losses, norms and weights of two steps with an evaluation between."""
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    if shares:
        training = TrainingStep(model, cfg)
    else:
        # As on several machines: messages, whose sums have the same order; with ZeRO 0 gloo's sum of two terms.
        with patch.object(fsdp_hooks, "open_shared_exchange", lambda group, device: None):
            training = TrainingStep(model, cfg)
    data = DataRequest(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=3).open()
    batches = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    size = cfg.train.global_batch_size
    numbers = []
    for step in range(2):
        result = training.run(batches.batch(step * size), step + 1)
        numbers += [result.loss, result.grad_norm]
        if step == 0:
            numbers.append(training.evaluate([batches.batch(0)]))
    weights = [local_tensor(p).detach().clone() for p in model.named_parameters.values()]
    return len(training.shared_weights), numbers, weights


ROWS = {"model": {"ffn.moe.num_experts": 2}}
"""Too few experts for three ranks, so that the rows of each are cut."""
CASES = {
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3, "train": {"global_batch_size": 6, "micro_batch_size": 1}},
    "zero 0": {"zero": 0, "world_size": 2, "train": {"global_batch_size": 6, "micro_batch_size": 1}},
    "experts by rows": {"zero": 2, **ROWS, "train": {"global_batch_size": 6, "micro_batch_size": 1}},
    "micro-batches": {"zero": 1, "train": {"global_batch_size": 6, "micro_batch_size": 1}},
    "overlapped stages": {"zero": 1, "pp": 2, "schedule": "zero-bubble", "world_size": 4},
}
FAST = (
    # ZeRO 0 shares no weights: `test_replicas_of_zero_0_get_the_same_bits`.
    ("zero 3", "bfloat16"),
    ("experts by rows", "bfloat16"),
    ("overlapped stages", "bfloat16"),
)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *FAST,
        *slow(pair for pair in product(CASES, ("bfloat16", "float32")) if pair not in FAST),
    ],
)
def test_the_numbers_equal_private_copies(pool, case, dtype):
    keys = {"world_size": 3, "train": {"global_batch_size": 6}, **CASES[case]}
    if keys.get("pp"):
        keys = {**keys, "model": {"layers": 3}, "train": {"global_batch_size": 4, "micro_batch_size": 1}}
    cfg = tiny(**keys)
    cfg = replace(cfg, run=replace(cfg.run, dtype=dtype))
    shared, private = run_each(pool, cfg.parallel.world_size, _train, (cfg, True), (cfg, False))
    for (count, numbers, weights), (none, expected, references) in zip(shared, private, strict=True):
        assert (count > 0) == (cfg.parallel.zero in (1, 2))
        assert none == 0
        assert numbers == expected
        assert all(torch.equal(a, b) for a, b in zip(weights, references, strict=True))


def test_replicas_of_zero_0_get_the_same_bits(pool):
    first, *others = pool.run(3, _train, tiny(world_size=3, zero=0, train={"global_batch_size": 6}), True)
    for _, numbers, weights in others:
        assert numbers == first[1]
        assert all(torch.equal(a, b) for a, b in zip(weights, first[2], strict=True))


def _changes_are_read_after_the_next_gather(cfg: Config) -> None:
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    assert training.shared_weights
    (stage,) = model.stages
    fsdp.init_fsdp_root(stage)
    (param, *_) = fsdp_param_group(stage).fsdp_params
    stage.unshard()
    sharded, gathered = fsdp_parameters(param)
    before = local_tensor(gathered).clone()
    with torch.no_grad():
        local_tensor(sharded).add_(1)
    torch.distributed.barrier()
    assert torch.equal(local_tensor(gathered), before), "a step reads the weights with which it began"
    stage.reshard()
    stage.unshard()
    assert torch.equal(local_tensor(gathered), before + 1)
    pages = local_tensor(gathered).untyped_storage()
    others = [local_tensor(fsdp_parameters(p)[1]).untyped_storage() for p in fsdp_param_group(stage).fsdp_params[1:]]
    assert all(other.data_ptr() != pages.data_ptr() for other in others), "caches know weights by their storage"
    stage.reshard()


def test_a_change_is_read_after_the_next_gather(pool):
    pool.run(2, _changes_are_read_after_the_next_gather, tiny(world_size=2, zero=1))
