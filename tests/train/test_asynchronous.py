"""Ranks that only sample: an asynchronous run has the bits of the same run on ranks that sample in turn."""

import random
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import ParallelGroups
from moefold.comm.job_link import JobLink, JobSplit
from moefold.config.schema import Config, ParallelConfig
from moefold.model.local_param import local_tensor
from moefold.rl.reward import Reward
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.sampling_worker import SamplingWorker, sampling_groups
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.ops.c_kernels import needs_compiler
from tests.slow import slow
from tests.train.test_rollout_loader import recipe, records

pytestmark = [pytest.mark.parity, needs_compiler]


class Delay(Callback):
    """Lets one rank wait for random times."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def after_step(self, run: TrainingContext, step: FinishedStep) -> None:
        time.sleep(0.05 * self._random.random())


def run_split(cfg: Config, seed: int = -1) -> dict[str, list[float]]:
    """Train on the first ranks of the pool and sample on the others; return the weights of a training rank, by name."""
    split = JobSplit(cfg.parallel.world_size, cfg.rollout.ranks)
    layout = check_config(cfg)
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    ranks = split.ranks_like(rank)
    timeout = timedelta(seconds=60)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"from {ranks.start}", store),
        rank=rank - ranks.start,
        world_size=len(ranks),
        timeout=timeout,
    )
    link = JobLink.connect(split, rank, store, timeout)
    device = torch.device("cpu")
    if split.samples(rank):
        if seed >= 0:
            _delay_sampling(seed)
        SamplingWorker(cfg, layout, sampling_groups(cfg, device, FlightRecorder()), link).run()
        return {}
    groups = ParallelGroups.create(layout, device)
    callbacks = [Delay(seed)] if seed >= 0 and rank == 0 else []
    trainer = Trainer(cfg, groups, callbacks=callbacks, link=link)
    trainer.run(StopSignals())
    return _weights(trainer)


def _delay_sampling(seed: int) -> None:
    delays = random.Random(seed + dist.get_rank())
    score = Reward.score

    def late(self: Reward, *args: Any) -> Any:
        time.sleep(0.05 * delays.random())
        return score(self, *args)

    Reward.score = late  # type: ignore[method-assign]


def run_in_turn(cfg: Config) -> dict[str, list[float]]:
    """Train and sample in turn on the ranks of the pool; return the weights of this rank, by name."""
    trainer = Trainer(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu")))
    trainer.run(StopSignals())
    return _weights(trainer)


def _weights(trainer: Trainer) -> dict[str, list[float]]:
    parameters = trainer._train_step.parameters
    return {name: local_tensor(value).detach().flatten().tolist() for name, value in parameters.items()}


def asynchronous(tmp_path: Path, steps: int, staleness: int, sampling: dict[str, int], **parallel: Any) -> Config:
    """The recipe of a run that samples on ranks of its own, with kernels whose bits no mapping of sampling changes."""
    cfg = recipe(tmp_path, steps, objective="clip", staleness=staleness)
    return replace(
        cfg,
        run=replace(cfg.run, dir=str(tmp_path / "split"), dtype="float32", kernels="c"),
        parallel=ParallelConfig(**parallel),
        rollout=replace(cfg.rollout, **sampling),
        train=replace(cfg.train, eval_every=4, eval_samples=4),
    )


def in_turn(cfg: Config, tmp_path: Path) -> Config:
    """The same run on the training ranks alone."""
    rollout = replace(cfg.rollout, ranks=0, tp=0, pp=0, ep=0, etp=0)
    return replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "in turn")), rollout=rollout)


def same_run(first: Config, second: Config) -> bool:
    """Whether two runs have written the same rollouts and the same metrics but for times."""
    rollouts = [(Path(one.run.dir) / "rollouts.jsonl").read_text() for one in (first, second)]
    return rollouts[0] == rollouts[1] and _metrics(first) == _metrics(second)


def _metrics(cfg: Config) -> list[dict[str, Any]]:
    found = []
    for record in records(cfg):
        rl = {name: value for name, value in record["rl"].items() if not name.endswith("_s")}
        found.append({"loss": record["loss"], "grad_norm": record["grad_norm"], **rl})
    return found


@pytest.mark.parametrize(
    ("staleness", "sampling", "parallel"),
    [
        (1, {"ranks": 2, "ep": 1}, {"world_size": 2, "ep": 2}),
        *slow(
            [
                (1, {"ranks": 2}, {"world_size": 2}),
                (2, {"ranks": 2}, {"world_size": 2, "zero": 3}),
                (2, {"ranks": 2, "pp": 2, "ep": 1}, {"world_size": 2, "ep": 2}),
                (3, {"ranks": 1, "ep": 1}, {"world_size": 4, "ep": 4}),
                (1, {"ranks": 3}, {"world_size": 1}),
            ]
        ),
    ],
)
def test_an_asynchronous_run_has_the_bits_of_one_that_samples_in_turn(pool, tmp_path, staleness, sampling, parallel):
    cfg = asynchronous(tmp_path, 12, staleness, sampling, **parallel)
    other = in_turn(cfg, tmp_path)
    ranks = cfg.parallel.world_size
    split = pool.run(cfg.num_job_ranks, run_split, cfg, 7)
    assert split[:ranks] == pool.run(ranks, run_in_turn, other)
    assert same_run(cfg, other)
    assert [record["rl"]["staleness"] for record in records(cfg)] == [min(i, staleness) for i in range(12)]
