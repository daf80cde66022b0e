"""data.corrupt="skip" under a run that goes on: a file that breaks takes its own samples with it, and nothing else."""

import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.convert.init_from import load_initial_weights
from moefold.data.dataset import DataRequest
from moefold.errors import ConfigError, RunError
from moefold.parallel.batch import Batch
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.signals import StopSignals
from moefold.train.train_step import TrainingStep
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.metrics.faults import read_faults
from tests.slow import slow
from tests.train.tiny_runs import losses, recipe, records, train_rank

pytestmark = pytest.mark.parity

BATCH = 4
LENGTH = 700
STEPS = 6


def _tokens(folder: Path) -> Path:
    folder.mkdir()
    chance = np.random.default_rng(0)
    for i in range(3):
        np.save(folder / f"{i}.npy", chance.integers(0, 32, LENGTH, dtype=np.uint16))
    return folder


def _recipe(run_dir: Path, steps: int, tokens: Path, *, corrupt: Any = "skip", **parallel: object) -> Config:
    cfg = recipe(run_dir, steps, train={"eval_every": 3, "eval_samples": 6}, **parallel)
    return replace(cfg, data=DataConfig(kind="tokens", path=str(tokens), validation_fraction=0.2, corrupt=corrupt))


def _touching(which: int, tokens: slice = slice(0, LENGTH)) -> Callable[[int], bool]:
    """Return whether sample `number` of the data has any of these tokens of a file, for sequences of 16."""

    def touches(number: int) -> bool:
        mine = range(number * 16, number * 16 + 17)
        lost = range(which * LENGTH + tokens.start, which * LENGTH + tokens.stop)
        return mine.start < lost.stop and lost.start < mine.stop

    return touches


def _by_hand(cfg: Config, batches: list[list[int]], held_out: list[list[int]]) -> tuple[list[float], list[float]]:
    """Losses of these batches of the sound data, one after another, and the evaluation after steps 3 and 6."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    data = DataRequest.of(cfg).open()
    load_initial_weights(cfg.run, cfg.model, cfg.data, cfg.checkpoint, model, is_first_rank=True)
    loader = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    evaluated, trained = [], []
    for step, samples in enumerate(batches, 1):
        trained.append(training.run(loader.to_batch(loader.read(samples)), step).loss)
        if step % 3 == 0:
            recipe = replace(cfg, train=replace(cfg.train, global_batch_size=1))
            one = BatchSharder(data.validation, recipe.batch_shape, groups, model.positions)
            samples = held_out[step // 3 - 1]
            by_one = [replace(one.batch(sample), num_micro_batches=1) for sample in samples]
            evaluated.append(float(np.mean([training.evaluate([batch]) for batch in by_one])))
    return trained, evaluated


def _numbers(cfg: Config, part: str, count: int) -> list[int]:
    """The rows of the data that the samples 0 .. count-1 of the run are."""
    data = DataRequest.of(cfg).open()
    return [int(getattr(data, part).origin(i).split()[1]) for i in range(count)]


def _plan(cfg: Config, is_lost: Sequence[Callable[[int], bool]]) -> list[list[int]]:
    """The batches of a run that cannot take samples at step s + 1 if is_lost[s] holds."""
    rows, batches, place = _numbers(cfg, "train", 400), [], 0
    for lost in is_lost:
        batch: list[int] = []
        while len(batch) < BATCH:
            if not lost(rows[place]):
                batch.append(place)
            place += 1
        batches.append(batch)
    return batches


def _evaluated(cfg: Config, lost: Callable[[int], bool], count: int = 6) -> list[int]:
    rows = _numbers(cfg, "validation", len_of_validation(cfg))
    return [i for i, row in enumerate(rows) if not lost(row)][:count]


def len_of_validation(cfg: Config) -> int:
    data = DataRequest.of(cfg).open()
    return len(data.validation)


def _cut(path: Path) -> None:
    os.truncate(path, 400)


def _flip(path: Path) -> None:
    ids = np.load(path)
    ids[:40] = 31 - ids[:40]
    np.save(path, ids)


def _replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _sound(number: int) -> bool:
    return False


ONE: dict[str, Any] = {}
MANY = ({"world_size": 2}, {"world_size": 4, "tp": 2, "ep": 2}, {"world_size": 4, "pp": 2, "cp": 2})
"""Mappings that take turns behind the break: dp, tp and ep, pp and cp."""


@pytest.mark.parametrize(
    ("breaks", "mappings"),
    [
        (Path.unlink, MANY[:1]),
        *slow([(_cut, [ONE]), (Path.unlink, MANY), (_flip, [ONE]), (_replace_by_a_folder, [ONE])]),
    ],
)
def test_a_run_goes_on_in_its_order_without_a_file_that_broke(pool, tmp_path, breaks, mappings):
    tokens = _tokens(tmp_path / "tokens")
    whole = _recipe(tmp_path / "run", STEPS, tokens)
    batches = _plan(whole, [_sound] * 2 + [_touching(1)] * 4)
    assert batches != _plan(whole, [_sound] * 6), "the test would notice"
    assert _evaluated(whole, _touching(1)) != list(range(6))
    evaluations = [_evaluated(whole, _touching(1))] * 2
    ((expected, expected_eval),) = pool.run(1, _by_hand, whole, batches, evaluations)
    pool.run(1, train_rank, _recipe(tmp_path / "run", 2, tokens))
    breaks(tokens / "1.npy")
    (error,) = pool.run(1, _refused, _recipe(tmp_path / "run", 3, tokens, corrupt="fatal"))
    assert "tokens/1.npy" in error
    steps = [3, 4, STEPS] if len(mappings) > 1 else [STEPS]
    for step, mapping in zip(steps, mappings, strict=True):
        pool.run(mapping.get("world_size", 1), train_rank, _recipe(tmp_path / "run", step, tokens, **mapping))
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-9)
    evaluated = [record["eval_loss"] for record in records(tmp_path / "run")]
    assert [evaluated[2], evaluated[5]] == pytest.approx(expected_eval, rel=1e-9)
    meta = read_meta(tmp_path / "run" / "checkpoints" / "step-000006")
    assert list(meta.data_lost) == [f"{tokens}/1.npy"]
    assert meta.samples == batches[-1][-1] + 1
    (fault,) = read_faults(tmp_path / "run")
    assert (fault["step"], fault["kind"], fault["file"]) == (3, "data", f"{tokens}/1.npy")
    assert 0 < fault["lost_samples"] < fault["epoch_samples"]


def _refused(cfg: Config, breaks: Callable[[Path], None] | None = None, which: int = 0) -> str:
    try:
        train_rank(cfg) if breaks is None else _train_until_it_breaks(cfg, breaks, which)
    except (ConfigError, RunError) as error:
        return str(error)
    return ""


def _spoil(path: Path) -> None:
    np.save(path, np.full(LENGTH, 99, dtype=np.uint16))


def _cut_all(path: Path) -> None:
    os.truncate(path, 130)


def _train_until_it_breaks(cfg: Config, breaks: Callable[[Path], None], which: int) -> int:
    """Train, and break a file before the third batch is read."""
    trainer = Trainer(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu")))
    next_batch = trainer.data_loader.next_batch

    def broken_next_batch(first: int, left_out: Sequence[range]) -> tuple[Batch, Sequence[int]]:
        if trainer.position.step == 2:
            dist.barrier()
            if dist.get_rank() == 0:
                breaks(Path(str(cfg.data.path)) / f"{which}.npy")
            dist.barrier()
        return next_batch(first, left_out)

    trainer.data_loader.next_batch = broken_next_batch  # type: ignore[method-assign]
    return trainer.run(StopSignals())


@pytest.mark.parametrize(
    ("breaks", "words", "mappings"),
    [
        (_cut_all, "broke while the run read it: it", MANY[:1]),
        *slow(
            [
                (_cut_all, "broke while the run read it: it", [ONE, {"world_size": 4, "tp": 2, "ep": 2}]),
                (_spoil, "holds id 99 at token", [ONE, *MANY[:1]]),
            ]
        ),
    ],
)
def test_a_file_that_breaks_is_left_out_from_that_batch_on(pool, tmp_path, breaks, words, mappings):
    sound = _recipe(tmp_path / "sound", STEPS, _tokens(tmp_path / "tokens"))
    rows = _numbers(sound, "train", 3 * BATCH)
    which = rows[2 * BATCH] * 16 // LENGTH
    batches = _plan(sound, [_sound] * 2 + [_touching(which)] * (STEPS - 2))
    evaluations = [_evaluated(sound, _touching(which))] * 2
    ((expected, expected_eval),) = pool.run(1, _by_hand, sound, batches, evaluations)
    for number, mapping in enumerate(mappings):
        name, run = str(mapping), tmp_path / f"run-{number}"
        cfg = _recipe(run, STEPS, _tokens(tmp_path / f"tokens-{number}"), **mapping)
        pool.run(mapping.get("world_size", 1), _train_until_it_breaks, cfg, breaks, which)
        assert losses(run) == pytest.approx(expected, rel=1e-9), name
        evaluated = [record["eval_loss"] for record in records(run)]
        assert [evaluated[2], evaluated[5]] == pytest.approx(expected_eval, rel=1e-9), name
        (fault,) = read_faults(run)
        assert fault["step"] == 3
        assert f"{which}.npy {words}" in fault["what"]
        assert re.fullmatch(rf"rank \d+ \(host {re.escape(socket.gethostname())}\)", fault["found_by"])
        # The recipe said the way out.
        (why,) = read_meta(run / "checkpoints" / f"step-{STEPS:06d}").data_lost.values()
        assert why == fault["what"]
        assert ";" not in why
    fatal = replace(cfg, data=replace(cfg.data, path=str(_tokens(tmp_path / "tokens-fatal")), corrupt="fatal"))
    fatal = replace(fatal, parallel=type(fatal.parallel)(), run=replace(fatal.run, dir=str(tmp_path / "fatal")))
    (error,) = pool.run(1, _refused, fatal, breaks, which)
    assert f"{which}.npy {words}" in error


def test_the_last_file_that_breaks_ends_the_run(pool, tmp_path):
    tokens = _tokens(tmp_path / "tokens")
    for number in (0, 1):
        (tokens / f"{number}.npy").unlink()
    (error,) = pool.run(1, _refused, _recipe(tmp_path / "run", 4, tokens), _cut_all, 2)
    assert "every training sample belongs to a skipped file" in error
    meta = read_meta(tmp_path / "run" / "checkpoints" / "step-000002")
    assert (list(meta.data_tokens), meta.data_lost) == ([f"{tokens}/2.npy"], {})


def _held_out_in(which: int, cfg: Config) -> bool:
    """Return whether all validation samples, and not all training samples, touch a file."""
    touches = _touching(which)
    held_out = _numbers(cfg, "validation", len_of_validation(cfg))
    return all(map(touches, held_out)) and not all(map(touches, _numbers(cfg, "train", 60)))


@pytest.mark.parametrize("breaks_under_way", [True, False])
def test_a_run_whose_validation_samples_are_all_lost_goes_on_without_evaluation(pool, tmp_path, breaks_under_way):
    tokens = _tokens(tmp_path / "tokens")
    cfg = _recipe(tmp_path / "run", 4, tokens)
    cfg = replace(cfg, data=replace(cfg.data, validation_fraction=0.01), train=replace(cfg.train, eval_every=1))
    which = next(number for number in range(3) if _held_out_in(number, cfg))
    if not breaks_under_way:
        pool.run(1, train_rank, replace(cfg, run=replace(cfg.run, steps=2)))
        _cut_all(tokens / f"{which}.npy")
        pool.run(1, train_rank, cfg)
    else:
        pool.run(1, _train_until_it_breaks, cfg, _cut_all, which)
    evaluated = [record["eval_loss"] for record in records(tmp_path / "run")]
    assert [loss is None for loss in evaluated] == [False, False, True, True]
    assert len(losses(tmp_path / "run")) == 4
    file, evaluation = read_faults(tmp_path / "run")
    assert (file["file"], file["step"]) == (f"{tokens}/{which}.npy", 3)
    if breaks_under_way:
        assert file["found_by"] == f"rank 0 (host {socket.gethostname()})"
    assert (evaluation["action"], evaluation["step"], evaluation["lost_samples"]) == ("evaluation skipped", 3, 1)


def test_a_data_fault_names_the_rank_that_found_it_its_host_and_the_step(pool, tmp_path):
    tokens = _tokens(tmp_path / "tokens")
    cfg = _recipe(tmp_path / "run", 4, tokens, corrupt="fatal", world_size=2)
    rows = _numbers(cfg, "train", 3 * BATCH)[2 * BATCH :]
    # The first rank reads the first half of a batch: break a file that only the second one needs.
    halves = [{row * 16 // LENGTH for row in half} for half in (rows[: BATCH // 2], rows[BATCH // 2 :])]
    which = min(halves[1])
    reads_it = [any(map(_touching(which), half)) for half in (rows[: BATCH // 2], rows[BATCH // 2 :])]
    errors = pool.run(2, _refused_alone, cfg, which)
    for rank, reads in enumerate(reads_it):
        said = f"rank {rank} (host {socket.gethostname()}), step 3: "
        assert errors[rank].startswith(said) == reads, errors[rank]


def _refused_alone(cfg: Config, which: int) -> str:
    """Return the message of the first read of the third batch on this rank, without the other one."""
    trainer = Trainer(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu")))
    trainer.data_loader.open(None)
    trainer.groups.recorder.begin_step(3, "loading data")
    dist.barrier()
    if dist.get_rank() == 0:
        _spoil(Path(str(cfg.data.path)) / f"{which}.npy")
    dist.barrier()
    try:
        trainer.data_loader.next_batch(2 * BATCH, ())
    except (ConfigError, RunError) as error:
        return str(error)
    return ""
