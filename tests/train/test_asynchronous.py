"""Ranks that only sample: an asynchronous run has the bits of the same run on ranks that sample in turn."""

import contextlib
import io
import itertools
import json
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.find_checkpoint import checkpoint_folder, step_path
from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.launch.rank_pool import WorkerError
from moefold.model.local_param import local_tensor
from moefold.parallel.batch import Batch
from moefold.parallel.remote_reshard import ReceivedWeights, WeightReceiver
from moefold.parallel.reshard import weight_tensors
from moefold.rl.reward import Reward
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.rl.remote_rollouts import SamplingWorker
from moefold.train.rl.rollout_loader import RolloutLoader
from moefold.train.signals import SIGNALS, StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.ops.c_kernels import needs_compiler
from tests.slow import slow
from tests.split_job import split_pool
from tests.train.policy_runs import recipe, records

pytestmark = [pytest.mark.parity, needs_compiler]


class Delay(Callback):
    """Lets one rank wait for random times."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        time.sleep(0.05 * self._random.random())


class SignalInStep(StopSignals):
    """Reports SIGTERM in a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._steps_left = step

    @property
    def flags(self) -> tuple[bool, ...]:
        """Count the steps: the training step reads the flags once in each."""
        self._steps_left -= 1
        return tuple(number == signal.SIGTERM and self._steps_left == 0 for number in SIGNALS)


def _signals(stop: int) -> StopSignals:
    return SignalInStep(stop) if stop else StopSignals()


def poison(prompt: int) -> None:
    """Make the loss of a step NaN if a prompt is among its prompts."""
    next_batch = RolloutLoader.next_batch

    def poisoned(self: RolloutLoader, first: int, skipped: Sequence[range]) -> tuple[Batch, Sequence[int]]:
        batch, prompts = next_batch(self, first, skipped)
        if prompt in prompts:
            batch = replace(batch, columns=batch.columns | {"weights": batch.columns["weights"] * float("nan")})
        return batch, prompts

    RolloutLoader.next_batch = poisoned  # type: ignore[method-assign]


def run_split_poisoned(cfg: Config, prompt: int) -> dict[str, list[float]]:
    """As `run_split`, with a step whose loss is NaN."""
    poison(prompt)
    return run_split(cfg)


def run_in_turn_poisoned(cfg: Config, prompt: int) -> dict[str, list[float]]:
    """As `run_in_turn`, with a step whose loss is NaN."""
    poison(prompt)
    return run_in_turn(cfg)


def run_split(cfg: Config, seed: int = -1, stop: int = 0) -> dict[str, list[float]]:
    """Train on the first ranks of the pool and sample on the others; return the weights of a training rank, by name.

    Args:
        cfg: the recipe.
        seed: of random delays of a training rank and of the sampling ranks; -1: none.
        stop: step that is the last one, as after a signal; 0: none.
    """
    link = split_pool(cfg)
    split = link.split
    rank = link.rank
    layout = check_config(cfg)
    device = torch.device("cpu")
    if split.samples(rank):
        if seed >= 0:
            _delay_sampling(seed)
        SamplingWorker(cfg, layout, device, FlightRecorder(), link).run()
        return {}
    groups = ParallelGroups.create(layout, device)
    callbacks = [Delay(seed)] if seed >= 0 and rank == 0 else []
    trainer = Trainer(cfg, groups, callbacks=callbacks, link=link)
    trainer.run(_signals(stop))
    return _weights(trainer)


def _delay_sampling(seed: int) -> None:
    delays = random.Random(seed + dist.get_rank())
    score = Reward.score

    def late(self: Reward, *args: Any) -> Any:
        time.sleep(0.05 * delays.random())
        return score(self, *args)

    Reward.score = late  # type: ignore[method-assign]


def run_split_with_a_wrong_version(cfg: Config) -> dict[str, list[float]]:
    """As `run_split`, but the rounds of one order are sampled by the weights of the order before."""
    receive = WeightReceiver.receive
    versions = itertools.count()

    def stale(self: WeightReceiver) -> ReceivedWeights:
        before = [tensor.clone() for tensor in weight_tensors(self._model).values()]
        received = receive(self)
        if next(versions) == 2:
            for tensor, values in zip(weight_tensors(self._model).values(), before, strict=True):
                tensor.data.copy_(values)
        return received

    WeightReceiver.receive = stale  # type: ignore[method-assign]
    return run_split(cfg)


def run_in_turn(cfg: Config, stop: int = 0) -> dict[str, list[float]]:
    """Train and sample in turn on the ranks of the pool; return the weights of this rank, by name."""
    trainer = Trainer(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu")))
    trainer.run(_signals(stop))
    return _weights(trainer)


def log_in_turn(cfg: Config) -> str:
    """As `run_in_turn`, and return what the run prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_in_turn(cfg)
    return printed.getvalue()


def _weights(trainer: Trainer) -> dict[str, list[float]]:
    parameters = trainer.train_step.parameters
    return {name: local_tensor(value).detach().flatten().tolist() for name, value in parameters.items()}


def asynchronous(tmp_path: Path, steps: int, staleness: int, sampling: dict[str, Any], **parallel: Any) -> Config:
    """The recipe of a run that samples on ranks of its own, with kernels whose bits no mapping of sampling changes."""
    cfg = recipe(tmp_path, steps, objective="clip", staleness=staleness)
    assert isinstance(cfg.reward.use, str)
    return replace(
        cfg,
        reward=replace(cfg.reward, use=(cfg.reward.use, "exact"), weights=(1.0, 0.5)),
        run=replace(cfg.run, dir=str(tmp_path / "split"), dtype="float32", kernels="c"),
        parallel=ParallelConfig(**parallel),
        rollout=replace(cfg.rollout, **sampling),
        train=replace(cfg.train, eval_every=4, eval_samples=4),
    )


def in_turn(cfg: Config, tmp_path: Path) -> Config:
    """The same run on only the training ranks."""
    rollout = replace(cfg.rollout, ranks=0, tp=0, pp=0, ep=0, etp=0, experts="exchange")
    return replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "in turn")), rollout=rollout)


def same_run(first: Config, second: Config) -> bool:
    """Return whether two runs have written the same rollouts and the same metrics but for times."""
    rollouts = [(Path(one.run.dir) / "rollouts.jsonl").read_text() for one in (first, second)]
    return rollouts[0] == rollouts[1] and _metrics(first) == _metrics(second)


def _metrics(cfg: Config) -> list[dict[str, Any]]:
    found = []
    for record in records(cfg):
        rl = {name: value for name, value in record["rl"].items() if not name.endswith("_s")}
        found.append({"loss": record["loss"], "grad_norm": record["grad_norm"], **rl})
    return found


RESET = {"kl": 0.1, "reset_patience": 1}
ROUNDS = {"updates": 2, "mixed_only": True}
FAR = {"mismatch_limit": 3.0}
"""Three steps at this learning rate move the weights by more than the usual limit, 1 nat a token."""


@pytest.mark.parametrize(
    ("steps", "staleness", "sampling", "parallel", "rl"),
    [
        (4, 1, {"ranks": 1, "ep": 1}, {"world_size": 2, "ep": 2}, {}),
        *slow(
            [
                (12, 1, {"ranks": 2}, {"world_size": 2}, {}),
                (12, 1, {"ranks": 2, "ep": 1}, {"world_size": 2, "ep": 2}, RESET),
                (12, 2, {"ranks": 2}, {"world_size": 2, "zero": 3}, {"advantage": "batch"}),
                (12, 2, {"ranks": 2, "pp": 2, "ep": 1}, {"world_size": 2, "ep": 2}, ROUNDS),
                (12, 3, {"ranks": 1, "ep": 1}, {"world_size": 4, "ep": 4}, FAR),
                (12, 1, {"ranks": 3}, {"world_size": 1}, {"mixed_only": True}),
                (12, 1, {"ranks": 2}, {"world_size": 2, "pp": 2}, {"kl": 0.1}),
                (12, 1, {"ranks": 4, "pp": 2, "experts": "fetch"}, {"world_size": 2, "ep": 2}, {}),
                (12, 1, {"ranks": 2, "experts": "whole"}, {"world_size": 2, "ep": 2}, {}),
            ]
        ),
    ],
)
def test_an_asynchronous_run_has_the_bits_of_an_alternating_run(
    fresh_pool, tmp_path, steps, staleness, sampling, parallel, rl
):
    cfg = asynchronous(tmp_path, steps, staleness, sampling, **parallel)
    cfg = replace(cfg, rl=replace(cfg.rl, **rl))
    other = in_turn(cfg, tmp_path)
    ranks = cfg.parallel.world_size
    split = fresh_pool.run(cfg.num_job_ranks, run_split, cfg, 7)
    assert split[:ranks] == fresh_pool.run(ranks, run_in_turn, other)
    assert same_run(cfg, other)
    updates = cfg.rl.updates
    lags = [min(i - i % updates, staleness) + i % updates for i in range(steps)]
    assert [record["rl"]["staleness"] for record in records(cfg)] == lags


def test_sampling_by_weights_of_another_step_is_noticed(fresh_pool, tmp_path):
    cfg = asynchronous(tmp_path, 5, 1, {"ranks": 1}, world_size=1)
    other = in_turn(cfg, tmp_path)
    split = fresh_pool.run(2, run_split_with_a_wrong_version, cfg)
    assert split[:1] != fresh_pool.run(1, run_in_turn, other)
    assert not same_run(cfg, other)
    # Versions 0, 1 and 2 sample the steps up to 4, and the wrong one the last of them.
    first, second = ([record["rl"]["reward"] for record in records(one)] for one in (cfg, other))
    assert first[:3] == second[:3]
    assert first[3:] != second[3:]


def test_rollouts_of_weights_that_training_has_left_behind_end_the_run(pool, tmp_path):
    """The second step has rollouts of the first weights, which a rate far too high has moved away."""
    cfg = recipe(tmp_path, 3, objective="clip", staleness=1)
    cfg = replace(cfg, train=replace(cfg.train, lr=1.0, warmup_steps=0, lr_schedule="constant"))
    with pytest.raises(Exception, match=r"step 2: the log-probabilities of .*, and rl.mismatch_limit allows 1\b"):
        pool.run(1, run_in_turn, cfg)
    assert [record["rl"]["staleness"] for record in records(cfg)] == [0]


@pytest.mark.parametrize(
    ("stop", "staleness", "further"),
    [(3, 2, {}), *slow([(1, 1, {}), (3, 2, {"mixed_only": True}), (2, 2, {"updates": 2})])],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_run(fresh_pool, tmp_path, stop, staleness, further):
    """A run is stopped by a signal; the rounds in flight are saved, and go on on other numbers of ranks."""
    cfg = asynchronous(tmp_path, 6, staleness, {"ranks": 1}, world_size=1)
    cfg = replace(cfg, rl=replace(cfg.rl, **further))
    never = in_turn(cfg, tmp_path)
    expected = fresh_pool.run(1, run_in_turn, never)
    assert fresh_pool.run(2, run_split, cfg, -1, stop)[:1] != expected
    table = read_meta(step_path(checkpoint_folder(cfg.run, cfg.checkpoint), stop)).state_of("data")["rl"]["rollouts"]
    rounds = range(0, staleness, cfg.rl.updates)
    assert [header["version"] for header in table] == [max(0, stop + i - staleness) for i in rounds]
    assert fresh_pool.run(2, run_split, cfg)[:1] == expected
    assert same_run(cfg, never)


@pytest.mark.parametrize(("steps", "stop"), [(2, 0), (4, 2)])
def test_a_longer_run_says_which_rounds_the_checkpoint_lacks(pool, tmp_path, steps, stop):
    """A run of 2 steps has sampled nothing ahead; a run of 4 steps that stops after 2 has both further rounds."""
    cfg = in_turn(asynchronous(tmp_path, 4, 2, {"ranks": 1}, world_size=1), tmp_path)
    pool.run(1, run_in_turn, replace(cfg, run=replace(cfg.run, steps=steps)), stop)
    (log,) = pool.run(1, log_in_turn, cfg)
    lacking = "the checkpoint has 0 of the 2 rounds of rollouts that a run of 4 steps with rl.staleness=2 has sampled"
    assert "at step 2" in log
    assert (lacking in log) == (not stop)


@pytest.mark.slow
def test_a_rollback_leaves_out_prompts_of_the_faulty_step(fresh_pool, tmp_path):
    """Step 5 has the prompts 16 to 19, and the checkpoint of step 4 has their rollouts and the rollouts of step 6."""
    cfg = asynchronous(tmp_path, 8, 2, {"ranks": 1}, world_size=2)
    cfg = replace(cfg, faults=replace(cfg.faults, nonfinite="rollback"))
    other = in_turn(cfg, tmp_path)
    split = fresh_pool.run(3, run_split_poisoned, cfg, 17)
    assert split[:2] == fresh_pool.run(2, run_in_turn_poisoned, other, 17)
    assert same_run(cfg, other)
    (fault,) = (json.loads(line) for line in (Path(cfg.run.dir) / "faults.jsonl").read_text().splitlines())
    assert (fault["step"], fault["kind"], fault["action"]) == (5, "nonfinite", "rollback")
    lines = (Path(cfg.run.dir) / "rollouts.jsonl").read_text().splitlines()
    assert not {16, 17, 18, 19} & {json.loads(line)["prompt_number"] for line in lines}


@pytest.mark.slow
def test_rollouts_in_a_checkpoint_go_on_where_the_training_ranks_sample(fresh_pool, tmp_path):
    cfg = asynchronous(tmp_path, 6, 2, {"ranks": 1}, world_size=1)
    never = in_turn(cfg, tmp_path)
    expected = fresh_pool.run(1, run_in_turn, never)
    fresh_pool.run(2, run_split, cfg, -1, 3)
    assert fresh_pool.run(1, run_in_turn, replace(cfg, rollout=never.rollout)) == expected


def test_rollouts_in_a_checkpoint_of_other_groups_are_refused(pool, tmp_path):
    cfg = in_turn(asynchronous(tmp_path, 4, 1, {"ranks": 1}, world_size=1), tmp_path)
    pool.run(1, run_in_turn, cfg, 2)
    other = replace(cfg, rl=replace(cfg.rl, group_size=8))
    with pytest.raises(WorkerError, match=r"not trained on yet \(rl.staleness\), 16 a round in groups of 4"):
        pool.run(1, run_in_turn, other)


@pytest.mark.parametrize(("staleness", "replay"), [(0, "on"), *slow([(1, "off")])])
def test_rollouts_of_older_weights_than_a_new_staleness_allows_are_sampled_again(pool, tmp_path, staleness, replay):
    """The checkpoint of step 2 has rounds of the versions 0 and 1; rounds to replay also need their expert choices."""
    cfg = in_turn(asynchronous(tmp_path, 4, 2, {"ranks": 1}, world_size=1), tmp_path)
    # Without C kernels sampling is inexact, so there is something to replay.
    cfg = replace(cfg, run=replace(cfg.run, kernels="plain"))
    pool.run(1, run_in_turn, cfg, 2)
    rl = replace(cfg.rl, staleness=staleness, replay=replay, objective="clip" if staleness else "policy")
    pool.run(1, run_in_turn, replace(cfg, rl=rl))
    assert [record["rl"]["staleness"] for record in records(cfg)[2:]] == [0, staleness]
    prompts = [json.loads(line)["prompt_number"] for line in (Path(cfg.run.dir) / "rollouts.jsonl").open()]
    assert prompts == [number for number in range(16) for _ in range(4)]
