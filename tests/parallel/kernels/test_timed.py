"""Test that ranks run the same kernels: by the record of rank 0, or by times that all ranks measure."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moefold.comm.groups import ParallelGroups
from moefold.ops.autotune import Autotuner, TuningKey
from moefold.parallel.kernels import timed
from moefold.parallel.kernels.timed import recall_choices, settle_choices
from moefold.validate.config import check_config
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity
CPU = torch.device("cpu")
KEYS = [TuningKey("product", rows, (64, True)) for rows in (1000, 100)]


@dataclass
class Case:
    """Milliseconds of both candidates on each rank, None: it raises; and the device of each rank."""

    times: list[tuple[float | None, float | None]]
    devices: list[str]
    cache: Path


def _choices(case: Case) -> tuple[list[str], list[str], int, list[str]]:
    """Return the kernel of this rank before and after it settles, its number of measurements, and its log."""
    rank = dist.get_rank()
    os.environ["XDG_CACHE_HOME"] = str(case.cache / str(rank))
    timed.kernel_environment = lambda device: {"device": case.devices[rank]}
    cfg = tiny(world_size=2)
    world = ParallelGroups.create(check_config(cfg), CPU).world
    measured = []

    def timer(candidate: Callable[[], object]) -> float:
        ms = candidate()
        measured.append(ms)
        if ms is None:
            raise RuntimeError("no kernel")
        assert isinstance(ms, float)
        return ms

    tuner = Autotuner(is_enabled=True, num_ranks=2, timer=timer)
    candidates = {name: (lambda ms=ms: ms) for name, ms in zip(("one", "two"), case.times[rank], strict=True)}
    messages = [recall_choices(tuner, CPU, world)]
    # The second octave occurs on rank 1 only.
    before = [tuner.choose(key, candidates) for key in KEYS[: rank + 1]]
    messages.append(settle_choices(tuner, CPU, world))
    after = [tuner.choose(key, candidates) for key in KEYS]
    return before, after, len(measured), messages


def _run(fresh_pool, tmp_path, *times, devices=("H100", "H100")):
    return fresh_pool.run(2, _choices, Case(list(times), list(devices), tmp_path))


def test_the_slowest_rank_decides_and_the_next_run_measures_nothing(fresh_pool, tmp_path):
    first, second = _run(fresh_pool, tmp_path, (2.0, 1.0), (2.0, 3.0))
    # Alone, rank 0 would choose the second candidate.
    assert (first[0], second[0]) == (["one"], ["one", "one"])
    assert first[1] == second[1] == ["one", "one"]
    assert (first[2], second[2]) == (2, 4)
    (path,) = (tmp_path / "0" / "moefold").glob("*.kernels.json")
    assert first[3] == ["", f"kernels by measured time: product by one (below 1024 rows); recorded in {path}"]
    assert second[3] == ["", ""]
    recorded = {"10": {"one": 2.0, "two": 3.0}, "7": {"one": 2.0, "two": 3.0}}
    assert json.loads(path.read_text())["ms"] == {"product: 64, True": recorded}
    assert not (tmp_path / "1").exists()
    # Rank 1 has no record of its own: it uses the record of rank 0.
    changed = {"10": {"one": 2.0, "two": 1.0}, "7": recorded["7"]}
    path.write_text(json.dumps({"environment": {"device": "H100"}, "ms": {"product: 64, True": changed}}))
    first, second = _run(fresh_pool, tmp_path, (9.0, 9.0), (9.0, 9.0))
    assert (first[0], second[0]) == (["two"], ["two", "one"])
    assert first[1] == second[1] == ["two", "one"]
    assert (first[2], second[2]) == (0, 0)
    assert first[3][0] == second[3][0] == "kernels by 2 recorded times of H100"


def test_a_kernel_that_raises_on_one_rank_is_chosen_on_none(fresh_pool, tmp_path):
    first, second = _run(fresh_pool, tmp_path, (2.0, 1.0), (2.0, None))
    assert first[1] == second[1] == ["one", "one"]
    assert "not used, as they raise: product by two" in first[3][1]
    (path,) = (tmp_path / "0" / "moefold").glob("*.kernels.json")
    assert json.loads(path.read_text())["ms"] == {}


def test_ranks_of_two_kinds_of_device_choose_the_same_and_record_nothing(fresh_pool, tmp_path):
    first, second = _run(fresh_pool, tmp_path, (2.0, 1.0), (2.0, 1.0), devices=("H100", "H200"))
    assert first[1] == second[1] == ["two", "two"]
    assert first[3][0] == "recorded kernel times are not used, as ranks differ in device"
    assert first[3][1].endswith("; not recorded, as ranks differ in device")
    assert not list(tmp_path.rglob("*.kernels.json"))


def test_where_nothing_is_measured_nothing_is_said():
    tuner = Autotuner(is_enabled=False)
    assert recall_choices(tuner, CPU, None) == settle_choices(tuner, CPU, None) == ""
