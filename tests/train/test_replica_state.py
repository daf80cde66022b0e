"""The random numbers and positions of ranks are compared like weights: a rank with another state is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.errors import RunError
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.models import edit_model
from tests.train.tiny_runs import recipe
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity


def _draw(trainer: Trainer) -> None:
    torch.rand(1)


def _take_other_samples(trainer: Trainer) -> None:
    # Past the batch that the step has read: only the next batch would show it.
    trainer.position.skip(24, 28)


def _lose_a_file(trainer: Trainer) -> None:
    trainer.data_loader.files.initial = {"tokens/1.npy": "skipped"}


def _move_in_the_stream(trainer: Trainer) -> None:
    trainer.data_loader.train_sampler._state[3] += 1  # type: ignore[attr-defined]


def _step_a_router(trainer: Trainer) -> None:
    # The hook runs once the step has set them all.
    next(iter(trainer.train_step.model.moe_layers().values())).router.step += 1


def _message(cfg: Config, harm: Callable[[Trainer], None], odd: int) -> str:
    """Return the end of the run if one rank is harmed while it computes the second step."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    trainer = Trainer(cfg, groups)
    runner = trainer.train_step.model.runner
    forward_backward = runner.forward_backward

    def harmed(batch: object) -> torch.Tensor:
        loss = forward_backward(batch)
        if trainer.position.step == 1 and groups.rank == odd:
            harm(trainer)
        return loss

    runner.forward_backward = harmed
    try:
        trainer.run(StopSignals())
    except RunError as error:
        return str(error)
    return ""


def _checked(run_dir: Path, **parallel: object) -> Config:
    cfg = recipe(run_dir, 3, every=0, train={"global_batch_size": 12}, **parallel)
    return replace(cfg, faults=replace(cfg.faults, replica_check_every=1))


HARMS = (_draw, _step_a_router, _take_other_samples, _lose_a_file)


@pytest.fixture(scope="module")
def messages(pool, tmp_path_factory) -> dict[Callable[[Trainer], None], list[str]]:
    """Return the message of each of three ranks on each harm to one of them."""
    runs = [(_checked(tmp_path_factory.mktemp("harmed") / "run", world_size=3), harm, 1) for harm in HARMS]
    return dict(zip(HARMS, run_each(pool, 3, _message, *runs), strict=True))


@pytest.mark.parametrize(
    ("harm", "what", "axis"),
    [
        (_draw, "the random number generators", "stage"),
        (_step_a_router, "the random number generators", "stage"),
        (_take_other_samples, "the data position", "world"),
        (_lose_a_file, "the data position", "world"),
    ],
)
def test_a_rank_that_draws_or_reads_elsewhere_is_named(messages, harm, what, axis):
    found = messages[harm]
    assert found[0] == found[1] == found[2]
    assert found[0].startswith(f"step 2: replicas have diverged: {what} on rank 1 differs from the 2 other ranks")
    assert f"hold it ({axis})" in found[0]
    assert "look at rank 1 (" in found[0]


def test_a_rank_elsewhere_in_a_stream_is_named(pool, tmp_path):
    pytest.importorskip("datasets")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{i} words " * 40}) + "\n" for i in range(400)))

    def streaming(name: str) -> Config:
        cfg = _checked(tmp_path / name, world_size=2, tp=2, ep=2)
        data = DataConfig(kind="huggingface", path=str(texts), streaming=True)
        return replace(cfg, data=data, model=edit_model(cfg.model, {"vocab_size": 256}))

    runs = (streaming("sound"), _nothing, 1), (streaming("run"), _move_in_the_stream, 1)
    sound, found = run_each(pool, 2, _message, *runs)
    assert sound == [""] * 2
    assert "the stream position differs between ranks 0, 1 (tp)" in found[0]


def _nothing(trainer: Trainer) -> None:
    """Leave the rank as it is."""
