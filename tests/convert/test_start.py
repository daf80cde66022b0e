"""Runs that start with the weights of a Hugging Face folder: logits and ten steps of AdamW equal transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moefold.checkpoint.folder import read_meta
from moefold.cli.main import main
from moefold.config.checks import check_config
from moefold.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    MoEConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from moefold.convert.hf_config import read_model_config
from moefold.convert.start import start_weights
from moefold.data import open_dataset
from moefold.parallel.groups import ParallelGroups
from moefold.parallel.parallelize import parallelize
from moefold.train.batch import BatchLoader
from moefold.train.step import TrainingStep
from tests.convert.hf_models import logits_of, make_model, save_model, tokens_of
from tests.convert.test_round_trip import add_tokenizer

pytestmark = pytest.mark.parity

SEQ_LEN = 16
STEPS = 10
BATCHES = 2
"""So many global batches, in turn: what is learnt shows in their loss."""
MAPPINGS = [
    {"world_size": 1},
    {"world_size": 2, "tp": 2, "ep": 2},
    {"world_size": 2, "cp": 2, "ep": 2},
    {"world_size": 2, "pp": 2},
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2},
]


def name_of(mapping: dict[str, int]) -> str:
    return "-".join(f"{key}{value}" for key, value in mapping.items())


def recipe(start: Path, model_folder: Path, **parallel: object) -> Config:
    """Ten plain steps of AdamW, without any loss but the language model's."""
    return Config(
        run=RunConfig(device="cpu", dtype="float32", steps=STEPS, seed=1),
        model=read_model_config(model_folder),
        parallel=ParallelConfig(**parallel),
        moe=MoEConfig(aux_loss=0.0),
        train=TrainConfig(
            seq_len=SEQ_LEN,
            global_batch_size=4,
            lr=1e-2,
            lr_schedule="constant",
            weight_decay=0.1,
            clip_grad=1.0,
        ),
        data=DataConfig(kind="synthetic"),
        checkpoint=CheckpointConfig(init_from=str(start)),
    )


def _logits(cfg: Config, tokens: torch.Tensor) -> tuple[np.ndarray, int, np.ndarray] | None:
    """(positions, tp rank, logits [S/cp, B, V/tp]) of a rank of the last stage."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    start_weights(cfg, model, is_first_rank=groups.rank == 0)
    model.train(False)
    (stage,) = model.stages
    x = tokens[:, model.positions]
    with torch.no_grad():
        if not stage.is_first:
            shape = (SEQ_LEN // (cfg.parallel.cp * cfg.parallel.tp), len(tokens), cfg.model.hidden_size)
            x = torch.empty(shape)
            dist.recv(x, groups.pp.ranks[groups.pp.rank - 1])
        x = stage(x)
        if not stage.is_last:
            dist.send(x.contiguous(), groups.pp.ranks[groups.pp.rank + 1])
            return None
    return model.positions.numpy(), groups.attn.tp.rank, x.numpy()


@pytest.mark.parametrize(
    ("name", "mapping"),
    [*(("qwen2-moe", mapping) for mapping in MAPPINGS), ("mixtral-tied", MAPPINGS[3]), ("mixtral-tied", MAPPINGS[4])],
    ids=str,
)
def test_logits_of_every_mapping_equal_transformers(pool, tmp_path, name, mapping):
    theirs = make_model(name, num_hidden_layers=2)
    folder = save_model(theirs, tmp_path / "hf")
    tokens = tokens_of(2, SEQ_LEN)
    parts = [
        part for part in pool.run(mapping["world_size"], _logits, recipe(folder, folder, **mapping), tokens) if part
    ]
    expected = logits_of(theirs, tokens).transpose(0, 1).numpy()
    columns = expected.shape[-1] // mapping.get("tp", 1)
    assert {int(p) for positions, _, _ in parts for p in positions} == set(range(SEQ_LEN))
    for positions, tp_rank, found in parts:
        mine = expected[positions][:, :, tp_rank * columns : (tp_rank + 1) * columns]
        np.testing.assert_allclose(found, mine, rtol=1e-5, atol=1e-5)


def _losses(cfg: Config) -> list[float]:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    training = TrainingStep(parallelize(cfg, groups), cfg)
    start_weights(cfg, training.model, is_first_rank=groups.rank == 0)
    data = open_dataset(cfg.data, seq_len=SEQ_LEN, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
    loader = BatchLoader(data.train, cfg, groups, training.model.positions)
    size = cfg.train.global_batch_size
    return [training.run(loader.batch(i % BATCHES * size), i + 1).loss for i in range(STEPS)]


def _their_losses(model: object, cfg: Config) -> list[float]:
    """A plain loop of transformers and torch."""
    data = open_dataset(cfg.data, seq_len=SEQ_LEN, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
    train, parameters = cfg.train, list(model.parameters())
    size = train.global_batch_size
    decays = [p for p in parameters if p.dim() > 1]
    groups = [{"params": decays}, {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, weight_decay=train.weight_decay
    )
    losses = []
    for i in range(STEPS):
        tokens = torch.from_numpy(data.train.batch(i % BATCHES * size, size).tokens)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, train.clip_grad)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mapping", [MAPPINGS[1], MAPPINGS[3], MAPPINGS[4]], ids=name_of)
def test_ten_steps_equal_a_loop_of_transformers(pool, tmp_path, mapping):
    _assert_ten_steps(pool, tmp_path, "qwen3-moe", mapping)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mixtral", "qwen2-moe"])
def test_ten_steps_of_every_family(pool, tmp_path, name):
    _assert_ten_steps(pool, tmp_path, name, {"world_size": 1})


def _assert_ten_steps(pool, tmp_path, name, mapping):
    theirs = make_model(name, num_hidden_layers=2, initializer_range=0.05)
    folder = save_model(theirs, tmp_path / "hf")
    cfg = recipe(folder, folder, **mapping)
    losses = pool.run(mapping["world_size"], _losses, cfg)[0]
    expected = _their_losses(theirs, cfg)
    assert expected[-1] < expected[0] - 0.1
    assert losses == pytest.approx(expected, rel=1e-4)


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
    assert "holds weights alone" in capsys.readouterr().err
    _assert_a_run_stands_for_its_newest_checkpoint(words, capsys)


def _assert_a_run_stands_for_its_newest_checkpoint(words, capsys):
    assert main(["export", "runs/ckpt", "newest"]) == 0
    assert Path("newest/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()
    for start in ("runs/ckpt", "runs/ckpt/checkpoints"):
        more = ["run.steps=1", f"checkpoint.init_from={start}", f"run.dir=runs/from-{Path(start).name}"]
        assert main(["train", "ckpt/recipe.toml", *words, *more]) == 0
        assert "weights from runs/ckpt/checkpoints/step-000004" in capsys.readouterr().out
        assert Path(f"runs/from-{Path(start).name}/checkpoints/hf/tokenizer.json").is_file()
    assert main(["upcycle", "runs/ckpt", "moe"]) == 2
    assert "it has experts already" in capsys.readouterr().err


def test_a_run_can_start_with_another_runs_weights(pool, tmp_path):
    folder = add_tokenizer(save_model(make_model("mixtral", num_hidden_layers=2), tmp_path / "hf"))
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    first = pool.run(1, _losses, recipe(folder, folder))[0]
    assert pool.run(2, _losses, recipe(tmp_path / "ckpt", folder, world_size=2, ep=2))[0] == pytest.approx(
        first, rel=1e-5
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["checkpoint.init_from=gone"], "checkpoint.init_from='gone': it does not exist or is no folder"),
        (["checkpoint.init_from=hf", "model.qk_norm=true"], "it is of another model: "),
        (["checkpoint.init_from=hf", "model.upcycle_from=hf"], "both give the first weights"),
        (["model.upcycle_noise=0.1"], "has no effect: only model.upcycle_from reads it"),
    ],
)
def test_weights_that_a_recipe_cannot_start_with(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    save_model(make_model("mixtral"), tmp_path / "hf")
    (tmp_path / "recipe.toml").write_text("")
    assert main(["train", "recipe.toml", "data.kind=synthetic", *words]) == 2
    assert message in capsys.readouterr().err
