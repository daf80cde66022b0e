"""The rows of the built-in schedules equal the rows of torch's own classes of these schedules."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.topology.schedules import schedule_slots, stage_ranks
from moefold.validate.pipeline import validate_micro_batch_count

COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
CLASSES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2)]
CASES += [("zero-bubble", 3), ("zbv", 2), ("dualpipev", 2)]


def _stages(cfg: Config) -> list[PipelineStage]:
    x = torch.zeros(1, 1, device="meta")
    ranks, device = stage_ranks(cfg.parallel), torch.device("cpu")
    return [
        PipelineStage(nn.Identity(), i, len(ranks), device, input_args=(x,), output_args=(x,))
        for i, rank in enumerate(ranks)
        if rank == 0
    ]


def _of_torch(cfg: Config):
    cls, stages = CLASSES[cfg.parallel.schedule.kind], _stages(cfg)
    stages = stages[0] if cfg.parallel.schedule.kind in ("gpipe", "1f1b") else stages
    return cls(stages, cfg.num_micro_batches, loss_fn=lambda y, target: y.sum(), scale_grads=False)


@contextmanager
def _group(pp: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=pp, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _torch_rows(cfg: Config, pp: int) -> list[str]:
    with _group(pp):
        built = _of_torch(cfg)
        order = getattr(built, "pipeline_order", None) or built._get_pipeline_order()
    return [" ".join("".join(part) for word in order[r] for part in COMPUTE.findall(str(word))) for r in sorted(order)]


def _legal_configs(schedule: str, chunks: int, pp: int) -> Iterator[Config]:
    for count in range(1, 4 * pp + 2):
        cfg = Config(
            parallel=ParallelConfig(world_size=pp, pp=pp, schedule=schedule, virtual_stages=chunks),
            train=TrainConfig(global_batch_size=count),
        )
        if not list(validate_micro_batch_count(cfg.parallel, cfg.train)):
            yield cfg


@pytest.mark.parametrize("pp", [2, 3, 4, 5])
@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_every_rank_acts_as_in_torch(schedule, chunks, pp):
    compared = 0
    for cfg in _legal_configs(schedule, chunks, pp):
        rows = [
            " ".join(str(action) for (action,) in row) for row in schedule_slots(cfg.model, cfg.parallel, cfg.train)
        ]
        wanted = _torch_rows(cfg, pp)
        if schedule == "1f1b":
            # Torch draws this schedule from micro-batch 1 on the last rank, and runs it from 0.
            rows[-1], wanted[-1] = (re.sub(r"\d+( |$)", r"\1", row) for row in (rows[-1], wanted[-1]))
        assert rows == wanted, cfg.num_micro_batches
        compared += 1
    assert compared > pp


def test_without_a_pipeline_micro_batches_follow_each_other():
    (row,) = schedule_slots(ModelConfig(), ParallelConfig(), TrainConfig(global_batch_size=2))
    assert " ".join(str(action) for (action,) in row) == "0F0 0B0 0F1 0B1"
