"""The order of work that the memory formulas read is the one that torch runs."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefold.config.schema import Config, ParallelConfig, TrainConfig
from moefold.parallel.pipeline_schedule import training_schedule
from moefold.topology.schedule_tables import build_schedule_table, stage_ranks
from moefold.validate.parallel import validate_micro_batch_count

COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2)]
CASES += [("zero-bubble", 3), ("zbv", 2), ("dualpipev", 2)]


def _torch_rows(cfg: Config, pp: int) -> list[str]:
    dist.init_process_group("fake", rank=0, world_size=pp, store=FakeStore())
    try:
        x = torch.zeros(1, 1, device="meta")
        ranks, device = stage_ranks(cfg.parallel), torch.device("cpu")
        stages = [
            PipelineStage(nn.Identity(), i, len(ranks), device, input_args=(x,), output_args=(x,))
            for i, rank in enumerate(ranks)
            if rank == 0
        ]
        built = training_schedule(cfg, stages, lambda y, target: y.sum())
        order = getattr(built, "pipeline_order", None) or built._get_pipeline_order()
    finally:
        dist.destroy_process_group()
    return [" ".join("".join(part) for word in order[r] for part in COMPUTE.findall(str(word))) for r in sorted(order)]


@pytest.mark.parametrize("pp", [2, 3, 4, 5])
@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_every_rank_does_what_torch_has_it_do(schedule, chunks, pp):
    compared = 0
    for count in range(1, 4 * pp + 2):
        cfg = Config(
            parallel=ParallelConfig(world_size=pp, pp=pp, schedule=schedule, virtual_stages=chunks),
            train=TrainConfig(global_batch_size=count),
        )
        if list(validate_micro_batch_count(cfg)) or (schedule == "1f1b" and count < pp):
            continue
        rows, wanted = [" ".join(map(str, row)) for row in build_schedule_table(cfg).rows], _torch_rows(cfg, pp)
        if schedule == "1f1b":
            # Torch draws this schedule from micro-batch 1 on the last rank, and runs it from 0.
            rows[-1], wanted[-1] = (re.sub(r"\d+( |$)", r"\1", row) for row in (rows[-1], wanted[-1]))
        assert rows == wanted, count
        compared += 1
    assert compared > pp


def test_without_a_pipeline_micro_batches_follow_each_other():
    (row,) = build_schedule_table(Config(train=TrainConfig(global_batch_size=2))).rows
    assert " ".join(map(str, row)) == "0F0 0B0 0F1 0B1"
