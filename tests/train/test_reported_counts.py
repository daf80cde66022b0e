"""The counts that a run reports, against counts by hand, under three mappings each.

Each run is one epoch whose samples hold one text each, so that the count by hand is a sum of lengths.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.checkpoint.checkpoint_meta import META_FILE, read_meta
from moefold.checkpoint.find_checkpoint import complete_checkpoints
from moefold.checkpoint.manifest import MANIFEST_FILE, digest_file, write_manifest
from moefold.comm.groups import ParallelGroups
from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.cost.flops import train_flops_per_token
from moefold.data.dataset import DataRequest
from moefold.recipe import load_config
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.metrics.undefined import undefined
from tests.train.tiny_runs import printed_by_rank

pytestmark = pytest.mark.parity

S = 64
TEXTS = 8
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
COMMON = [
    "run.device=cpu",
    "run.dtype=float64",
    "run.steps=2",
    *[f"model.{key}" for key in ("layers=2", "hidden_size=16", "vocab_size=256")],
    *[f"model.attention.{key}" for key in ("num_heads=4", "num_kv_heads=2")],
    *[f"model.ffn.moe.{key}" for key in ("num_experts=4", "intermediate_size=8")],
    f"train.seq_len={S}",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "data.validation_fraction=0.0",
    "checkpoint.every=0",
]
MAPPINGS = {
    "one": {},
    "dp2": {"world_size": 2, "ep": 2},
    "pp2": {"world_size": 2, "pp": 2},
}


def conversations(folder: Path) -> tuple[list[str], int]:
    """Conversations of 36 to 64 tokens: no two fit into 65."""
    rows = [{"prompt": f"q{i}", "response": "x" * (30 + 4 * i)} for i in range(TEXTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "template.jinja").write_text(TEMPLATE)
    words = ["data.kind=sft", f"data.path={folder}/rows.jsonl", f"data.chat_template={folder}/template.jinja"]
    lengths = [len(f"u{row['prompt']}.a{row['response']}.") for row in rows]
    assert all((S + 1) // 2 < length <= S for length in lengths)
    return words, sum(lengths)


def pairs(folder: Path) -> tuple[list[str], int]:
    """Pairs whose prompt is in both sequences."""
    rows = [{"prompt": f"q{i}", "chosen": "y" * (22 + i), "rejected": "n" * (5 + 2 * i)} for i in range(TEXTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "template.jinja").write_text(TEMPLATE)
    words = ["data.kind=preference", f"data.path={folder}/rows.jsonl", f"data.chat_template={folder}/template.jinja"]
    texts = [[f"u{row['prompt']}.a{row[kind]}." for kind in ("chosen", "rejected")] for row in rows]
    lengths = [len(chosen) + len(rejected) for chosen, rejected in texts]
    assert all((S + 1) // 2 < length <= S for length in lengths)
    return [*words, "align.method=dpo"], sum(lengths)


def documents(folder: Path) -> tuple[list[str], int]:
    """Documents of 34 to 62 tokens, the separator after each included."""
    texts = ["d" * (33 + 4 * i) for i in range(TEXTS)]
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    paths = ",".join(f'"{folder}/{i}.txt"' for i in range(TEXTS))
    words = ["data.kind=text", f"data.path=[{paths}]", "data.packing=best_fit", "data.document_end=0"]
    return words, sum(len(text) + 1 for text in texts)


PLANNED = {"world_size": 2, "cp": 2, "context": make_part("context", "planned", placement="balanced", hosts="balanced")}
CASES = [
    (make, name, parallel)
    for make in (conversations, pairs, documents)
    for name, parallel in (MAPPINGS | ({"planned": PLANNED} if make is documents else {})).items()
]


def _train(cfg: Config) -> int:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    return Trainer(cfg, groups).run(StopSignals())


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("make", "name", "parallel"),
    [
        # In `make test` each kind of text under one mapping, each mapping with one kind.
        pytest.param(*case, id=f"{case[0].__name__}-{case[1]}", marks=pytest.mark.slow if i % 4 and i < 9 else ())
        for i, case in enumerate(CASES)
    ],
)
def test_tokens_equal_the_texts_under_every_mapping(
    pool, tmp_path, make: Callable[[Path], tuple[list[str], int]], name: str, parallel: dict[str, Any]
):
    words, expected = make(tmp_path)
    cfg = load_config(None, [*COMMON, *words, f"run.dir={tmp_path / 'run'}"])
    cfg = replace(cfg, parallel=ParallelConfig(**parallel))
    pool.run(cfg.parallel.world_size, _train, cfg)
    first, last = records(tmp_path / "run")
    assert last["tokens"] == last["tokens_consumed"] == expected
    # Rates and FLOPs have the same tokens, only of this step.
    in_step = last["tokens"] - first["tokens"]
    assert last["tokens_per_s"] * last["step_time_s"] == pytest.approx(in_step, rel=1e-12)
    flops = in_step * train_flops_per_token(cfg.model, S).total
    on_ranks = last["tflops_per_rank"] * 1e12 * cfg.parallel.world_size * last["step_time_s"]
    assert on_ranks == pytest.approx(flops, rel=1e-12)
    assert undefined(last) == []
    (path,) = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert (read_meta(path).tokens, read_meta(path).state_of("position")["tokens_consumed"]) == (expected, expected)


@pytest.mark.parametrize("make", [conversations, pairs])
def test_the_tokens_of_an_epoch_are_told_without_padding(tmp_path, make):
    words, expected = make(tmp_path)
    cfg = load_config(None, [*COMMON, *words, f"run.dir={tmp_path / 'run'}"])
    data = DataRequest(cfg.data, seq_len=S, vocab_size=256, seed=0, align=cfg.align).open()
    assert len(data.train) * S * data.train.fill_fraction == pytest.approx(expected, rel=1e-12)


def test_samples_that_fill_up_the_ranks_count_nowhere(pool, tmp_path):
    words = [*COMMON, "data.kind=synthetic", "train.micro_batch_size=1", "train.global_batch_size=5"]
    cfg = load_config(None, [*words, "parallel.elastic=true", f"run.dir={tmp_path / 'run'}"])
    pool.run(3, _train, replace(cfg, parallel=replace(cfg.parallel, world_size=3)))
    assert [record["tokens"] for record in records(tmp_path / "run")] == [5 * S, 10 * S]


def test_skipped_updates_are_consumed_and_not_trained_on(pool, tmp_path):
    words = [*COMMON, "data.kind=synthetic", "run.steps=6", "checkpoint.every=3", f"run.dir={tmp_path / 'run'}"]
    words += ["faults.spike=skip", "faults.spike_window=3", "faults.spike_factor=0.001", "faults.max_skips=99"]
    cfg = load_config(None, words)
    pool.run(1, _train, cfg)
    found = records(tmp_path / "run")
    applied = [record["skipped"] is None for record in found]
    assert 0 < sum(applied) < len(found), "a run with both"
    assert [record["tokens_consumed"] for record in found] == [4 * S * step for step in range(1, 7)]
    assert [record["tokens"] for record in found] == [4 * S * sum(applied[:step]) for step in range(1, 7)]
    # A resume goes on with both counts.
    pool.run(1, _train, replace(cfg, run=replace(cfg.run, steps=7)))
    before, after = records(tmp_path / "run")[-2:]
    assert after["tokens_consumed"] - before["tokens_consumed"] == 4 * S
    assert after["tokens"] - before["tokens"] == 4 * S * (after["skipped"] is None)


def test_a_longer_run_says_how_its_learning_rate_continues(pool, tmp_path):
    words = [*COMMON, "data.kind=synthetic", "train.lr=1e-2", f"run.dir={tmp_path / 'run'}"]
    (printed,) = pool.run(1, printed_by_rank, load_config(None, words))
    hint = printed.split("the same command with ")[1].split(" (")[0].split()
    assert hint == ["run.steps=4", "train.lr=0.005"]
    (printed,) = pool.run(1, printed_by_rank, load_config(None, [*words, *hint]))
    rates = [record["lr"] for record in records(tmp_path / "run")]
    assert len(rates) == 4
    assert f"the learning rate rises from 0 to {rates[2]:.3g} in step 3; the cosine ends at 0 in step 4" in printed
    assert "the schedule of 2 steps has ended; with run.steps=4 (it had 2), train.lr=0.005 (it had 0.01)" in printed
    assert 0 < rates[2] < 0.005
    assert rates[3] == 0


def test_a_checkpoint_that_counted_padding_is_recognised(pool, tmp_path):
    """An earlier version counted padding and skipped updates, and did not record its schedule."""
    words, expected = conversations(tmp_path)
    cfg = load_config(None, [*COMMON, *words, f"run.dir={tmp_path / 'run'}"])
    pool.run(1, _train, cfg)
    (path,) = complete_checkpoints(tmp_path / "run" / "checkpoints")
    meta = json.loads((path / META_FILE).read_text())
    del meta["states"]["position"]["tokens_consumed"], meta["states"]["schedule"]
    meta["states"]["position"]["tokens"] = 2 * 4 * S
    (path / META_FILE).write_text(json.dumps(meta))
    write_manifest(path, {file.name: digest_file(file) for file in path.iterdir() if file.name != MANIFEST_FILE})
    (printed,) = pool.run(1, printed_by_rank, replace(cfg, run=replace(cfg.run, steps=4)))
    line = "`tokens` goes on from the 512 of the checkpoint, which an earlier version counted with padding"
    assert line in printed
    assert "the learning rate of step 3 is" in printed
    assert records(tmp_path / "run")[-1]["tokens"] == 2 * 4 * S + expected
