"""Dense models made models with experts: equal at first where that is promised, and not by accident."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.checkpoint_meta import read_meta, write_meta
from moefold.checkpoint.manifest import MANIFEST_FILE
from moefold.checkpoint.streaming_io import CheckpointSource, write_manifest_in_parallel
from moefold.cli.main import main
from moefold.comm.groups import ParallelGroups, World
from moefold.config.edit import edit
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.convert.families.hf_config import read_model_config
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.init_from import UpcycledSource, load_initial_weights
from moefold.convert.preflight import export_message, preserves_outputs, upcycle_unsupported_reason
from moefold.convert.weight_sources import HfSource, load_shards
from moefold.inference.source import find_source
from moefold.model.transformer import build_model
from moefold.parallel.parallelize import parallelize
from moefold.validate.config import check_config
from tests.convert.hf_folders import add_tokenizer
from tests.convert.hf_models import logits_of, make_model, save_model, tokens_of, transformers
from tests.convert.regions import full_region
from tests.models import edit_model

SEQ_LEN = 16


def _sizes(num_experts: int, top_k: int, width: int, **others: object) -> dict[str, object]:
    """Settings of experts. Other keys of [model.ffn.moe] with two underscores for a dot."""
    settings = {"num_experts": num_experts, "top_k": top_k, "intermediate_size": width} | others
    return {f"ffn.moe.{key.replace('__', '.')}": value for key, value in settings.items()}


ZERO = {"upcycle.router_init": "zero"}
SETTINGS: dict[str, dict[str, object]] = {
    "copies": _sizes(4, 2, 36),
    "one of copies": _sizes(4, 1, 36, router__softmax="pre") | ZERO,
    "slices": _sizes(12, 6, 12),
    "scaled router": _sizes(8, 2, 18, router__scaling_factor=2.5),
    "sigmoid": _sizes(8, 4, 18, router="sigmoid", router__expert_bias=True),
    "shared": _sizes(4, 2, 36, shared__intermediate_size=8, shared__gate=True),
    "biases": _sizes(4, 2, 36, bias=True, router__bias=True),
    "some layers": _sizes(4, 2, 36) | {"layers.ffn": "dense, 2 moe"},
    "zero router, probabilities": _sizes(12, 6, 12, router__softmax="pre") | ZERO,
    "zero router, sigmoid": _sizes(4, 2, 36, router="sigmoid", router__normalize=False) | ZERO,
    "zero router, sqrtsoftplus": _sizes(6, 3, 12, router="sqrtsoftplus", router__normalize=False) | ZERO,
}
"""Settings that promise to start equal."""

BREAKS: dict[str, dict[str, object]] = {
    "noise": {"upcycle.noise": 0.05},
    "router of each expert": {"upcycle.router_init": "expert"},
    "no scaling": {"upcycle.scaling": False},
    "probabilities of a random router": {"ffn.moe.router.softmax": "pre"},
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A Llama of transformers and its folder; width 36."""
    model = make_model("llama-tied")
    return model, add_tokenizer(save_model(model, tmp_path_factory.mktemp("dense") / "hf"))


def config_of(folder: Path, settings: dict[str, object]) -> Config:
    """Config with the settings of the model, and of checkpoint.upcycle by "upcycle.key"."""
    sizes = {key: value for key, value in settings.items() if not key.startswith("upcycle.")}
    model = edit_model(read_model_config(folder), {"layers.ffn": "moe", **sizes})
    run = RunConfig(device="cpu", dtype="float32", seed=3)
    cfg = Config(run=run, model=model, train=TrainConfig(seq_len=SEQ_LEN))
    made = {f"checkpoint.{key}": value for key, value in settings.items() if key not in sizes}
    return edit(cfg, {"checkpoint.upcycle.dense": str(folder), **made})


def source_of(folder: Path, cfg: Config) -> UpcycledSource:
    return UpcycledSource(HfSource(open_hf_folder(folder)), cfg.model, cfg.checkpoint.upcycle, cfg.run.seed)


def upcycled_logits(folder: Path, cfg: Config, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S, V] of the upcycled model on one process."""
    assert upcycle_unsupported_reason(read_model_config(folder), cfg.model) == ""
    check_config(cfg)
    module = build_model(cfg)
    module.set_positions(torch.arange(SEQ_LEN))
    load_shards(source_of(folder, cfg), {**dict(module.named_parameters()), **dict(module.named_buffers())}, "dense")
    with torch.no_grad():
        return module.eval()(tokens).transpose(0, 1)


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_upcycling_that_promises_to_start_equal_does(dense, kind):
    theirs, folder = dense
    cfg = config_of(folder, SETTINGS[kind])
    assert preserves_outputs(cfg.model, cfg.checkpoint.upcycle)
    tokens = tokens_of(2, SEQ_LEN)
    found = upcycled_logits(folder, cfg, tokens)
    torch.testing.assert_close(found, logits_of(theirs, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", BREAKS)
def test_an_upcycling_without_that_promise_starts_otherwise(dense, kind):
    theirs, folder = dense
    cfg = config_of(folder, SETTINGS["slices"] | BREAKS[kind])
    assert not preserves_outputs(cfg.model, cfg.checkpoint.upcycle)
    tokens = tokens_of(2, SEQ_LEN)
    assert (upcycled_logits(folder, cfg, tokens) - logits_of(theirs, tokens)).abs().max() > 1e-2


def test_virtual_groups_hold_one_copy_each(dense):
    theirs, folder = dense
    source = source_of(folder, config_of(folder, SETTINGS["slices"] | {"upcycle.scaling": False}))
    router = source.read("layers.1.ffn.router.weight", (slice(0, 12), slice(0, 24)))
    assert torch.equal(router[0:1].expand(3, -1), router[0:3])
    assert not torch.equal(router[2], router[3])
    up = source.read("layers.1.ffn.experts.w_up", (slice(0, 12), slice(0, 24), slice(0, 12)))
    down = source.read("layers.1.ffn.experts.w_down", (slice(0, 12), slice(0, 12), slice(0, 24)))
    mlp = theirs.model.layers[1].mlp
    for group in range(4):
        experts = range(3 * group, 3 * group + 3)
        assert torch.equal(torch.cat([up[e] for e in experts], 1).T, mlp.up_proj.weight)
        assert torch.equal(torch.cat([down[e] for e in experts], 0).T, mlp.down_proj.weight)


def test_noise_has_the_size_asked_for_and_differs_by_expert(dense):
    theirs, folder = dense
    source = source_of(folder, config_of(folder, SETTINGS["copies"] | {"upcycle.noise": 0.1}))
    gate = source.read("layers.0.ffn.experts.w_gate", (slice(0, 4), slice(0, 24), slice(0, 36)))
    noise = gate - theirs.model.layers[0].mlp.gate_proj.weight.T
    assert noise[1].std().item() == pytest.approx(0.1 * gate[1].std().item(), rel=0.1)
    assert not torch.equal(noise[0], noise[1])


def _upcycled_parts(cfg: Config) -> dict[str, torch.Tensor]:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    assert load_initial_weights(cfg.run, cfg.model, cfg.data, cfg.checkpoint, model, is_first_rank=False).startswith(
        "upcycled from"
    )
    return {
        name: parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
        for name, parameter in model.named_parameters.items()
    }


@pytest.mark.parity
def test_every_mapping_upcycles_to_the_same_weights(pool, dense):
    _, folder = dense
    cfg = config_of(folder, SETTINGS["slices"] | {"upcycle.noise": 0.1, "tie_embeddings": True})
    (expected,) = pool.run(1, _upcycled_parts, cfg)
    mapped = replace(cfg, parallel=ParallelConfig(world_size=4, tp=2, pp=2, etp=2))
    for rank, found in enumerate(pool.run(4, _upcycled_parts, mapped)):
        assert found
        for name, values in found.items():
            assert torch.equal(values, expected[name]), (rank, name)


def test_the_command_makes_a_checkpoint_that_exports_and_trains(dense, tmp_path, monkeypatch, capsys):
    """A Llama becomes a Mixtral that transformers loads, with the same logits."""
    theirs, folder = dense
    monkeypatch.chdir(tmp_path)
    assert main(["upcycle", str(folder), "moe", "model.ffn.moe.num_experts=4", "model.ffn.moe.top_k=2"]) == 0
    assert "computes at first what the dense model does" in capsys.readouterr().out
    assert read_meta(Path("moe")).origin.startswith("upcycle of ")
    assert CheckpointSource(Path("moe")).shapes["layers.0.ffn.experts.w_up"] == (4, 24, 36)
    assert main(["export", "moe", "mixtral", "--check"]) == 0
    assert Path("mixtral/tokenizer.json").is_file()
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained("mixtral", output_loading_info=True)
    assert type(loaded).__name__ == "MixtralForCausalLM"
    assert not any(info.values()), info
    tokens = tokens_of(2, SEQ_LEN)
    torch.testing.assert_close(logits_of(loaded, tokens), logits_of(theirs, tokens), rtol=1e-5, atol=1e-5)
    words = ["run.device=cpu", "run.dtype=float32", "data.kind=synthetic", "data.tokenizer=bytes"]
    words += ["train.seq_len=16", "train.global_batch_size=2", "run.steps=1"]
    assert main(["train", "moe/recipe.toml", *words]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.ffn.moe.num_experts=6", "model.ffn.moe.top_k=3", "--granularity", "2"], "must be multiples of 2"),
        (["--granularity", "5"], "--granularity 5 must divide the width 36"),
        (["model.hidden_size=32"], "it is of another shape: "),
        (
            ["model.ffn.moe.latent_size=12"],
            "model.ffn.moe.latent_size=12, the width of latent experts; leave latent_size out",
        ),
        (["model.ffn.moe.num_experts=4", "model.ffn.moe.router.num_groups=2"], "choose between their members"),
        (["model.ffn.moe.activation=clamped_swiglu"], "ffn.moe.activation 'swiglu' there, 'clamped_swiglu' here"),
        (["model.ffn.moe.zero_experts=2"], "model.ffn.moe.zero_experts=2 is incompatible with checkpoint.upcycle={"),
        (["model.ffn.moe.probs_on_input=true"], "ffn.moe.probs_on_input False there, True here"),
        (["train.lr=1"], "is not a key of [model]"),
        (["model.ffn.moe.num_expert=4"], "did you mean model.ffn.moe.num_experts?"),
        (["model.preset=mixtral-8x7b"], "model.preset has no effect on moefold upcycle"),
        (["checkpoint.upcycle.dense=other"], "checkpoint.upcycle.dense is DENSE"),
        (["model.upcycle_noise=0.1"], "is checkpoint.upcycle.noise now: write checkpoint.upcycle.noise=0.1"),
        (
            ["checkpoint.upcycle.router_init=copies"],
            "router_init='copies' must be 'group', 'expert' or 'zero'",
        ),
        (["checkpoint.every=3"], "is not a key of [model] or [checkpoint.upcycle]"),
        (["model.ffn.moe.router=missing.py:Score"], "missing.py' does not exist; name a Python file"),
        (
            ["model.ffn.moe.router={kind='softmax', softmax='pre'}", "model.ffn.moe.router=sigmoid", "model.lr=1"],
            "model.ffn.moe.router='sigmoid' leaves out model.ffn.moe.router.softmax='pre'",
        ),
        (
            [
                "model.ffn.moe.num_experts=8",
                "model.ffn.moe.top_k=4",
                "model.ffn.moe.intermediate_size=12",
                "--granularity",
                "2",
            ],
            "model.ffn.moe.intermediate_size=12 is not the width 18 that --granularity 2 gives",
        ),
        (
            ["model.ffn.moe.intermediate_size=18", "--granularity", "1"],
            "is not the width 36 that --granularity 1 gives",
        ),
    ],
)
def test_a_refused_upcycling_is_one_message(dense, tmp_path, capsys, words, message):
    _, folder = dense
    assert main(["upcycle", str(folder), str(tmp_path / "moe"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_slices_are_given_by_their_number_or_their_width(dense, tmp_path):
    _, folder = dense
    sizes = ["model.ffn.moe.num_experts=8", "model.ffn.moe.top_k=4"]
    ways = {"number": ["--granularity", "2"], "width": ["model.ffn.moe.intermediate_size=18"]}
    ways["both"] = ways["number"] + ways["width"]
    for name, words in ways.items():
        assert main(["upcycle", str(folder), str(tmp_path / name), *sizes, *words]) == 0
        assert CheckpointSource(tmp_path / name).shapes["layers.0.ffn.experts.w_up"] == (8, 24, 18)


def test_a_dense_model_without_tokenizer_is_noted(dense, tmp_path, capsys):
    """The recipe of the result can name none, so it would read other ids than the model knows."""
    folder = tmp_path / "dense"
    shutil.copytree(dense[1], folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    sizes = ["model.ffn.moe.num_experts=4", "model.ffn.moe.top_k=2"]
    assert main(["upcycle", str(folder), str(tmp_path / "moe"), *sizes]) == 0
    note = "note: recipe.toml names no tokenizer: '" + str(folder)
    assert f"{note}' has tokenizer.model, but no tokenizer.json, which moefold reads" in capsys.readouterr().out
    (folder / "tokenizer.model").unlink()
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--no-tokenizer"]) == 0
    assert main(["upcycle", str(tmp_path / "ckpt"), str(tmp_path / "again"), *sizes]) == 0
    out = capsys.readouterr().out
    folder_s, checkpoint_s = CheckpointSource(tmp_path / "moe"), CheckpointSource(tmp_path / "again")
    for tensor, shape in folder_s.shapes.items():
        assert torch.equal(folder_s.read(tensor, full_region(shape)), checkpoint_s.read(tensor, full_region(shape))), (
            tensor
        )
    assert "has no tokenizer (tokenizer.json), so the model could read no text; add its files, or set data" in out
    assert main(["upcycle", str(dense[1]), str(tmp_path / "whole"), *sizes]) == 0
    assert "note" not in capsys.readouterr().out


def test_the_tokenizer_of_a_run_comes_from_the_recipe(dense, tmp_path, monkeypatch, capsys):
    """A run from scratch has its tokenizer by path, nothing beside its checkpoints."""
    monkeypatch.chdir(tmp_path)
    for name, tokenizer in (("text", "words/tokenizer.json"), ("letters", "bytes")):
        shutil.copytree(dense[1], name)
        assert main(["import", name, f"{name}-ckpt"]) == 0
        meta = read_meta(Path(f"{name}-ckpt"))
        write_meta(Path(f"{name}-ckpt"), replace(meta, origin="", order={"tokenizer": tokenizer}))
        (Path(f"{name}-ckpt") / MANIFEST_FILE).unlink()
        write_manifest_in_parallel(Path(f"{name}-ckpt"), World())
        shutil.rmtree(f"{name}-ckpt/hf")
    Path("words").mkdir()
    Path("words/tokenizer.json").write_text("{}")
    for name in ("text", "letters"):
        assert main(["upcycle", f"{name}-ckpt", f"{name}-moe", "model.ffn.moe.num_experts=4"]) == 0
    assert f'tokenizer = "{tmp_path}/words/tokenizer.json"' in Path("text-moe/recipe.toml").read_text()
    assert 'tokenizer = "bytes"' in Path("letters-moe/recipe.toml").read_text()
    assert find_source("letters-moe").data.tokenizer == "bytes"
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mixtral", "qwen3-next"])
def test_a_model_with_experts_is_not_upcycled(tmp_path, capsys, name):
    folder = add_tokenizer(save_model(make_model(name), tmp_path / "hf"))
    assert main(["upcycle", str(folder), str(tmp_path / "moe"), "model.ffn.moe.num_experts=4"]) == 2
    assert "it has experts already" in capsys.readouterr().err


def test_a_result_that_no_family_computes_is_noted_with_a_way_to_a_family(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    add_tokenizer(save_model(make_model("qwen2"), Path("hf")))
    words = ["model.ffn.moe.num_experts=4", "model.ffn.moe.top_k=2"]
    assert main(["upcycle", "hf", "bare", *words]) == 0
    way_out = ["model.ffn.moe.shared.intermediate_size=36", "model.ffn.moe.shared.gate=true"]
    note = f"so moefold export cannot write it; with {' '.join(way_out)} it is qwen2_moe"
    assert note in capsys.readouterr().out
    assert main(["export", "bare", "out"]) == 2
    assert "no family of Hugging Face models computes what this model does" in capsys.readouterr().err
    assert main(["upcycle", "hf", "shared", *words, *way_out]) == 0
    assert "note: " not in capsys.readouterr().out
    assert main(["export", "shared", "out", "--check"]) == 0
    assert type(transformers.AutoModelForCausalLM.from_pretrained("out")).__name__ == "Qwen2MoeForCausalLM"
    recipe = Path("bare/recipe.toml").read_text().replace("init_from", "resume = 'auto' #")
    Path("start.toml").write_text(recipe.replace("[checkpoint]", '[checkpoint]\nupcycle = { dense = "hf" }'))
    few = ["run.device=cpu", "run.dtype=float32", "data.kind=synthetic", "data.tokenizer=bytes", "run.steps=1"]
    few += ["train.seq_len=16", "train.global_batch_size=2"]
    capsys.readouterr()
    assert main(["train", "start.toml", *few]) == 0
    assert note in capsys.readouterr().out


def test_a_run_that_an_earlier_version_upcycled_goes_on(dense, tmp_path, monkeypatch, capsys):
    """Its config.json and its checkpoints have the keys in [model]."""
    monkeypatch.chdir(tmp_path)
    assert main(["upcycle", str(dense[1]), "moe", "model.ffn.moe.num_experts=4", "model.ffn.moe.top_k=2"]) == 0
    words = ["checkpoint.init_from=", "data.tokenizer=bytes"]
    words += ["run.device=cpu", "run.dtype=float32", "data.kind=synthetic", "run.dir=run", "train.seq_len=16"]
    words += ["train.global_batch_size=2", f"checkpoint.upcycle.dense={dense[1]}", "checkpoint.upcycle.noise=0.1"]
    assert main(["train", "moe/recipe.toml", *words, "run.steps=1"]) == 0
    assert f"upcycled from {dense[1]}" in capsys.readouterr().out
    checkpoint = Path("run/checkpoints/step-000001")
    tree, meta = (json.loads(file.read_text()) for file in (Path("run/config.json"), checkpoint / "moefold.json"))
    assert not [key for key in meta["model"] if "upcycle" in key]
    old = {
        f"upcycle_{'from' if key == 'dense' else key.removesuffix('_init')}": value
        for key, value in tree["checkpoint"].pop("upcycle").items()
    }
    Path("run/config.json").write_text(json.dumps(tree | {"model": tree["model"] | old}))
    (checkpoint / "moefold.json").write_text(json.dumps(meta | {"model": meta["model"] | old, "format": 1}))
    (checkpoint / MANIFEST_FILE).unlink()
    write_manifest_in_parallel(checkpoint, World())
    assert main(["train", "moe/recipe.toml", *words, "run.steps=2"]) == 0
    out = capsys.readouterr().out
    assert "run/checkpoints/step-000001" in out
    assert "other settings" not in out
    assert not Path("run-2").exists()
    settings = json.loads(Path("run/config.json").read_text())["checkpoint"]["upcycle"]
    assert settings == {"dense": str(dense[1]), "router_init": "group", "scaling": True, "noise": 0.1}
    words = [word for word in words if "upcycle" not in word]
    assert main(["train", "moe/recipe.toml", *words, "run.steps=2"]) == 0
    assert 'checkpoint.upcycle="none" (it has' in capsys.readouterr().out
    assert Path("run-2").exists()


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({}, ""),
        ({"mtp_layers": 1}, ""),
        ({"ffn.moe.router.softmax": "pre"}, "with model.ffn.moe.router.softmax=post it is mixtral"),
        ({"ffn.moe.router.softmax": "pre", "ffn.moe.top_k": 1}, "model.ffn.moe.shared.gate=true it is qwen2_moe"),
        ({"ffn.moe.bias": True}, "the nearest is mixtral: ffn.moe.bias True in this model, False in the family"),
    ],
)
def test_the_note_names_the_nearest_family(change, note):
    found = export_message(edit_model(ModelConfig(), change))
    assert found.endswith(note)
    assert bool(found) == bool(note)
