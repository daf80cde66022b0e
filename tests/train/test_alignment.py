"""Runs with [align]: equality by bits with a run without it, and the reference of preference losses."""

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from moefold import generate, train_model
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.errors import ConfigError, RunError
from moefold.parallel.parallelize import parallelize
from moefold.recipe import load_config
from moefold.topology.layout import fold
from moefold.train.callbacks.callback import TrainingContext
from moefold.train.callbacks.preference_reference import ReferencePass
from moefold.train.data_loader import DataLoader
from moefold.train.position import Position
from moefold.train.signals import StopSignals
from moefold.train.train_step import TrainingStep
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import DistributedRecord, create_groups, run_distributed
from tests.model.moe.dispatch.symm_mem_stand_in import symmetric_memory
from tests.slow import slow

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
COMMON = [
    "model.preset=tiny",
    "model.vocab_size=256",
    "model.layers=2",
    "train.seq_len=64",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.lr_schedule=constant",
    "train.lr=1e-3",
    "run.device=cpu",
    "run.dtype=float64",
    "checkpoint.every=0",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data files, and a token cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    rng = np.random.default_rng(0)
    files = {name: [] for name in ("scored", "best", "pairs", "labelled")}
    for i in range(24):
        prompt, good, bad = f"{i}: after {WORDS[i % 9]}?", WORDS[i % 9 + 1], WORDS[rng.integers(9)] + "x"
        rows = [{"prompt": prompt, "response": text, "reward": reward} for text, reward in ((bad, 0.01), (good, 0.03))]
        files["scored"] += rows
        files["best"].append(rows[1])
        files["pairs"].append({"prompt": prompt, "chosen": good, "rejected": bad})
        files["labelled"].append({"prompt": prompt, "completion": good if i % 2 else bad, "label": bool(i % 2)})
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def _recipe(folder: Path, name: str, file: str, *settings: str) -> Config:
    kind = "preference" if file in ("pairs", "labelled") else "sft"
    words = [f"data.kind={kind}", f"data.path={folder / file}.jsonl", f"run.dir={folder / name}"]
    words.append(f"data.chat_template={folder / 'template.jinja'}")
    if "data.validation_fraction" not in "".join(settings):
        words.append("data.validation_fraction=0.0")
    return load_config(None, [*COMMON, *words, *settings])


def _train(folder: Path, name: str, file: str, *settings: str) -> list[dict[str, object]]:
    """Train, and return the records of the steps."""
    cfg = _recipe(folder, name, file, *settings)
    assert train_model(cfg).status == 0
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def _numbers(records: list[dict[str, object]]) -> list[tuple[object, ...]]:
    return [(record["loss"], record["grad_norm"], record["aux_loss"]) for record in records]


def test_weight_with_an_infinite_beta_is_fine_tuning_by_bits(folder: Path):
    """The largest beta that a recipe may have is infinite for these rewards: exp(-0.02 / beta) rounds to 1."""
    plain = _train(folder, "plain", "scored", "run.steps=2")
    flat = _train(folder, "flat", "scored", "run.steps=2", "align.method=weight", "align.method.beta=1e15")
    steep = _train(folder, "steep", "scored", "run.steps=1", "align.method=weight", "align.method.beta=0.01")
    assert _numbers(flat) == _numbers(plain)
    assert steep[0]["loss"] != plain[0]["loss"]


def test_filter_of_the_best_is_fine_tuning_on_the_filtered_file_by_bits(folder: Path):
    best = _train(folder, "best", "best", "run.steps=2")
    assert _numbers(_train(folder, "filtered", "scored", "run.steps=2", "align.method=filter")) == _numbers(best)


FIRST_LOSS = {"dpo": math.log(2), "ipo": 25.0, "kto": 0.5}


@pytest.mark.parametrize("method", ["dpo", "kto", *slow([("ipo",)])])
def test_the_first_step_compares_the_initial_weights_with_themselves(folder: Path, method):
    file = "labelled" if method == "kto" else "pairs"
    settings = ("run.steps=2", f"align.method={method}", "train.eval_every=2", "data.validation_fraction=0.2")
    first, second = _train(folder, "run", file, *settings)
    assert first["loss"] == pytest.approx(FIRST_LOSS[method], rel=1e-14)
    rewards = {name: value for name, value in first["loss_metrics"].items() if name != "accuracy"}
    assert set(rewards.values()) == {0.0}
    assert second["loss"] != first["loss"]
    assert math.isfinite(second["eval_loss"])


def test_a_resumed_run_keeps_its_reference(folder: Path):
    settings = ("align.method=dpo", "align.method.beta=0.5")
    whole = _train(folder, "whole", "pairs", "run.steps=3", *settings)
    _train(folder, "run", "pairs", "run.steps=1", *settings)
    shutil.copytree(folder / "run", folder / "copy")
    assert _numbers(_train(folder, "run", "pairs", "run.steps=3", *settings)) == _numbers(whole)
    (file,) = (folder / "copy").glob("reference-*.npy")
    file.unlink()
    with pytest.raises(ConfigError, match="has no readable reference-.*; restore the file and the data, or start a"):
        _train(folder, "copy", "pairs", "run.steps=3", *settings)


@pytest.mark.slow
def test_a_run_that_goes_on_in_another_folder_has_the_reference_there(folder: Path):
    whole = _train(folder, "whole", "pairs", "align.method=dpo", "run.steps=3")
    _train(folder, "start", "pairs", "align.method=dpo", "run.steps=1")
    resume = f"checkpoint.resume={folder / 'start/checkpoints/step-000001'}"
    _train(folder, "other", "pairs", "align.method=dpo", "run.steps=2", resume)
    shutil.rmtree(folder / "start")
    other = _train(folder, "other", "pairs", "align.method=dpo", "run.steps=3")
    assert _numbers(other)[-2:] == _numbers(whole)[1:]


def test_dpo_learns_to_distinguish_pairs(folder: Path):
    records = _train(folder, "run", "pairs", "run.steps=12", "align.method=dpo", "train.lr=5e-3")
    assert records[-1]["loss"] < 0.35
    assert records[-1]["loss_metrics"]["accuracy"] == 1
    (generation,) = generate(folder / "run", "after three?", max_tokens=3)
    assert len(generation.tokens) <= 3


def _reference(cfg: Config, cache: str) -> np.ndarray:
    os.environ["XDG_CACHE_HOME"] = cache
    groups = create_groups(cfg)
    training = TrainingStep(parallelize(cfg, groups), cfg)
    position = Position()
    loader = DataLoader(cfg, training.model, position)
    loader.open(None)
    run = TrainingContext(Path(cfg.run.dir), groups, training, loader, position, StopSignals(announces=False))
    values = ReferencePass(loader, cfg.checkpoint).log_probs(run, len(loader.reference.values))
    assert training.model.stages[-1].training
    assert training.model.stages[-1].loss.terms == ("preference",)
    return values


def _refused_reference(cfg: Config, cache: str) -> str:
    """Return the error of the pass for the reference, whose experts have too little room."""
    os.environ["XDG_CACHE_HOME"] = cache
    with symmetric_memory():
        groups = ParallelGroups.create(fold(world_size=2, ep=2), torch.device("cpu"))
        training = TrainingStep(parallelize(cfg, groups), cfg)
    position = Position()
    loader = DataLoader(cfg, training.model, position)
    loader.open(None)
    folder = Path(cfg.run.dir)
    folder.mkdir(exist_ok=True)
    run = TrainingContext(folder, groups, training, loader, position, StopSignals(announces=False))
    with pytest.raises(RunError) as caught:
        ReferencePass(loader, cfg.checkpoint).on_start(run)
    return str(caught.value)


@pytest.mark.parity
def test_no_reference_is_written_after_a_pass_without_room(pool, folder: Path):
    mapping = ("parallel.world_size=2", "parallel.ep=2", "parallel.dispatcher=symm_mem")
    skewed = ("parallel.dispatcher.receive_factor=1.0", "moe.choice=skewed", "moe.choice.share=0.9")
    cfg = _recipe(folder, "run", "pairs", "align.method=dpo", "run.device=auto", *mapping, *skewed)
    for error in pool.run(2, _refused_reference, cfg, str(folder / "cache")):
        assert error.startswith("the pass for the log-probabilities of the reference is void: rank ")
    assert not list((folder / "run").glob("reference-*"))


def _mapping(cfg: Config, cache: str) -> DistributedRecord:
    os.environ["XDG_CACHE_HOME"] = cache
    return run_distributed(cfg, 1)


@pytest.mark.parity
def test_moefold_verify_compares_the_loss_of_the_recipe(pool, folder: Path):
    """The oracle reads the pairs of the recipe, and has its loss, with a uniform distribution for the reference."""
    settings = ("align.method=dpo", "data.validation_fraction=0.2", "model.attention.num_kv_heads=2")
    cfg = _recipe(folder, "run", "pairs", *settings, "parallel.world_size=2", "parallel.cp=2")
    oracle = run_oracle(cfg, 1)
    assert 0.1 < oracle.steps[0].loss < 2
    worst = compare_records(oracle, pool.run(2, _mapping, cfg, str(folder / "cache")))[0]
    assert worst.error <= 1e-9, worst


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    [
        ("world_size=2", "cp=2"),
        *slow(
            (words,)
            for words in (
                ("world_size=2", "pp=2", "zero=2"),
                ("world_size=4", "tp=2", "cp=2"),
                ("world_size=2", "ep=2", "zero=3"),
            )
        ),
    ],
)
def test_the_reference_is_the_same_under_every_mapping(pool, folder: Path, mapping):
    settings = ("align.method=dpo", "data.validation_fraction=0.2", "model.attention.num_kv_heads=2")
    alone = _recipe(folder, "run", "pairs", *settings)
    cache = str(folder / "cache")
    (expected,) = pool.run(1, _reference, alone, cache)
    assert expected.shape == (24, 2)
    assert (expected < -10).all()
    cfg = _recipe(folder, "run", "pairs", *settings, *(f"parallel.{word}" for word in mapping))
    for found in pool.run(cfg.parallel.world_size, _reference, cfg, cache):
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), rtol=1e-11, atol=1e-9)
