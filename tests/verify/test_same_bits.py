"""Test that recomputation, overlap and offload change no bit of losses, counts, gradients and weights."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moefold.config.schema import Config
from moefold.offload.ssd import SsdFile
from moefold.optim.state_offload import host_mesh
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.verify.cases import Case
from tests.verify.recipes import tiny
from tests.verify.same_bits import assert_equal_bits, run_both
from tests.verify.same_bits_cases import CASES, LAYER, OFFLOAD_MODEL, ONE_RANK, TWO_SAMPLES, without_switch
from tests.verify.shared_ranks import Call, SharedRanks, selected_cases

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def ranks_of_cases(request, pool, tmp_path_factory) -> SharedRanks:
    """The ranks of the selected cases."""

    def call(case: Case) -> Call:
        cfg = case.config(tmp_path_factory.mktemp("case"))
        return Call(cfg.parallel.world_size, run_both, (without_switch(cfg), cfg, case.steps))

    selected = selected_cases(request, "test_each_case_has_the_same_bits")
    return SharedRanks(pool, {name: call(case) for name, case in selected.items()})


@pytest.mark.parametrize("case", [case.param() for case in CASES])
def test_each_case_has_the_same_bits(request, ranks_of_cases, case: Case):
    _, cfg, _ = ranks_of_cases.calls[request.node.name].args
    ranks = ranks_of_cases.results(request.node.name)
    assert_equal_bits(ranks)
    if cfg.train.offload and cfg.train.offload_waits:
        for step in ranks[0][1].steps:
            assert step.offload["stored_gib"] > 0
            assert step.offload["kept_gib"] == 0


def _run_with_a_changed_byte(cfg: Config) -> DistributedRecord:
    """Run with a disk that returns a changed byte in each extent."""
    read = SsdFile._read

    def broken(self: SsdFile, host: torch.Tensor, offset: int) -> None:
        read(self, host, offset)
        host[0] ^= 1

    SsdFile._read = broken
    return run_distributed(cfg, 1)


def _run_without_checksums(cfg: Config) -> DistributedRecord:
    from moefold.offload import ssd

    ssd.checksum = lambda host: 0
    return _run_with_a_changed_byte(cfg)


def test_a_changed_byte_is_noticed(fresh_pool, tmp_path):
    """By the checksum of each extent; and, without it, by the comparison, so the tensors did come from the disk."""
    train = TWO_SAMPLES | {"offload": LAYER, "offload_to": "ssd", "offload_min_kib": 0, "offload_waits": True}
    cfg = Case("offload", {"model": OFFLOAD_MODEL, "train": train, **ONE_RANK}).config(tmp_path)
    with pytest.raises(RuntimeError, match="the offloaded bytes differ from the written bytes"):
        fresh_pool.run(1, _run_with_a_changed_byte, cfg)
    plain = tiny(model=OFFLOAD_MODEL, train=TWO_SAMPLES)
    ranks = zip(
        fresh_pool.run(1, run_distributed, plain, 1), fresh_pool.run(1, _run_without_checksums, cfg), strict=True
    )
    with pytest.raises(AssertionError, match="gradients"):
        assert_equal_bits(ranks)


def _is_sharded_alike_on_the_host() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for axes, places in ((mesh, [Shard(0), Shard(1)]), (mesh["tp"], [Shard(1)])):
        like = distribute_tensor(torch.arange(35.0).view(5, 7), axes, places)
        on_host = DTensor.from_local(
            like.to_local(), host_mesh(axes), places, run_check=False, shape=like.shape, stride=like.stride()
        )
        if not torch.equal(on_host.full_tensor(), like.full_tensor()):
            return False
    return True


def test_the_mesh_of_moments_on_the_host_shards_as_the_mesh_of_the_weights(pool):
    assert all(pool.run(4, _is_sharded_alike_on_the_host))
