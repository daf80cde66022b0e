"""The training run on forked ranks: resuming with other settings, evaluation, and the numbers it reports."""

import os
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.find_checkpoint import complete_checkpoints, locate_checkpoint, step_path
from moefold.checkpoint.load import load_checkpoint
from moefold.checkpoint.stored_tensors import differing_tensors, stored_tensors
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.data.routing_trace import RoutingTrace
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.signals import StopSignals
from moefold.train.train_step import STOP_POLL_EVERY, TrainingStep
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.models import edit_model
from tests.slow import slow
from tests.train.tiny_runs import losses, printed_by_rank, recipe, records, train_rank
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity


def _loss_of_samples(cfg: Config, checkpoint: str, first_sample: int) -> float:
    """The loss of one global batch under the weights of a checkpoint."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    load_checkpoint(Path(checkpoint), training.parameters, training.buffers, training.optimizer)
    data = DataRequest.of(cfg).open()
    return training.evaluate([BatchSharder(data.train, cfg.batch_shape, groups, model.positions).batch(first_sample)])


def test_a_resume_with_another_batch_goes_on_at_the_next_sample(pool, tmp_path):
    pool.run(1, train_rank, recipe(tmp_path, 2))
    larger = recipe(tmp_path, 3, train={"global_batch_size": 8})
    saved = str(tmp_path / "checkpoints" / "step-000002")
    (expected,) = pool.run(1, _loss_of_samples, larger, saved, 2 * 4)
    pool.run(2, train_rank, replace(larger, parallel=replace(larger.parallel, world_size=2)))
    last = records(tmp_path)[-1]
    assert last["loss"] == pytest.approx(expected, rel=1e-12)
    assert last["tokens"] == (2 * 4 + 8) * 16
    (elsewhere,) = pool.run(1, _loss_of_samples, larger, saved, 2 * 8)
    assert elsewhere != pytest.approx(expected, rel=1e-3)


def test_a_resume_with_another_dp_is_noted_where_the_loss_depends_on_it(pool, tmp_path):
    def note(kind: str, world_size: int, steps: int) -> bool:
        cfg = recipe(tmp_path / kind, steps, world_size=world_size)
        cfg = replace(cfg, moe=replace(cfg.moe, aux_kind=kind))
        return "depends on dp, which was 1 and is 2" in pool.run(world_size, printed_by_rank, cfg)[0]

    assert [note("global_batch", *run) for run in ((1, 1), (1, 2), (2, 3))] == [False, False, True]
    assert [note("last_global_batch", *run) for run in ((1, 1), (2, 2))] == [False, False]


def test_a_resume_with_other_ranks_of_a_sample_is_noted_where_drops_depend_on_it(pool, tmp_path):
    def note(scope: str, steps: int, **parallel: Any) -> str:
        cfg = recipe(tmp_path / scope, steps, **parallel)
        cfg = replace(cfg, moe=replace(cfg.moe, capacity_factor=0.75, drop_scope=scope))
        printed = pool.run(cfg.parallel.world_size, printed_by_rank, cfg)[0]
        _, _, shares = printed.partition("depends on the ranks that share a sample, which were ")
        return shares.partition(": other tokens may be dropped")[0]

    tp = {"world_size": 2, "tp": 2}
    cp = {"world_size": 2, "cp": 2}
    assert [note("sub_sequence", 1), note("sub_sequence", 2)] == ["", ""]
    assert note("sub_sequence", 3, **tp) == "tp=1 cp=1 and are tp=2 cp=1"
    # The same number of ranks, but the halves of a sample that are next to each other are on others.
    assert note("sub_sequence", 4, **cp) == "tp=2 cp=1 and are tp=1 cp=2 context='ring'"
    ulysses = cp | {"context": "ulysses"}
    assert note("sub_sequence", 5, **ulysses) == "tp=1 cp=2 context='ring' and are tp=1 cp=2 context='ulysses'"
    assert [note("full_sequence", 1), note("full_sequence", 2, **cp)] == ["", ""]


def test_a_resume_with_another_batch_begins_its_trace_anew_and_says_so(pool, tmp_path):
    for steps, size, expected in ((2, 4, [1, 2]), (4, 4, [1, 2, 3, 4]), (6, 8, [5, 6])):
        cfg = recipe(tmp_path, steps, train={"global_batch_size": size})
        (printed,) = pool.run(1, printed_by_rank, replace(cfg, moe=replace(cfg.moe, trace_every=1)))
        assert ("removed 4 steps from routing/: of another batch" in printed) == (size == 8)
        trace = RoutingTrace(tmp_path, "run")
        assert trace.steps == expected
        assert np.stack([*trace.step(steps)]).shape == trace.shape.file_shape == (2, size, 16, 2)


@pytest.mark.parametrize(
    ("before", "after", "tolerance"), [("float32", "bfloat16", 0.02), *slow([("float64", "float32", 1e-5)])]
)
def test_a_resume_may_change_the_compute_type(pool, tmp_path, before, after, tolerance):
    pool.run(1, train_rank, recipe(tmp_path / "changed", 2, dtype=before))
    pool.run(2, train_rank, recipe(tmp_path / "changed", 4, dtype=after, world_size=2, ep=2))
    pool.run(1, train_rank, recipe(tmp_path / "whole", 4, dtype=before))
    assert losses(tmp_path / "changed") == pytest.approx(losses(tmp_path / "whole"), rel=tolerance)
    assert losses(tmp_path / "changed")[2:] != losses(tmp_path / "whole")[2:]


def test_the_peak_of_memory_since_the_start_never_falls(pool, tmp_path):
    pool.run(1, train_rank, recipe(tmp_path, 2))
    memory = [record["memory_gib"] for record in records(tmp_path)]
    # One process with torch in it has more than 100 MiB from the first step on.
    assert 0.1 < memory[0] <= memory[1]


def test_evaluation_is_due_every_so_many_steps_and_after_the_last(pool, tmp_path):
    pool.run(1, train_rank, recipe(tmp_path, 5, every=0, train={"eval_every": 2}))
    assert [record["step"] for record in records(tmp_path) if record["eval_loss"] is not None] == [2, 4, 5]
    assert not (tmp_path / "checkpoints").exists()


def test_evaluation_does_not_depend_on_batch_or_mapping(pool, tmp_path):
    found = []
    for name, parallel, size in (("one", {}, 4), ("four", {"world_size": 4, "cp": 2}, 8)):
        # A rate so small that the step leaves the weights as they were.
        train = {"eval_every": 1, "eval_samples": 6, "micro_batch_size": 1, "global_batch_size": size, "lr": 1e-30}
        cfg = recipe(tmp_path / name, 1, every=0, train=train, **parallel)
        pool.run(cfg.parallel.world_size, train_rank, cfg)
        found.append(records(tmp_path / name)[0]["eval_loss"])
    assert found == pytest.approx([found[0]] * 2, rel=1e-9)


def test_an_evaluation_changes_no_step_after_it_under_pp(pool, tmp_path):
    cfgs = [
        recipe(tmp_path / name, 3, every=0, train={"eval_every": eval_every}, world_size=2, pp=2)
        for name, eval_every in (("with", 1), ("without", 0))
    ]
    run_each(pool, 2, train_rank, *((cfg,) for cfg in cfgs))
    found = [[(record["loss"], record["grad_norm"]) for record in records(Path(cfg.run.dir))] for cfg in cfgs]
    assert found[0] == found[1]


def _train_and_stop(cfg: Config) -> int:
    """Train with a signal that came only to the first rank, before its first step ended."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    trainer = Trainer(cfg, groups)
    stop = StopSignals()
    with stop:
        if groups.rank == 0:
            signal.raise_signal(signal.SIGTERM)
    return trainer.run(stop)


def test_a_signal_to_one_rank_stops_all_after_the_step(pool, tmp_path):
    assert pool.run(2, _train_and_stop, recipe(tmp_path, 9, world_size=2, ep=2)) == [143, 143]
    assert len(losses(tmp_path)) == 1
    assert (tmp_path / "checkpoints" / "step-000001").is_dir()


def _train_and_stop_in_an_evaluation(cfg: Config, at_batch: int) -> tuple[int, int]:
    """Train with a signal that comes to the second rank within an evaluation; returns status and batches evaluated."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    trainer = Trainer(cfg, groups)
    runner = trainer.train_step.model.runner
    evaluate, count = runner.evaluate, 0

    def interrupted(batch: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == at_batch and groups.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(batch)

    runner.evaluate = interrupted
    return trainer.run(StopSignals()), count


@pytest.mark.parametrize("parallel", [{}, *slow([({"pp": 2},)])], ids=["dp", "pp"])
def test_a_signal_within_an_evaluation_saves_and_stops_before_long(pool, tmp_path, parallel):
    train = {"eval_every": 2, "eval_samples": 40}
    cfg = recipe(tmp_path / "run", 4, every=100, train=train, world_size=2, **parallel)
    assert pool.run(2, _train_and_stop_in_an_evaluation, cfg, 3) == [(143, STOP_POLL_EVERY)] * 2
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    assert [record["eval_loss"] for record in records(tmp_path / "run")] == [None, None]
    whole = replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "whole")))
    run_each(pool, 2, train_rank, (cfg,), (whole,))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")


def evaluations(run_dir: Path) -> list[float | None]:
    return [record["eval_loss"] for record in records(run_dir)]


def test_a_signal_in_a_last_step_without_evaluation_changes_nothing(pool, tmp_path):
    assert pool.run(1, _train_and_stop, recipe(tmp_path, 1)) == [0]


def test_an_evaluation_of_the_last_step_that_a_signal_cut_off_is_made_up_for(pool, tmp_path):
    cfgs = [recipe(tmp_path / name, 1, train={"eval_every": 3}, world_size=2, ep=2) for name in ("run", "whole")]
    assert pool.run(2, _train_and_stop, cfgs[0]) == [143, 143]
    assert evaluations(tmp_path / "run") == [None]
    assert pool.run(2, _resume_and_stop, cfgs[0]) == [143, 143]
    assert evaluations(tmp_path / "run") == [None]
    assert run_each(pool, 2, train_rank, (cfgs[0],), (cfgs[1],)) == [[0, 0], [0, 0]]
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole") != [None]
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert pool.run(2, train_rank, cfgs[0]) == [0, 0]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def _resume_and_stop(cfg: Config) -> int:
    """Resume; a signal comes to one rank before anything is computed."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    trainer = Trainer(cfg, groups)
    evaluation = trainer.data_loader.eval_batches

    def interrupted() -> Any:
        if groups.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluation()

    trainer.data_loader.eval_batches = interrupted
    return trainer.run(StopSignals())


def test_a_dense_model_has_no_expert_load(pool, tmp_path):
    cfg = recipe(tmp_path, 1, every=0)
    dense = replace(cfg, model=edit_model(cfg.model, {"layers.ffn": "dense"}))
    pool.run(1, train_rank, dense)
    (record,) = records(tmp_path)
    assert (record["expert_load"], record["aux_loss"], record["dropped_fraction"]) == ([], 0.0, 0.0)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_resume_between_two_resets_of_the_moments_gives_the_same_bits(pool, tmp_path, optimizer):
    """Resets follow steps 3 and 6; the run stops after step 4, one update after a reset."""
    train = {"optimizer": optimizer, "reset_moments_every": 3}
    whole, first, second = (
        recipe(tmp_path / name, steps, train=train) for name, steps in (("whole", 7), ("parts", 4), ("parts", 7))
    )
    run_each(pool, 1, train_rank, (whole,), (first,), (second,))
    last = [tmp_path / name / "checkpoints" / "step-000007" for name in ("whole", "parts")]
    assert differing_tensors(*last) == []
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert [read_meta(path).state_of("weights")["moment_updates"] for path in last] == [1, 1]


def test_a_reset_zeroes_the_moments_after_its_step_and_no_other(pool, tmp_path):
    pool.run(2, train_rank, recipe(tmp_path, 4, every=1, train={"reset_moments_every": 2}, world_size=2, zero=3))
    saved = [tmp_path / "checkpoints" / f"step-{step:06d}" for step in (1, 2, 3, 4)]
    moments = {tensor.name for tensor in stored_tensors(saved[0]) if tensor.name.startswith("optimizer.")}
    assert differing_tensors(saved[1], saved[3], "optimizer.") == []
    for before, after in pairwise(saved):
        assert {tensor.name for tensor in differing_tensors(before, after, "optimizer.")} == moments


def test_the_checkpoint_with_the_lowest_held_out_loss_stays(pool, tmp_path):
    # A rate that grows until the model diverges: the best checkpoint is not the last.
    cfg = recipe(tmp_path, 10, dtype="float32", train={"eval_every": 2, "lr": 0.3})
    train = replace(cfg.train, lr_schedule="linear", warmup_steps=10)
    cfg = replace(cfg, train=train, checkpoint=replace(cfg.checkpoint, keep=1, keep_best=True))
    pool.run(1, train_rank, cfg)
    evaluated = {r["step"]: r["eval_loss"] for r in records(tmp_path) if r["eval_loss"] is not None}
    best = min(evaluated, key=evaluated.__getitem__)
    assert best != 10
    kept = {path: read_meta(path).eval_loss for path in complete_checkpoints(tmp_path / "checkpoints")}
    assert kept == {step_path(tmp_path / "checkpoints", step): evaluated[step] for step in (best, 10)}
    assert locate_checkpoint(tmp_path / "best").name == f"step-{best:06d}"
