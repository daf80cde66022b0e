"""The bytes that CUDA graphs hold at fixed addresses, by formula and as allocated in training."""

from dataclasses import replace

import pytest

from moefold.config.schema import Config
from moefold.cost.peak_memory import compute_rank_memory
from moefold.data.dataset import DataRequest
from moefold.parallel.graphed_modules import GraphedModule, apply_cuda_graphs
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.verify.distributed_run import create_groups
from tests.parallel.recorded_graphs import TapeRecorder
from tests.slow import slow
from tests.verify.linear_cases import HYBRID
from tests.verify.recipes import tiny


def _allocated(cfg: Config, has_router: bool) -> int:
    """Return the bytes at fixed addresses after a step, without the inputs of attention, which are saved tensors."""
    model = parallelize(cfg, create_groups(cfg))
    for stage in model.stages:
        apply_cuda_graphs(stage, model.weight_cache, TapeRecorder, has_router=has_router)
    data = DataRequest.of(cfg).open()
    sharder = BatchSharder(data.train, cfg.batch_shape, model.groups, model.positions)
    TrainingStep(model, cfg).run(sharder.batch(0), 1)
    hidden_bytes = cfg.train.seq_len * cfg.train.micro_batch_size * cfg.model.hidden_size * stage.dtype.itemsize
    total = 0
    for stage in model.stages:
        for block in stage.layers.values():
            attention = block.attention.forward
            routers = [block.ffn.router.forward] if has_router else []
            assert all(isinstance(module, GraphedModule) for module in (attention, *routers))
            statics = [tensor for module in (attention, *routers) for tensor in module.static_tensors()]
            total += sum(tensor.nbytes for tensor in statics) - len(attention._idle) * hidden_bytes
    return total


@pytest.mark.parametrize(
    ("model", "dtype", "mapping"),
    [
        ({"attention.qkv_bias": True, "attention.qk_norm": {}}, "bfloat16", {}),
        (HYBRID, "float64", {"world_size": 2, "pp": 2}),
        ({"ffn.moe.router.bias": True, "ffn.moe.router": "sigmoid"}, "bfloat16", {"world_size": 2, "zero": 1, "ep": 2}),
    ],
)
@pytest.mark.parametrize("mode", ["attention_router", *slow([("attention",)])])
def test_bytes_at_fixed_addresses_equal_the_formula(pool, mode, model, dtype, mapping):
    cfg = tiny(model=model, train={"micro_batch_size": 2, "global_batch_size": 8}, **mapping)
    cfg = replace(cfg, run=replace(cfg.run, dtype=dtype, kernels="plain"))
    allocated = pool.run(cfg.parallel.world_size, _allocated, cfg, mode == "attention_router")
    graphed = replace(cfg, run=replace(cfg.run, cuda_graphs=mode))
    ranks = compute_rank_memory(graphed)
    assert [rank.graphs for rank in ranks] == sorted(set(allocated), reverse=True)
    without = compute_rank_memory(cfg)
    assert [rank.total - rank.graphs for rank in ranks] == [rank.total for rank in without]
    assert not any(rank.graphs for rank in without)
