"""The first and the last lines of a run's log."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from moefold.checkpoint.checkpoint_meta import META_FILE
from moefold.checkpoint.find_checkpoint import step_path
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.recipe import load_config
from moefold.train.rl import callbacks as module
from moefold.train.run_summary import closing_lines, next_commands, startup_lines

WORDS = ("model.preset=tiny", "model.vocab_size=256", "train.seq_len=32", "run.steps=20", "run.dtype=float32")
UNSAVED = ("checkpoint.every=0", "checkpoint.at_end=false")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def lines_of(cfg: Config) -> dict[str, str]:
    data = DataRequest.of(cfg).open()
    return dict(line.split(maxsplit=1) for line in startup_lines(cfg, "cpu", data.train, data.validation))


def test_the_log_begins_with_the_run(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 32_050)
    mapping = [f"parallel.{word}" for word in ("world_size=8", "tp=2", "pp=2", "ep=4")]
    words = [*WORDS, "run.dir=runs/x", "data.kind=text", f"data.path={tmp_path}/a.txt", *mapping, "train.lr=1e-3"]
    lines = lines_of(load_config(None, [*words, "train.global_batch_size=16"]))
    assert lines["run"] == "runs/x, 20 steps"
    assert lines["model"].startswith("tiny, ")
    assert " parameters, " in lines["model"]
    assert " active for each token; 2 layers, 8 experts, top 2" in lines["model"]
    assert lines["data"] == f"text {tmp_path}/a.txt, 30k tokens to train on, 1.6k held out, 0.34 epochs in all"
    assert lines["batch"] == "16 x 32 = 512 tokens a step, learning rate 0.001, 0 steps of warm-up, adamw"
    assert lines["ranks"] == "8 on cpu, float32; attention tp2 x cp1 x dp2 x pp2, experts etp1 x ep4 x edp1 x pp2"
    assert lines["saves"] == "every 500 steps and at the end, the newest 10 stay"
    assert "note" not in lines
    warmup = ["model.attention.indexer.top_k=8", "model.attention.indexer.head_dim=16", "train.indexer_stage=warmup"]
    lines = lines_of(load_config(None, [*words, "train.global_batch_size=16", *warmup]))
    assert lines["note"] == "train.indexer_stage='warmup' trains the indexers alone; other losses are reported only"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (UNSAVED, "no model is saved (checkpoint.every=0, checkpoint.at_end=false)"),
        (["checkpoint.every=0", "checkpoint.keep=0"], "at the end, all stay"),
        (
            ["checkpoint.at_end=false", "checkpoint.every=2000", "checkpoint.keep=3", "checkpoint.keep_every=10000"],
            "every 2,000 steps, the newest 3 stay, and one every 10,000 steps",
        ),
    ],
)
def test_the_log_names_the_planned_saves(tmp_path, words, text):
    lines = lines_of(load_config(None, [*WORDS, "data.kind=synthetic", *words]))
    assert lines["saves"] == text
    assert lines["data"] == "synthetic"
    assert lines["ranks"] == "1 on cpu, float32"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["sites.count=2", "sites.number=1", "sites.every=5"],
            "number 1 of 2, a round every 5 steps, learning rate 1",
        ),
        (
            ["sites.method=diloco", "sites.every=10", "sites.fragment_layers=1"],
            "a round every 10 steps for each of 2 fragments, learning rate 0.7, momentum 0.9; with only 3 rounds this "
            "momentum does harm, sites.method='mean' does not",
        ),
        (
            ["sites.method=diloco", "sites.every=10", "run.steps=5000"],
            "a round every 10 steps, learning rate 0.7, momentum 0.9",
        ),
    ],
)
def test_the_log_says_when_sites_have_rounds(tmp_path, words, text):
    assert lines_of(load_config(None, [*WORDS, "data.kind=synthetic", *words]))["sites"] == text


@pytest.mark.parametrize(
    ("saved", "words", "status", "step", "first"),
    [
        (20, [], 0, 20, "done: 20 steps, in {run}; model in {run}/checkpoints/step-000020"),
        (
            15,
            ["checkpoint.at_end=false", "checkpoint.every=15"],
            0,
            20,
            "done: 20 steps, in {run}; not saved since step 15, as checkpoint.every=15 and checkpoint.at_end=false "
            "say; model in {run}/checkpoints/step-000015",
        ),
        (
            None,
            UNSAVED,
            0,
            20,
            "done: 20 steps, in {run}; no model was saved, as checkpoint.every=0 and checkpoint.at_end=false say; "
            "set checkpoint.at_end=true to save one",
        ),
        (
            9,
            [],
            130,
            9,
            "stopped by SIGINT after step 9 of 20; saved in {run}/checkpoints/step-000009; the same command goes on "
            "from there",
        ),
        (
            None,
            UNSAVED,
            143,
            9,
            "stopped by SIGTERM after step 9 of 20; nothing was saved, as checkpoint.every=0 and "
            "checkpoint.at_end=false say",
        ),
        (None, [], 143, 0, "stopped by SIGTERM after step 0 of 20; there is nothing to save"),
    ],
)
def test_the_log_ends_with_where_the_model_is(tmp_path, saved, words, status, step, first):
    run_dir = tmp_path / "a run"
    if saved is not None:
        path = step_path(run_dir / "checkpoints", saved)
        path.mkdir(parents=True)
        (path / META_FILE).touch()
    cfg = load_config(None, [*WORDS, f"run.dir={run_dir}", *words])
    lines = closing_lines(cfg, status, step)
    assert lines[0] == first.format(run=run_dir)
    # python-docs: the next input is a prompt for its model.
    more = [
        f"next: moefold generate '{run_dir}' 'The for statement'",
        "or train on: the same command with run.steps=40 train.lr=0.00015 (its learning rate has ended at 0: this one "
        "rises again, half as high, and ends at 0 too)",
    ]
    assert lines[1:] == (more if saved and not status else [])


def test_a_chat_model_is_tried_with_chat(tmp_path):
    words = ["data.kind=sft", "data.path=x.jsonl", f"run.dir={tmp_path}"]
    assert next_commands(load_config(None, words))[0] == f"next: moefold generate {tmp_path} Hello --chat"


def test_the_summary_names_chunks_of_large_logits(tmp_path):
    words = [*WORDS, "data.kind=synthetic", "model.vocab_size=131072", "train.seq_len=8192"]
    line = lines_of(load_config(None, words))["loss"]
    assert line == (
        "logits of 256 of 8,192 tokens at a time, recomputed in the backward pass; all would be 4.0 GiB in float32 "
        "(train.loss_chunk=-1)"
    )
    assert "loss" not in lines_of(load_config(None, [*words, "train.loss_chunk=0"]))
    assert "loss" not in lines_of(load_config(None, [*words, "train.seq_len=512"]))


@pytest.mark.parametrize(
    ("reward", "first", "last"),
    [
        (
            None,
            "step 1: no rollout has a reward, so nothing is learnt",
            "learnt: no rollout has a reward; let a function",
        ),
        (0.0, "step 20: no group", "no rollout is better than others (mean reward 0.0); use other prompts"),
        (1.0, "step 20: no group", "the prompts are solved (mean reward 1.0); use other prompts"),
    ],
)
def test_rewards_that_teach_nothing_are_said_once(reward, first, last):
    said: list[str] = []
    loader = SimpleNamespace(metrics={"reward": reward, "mixed_groups": 0.0})
    run, callback = (
        SimpleNamespace(log=SimpleNamespace(message=said.append)),
        module.RolloutLogging(cast(Any, loader), 0),
    )
    for number in range(1, 2 * module.SILENT_STEPS + 1):
        callback.after_step(cast(Any, run), cast(Any, SimpleNamespace(number=number)))
    assert said[0].startswith(first)
    assert last in said[-1]
    assert len(said) == 1 + (reward is None)
