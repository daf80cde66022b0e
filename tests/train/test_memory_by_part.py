"""A measured step says where every rank's bytes are, and computes the same as a step that is not measured."""

from dataclasses import replace

import pytest

from moefold.config.schema import Config
from moefold.config.sections.metrics import MetricsConfig
from moefold.cost.peak_memory import compute_rank_memory
from moefold.cost.saved_tensors import CPU_KERNELS
from moefold.parallel.memory_tracking import (
    ACTIVATIONS,
    DISPATCH_PART,
    PARTS,
    RELOADED,
    TRACKED_LAYERS,
    TRACKED_METHODS,
)
from moefold.validate.config import check_config
from moefold.verify.distributed_run import run_distributed
from tests.models import edit_model
from tests.slow import slow
from tests.verify.recipes import tiny
from tests.verify.same_bits import assert_equal_bits
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity

SHARED = {"ffn.moe.shared.intermediate_size": 16, "layers.ffn": "dense, moe"}
BIG = {"hidden_size": 64, "attention.head_dim": 16, "ffn.moe.intermediate_size": 32, "ffn.dense.intermediate_size": 96}
V = {"pp": 2, "virtual_stages": 2}
MAPPINGS = {
    "one rank": {},
    "tp": {"world_size": 2, "tp": 2, "zero": 3},
    "gpipe": {"world_size": 2, "pp": 2, "schedule": "gpipe"},
    "interleaved": {"world_size": 2, **V, "schedule": "interleaved"},
    "zero-bubble": {"world_size": 2, "pp": 2, "schedule": "zero-bubble"},
    "zbv": {"world_size": 2, **V, "schedule": "zbv"},
    "dualpipev": {"world_size": 4, "ep": 2, **V, "schedule": "dualpipev", "zero": 2},
    "overlap": {"world_size": 2, "ep": 2, "overlap_experts": True},
    "1f1b, overlap": {"world_size": 4, "ep": 2, "pp": 2, "overlap_experts": True, "zero": 2},
}
FAST = ("one rank", "zbv")
TRAINS = {
    "offload": {"offload": ("layer",), "offload_min_kib": 0, "offload_waits": True},
    "recompute": {"recompute": ("norms", "moe")},
}


def _measured(cfg: Config, every: int) -> Config:
    found = replace(cfg, metrics=MetricsConfig(memory_every=every))
    check_config(found)
    return found


def _recipe(train: dict[str, object] | None = None, **mapping: object) -> Config:
    # tp does not divide this vocabulary.
    odd = {"vocab_size": 33} if mapping.get("tp") else {}
    # Four micro-batches on each data-parallel rank.
    dp = int(mapping.get("world_size", 1)) // int(mapping.get("tp", 1)) // int(mapping.get("pp", 1))
    train = {"global_batch_size": 4 * dp, "micro_batch_size": 1} | (train or {})
    return tiny(model=SHARED | BIG | odd, train=train, **mapping)


def _check(pool, cfg: Config) -> list[dict[str, int]]:
    """Train two steps, the second one measured. Return the parts of each rank at its peak."""
    size = cfg.parallel.world_size
    plain, found = run_each(pool, size, run_distributed, (cfg, 2), (_measured(cfg, 2), 2))
    assert_equal_bits(zip(plain, found, strict=True))
    assert found[0].steps[0].memory_by_part is None
    memory = found[0].steps[1].memory_by_part
    assert all(record.steps[1].memory_by_part == memory for record in found), "all ranks know of all"
    states = [rank.states for rank in compute_rank_memory(cfg, kernels=CPU_KERNELS)]
    stages = [rank * cfg.parallel.pp // size for rank in range(size)]
    for part in ("weights", "gradients", "optimizer"):
        found = [max(memory.current_bytes[part][rank] for rank in range(size) if stages[rank] == s) for s in stages]
        assert found == [getattr(states[stage], part) for stage in stages], part
    peaks = [{part: sizes[rank] for part, sizes in memory.peak_bytes.items()} for rank in range(size)]
    for rank, peak in enumerate(peaks):
        now = sum(sizes[rank] for sizes in memory.current_bytes.values())
        assert sum(peak.values()) >= now
        assert sum(peak.get(part, 0) for part in ACTIVATIONS) > 0
        assert peak.get("other", 0) < 0.02 * sum(peak.values()), peak
    return peaks


@pytest.mark.parametrize("name", [*FAST, *slow((name,) for name in MAPPINGS if name not in FAST)])
def test_memory_by_part_equals_the_formula_under_a_mapping(pool, name):
    _check(pool, _recipe(**MAPPINGS[name]))


@pytest.fixture(scope="module")
def kept(pool) -> dict[str, int]:
    """The peak of a rank that keeps all activations."""
    return _check(pool, _recipe())[0]


@pytest.mark.parametrize("name", TRAINS)
def test_memory_by_part_is_measured_with_recompute_or_offload(pool, kept, name):
    (peak,) = _check(pool, _recipe(TRAINS[name]))
    assert (RELOADED in peak) == (name == "offload")
    if name == "recompute":
        assert peak.get("norms", 0) < kept["norms"]


def test_the_formula_of_offload_has_the_bytes_left_in_memory(pool):
    cfg = _recipe(TRAINS["offload"])
    cfg = replace(cfg, model=edit_model(cfg.model, {"layers": 6}))
    memory = pool.run(1, run_distributed, _measured(cfg, 2), 2)[0].steps[1].memory_by_part
    # No formula has the workspace of the backward pass.
    measured = sum(sizes[0] for part, sizes in memory.peak_bytes.items() if part != "workspace")
    whole, left = (compute_rank_memory(cfg, offload=parts, kernels=CPU_KERNELS)[0] for parts in ((), ("layer",)))
    assert left.total == pytest.approx(measured, rel=0.02)
    assert whole.total > 1.04 * measured
    assert left.activations.total < 0.4 * whole.activations.total


@pytest.mark.slow
def test_two_micro_batches_at_a_time_are_in_memory(pool):
    """The tracker sees the activations of two micro-batches of a pair, without the gradients that go backward."""
    mapping = MAPPINGS["overlap"]
    train = {"global_batch_size": 8}
    both = [_check(pool, _recipe(train, **mapping | {"overlap_experts": on})) for on in (False, True)]
    one, two = ([sum(peak.get(part, 0) for part in ACTIVATIONS) for peak in peaks] for peaks in both)
    for alone, paired in zip(one, two, strict=True):
        assert 1.4 * alone < paired < 2.2 * alone


def test_every_name_is_known():
    names = {part for *_, part in (*TRACKED_METHODS, *TRACKED_LAYERS)} | {DISPATCH_PART}
    assert names <= set(PARTS)
    assert len(set(PARTS)) == len(PARTS)
