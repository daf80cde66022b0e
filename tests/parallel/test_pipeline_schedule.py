"""Every schedule that a recipe may ask for ends: the order of work of each rank, run by itself."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefold.config.schema import Config, ParallelConfig, TrainConfig
from moefold.cost.stages import plan_stages
from moefold.parallel.pipeline_schedule import evaluation_schedule, training_schedule
from moefold.topology.pipeline_action import Action, find_deadlock, one_per_slot
from moefold.topology.schedules import stage_ranks
from moefold.validate.parallel import validate_micro_batch_count, validate_schedule

COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")


@pytest.fixture
def _group_of_four():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def _config(schedule: str, chunks: int, num_micro_batches: int) -> Config:
    return Config(
        parallel=ParallelConfig(world_size=4, pp=4, schedule=schedule, virtual_stages=chunks),
        train=TrainConfig(global_batch_size=num_micro_batches),
    )


def _stages(cfg: Config) -> list[PipelineStage]:
    x = torch.zeros(1, 1, device="meta")
    shapes = {"input_args": (x,), "output_args": (x,)}
    ranks = stage_ranks(cfg.parallel)
    device = torch.device("cpu")
    return [PipelineStage(nn.Identity(), i, len(ranks), device, **shapes) for i, rank in enumerate(ranks) if rank == 0]


def _actions(rows: dict[int, list[object]]) -> list[tuple[Action, ...]]:
    return [
        tuple(Action(int(s), kind, int(m)) for word in rows[rank] for s, kind, m in COMPUTE.findall(str(word)))
        for rank in sorted(rows)
    ]


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2), ("zero-bubble", 3)]
    + [("zbv", 2), ("dualpipev", 2)],
)
@pytest.mark.usefixtures("_group_of_four")
def test_every_number_of_micro_batches_ends_with_all_work_done(schedule, chunks):
    accepted = 0
    for count in range(1, 21):
        cfg = _config(schedule, chunks, count)
        assert list(validate_schedule(cfg)) == []
        if list(validate_micro_batch_count(cfg)):
            continue
        accepted += 1
        built = training_schedule(cfg, _stages(cfg), lambda y, target: y.sum())
        rows = _actions(built.pipeline_order_with_comms)
        assert find_deadlock([one_per_slot(row) for row in rows]) is None, count
        forward = {(a.stage, a.micro_batch) for row in rows for a in row if a.kind == "F"}
        weights = [(a.stage, a.micro_batch) for row in rows for a in row if a.kind in "BW"]
        assert len(forward) == 4 * chunks * count
        assert sorted(weights) == sorted(forward)
        placed = {a.stage: rank for rank, row in enumerate(rows) for a in row}
        assert tuple(placed[stage] for stage in sorted(placed)) == stage_ranks(cfg.parallel)
    assert accepted >= 10


@pytest.mark.parametrize(("schedule", "chunks"), [("zero-bubble", 1), ("zero-bubble", 4), ("zbv", 2), ("dualpipev", 2)])
@pytest.mark.usefixtures("_group_of_four")
def test_evaluation_runs_forward_alone(schedule, chunks):
    cfg = _config(schedule, chunks, 8)
    model = replace(cfg.model, num_layers=4 * chunks)
    cfg = replace(cfg, model=model)
    built = evaluation_schedule(cfg, plan_stages(cfg), _stages(cfg), lambda y, target: y.sum())
    words = [str(action) for row in built.pipeline_order_with_comms.values() for action in row]
    assert sum("F" in word and COMPUTE.fullmatch(word) is not None for word in words) == 4 * chunks * 8
    assert not any(re.search(r"\d[BIW]\d|SEND_B|RECV_B|REDUCE", word) for word in words)
    assert sum("UNSHARD" in word for word in words) == sum("RESHARD" in word for word in words) > 0
    sent, received = (sorted(re.sub(r"SEND|RECV", "", w) for w in words if kind in w) for kind in ("SEND", "RECV"))
    next_stage = [f"{int(w.split('_')[0]) + 1}_{w.split('_')[1]}" for w in sent]
    assert sorted(next_stage) == received
