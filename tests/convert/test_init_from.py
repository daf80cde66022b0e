"""Runs that start with given weights, from the command line on. Their results are tested in `test_families`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moefold.checkpoint.checkpoint_meta import TrainState, counted, read_meta
from moefold.checkpoint.entries import checkpoint_state
from moefold.checkpoint.streaming_io import CheckpointSource
from moefold.checkpoint.write_checkpoint import write_checkpoint
from moefold.cli.main import main
from moefold.config.schema import Config
from moefold.convert.init_from import load_initial_weights
from moefold.convert.preflight import resolve_weights_folder
from moefold.parallel.parallelize import parallelize
from moefold.train.train_step import TrainingStep
from moefold.verify.distributed_run import create_groups
from tests.convert.hf_folders import add_tokenizer
from tests.convert.hf_models import make_model, save_model
from tests.convert.side_by_side import recipe, train_ours

pytestmark = pytest.mark.parity
STAGES = ("dense", "warm", "sparse")


MTP = """
[run]
steps = 1
device = "cpu"
[model]
layers = 2
hidden_size = 16
attention = { num_heads = 2, num_kv_heads = 2 }
vocab_size = 256
ffn = { moe = { num_experts = 4, top_k = 2, intermediate_size = 8 } }
mtp_layers = 1
[train]
seq_len = 16
micro_batch_size = 1
global_batch_size = 4
optimizer = { kind = "adamw", weight_decay = 0.0 }
eval_every = 0
"""


def test_the_command_line_imports_trains_resumes_and_exports(tmp_path, monkeypatch, capsys):
    """The whole way, and a run's export is in its own type, with the tokenizer that came with the weights."""
    monkeypatch.chdir(tmp_path)
    add_tokenizer(save_model(make_model("qwen3-moe"), tmp_path / "hf", dtype=torch.bfloat16))
    assert main(["import", "hf", "ckpt"]) == 0
    words = ["run.device=cpu", "run.dtype=float32", "data.kind=synthetic", "data.tokenizer=bytes", "train.seq_len=16"]
    words += ["train.global_batch_size=2", "checkpoint.every=2"]
    assert main(["train", "ckpt/recipe.toml", *words, "run.steps=2"]) == 0
    assert f"weights from {tmp_path / 'ckpt'}" in capsys.readouterr().out
    assert main(["train", "ckpt/recipe.toml", *words, "run.steps=4"]) == 0
    assert "resumed from runs/ckpt/checkpoints/step-000002 at step 2" in capsys.readouterr().out
    assert main(["export", "runs/ckpt/checkpoints/step-000004", "out", "--check"]) == 0
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("qwen3_moe", "float32")
    assert read_meta(tmp_path / "runs" / "ckpt" / "checkpoints" / "step-000004").origin == ""
    assert main(["train", "ckpt/recipe.toml", *words, "run.steps=4", "checkpoint.resume=ckpt", "run.dir=runs/b"]) == 2
    assert "holds only weights" in capsys.readouterr().err
    _assert_a_run_stands_for_its_newest_checkpoint(words, capsys)


def _assert_a_run_stands_for_its_newest_checkpoint(words, capsys):
    assert main(["export", "runs/ckpt", "newest"]) == 0
    assert Path("newest/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()
    more = ["run.steps=1", "checkpoint.init_from=runs/ckpt/checkpoints", "run.dir=runs/from"]
    assert main(["train", "ckpt/recipe.toml", *words, *more]) == 0
    assert "weights from runs/ckpt/checkpoints/step-000004" in capsys.readouterr().out
    assert Path("runs/from/checkpoints/hf/tokenizer.json").is_file()
    assert main(["upcycle", "runs/ckpt", "moe"]) == 2
    assert "it has experts already" in capsys.readouterr().err


def test_a_run_can_start_with_another_runs_weights(pool, tmp_path):
    folder = add_tokenizer(save_model(make_model("mixtral", num_hidden_layers=2), tmp_path / "hf"))
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    first = pool.run(1, train_ours, recipe(folder, folder))[0]
    second = pool.run(2, train_ours, recipe(tmp_path / "ckpt", folder, world_size=2, ep=2))[0]
    assert second.losses == pytest.approx(first.losses, rel=1e-5)


def _save_under(cfg: Config) -> None:
    """Load the initial weights under a mapping, and save them as step 0."""
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    load_initial_weights(cfg.run, cfg.model, cfg.data, cfg.checkpoint, model, is_first_rank=groups.rank == 0)
    training = TrainingStep(model, cfg)
    state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
    write_checkpoint(cfg, state, TrainState(states=counted(step=0, samples=0, tokens=0)))


@pytest.mark.parametrize("is_tied", [False, True], ids=["head", "tied"])
def test_a_vocabulary_that_tp_does_not_divide_is_exported_whole(pool, tmp_path, is_tied):
    """A save of two tp ranks has the rows of the folder that they read, and the same bits."""
    given = make_model("mixtral", num_hidden_layers=1, vocab_size=67, tie_word_embeddings=is_tied)
    folder = add_tokenizer(save_model(given, tmp_path / "hf"))
    cfg = recipe(folder, folder, world_size=2, tp=2)
    pool.run(2, _save_under, replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "run"))))
    assert main(["export", str(next((tmp_path / "run").rglob("step-*"))), str(tmp_path / "out"), "--check"]) == 0
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    assert theirs.keys() == ours.keys()
    assert len(ours["model.embed_tokens.weight"]) == 67
    assert all(torch.equal(values, ours[name]) for name, values in theirs.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 67


def test_weights_without_their_layers_of_multi_token_prediction(tmp_path, monkeypatch, capsys):
    """The way out of reinforcement learning, which refuses these layers: the other weights are loaded unchanged."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mtp.toml").write_text(MTP)
    task = ["data.kind=task", "data.task=sort", "data.task_size=3"]
    assert main(["train", "mtp.toml", *task, "run.dir=mtp"]) == 0
    rl = [*task, "rl.group_size=2", "rollout.max_tokens=4", "run.dir=rl", "train.lr=1e-30"]
    assert main(["train", "mtp.toml", *rl]) == 2
    assert "set 0, with which checkpoint.init_from leaves these layers out" in capsys.readouterr().err
    assert main(["train", "mtp.toml", *rl, "model.mtp_layers=0", "checkpoint.init_from=mtp"]) == 0
    assert "without the layers of multi-token prediction, of which the weights have 1" in capsys.readouterr().out
    before, after = (CheckpointSource(Path(name, "checkpoints/step-000001")) for name in ("mtp", "rl"))
    assert set(after.shapes) < set(before.shapes)
    for name, shape in after.shapes.items():
        whole = tuple(slice(0, size) for size in shape)
        torch.testing.assert_close(after.read(name, whole), before.read(name, whole), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["checkpoint.init_from=gone"], "checkpoint.init_from='gone': it does not exist or is not a folder"),
        (["checkpoint.init_from=hf", "model.attention.qk_norm={}"], "it is of another model: "),
        (["checkpoint.init_from=hf", "checkpoint.upcycle.dense=hf"], "both give the first weights"),
        (["checkpoint.upcycle.noise=0.1"], "checkpoint.upcycle.dense is missing, and has no default; write "),
        (["checkpoint.upcycle=hf"], 'must be a table, or "none"; its keys are dense, router_init, scaling, noise'),
        (["checkpoint.upcycle.dense=''"], "checkpoint.upcycle.dense='' must name a folder"),
    ],
)
def test_weights_that_a_recipe_cannot_start_with(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    save_model(make_model("mixtral"), tmp_path / "hf")
    (tmp_path / "recipe.toml").write_text("")
    assert main(["train", "recipe.toml", "data.kind=synthetic", *words]) == 2
    assert message in capsys.readouterr().err


def test_sparse_attention_starts_from_dense_weights_and_warms_its_indexers_up(tmp_path, monkeypatch, capsys):
    """Dense run, warm-up of only the indexers, sparse run, generation. Each starts with the weights before it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dense.toml").write_text(MTP)
    sparse = [
        "dense.toml",
        "model.attention.indexer.top_k=6",
        "model.attention.indexer.num_heads=2",
        "model.attention.indexer.head_dim=8",
        "data.kind=text",
    ]
    sparse += ["data.path=dense.toml", "checkpoint.init_from=runs/dense"]
    assert main(["train", "dense.toml", "data.kind=text", "data.path=dense.toml", "run.dir=runs/dense"]) == 0
    assert (
        main(["train", *sparse, "train.indexer_stage=warmup", "run.dir=runs/warm", "train.optimizer.weight_decay=0.1"])
        == 0
    )
    assert "with random indexers, as the weights are of dense attention" in capsys.readouterr().out
    assert main(["train", *sparse[:-1], "checkpoint.init_from=runs/warm", "run.dir=runs/sparse"]) == 0
    assert "random indexers" not in capsys.readouterr().out
    dense, warm, trained = (CheckpointSource(resolve_weights_folder(Path("runs", name))) for name in STAGES)
    for name, shape in trained.shapes.items():
        whole = tuple(slice(0, size) for size in shape)
        before = dense.read(name, whole) if name in dense.shapes else None
        assert (before is None) == (".indexer." in name)
        assert before is None or torch.equal(warm.read(name, whole), before)
        if "indexer.w" in name:
            assert not torch.equal(warm.read(name, whole), trained.read(name, whole))
    steps = [json.loads(Path("runs", name, "metrics.jsonl").read_text())["indexer_loss"] for name in STAGES]
    assert steps[0] == 0.0
    assert min(steps[1:]) > 0.0
    assert main(["generate", "runs/sparse", "The", "--max-tokens", "8", "--temperature", "0"]) == 0
    # A warm-up run resumes; its checkpoints have no moments of the frozen weights.
    resumed = ["train.indexer_stage=warmup", "run.dir=runs/warm", "train.optimizer.weight_decay=0.1", "run.steps=2"]
    assert main(["train", *sparse, *resumed]) == 0
    assert "at step 1" in capsys.readouterr().out
    # The weights do not depend on the number of selected keys, and layers may come to share a selection.
    fewer = [
        "checkpoint.init_from=runs/warm",
        "model.attention.indexer.top_k=5",
        "model.layers=full, shared",
        "run.dir=runs/fewer",
    ]
    assert main(["train", *sparse[:-1], *fewer]) == 0
    assert "without the indexers of layers 1, which attend to the keys of earlier" in capsys.readouterr().out
    assert main(["train", *sparse[:-1], "checkpoint.init_from=runs/fewer", "run.dir=runs/again"]) == 0
    assert "with random indexers in layers 1, which the weights lack" in capsys.readouterr().out
    # Weights of a dense model start one with shared selections too.
    assert main(["train", *sparse, fewer[2], "train.indexer_stage=warmup", "run.dir=runs/shared"]) == 0
    assert "with random indexers, as the weights are of dense attention" in capsys.readouterr().out
