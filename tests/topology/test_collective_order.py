"""The order of exchanges on each rank: hand-worked, and orders that differ are found."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.cost.stage_balance import plan_stages
from moefold.data.dataset import DataRequest
from moefold.parallel.parallelize import parallelize
from moefold.topology.collective_order import collective_sequence, order_mismatches
from moefold.topology.layout import fold
from moefold.topology.schedules import runtime_slots
from moefold.train.batch_sharding import BatchSharder
from moefold.validate.config import check_config
from moefold.validate.parallel import validate_collective_order
from tests.verify.recipes import tiny


def _words(cfg, rank=0):
    rows = runtime_slots(cfg.model, cfg.parallel, cfg.train)
    return [
        str(begin)
        for begin in collective_sequence(
            cfg.model,
            cfg.parallel,
            cfg.train,
            {s.index: s for s in plan_stages(cfg).stages_of_rank(rank)},
            rows[rank],
        )
    ]


def test_the_passes_of_a_pair_take_turns():
    cfg = tiny(model={"layers": 1}, train={"global_batch_size": 4}, world_size=2, ep=2, overlap_experts=True)
    assert _words(cfg) == [
        "0F0 layer 0 dispatch over ep",
        "0F0 layer 0 combine over ep",
        "0B0 layer 0 combine over ep",
        "0F1 layer 0 dispatch over ep",
        "0B0 layer 0 dispatch over ep",
        "0F1 layer 0 combine over ep",
        "0B1 layer 0 combine over ep",
        "0B1 layer 0 dispatch over ep",
    ]


def test_recompute_and_etp_have_their_places():
    train = {"global_batch_size": 8, "recompute": ("moe",)}
    cfg = tiny(model={"layers": 1}, train=train, world_size=4, ep=2, etp=2, overlap_experts=True)
    pair = _words(cfg)[4:]
    ways = [word[1] for word in pair]
    # Eight exchanges of the backward pass, four of them made again, and four of the forward pass.
    assert ways == list("RFRFRFRFBBBBRRRRBBBB")
    assert [word.split("over ")[1] for word in pair if word[1] == "B"] == ["ep", "etp", "etp", "ep"] * 2


def test_ranks_of_a_group_that_differ_are_named():
    layout = fold(world_size=4, pp=2, ep=2)
    cfg = tiny(world_size=4, pp=2, ep=2, overlap_experts=True, train={"global_batch_size": 8})
    assert list(validate_collective_order(cfg)) == []
    rows = runtime_slots(cfg.model, cfg.parallel, cfg.train)
    stages = [{s.index: s for s in plan_stages(cfg).stages_of_rank(rank)} for rank in range(2)]
    first, last = (
        collective_sequence(cfg.model, cfg.parallel, cfg.train, stages[rank], rows[rank]) for rank in range(2)
    )
    assert list(order_mismatches([first, first, last, last], layout)) == []
    turned = (*first[:6], first[7], first[6], *first[8:])
    (fault,) = order_mismatches([first, turned, last, last], layout)
    assert fault.startswith("ranks 0 and 1 share a group, and collective 6 is ")
    (fault,) = order_mismatches([first, first[:-1], last, last], layout)
    assert fault.endswith("and nothing")
    # Ranks of different stages may differ: only the pipeline connects them.
    assert not list(order_mismatches([first, first, first, first], layout))


def test_a_rank_that_works_in_another_order_is_refused(monkeypatch):
    from moefold.validate import parallel as checks_overlap

    cfg = tiny(world_size=4, pp=2, ep=2, overlap_experts=True, train={"global_batch_size": 8})
    rows = list(runtime_slots(cfg.model, cfg.parallel, cfg.train))
    stuck = (tuple(reversed(rows[0])), rows[1])
    monkeypatch.setattr(checks_overlap, "runtime_slots", lambda *sections: stuck)
    assert "pipeline rank 0 would deadlock" in str(next(checks_overlap.validate_collective_order(cfg)))
    off = replace(cfg, parallel=replace(cfg.parallel, overlap_experts=False))
    assert list(validate_collective_order(off)) == []


class _Log(FlightRecorder):
    """A record that forgets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self._axes: list[str] = []

    def add_group(self, axes: str, ranks: Sequence[int]) -> int:
        self._axes.append(axes)
        return super().add_group(axes, ranks)

    def set_phase(self, phase: str) -> None:
        super().set_phase(phase)
        if hasattr(self, "events"):
            self.events.append(phase)

    def record_collective(self, collective: str, group: int, shape: Sequence[int]) -> None:
        super().record_collective(collective, group, shape)
        self.events.append(f"{collective} over {self._axes[group]}")


def _begun(cfg: Config) -> list[str]:
    """The exchanges of a rank in one step, in order, with the phases between."""
    log = _Log()
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"), log)
    model = parallelize(cfg, groups)
    data = DataRequest.of(cfg).open()
    batch = BatchSharder(data.train, cfg.batch_shape, groups, model.positions).batch(0)
    log.events.clear()
    model.forward_backward(batch)
    return log.events


@pytest.mark.parity
def test_ranks_begin_the_exchanges_predicted_before_they_started(pool):
    train = {"global_batch_size": 12, "recompute": ("moe",)}
    model = {"layers": 2, "layers.ffn": "dense, moe", "mtp_layers": 1, "ffn.moe.shared.intermediate_size": 16}
    cfg = tiny(model=model, train=train, world_size=4, ep=2, etp=2, overlap_experts=True)
    logs = pool.run(4, _begun, cfg)
    assert all(log == logs[0] for log in logs)
    assert [word for word in logs[0] if " of " in word] == [
        "forward of micro-batch 0",
        "backward of micro-batch 0 overlapped with the forward of 1",
        "backward of micro-batch 1 overlapped with the forward of 2",
        "backward of the last micro-batch",
    ]
    expected = [word.split("over ")[1] for word in _words(cfg)]
    words = [word.removeprefix("all_to_all over ") for word in logs[0]]
    begun = [word for word in words if word in ("ep", "etp")]
    assert begun == expected
    # No exchange of any pair is missing: two layers, each with four exchanges three times.
    assert len(begun) == 3 * 2 * 4 * 3
