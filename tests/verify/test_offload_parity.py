"""What leaves memory between the passes comes back as it was: the same bits under every mapping and schedule."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moefold.config.schema import Config
from moefold.offload.ssd import SsdFile
from moefold.optim.state_offload import host_mesh
from moefold.validate.config import check_config
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.verify.recipes import LATENT, tiny
from tests.verify.same_bits import assert_equal_bits, assert_same_bits
from tests.verify.test_pipeline_parity import write_split_rows

pytestmark = pytest.mark.parity

MODEL = {"layer_pattern": "DM", "shared_expert_ffn_hidden_size": 16, "shared_expert_gate": True, "expert_bias": True}
MOE = {"input_jitter": 0.1, "capacity_factor": 1.0, "bias_update_rate": 0.1}
TRAIN = {"micro_batch_size": 2, "global_batch_size": 8}
FURTHER = LATENT | {"mtp_layers": 1, "layer_pattern": "DM", "tie_embeddings": True}
INNER = ("norms", "core_attention", "dense_mlp", "expert_activation", "shared_experts")
WHOLE = ("norms", "core_attention", "dense_mlp", "moe")
LAYER = ("layer",)
AGAIN = ("norms", "core_attention", "expert_activation")
RECOMPUTED = [(LAYER, LAYER), (WHOLE, ("norms", "core_attention", "moe"))]


def _offloading(cfg: Config, parts: tuple[str, ...], folder: object = None, **train: object) -> Config:
    """The recipe with everything in these parts on a disk, or, without a folder, in other memory of the host."""
    place = {} if folder is None else {"offload_to": "ssd", "offload_dir": str(folder)}
    waits = {"offload_waits": True} | train
    found = replace(cfg, train=replace(cfg.train, offload=parts, offload_min_kib=0, **place, **waits))
    check_config(found)
    return found


def _run(pool, cfg: Config) -> list[DistributedRecord]:
    return pool.run(cfg.parallel.world_size, run_distributed, cfg, 2)


def _assert_same_bits(pool, cfg: Config, offloading: Config, *, stored: bool = True) -> None:
    found = _run(pool, offloading)
    assert_equal_bits(zip(_run(pool, cfg), found, strict=True))
    for step in found[0].steps:
        assert step.offload.stored_gib > 0 or not stored
        assert step.offload.kept_gib == 0 or not stored


@pytest.mark.parametrize("parts", [INNER, WHOLE, LAYER], ids=len)
@pytest.mark.parametrize("waits", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_parts_on_one_rank(pool, tmp_path, parts, waits):
    cfg = tiny(model=MODEL, moe=MOE, train=TRAIN)
    _assert_same_bits(pool, cfg, _offloading(cfg, parts, tmp_path, offload_waits=waits), stored=waits)


@pytest.mark.parametrize(
    ("parts", "again"),
    [(LAYER, AGAIN), *(pytest.param(*case, marks=pytest.mark.slow) for case in RECOMPUTED)],
    ids=str,
)
def test_with_recomputation(pool, tmp_path, parts, again):
    cfg = tiny(model=MODEL, moe=MOE, train=TRAIN)
    _assert_same_bits(pool, cfg, _offloading(cfg, parts, tmp_path, recompute=again))


MAPPINGS = [
    (INNER, (), {"tp": 2, "cp": 2, "ep": 2, "etp": 2, "zero": 3}),
    (LAYER, AGAIN, {"tp": 2, "pp": 2, "ep": 2, "zero": 2, "dispatcher": "allgather"}),
    (WHOLE, ("norms",), {"cp": 2, "pp": 2, "etp": 2, "zero": 3, "schedule": "interleaved", "virtual_stages": 2}),
    (LAYER, LAYER, {"ep": 4, "zero": 3}),
]
SCHEDULES = [
    ("gpipe", {}), ("1f1b", {"zero": 2}), ("interleaved", {"virtual_stages": 3}), ("zero-bubble", {"zero": 3}),
    ("zero-bubble", {"virtual_stages": 3}), ("zbv", {"virtual_stages": 2, "zero": 2}),
    ("dualpipev", {"virtual_stages": 2}),
]  # fmt: skip
AXES = [{"pp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"pp": 2, "ep": 2, "etp": 1}, {"pp": 2, "tp": 2, "etp": 2}, {"pp": 4}]


@pytest.mark.parametrize(
    ("parts", "again", "mapping"),
    [MAPPINGS[0], MAPPINGS[1], *(pytest.param(*case, marks=pytest.mark.slow) for case in MAPPINGS[2:])],
    ids=str,
)
def test_under_a_mapping(pool, tmp_path, parts, again, mapping):
    cfg = tiny(model=MODEL, moe=MOE, train=TRAIN, world_size=4, **mapping)
    _assert_same_bits(pool, cfg, _offloading(cfg, parts, tmp_path, recompute=again))


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [SCHEDULES[3], SCHEDULES[6], *(pytest.param(*SCHEDULES[i], marks=pytest.mark.slow) for i in (0, 5))],
    ids=str,
)
def test_schedules(pool, tmp_path, schedule, chunks):
    """Several micro-batches are away at a time, and those that wait for weight gradients are back."""
    cfg = tiny(model=FURTHER, train=TRAIN, world_size=2, pp=2, schedule=schedule, **chunks)
    _assert_same_bits(pool, cfg, _offloading(cfg, LAYER, tmp_path, recompute=("norms",)))


@pytest.mark.slow
@pytest.mark.parametrize("axes", AXES, ids=[f"axes{i}" for i in range(len(AXES))])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES, ids=str)
def test_schedules_mixed(pool, tmp_path, schedule, chunks, axes):
    """Models, parts, recomputation, the loss by chunks, the place and the waiting rotate."""
    i = SCHEDULES.index((schedule, chunks)) + AXES.index(axes)
    model, again, parts = (MODEL, FURTHER)[i % 2], ((), AGAIN, ("norms",))[i % 3], WHOLE if i % 6 == 3 else LAYER
    train = {"global_batch_size": 16 if "ep" in axes else 8, "loss_chunk": 5 * (i % 2)}
    cfg = tiny(model=model, train=train, world_size=4, schedule=schedule, **chunks | axes)
    folder, waits = None if i % 4 == 0 else tmp_path, i % 5 > 0
    _assert_same_bits(pool, cfg, _offloading(cfg, parts, folder, recompute=again, offload_waits=waits), stored=waits)


@pytest.mark.slow
def test_a_schedule_from_a_file(pool, tmp_path):
    rows = write_split_rows(tmp_path / "rows.csv", (1, 0, 1, 0), 4)
    mapping = {"world_size": 2, "pp": 2, "virtual_stages": 2, "schedule": "csv", "schedule_csv": rows}
    cfg = tiny(model=FURTHER, train={"global_batch_size": 4}, **mapping)
    _assert_same_bits(pool, cfg, _offloading(cfg, LAYER, tmp_path / "offload"))


CHUNKED = {"world_size": 4, "pp": 2, "ep": 2, "virtual_stages": 2}
OVERLAPPED = [
    (("layer",), (), {"world_size": 2, "ep": 2}),
    (("moe", "core_attention"), ("norms",), {"world_size": 4, "pp": 2, "ep": 2, "zero": 2}),
    (("layer",), ("layer",), {"world_size": 4, "tp": 2, "etp": 2}),
    (("norms", "dense_mlp", "moe"), (), CHUNKED | {"schedule": "interleaved"}),
    (("layer",), AGAIN, CHUNKED | {"schedule": "dualpipev"}),
    (("layer",), ("moe",), {"world_size": 4, "cp": 2, "ep": 4, "dispatcher": "allgather"}),
]


@pytest.mark.parametrize(
    ("parts", "again", "mapping"),
    [OVERLAPPED[0], OVERLAPPED[1], *(pytest.param(*case, marks=pytest.mark.slow) for case in OVERLAPPED[2:])],
    ids=str,
)
@pytest.mark.parametrize("waits", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_micro_batches_at_a_time(pool, tmp_path, parts, again, mapping, waits):
    """While the exchanges of experts are hidden, one micro-batch gives away what another one takes back."""
    train = TRAIN | {"micro_batch_size": 1}
    cfg = tiny(model=MODEL | {"num_layers": 4}, moe=MOE, train=train, overlap_experts=True, **mapping)
    _assert_same_bits(pool, cfg, _offloading(cfg, parts, tmp_path, recompute=again, offload_waits=waits), stored=waits)


LOAN = {"choice": "skewed", "llep_min_tokens": 1, "llep_threshold": 1.0, "llep_capacity": 1.0}


@pytest.mark.parametrize(
    ("moe", "mapping"),
    [
        pytest.param(
            {**LOAN, "weight_in_expert": True},
            {"cp": 2, "ep": 2, "etp": 2, "dispatcher": "leastloaded", "zero": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param({"aux_kind": "global_batch"}, {"tp": 2, "ep": 2, "zero": 0}, marks=pytest.mark.slow),
        pytest.param({"choice": "sinkhorn"}, {"cp": 2, "etp": 2, "context": "ulysses"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kinds_of_routing(pool, tmp_path, moe, mapping):
    cfg = tiny(moe=moe, train=TRAIN, world_size=4, **mapping)
    _assert_same_bits(pool, cfg, _offloading(cfg, ("core_attention", "moe"), tmp_path))


def _run_with_a_changed_byte(cfg: Config) -> DistributedRecord:
    """As if the disk gave back one byte of each extent otherwise, and nobody had summed them up."""
    read = SsdFile._read

    def broken(self: SsdFile, host: torch.Tensor, offset: int) -> None:
        read(self, host, offset)
        host[0] ^= 1

    SsdFile._read = broken
    return run_distributed(cfg, 1)


def _run_unsummed(cfg: Config) -> DistributedRecord:
    from moefold.offload import ssd

    ssd.checksum = lambda host: 0
    return _run_with_a_changed_byte(cfg)


def test_a_changed_byte_is_noticed(pool, tmp_path):
    """By the sum of each extent; and, without it, by the comparison, so what is compared did come from the disk."""
    cfg = tiny(model=MODEL, train=TRAIN)
    offloading = _offloading(cfg, LAYER, tmp_path)
    with pytest.raises(RuntimeError, match="the offloaded bytes differ from what was written"):
        pool.run(1, _run_with_a_changed_byte, offloading)
    with pytest.raises(AssertionError, match="gradients"):
        assert_equal_bits(
            zip(pool.run(1, run_distributed, cfg, 1), pool.run(1, _run_unsummed, offloading), strict=True)
        )


MOMENTS = [
    ("adamw", "float32", {"world_size": 4, "tp": 2, "ep": 4, "zero": 1}),
    ("muon", "float32", {"world_size": 4, "cp": 2, "pp": 2, "ep": 2, "zero": 2}),
    ("adamw", "bfloat16", {"world_size": 4, "tp": 2, "etp": 2, "zero": 3}),
    ("muon", "bfloat16", {"world_size": 4, "pp": 2, "schedule": "zbv", "virtual_stages": 2, "zero": 3}),
    ("adamw", "float32", {"world_size": 4, "zero": 0}),
]


@pytest.mark.parametrize(
    ("optimizer", "moment_dtype", "mapping"),
    [MOMENTS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in MOMENTS[1:])],
    ids=str,
)
def test_moments_in_files(pool, tmp_path, optimizer, moment_dtype, mapping):
    """With every mapping; the rows of experts that ranks share, and the parts that FSDP cuts, included."""
    train = TRAIN | {"optimizer": optimizer, "moment_dtype": moment_dtype}
    cfg = tiny(model=MODEL | {"num_layers": 4}, train=train, **mapping)
    away = {"offload_optimizer": "ssd", "offload_dir": str(tmp_path), "offload_min_kib": 0}
    found = replace(cfg, train=replace(cfg.train, **away))
    check_config(found)
    assert_same_bits(pool, cfg, found)


def _is_cut_alike_on_the_host() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for axes, places in ((mesh, [Shard(0), Shard(1)]), (mesh["tp"], [Shard(1)])):
        like = distribute_tensor(torch.arange(35.0).view(5, 7), axes, places)
        on_host = DTensor.from_local(
            like.to_local(), host_mesh(axes), places, run_check=False, shape=like.shape, stride=like.stride()
        )
        if not torch.equal(on_host.full_tensor(), like.full_tensor()):
            return False
    return True


def test_the_mesh_of_moments_on_the_host_cuts_as_that_of_the_weights(pool):
    assert all(pool.run(4, _is_cut_alike_on_the_host))
