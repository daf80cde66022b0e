"""Run each command that reads a file on each kind of malformed file: one line, little memory and time."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.hostile_files import KINDS, run_bounded
from tests.inference.checkpoint_folder import described_run

RECIPE = Path(__file__).parents[2] / "recipes" / "single.toml"
TRAIN = f"train {RECIPE} run.dir={{f}}/out "
PIPELINE = "parallel.schedule=csv parallel.world_size=2 parallel.pp=2 "
TOKENIZE = " --out {f}/out --tokenizer bytes --processes 1"
PROGRESS = re.compile(r"[A-Z][\w ]* \(\d+ s\)")
TEXTS = ("empty", "binary", "deep", "deep object")
"""To the tokenizer of bytes, these are text."""
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 64,
    "hidden_act": "silu",
}
PLAN = "plan mixtral-8x7b --num-gpus 8 --seq-len 4096 --global-batch-size 8 --gpu "


@dataclass(frozen=True)
class Case:
    """A file that a command reads, below a folder."""

    words: str
    file: str
    fine: tuple[str, ...] = ()
    """Kinds that are content like any other here."""


CASES = {
    "recipe": Case("train {f}/x.toml", "x.toml", ("empty",)),
    "device": Case(PLAN + "{f}/x.toml", "x.toml"),
    "schedule": Case(
        TRAIN + "parallel.schedule=csv parallel.world_size=2 parallel.pp=2 parallel.schedule.path={f}/x.csv", "x.csv"
    ),
    "published table": Case("plan-accuracy {f}/x.csv", "x.csv"),
    "model to plan": Case(PLAN.replace("mixtral-8x7b", "{f}/config.json") + "h100", "config.json"),
    "tokenizer": Case(TRAIN + "data.kind=text data.path={f}/a.txt data.tokenizer={f}/x.json", "x.json"),
    "template": Case(TRAIN + "data.kind=sft data.path={f}/a.jsonl data.chat_template={f}/x.jinja", "x.jinja"),
    "text": Case("tokenize {f}/x.txt" + TOKENIZE, "x.txt", ("deep", "deep object")),
    "json lines": Case("tokenize {f}/x.jsonl" + TOKENIZE, "x.jsonl"),
    "compressed lines": Case("tokenize {f}/x.jsonl.gz" + TOKENIZE, "x.jsonl.gz"),
    "parquet": Case("tokenize {f}/x.parquet" + TOKENIZE, "x.parquet"),
    "tokens": Case("eval {f}/run --tokens {f}/x.npy --seq-len 16", "x.npy"),
    "text to score": Case(
        "eval {f}/run --text {f}/x.txt --seq-len 16", "x.txt", ("empty", "binary", "deep", "deep object")
    ),
    "metrics": Case("inspect {f}/run", "run/metrics.jsonl"),
    "counts": Case("inspect {f}/run", "run/expert_counts.bin"),
    "trace": Case("inspect {f}/run", "run/routing/trace.json"),
    "description": Case("checkpoint show {f}/run/checkpoints/step-000010", "run/checkpoints/step-000010/moefold.json"),
    "manifest": Case("export {f}/run {f}/out", "run/checkpoints/step-000010/manifest.json"),
    "index": Case("checkpoint show {f}/run/checkpoints/step-000010", "run/checkpoints/step-000010/.metadata"),
    "config of a model": Case("import {f}/hf {f}/out", "hf/config.json"),
    "index of a model": Case("import {f}/hf {f}/out", "hf/model.safetensors.index.json"),
    "weights": Case("import {f}/hf {f}/out", "hf/model.safetensors"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("text " * 1000)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    described_run(tmp_path / "run")
    (tmp_path / "run" / "routing").mkdir()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_one_message(folder: Path, name: str):
    case = CASES[name]
    path = folder / case.file
    kinds = [kind for kind in KINDS if kind not in case.fine]
    printed = folder / "printed"
    printed.mkdir()
    wrong = []
    for kind, found in run_bounded(case.words.format(f=folder).split(), path, kinds, printed).items():
        # A slow machine is told of the progress too.
        lines = [line for line in found.errors.strip().splitlines() if not PROGRESS.fullmatch(line)]
        if found.status != 2 or len(lines) != 1 or not lines[0].startswith("moefold: error: "):
            wrong.append((kind, found))
    assert not wrong
