"""Code of docs/extending.md that is not in tests/plugin: a loss and its data in a program, a schedule in a file."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.api import build_model, train_model
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.data.dataset import ProgramData
from moefold.errors import ConfigError, NoFormulaError
from moefold.launch.rank_pool import WorkerPool
from moefold.metrics.reader import read_steps
from moefold.parallel.parallelize import parallelize
from moefold.parts.schedule import CsvSchedule
from moefold.recipe import load_config
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.verify.distributed_run import create_groups, gather_full_tensors
from moefold.verify.oracle_objectives import objective_of
from tests.docs.extending_page import PAGE, blocks, register
from tests.slow import slow
from tests.verify.recipes import tiny


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-9) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_page_quotes_the_package_of_the_tests():
    """Each file of the package stands on the page by its name; quotes of the package equal its files."""
    folder = Path(__file__).parent / "plugin"
    [code], [project] = blocks("python", "A learning-rate schedule"), blocks("toml", "A learning-rate schedule")[:1]
    name, _, text = code.partition("\n")
    assert text == (folder / "src" / name.removeprefix("# ")).read_text()
    assert project.partition("\n")[2] == (folder / "pyproject.toml").read_text()
    listed = re.findall(r"^\| `(\w+\.py)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in folder.glob("src/*/[a-z]*.py"))


def _run_with_loss(cfg: Config) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train two steps; return the loss terms, and the weights of this rank's stage if it is the first of the stage."""
    register("A loss and its data")
    extension = sys.modules["extension"]
    groups = create_groups(cfg)
    model = parallelize(cfg, groups, extension.PolicyGradientLoss())
    batches = BatchSharder(extension.Rollouts(), cfg.batch_shape, groups, model.positions)
    training = TrainingStep(model, cfg)
    steps = [training.run(batches.batch(4 * i), i + 1) for i in range(2)]
    return [step.loss_terms for step in steps], gather_full_tensors(model)


def _expected_terms(cfg: Config) -> dict[str, float]:
    """Compute the loss terms of the first batch with only torch."""
    register("A loss and its data")
    batch = sys.modules["extension"].Rollouts().batch(0, 4)
    logits = build_model(cfg)(torch.from_numpy(batch.inputs)).transpose(0, 1)
    log_probs = logits.log_softmax(-1).gather(-1, torch.from_numpy(batch.labels).unsqueeze(-1)).squeeze(-1)
    policy = -log_probs * torch.from_numpy(batch.token_columns["advantages"])
    weights = torch.from_numpy(batch.weights / batch.weights.sum())
    z = 1e-2 * logits.logsumexp(-1).square()
    return {"policy": float((policy * weights).sum()), "z": float((z * weights).sum())}


@pytest.mark.parity
@pytest.mark.parametrize("mapping", [{"pp": 2}, {"cp": 2}, *slow([({"tp": 2},)])])
def test_example_of_a_loss_equals_torch_and_one_rank(pool: WorkerPool, mapping: dict[str, int]) -> None:
    """Compare the loss terms of two steps, and the weights after them."""
    one = tiny()
    [(expected, weights)] = pool.run(1, _run_with_loss, one)
    assert expected[0] == pytest.approx(pool.run(1, _expected_terms, one)[0], rel=1e-12)
    ranks = pool.run(2, _run_with_loss, replace(one, parallel=ParallelConfig(world_size=2, **mapping)))
    found: dict[str, torch.Tensor] = {}
    for terms, stage_weights in ranks:
        for step, reference in zip(terms, expected, strict=True):
            assert step == pytest.approx(reference, rel=1e-12)
        found |= stage_weights
    _assert_close(found, weights)


def test_program_trains_with_a_loss_and_data(tmp_path: Path) -> None:
    """Run the program of the page on one rank; the metrics have the terms by name."""
    register("A loss and its data")
    cfg = sys.modules["extension"].train(str(tmp_path / "run"))
    records = read_steps(tmp_path / "run")
    assert len(records) == cfg.run.steps
    for record in records:
        assert set(record["loss_terms"]) == {"policy", "z"}
        assert record["loss"] == pytest.approx(sum(record["loss_terms"].values()))
    with pytest.raises(ConfigError, match="data=..."):
        train_model(replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "other"))))


def test_the_oracle_refuses_a_loss_of_a_program() -> None:
    register("A loss and its data")
    with pytest.raises(NoFormulaError, match="no formula for the loss PolicyGradientLoss,"):
        objective_of(sys.modules["extension"].PolicyGradientLoss())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.kind=synthetic", 'must be "program"'),
        ("train.seq_len=8", "must be the seq_len of the samples, 16"),
        ("train.eval_every=1", "needs validation samples"),
    ],
)
def test_program_data_must_fit_the_recipe(tmp_path: Path, override: str, message: str) -> None:
    """Reject data that the recipe does not ask for, or that does not fit it."""
    register("A loss and its data")
    overrides = ["model.preset=tiny", "train.seq_len=16", "data.kind=program", "train.eval_every=0", "run.device=cpu"]
    cfg = load_config(None, [*overrides, f"run.dir={tmp_path / 'run'}", override])
    with pytest.raises(ConfigError, match=message):
        train_model(cfg, data=ProgramData(sys.modules["extension"].Rollouts()))


def test_example_of_a_schedule_is_read(tmp_path: Path) -> None:
    """Read the example as the rows of two ranks with two micro-batches."""
    [table] = blocks("csv", "A pipeline schedule")
    path = tmp_path / "schedule.csv"
    path.write_text(table)
    found = CsvSchedule(path=str(path)).rows(2, 1, 2)
    assert [[str(action) for (action,) in row] for row in found] == [line.split(",") for line in table.split()]
