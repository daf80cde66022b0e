"""Test weighted means of checkpoints: the numbers, any mapping, refusals, and commands that read the result."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, counted, read_meta
from moefold.checkpoint.manifest import MANIFEST_FILE, digest_file, write_manifest
from moefold.checkpoint.stored_tensors import differing_tensors, stored_tensors
from moefold.checkpoint.streaming_io import CheckpointSource
from moefold.cli.main import main
from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.convert.merge import MergedSource, check_same_tokenizer, matched_rows, unaligned_reasons
from moefold.errors import ConfigError
from moefold.remote_path import to_path
from tests.convert.regions import full_region
from tests.models import edit_model
from tests.train.tiny_runs import losses, recipe, train_rank

pytestmark = pytest.mark.parity

MAPPINGS = {
    "math": {"world_size": 2, "pp": 2, "zero": 2},
    "code": {"world_size": 2, "ep": 2, "zero": 3},
}


def _branch(root: Path, name: str, steps: int, *, seed: int, start: str = "start", **parallel: object) -> Config:
    """A run on other data that begins with the weights of the run `start`."""
    cfg = recipe(root / name, steps, dtype="float32", every=steps, **parallel)
    model = edit_model(
        cfg.model,
        {"ffn.moe.router.expert_bias": True, "ffn.moe.router": "sigmoid", "layers": 2, "tie_embeddings": True},
    )
    start_path = str(root / start) if start else ""
    cfg = replace(cfg, model=model, checkpoint=replace(cfg.checkpoint, init_from=start_path))
    return replace(cfg, run=replace(cfg.run, seed=seed), moe=replace(cfg.moe, bias_update_rate=0.01))


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory) -> Path:
    """Two runs from one start under different mappings, and one from another seed."""
    root = tmp_path_factory.mktemp("runs")
    pool.run(1, train_rank, _branch(root, "start", 2, seed=3, start=""))
    pool.run(2, train_rank, _branch(root, "math", 2, seed=4, **MAPPINGS["math"]))
    pool.run(2, train_rank, _branch(root, "code", 3, seed=5, **MAPPINGS["code"]))
    pool.run(1, train_rank, _branch(root, "other", 2, seed=6, start=""))
    return root


def _weights(path: Path) -> dict[str, torch.Tensor]:
    source = CheckpointSource(path)
    return {name: source.read(name, full_region(shape)).clone() for name, shape in source.shapes.items()}


def _newest(run: Path) -> Path:
    (found,) = (run / "checkpoints").glob("step-*")
    return found


def _merge(out: Path, *checkpoints: Path, weights: tuple[float, ...] = ()) -> Path:
    words = ["--weights", *map(str, weights)] if weights else []
    assert main(["merge", *map(str, checkpoints), *words, "--out", str(out)]) == 0
    return out


def test_a_merge_of_one_checkpoint_keeps_every_bit(runs, tmp_path):
    merged = _merge(tmp_path / "merged", runs / "code", weights=(3.0,))
    assert differing_tensors(merged, _newest(runs / "code"), "model.") == []
    assert not any(tensor.name.startswith("optimizer.") for tensor in stored_tensors(merged))


def test_the_mean_equals_numpy(runs, tmp_path):
    merged = _weights(
        _merge(tmp_path / "merged", *(runs / name for name in ("start", "math", "code")), weights=(1, 2, 5))
    )
    parts = [_weights(_newest(runs / name)) for name in ("start", "math", "code")]
    assert merged.keys() == parts[0].keys()
    assert "layers.1.ffn.router.expert_bias" in merged
    for name, mean in merged.items():
        stacked = np.stack([part[name].double().numpy() for part in parts])
        expected = np.average(stacked, axis=0, weights=(1, 2, 5))
        np.testing.assert_array_max_ulp(mean.numpy(), expected.astype(np.float32), maxulp=1)
        assert mean.dtype == torch.float32
    bias = "layers.1.ffn.router.expert_bias"
    assert not torch.equal(parts[1][bias], parts[2][bias])


def test_equal_weights_are_the_default_and_their_scale_does_not_matter(runs, tmp_path):
    pair = (runs / "math", runs / "code")
    first = _merge(tmp_path / "first", *pair)
    assert differing_tensors(first, _merge(tmp_path / "second", *pair, weights=(4, 4))) == []
    assert differing_tensors(first, _merge(tmp_path / "third", *pair, weights=(1, 2))) != []


def test_remote_checkpoints_have_the_same_mean(runs, tmp_path):
    first = _merge(tmp_path / "first", runs / "math", runs / "code", weights=(1, 3))
    remote = [to_path(f"file://{_newest(runs / name)}") for name in ("math", "code")]
    _merge(to_path(f"file://{tmp_path}/second"), *remote, weights=(1, 3))
    assert differing_tensors(first, tmp_path / "second") == []


@pytest.mark.slow
def test_the_mapping_that_wrote_a_checkpoint_does_not_matter(pool, runs, tmp_path):
    """8 ranks load both runs and save them after a step of nearly no learning rate; the mean has the same bits."""
    for name in ("math", "code"):
        optimizer = make_part("optimizer", "adamw", weight_decay=0.0)
        train = {"lr": 1e-45, "optimizer": optimizer, "global_batch_size": 8}
        cfg = _branch(tmp_path, name, 1, seed=3, start="", train=train, world_size=8, tp=2, etp=2, zero=1)
        cfg = replace(
            cfg,
            moe=replace(cfg.moe, bias_update_rate=0.0),
            checkpoint=replace(cfg.checkpoint, init_from=str(runs / name)),
        )
        pool.run(8, train_rank, cfg)
        assert differing_tensors(_newest(runs / name), _newest(tmp_path / name), "model.") == []
        assert read_meta(_newest(tmp_path / name)).parallel != read_meta(_newest(runs / name)).parallel
    originals = _merge(tmp_path / "originals", runs / "math", runs / "code", weights=(1, 3))
    copies = _merge(tmp_path / "copies", tmp_path / "math", tmp_path / "code", weights=(1, 3))
    assert differing_tensors(originals, copies) == []


def test_a_merge_is_read_by_runs_eval_and_another_merge(pool, runs, tmp_path, capsys):
    merged = _merge(tmp_path / "merged", runs / "math", runs / "code")
    assert "train from it: moefold train" in capsys.readouterr().out
    meta = read_meta(merged)
    assert (meta.step, meta.dtype) == (0, "float32")
    first, second = (_newest(runs / name) for name in ("math", "code"))
    assert meta.origin == f"merge of 0.5 * {first}, 0.5 * {second}"
    assert main(["checkpoint", "show", str(merged)]) == 0
    assert f"{merged}: weights alone, {meta.origin}\n" in capsys.readouterr().out
    cfg = _branch(tmp_path, "next", 1, seed=3, start="merged", world_size=2, ep=2)
    # The loss by the counts of the last step has a buffer that weights lack.
    pool.run(2, train_rank, replace(cfg, moe=replace(cfg.moe, aux_kind="last_global_batch")))
    assert losses(tmp_path / "next") != losses(runs / "start")[:1]
    _merge(tmp_path / "again", merged, runs / "start")
    np.save(tmp_path / "tokens.npy", np.arange(64, dtype=np.uint16) % 32)
    for command in (["checkpoint", "verify"], ["eval", "--tokens", str(tmp_path / "tokens.npy"), "--seq-len", "16"]):
        assert main([*command, str(tmp_path / "again")]) == 0


def test_a_merge_of_text_models_generates_and_exports(tmp_path, monkeypatch, capsys):
    """The tokenizer comes along, here "bytes", which no file holds."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words to learn from. " * 40)
    sizes = "hidden_size=16 attention.num_heads=4 attention.num_kv_heads=2 attention.head_dim=4 layers=1"
    sizes += " ffn.moe.intermediate_size=8"
    words = ["data.kind=text", "data.path=text.txt", "train.seq_len=16", "train.global_batch_size=2", "run.device=cpu"]
    words += [f"model.{word}" for word in sizes.split()] + ["run.steps=1"]
    Path("recipe.toml").write_text("")
    assert main(["train", "recipe.toml", *words, "run.dir=a"]) == 0
    for name in ("b", "c"):
        start = ["checkpoint.init_from=a", "run.seed=7", f"train.lr={0.01 if name == 'b' else 0.02}"]
        assert main(["train", "recipe.toml", *words, *start, f"run.dir={name}"]) == 0
    _merge(Path("merged"), Path("b"), Path("c"))
    assert main(["generate", "merged", "some", "--max-tokens", "4"]) == 0
    assert main(["export", "merged", "hf"]) == 0
    assert main(["train", "merged/recipe.toml", *words, "run.dir=d"]) == 0
    assert "weights from" in capsys.readouterr().out


def test_a_shard_is_read_by_rows_without_the_rest_of_it(runs):
    """Every range of rows of every tensor, across the shards of four ranks."""
    source = CheckpointSource(_newest(runs / "math"))
    whole = _weights(_newest(runs / "math"))
    for name, values in whole.items():
        rows = len(values)
        for start, stop in ((0, rows), (rows // 3, rows), (rows // 2, rows // 2 + 1)):
            assert torch.equal(source.read_rows(name, slice(start, stop)), values[start:stop]), name


def test_the_sum_keeps_negative_zero_and_takes_the_widest_dtype():
    narrow = _Weights(w=torch.tensor([[-0.0, 1.0]], dtype=torch.bfloat16))
    wide = _Weights(w=torch.tensor([[-0.0, 2.0]], dtype=torch.float32))
    alone = MergedSource([narrow], [7.0])
    assert torch.equal(
        alone.read("w", full_region((1, 2))).view(torch.int16), narrow.read_rows("w", slice(0, 1)).view(torch.int16)
    )
    both = MergedSource([narrow, wide], [1.0, 1.0])
    assert both.read("w", (slice(0, 1), slice(1, 2))).tolist() == [[1.5]]
    assert both.dtype("w") == torch.float32


def test_rows_match_under_a_common_ancestor_only():
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(64, 32, generator=generator, dtype=torch.float64)
    near = first + torch.randn(64, 32, generator=generator, dtype=torch.float64)
    assert matched_rows(first, near)[0] > 60
    assert matched_rows(first, torch.randn(64, 32, generator=generator, dtype=torch.float64))[0] < 6
    assert matched_rows(first, first.roll(1, 0))[0] == 0
    assert matched_rows(torch.zeros(4, 3), first[:4, :3]) == (0, 0)


class _Weights:
    """Weights in memory in place of a checkpoint's."""

    def __init__(self, **values: torch.Tensor) -> None:
        self.path = Path("x")
        self._values = {name.replace("_", "."): tensor for name, tensor in values.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._values.items()}
        self.meta = CheckpointMeta(states=counted(step=1), format=1, order={"seed": 3}, model={}, parallel={})

    def dtype(self, name: str) -> torch.dtype:
        return self._values[name].dtype

    def read_rows(self, name: str, rows: slice) -> torch.Tensor:
        return self._values[name][rows]


def test_permuted_experts_under_one_embedding_are_named():
    generator = torch.Generator().manual_seed(0)
    embedding, router = (torch.randn(size, 16, generator=generator) for size in (300, 8))
    first = _Weights(embedding_weight=embedding, layers_1_ffn_router_weight=router)
    near = _Weights(embedding_weight=embedding * 2, layers_1_ffn_router_weight=router + 0.1)
    permuted = _Weights(embedding_weight=embedding, layers_1_ffn_router_weight=router[[1, 0, 3, 2, 5, 4, 7, 6]])
    assert unaligned_reasons([first, near]) == []
    (reason,) = unaligned_reasons([first, near, permuted])
    assert "of 8 experts only 0 have a router row that resembles the row of the same expert most" in reason


def test_other_seeds_are_refused(runs, tmp_path, capsys):
    out = tmp_path / "merged"
    assert main(["merge", str(runs / "math"), str(runs / "other"), "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert "were not trained from the same weights: of 32 token embeddings only" in message
    assert "run.seed=4" in message
    assert "run.seed=6" in message
    assert len(message.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["math", "code", "--weights", "1"], "--weights has 1 numbers for 2 checkpoints; give one for each"),
        (["math", "code", "--weights", "1", "0"], "--weights 0 must be a finite number above 0"),
        (["math", "code", "--weights", "1e308", "1e308"], "--weights have a sum above the largest number"),
        (["math", "code", "--weights", "1", "nan"], "--weights nan must be a finite number above 0"),
        (["math", "gone"], "'gone' does not exist"),
        (["math", "dense"], "is of another model than"),
        (["math", "hf"], "is a Hugging Face folder; convert it with moefold import first"),
        (["math", "code", "--out", "math"], "'math' exists; name another folder, or remove it"),
    ],
)
def test_a_refused_merge_is_one_line(runs, tmp_path, monkeypatch, capsys, words, message):
    for name in ("math", "code"):
        (tmp_path / name).symlink_to(runs / name)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    dense = tmp_path / "dense" / "step-000001"
    dense.parent.mkdir()
    dense.symlink_to(_other_model(tmp_path, runs))
    monkeypatch.chdir(tmp_path)
    assert main(["merge", *words, *([] if "--out" in words else ["--out", "merged"])]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not Path("merged").exists()


def _other_model(root: Path, runs: Path) -> Path:
    """A copy of a checkpoint whose description names another number of experts per token."""
    source = _newest(runs / "code")
    copy = root / "changed"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    meta = json.loads((copy / "moefold.json").read_text())
    meta["model"]["top_k"] = 1
    (copy / "moefold.json").write_text(json.dumps(meta))
    # The manifest has the hash of the description.
    write_manifest(copy, {file.name: digest_file(file) for file in copy.iterdir() if file.name != MANIFEST_FILE})
    return copy


def test_a_damaged_checkpoint_is_named(runs, tmp_path, capsys):
    copy = tmp_path / "step-000003"
    copy.mkdir()
    for file in _newest(runs / "code").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    broken = sorted(copy.glob("*.distcp"))[0]
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 1
    broken.write_bytes(content)
    assert main(["merge", str(runs / "math"), str(copy), "--out", str(tmp_path / "merged")]) == 2
    assert f"is damaged: file {broken.name} has other content than was written" in capsys.readouterr().err


def test_tokenizers_must_be_the_same(tmp_path):
    for name, text in (("a.json", "{}"), ("b.json", "{}"), ("c.json", "[]")):
        (tmp_path / name).write_text(text)
    files = {name: str(tmp_path / f"{name}.json") for name in "abc"}
    paths = [Path("A"), Path("B"), Path("C")]
    check_same_tokenizer(paths, [files["a"], "", files["b"]])
    check_same_tokenizer(paths, ["bytes", "", "bytes"])
    for tokenizers in ([files["a"], files["b"], files["c"]], ["bytes", "", files["a"]]):
        with pytest.raises(ConfigError, match="'A' and 'C' were trained with different tokenizers"):
            check_same_tokenizer(paths, tokenizers)
