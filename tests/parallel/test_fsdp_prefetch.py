"""FSDP gathers the next block during the current one: the same numbers, and at most one block more in memory."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from moefold.comm.collectives import all_gather_into
from moefold.comm.groups import ParallelGroups
from moefold.comm.private_torch import fsdp_param_groups
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.parallel import fsdp
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from tests.slow import slow
from tests.verify.recipes import tiny
from tests.verify.shared_ranks import run_each

LAYERS = 4


class _Recorder:
    """All-gather of one FSDP module that logs its name and the blocks that are gathered by then."""

    def __init__(self, root, name, log):
        self._root = root
        self._name = name
        self._log = log

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        gathered = {
            group.modules[0]
            for group in fsdp_param_groups(self._root)
            if group.is_unsharded or group._all_gather_result is not None
        }
        names = {name for name, module in self._root.named_modules() if module in gathered}
        self._log.append((self._name, {name for name in names | {self._name} if name.startswith("layers")}))
        return all_gather_into(output_tensor, input_tensor, group, async_op=async_op)


@contextmanager
def _without_prefetch():
    prefetch = fsdp.prefetch_next_block
    fsdp.prefetch_next_block = lambda stage: None
    try:
        yield
    finally:
        fsdp.prefetch_next_block = prefetch


def _train(cfg: Config, prefetches: bool):
    """The results of two steps with an evaluation between them, the weights, and the all-gathers of both steps."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    if prefetches:
        model = parallelize(cfg, groups)
    else:
        with _without_prefetch():
            model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    logs = []
    for stage in model.stages:
        log = []
        for name, module in stage.named_modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_Recorder(stage, name or "root", log))
        logs.append(log)
    data = DataRequest.of(cfg).open()
    sharder = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    results = []
    gathers = []
    for step in range(2):
        batch = sharder.batch(step * cfg.train.global_batch_size)
        result = training.run(batch, step + 1)
        gathers.append([list(log) for log in logs])
        for log in logs:
            log.clear()
        results.append((result.loss, result.grad_norm, training.evaluate([batch]) if step == 0 else None))
        for log in logs:
            log.clear()
    weights = {name: p.to_local().clone() for name, p in model.named_parameters.items()}
    return results, weights, gathers


MAPPINGS = {
    "zero 3": ({"world_size": 2, "zero": 3}, {}),
    "zero 3, bfloat16": ({"world_size": 2, "zero": 3}, {"dtype": "bfloat16"}),
    "zero 1": ({"world_size": 2, "zero": 1}, {}),
    "zero 3, experts": ({"world_size": 4, "ep": 2, "zero": 3}, {}),
    "zero 3, pipeline": ({"world_size": 4, "pp": 2, "zero": 3}, {}),
    "zero 3, prediction of more tokens": ({"world_size": 2, "zero": 3}, {"model": {"mtp_layers": 1}}),
    "zero 3, recomputed": ({"world_size": 2, "zero": 3}, {"train": {"recompute": ("layer",)}}),
    "zero 3, recomputed pipeline": ({"world_size": 4, "pp": 2, "zero": 3}, {"train": {"recompute": ("layer",)}}),
}
FAST = ("zero 1", "zero 3, recomputed")


def _recipe(name: str) -> Config:
    parallel, other = MAPPINGS[name]
    cfg = tiny(model={"layers": LAYERS} | other.get("model", {}), train=other.get("train"), **parallel)
    return replace(cfg, run=replace(cfg.run, dtype=other.get("dtype", "float64")))


@pytest.mark.parametrize("name", [*FAST, *slow((name,) for name in MAPPINGS if name not in FAST)])
def test_a_step_has_the_same_bits_and_at_most_one_block_more(pool, name):
    cfg = _recipe(name)
    plain, ahead = run_each(pool, cfg.parallel.world_size, _train, (cfg, False), (cfg, True))
    for (results, weights, gathers), (other_results, other_weights, other_gathers) in zip(plain, ahead, strict=True):
        assert results == other_results
        assert weights.keys() == other_weights.keys()
        assert all(torch.equal(weights[key], other_weights[key]) for key in weights)
        # Every step gathers the same weights as often; nothing remains in flight behind a step or an evaluation.
        assert _names(gathers) == _names(other_gathers)
        assert cfg.parallel.zero != 3 or _most_blocks(other_gathers) == 2


def _names(gathers):
    return [[sorted(name for name, _ in log) for log in step] for step in gathers]


def _most_blocks(gathers):
    return max(
        len({name.split(".")[1] for name in gathered if "router" not in name})
        for step in gathers
        for log in step
        for _, gathered in log
    )


@pytest.mark.parametrize("name", ["zero 3, bfloat16", *slow([("zero 3",)])])
def test_a_block_starts_the_all_gathers_of_the_next_one(pool, name):
    _, _, gathers = pool.run(2, _train, _recipe(name), True)[0]
    blocks = [[f"layers.{i}", f"layers.{i}.ffn.experts"] for i in range(LAYERS)]
    forward = ["root", *sum(blocks, [])]
    backward = ["root", *sum(reversed(blocks), [])]
    for (log,) in gathers:
        # Routers in float32 are gathered once, in the first forward pass.
        log = [(name, gathered) for name, gathered in log if not name.endswith("router")]
        num_micro_batches, rest = divmod(len(log), len(forward) + len(backward))
        assert (num_micro_batches, rest) == (2, 0)
        assert [name for name, _ in log] == (forward + backward) * num_micro_batches
        # The experts of a block are gathered while the block before it, fully in memory, computes.
        forward_log, backward_log = dict(log[: len(forward)]), dict(log[len(forward) : len(forward) + len(backward)])
        for block, next_block in pairwise(blocks):
            assert forward_log[next_block[1]] >= {*block, *next_block}
            assert backward_log[block[1]] >= {*block, *next_block}
