"""DeepSeek-V3 folders with layers of multi-token prediction as DeepSeek publishes them, and exports of trained ones."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.cli.main import main
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.convert.families.families import FAMILIES
from moefold.convert.families.hf_config import read_model_config
from moefold.convert.families.mtp import tensor_names
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.hf_shards import MANIFEST_FILE, needs_mtp_file
from moefold.convert.weight_sources import load_hf_weights
from moefold.inference.source import find_source
from moefold.model.transformer import build_model
from tests.convert.hf_folders import add_tokenizer, assert_same_folder, import_and_export, split_weights
from tests.convert.hf_models import MODELS, logits_of, make_model, save_model, tokens_of, transformers
from tests.convert.mtp_folders import SEQ_LEN, WEIGHTS, as_published, assert_loads, assert_mtp_loss_of_transformers
from tests.models import model_of
from tests.slow import slow

APART = "moefold-mtp.safetensors"
OWN = {"enorm", "hnorm", "eh_proj", "post_norm"}


def published(
    folder: Path, *, layers: int = 2, shard: bool = False, name: str = "deepseek-v3", **sizes: object
) -> SimpleNamespace:
    """A folder whose further layers lie as in DeepSeek's; with the model of transformers and its drafting layers."""
    from transformers.modeling_layers import MtpModel

    if "mlp_layer_types" in MODELS[name][1]:
        sizes |= {"mtp_layer_types": ["indexed_attention"] * layers, "mtp_mlp_layer_types": ["sparse"] * layers}
    model = make_model(name, num_mtp_layers=layers, **sizes)
    count = model.config.num_hidden_layers
    torch.manual_seed(layers)
    further = MtpModel(model, layers).eval()
    with torch.no_grad():
        for key, parameter in further.layers.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.3)
        for buffer in further.layers.buffers():
            buffer.normal_(0.0, 0.1)
    save_model(model, folder)
    tensors = load_file(folder / WEIGHTS)
    for key, tensor in further.layers.state_dict().items():
        tensors |= as_published(key, tensor.detach(), count)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    for number in range(count, count + layers):
        tensors[f"model.layers.{number}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{number}.shared_head.head.weight"] = head.clone()
    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    if shard:
        split_weights(folder, load_file(folder / WEIGHTS))
    return SimpleNamespace(folder=add_tokenizer(folder), model=model, further=further)


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["deepseek-v32", *slow([("glm4-moe",), ("glm-moe-dsa",)])])
def test_folders_of_other_families_come_back(tmp_path, name):
    folder = published(tmp_path / "hf", name=name).folder
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0
    assert read_meta(tmp_path / "ckpt").model["mtp_layers"] == 2
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    assert_same_folder(folder, tmp_path / "again")


@pytest.mark.parametrize(("is_split", "is_tied"), [(True, True), *slow([(False, False), (False, True), (True, False)])])
def test_import_then_export_gives_the_same_files(tmp_path, capsys, is_split, is_tied):
    folder = published(tmp_path / "hf", shard=is_split, tie_word_embeddings=is_tied).folder
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0
    again = "model.layers.3.embed_tokens.weight, model.layers.3.shared_head.head.weight" if is_tied else ""
    assert f"ignored (the embedding again): {again}" in capsys.readouterr().out
    assert read_meta(tmp_path / "ckpt").model["mtp_layers"] == 2
    assert "mtp_layers = 2\n" in (tmp_path / "ckpt" / "recipe.toml").read_text()
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    assert_same_folder(folder, tmp_path / "again")
    manifest = json.loads((tmp_path / "again" / MANIFEST_FILE).read_text())
    assert manifest == json.loads((tmp_path / "ckpt" / "hf" / MANIFEST_FILE).read_text())
    assert manifest["tensors"].keys() == {name for file in folder.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_the_further_loss_equals_transformers(tmp_path, name):
    """The layers that a folder holds predict the second next token as transformers' drafting layers do."""
    made = published(tmp_path / "hf", layers=1, name=name)
    assert_mtp_loss_of_transformers(made)


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_work(pool, tmp_path, world_size):
    folder = published(tmp_path / "hf", shard=True).folder
    pool.run(world_size, import_and_export, folder, tmp_path / "ckpt", tmp_path / "again")
    assert_same_folder(folder, tmp_path / "again")


def _train(folder: Path, *words: str) -> None:
    more = ["run.device=cpu", "run.dtype=float32", "run.steps=1", "data.kind=synthetic", "data.tokenizer=bytes"]
    more += ["train.seq_len=16", "train.global_batch_size=2", "checkpoint.every=1", f"run.dir={folder}"]
    assert main(["train", *words, *more]) == 0


@pytest.mark.parametrize("layers", [2, *slow([(1,)])])
def test_a_trained_model_exports_and_loads_and_comes_back(tmp_path, monkeypatch, capsys, caplog, layers):
    """transformers is silent only on layer 61: other further layers have a file that no index names."""
    monkeypatch.chdir(tmp_path)
    made = published(tmp_path / "hf", layers=layers)
    assert main(["import", "hf", "ckpt"]) == 0
    _train(Path("run"), "ckpt/recipe.toml", "train.lr=1e-20", "moe.bias_update_rate=1e-20")
    assert main(["export", "run", "out", "--check"]) == 0
    assert f"note: the layers of multi-token prediction are in {APART}" in capsys.readouterr().out
    inside, apart = load_file(f"out/{WEIGHTS}"), load_file(f"out/{APART}")
    whole = load_file(f"hf/{WEIGHTS}")
    assert not any(name.startswith(("model.layers.3.", "model.layers.4.")) for name in inside)
    assert inside.keys() | apart.keys() == whole.keys()
    assert all(torch.equal((inside | apart)[name], whole[name]) for name in whole)
    assert_loads(Path("out"), made.model, monkeypatch, caplog)
    assert main(["import", "out", "back", "--check"]) == 0
    assert read_meta(Path("back")).model["mtp_layers"] == layers
    assert main(["export", "back", "again", "--check"]) == 0
    # The card describes the run; an imported folder says nothing of it.
    assert_same_folder(Path("out"), Path("again"), but=(MANIFEST_FILE, "README.md"))
    assert main(["export", "back", "inside", "--mtp-inside", "--check"]) == 0
    assert load_file(f"inside/{WEIGHTS}").keys() == whole.keys()
    assert not Path(f"inside/{APART}").exists()
    with pytest.raises(AssertionError, match="unexpected_keys"):
        assert_loads(Path("inside"), made.model, monkeypatch, caplog)
    assert "UNEXPECTED" in caplog.text
    assert main(["export", "back", "cut", "--shard-size", "20KB", "--check"]) == 0
    named = set(json.loads(Path("cut/model.safetensors.index.json").read_text())["weight_map"].values())
    assert {path.name for path in Path("cut").glob("model-*.safetensors")} == named
    assert len(list(Path("cut").glob("moefold-mtp-*.safetensors"))) > 1
    assert_loads(Path("cut"), made.model, monkeypatch, caplog)
    assert main(["import", "cut", "once-more", "--check"]) == 0


@pytest.mark.parametrize("family", [family for family in FAMILIES.values() if family.has_mtp], ids=lambda f: f.name)
def test_transformers_is_silent_on_the_layers_that_a_family_names(family):
    """Layers with these numbers are written among the others, all others to a file that no index names."""
    patterns = getattr(transformers, family.architecture)._keys_to_ignore_on_load_unexpected
    if family.mtp_unreported is None:
        assert any(re.search(pattern, "mtp.fc.weight") for pattern in patterns)
        return
    names = {number: f"model.layers.{number}.eh_proj.weight" for number in range(1, 100)}
    silent = {number for number, name in names.items() if any(re.search(pattern, name) for pattern in patterns)}
    assert silent == {*family.mtp_unreported}
    for number in names:
        model = model_of({"layers": number, "mtp_layers": 1})
        assert needs_mtp_file(model, family) == (number not in silent)


@pytest.mark.slow
def test_layer_61_is_written_among_the_others_and_transformers_is_silent(tmp_path, monkeypatch, capsys, caplog):
    """As many layers as DeepSeek-V3 itself has. The last layers have experts."""
    sizes = {"num_hidden_layers": 61, "first_k_dense_replace": 60, "n_routed_experts": 3, "n_group": 1, "topk_group": 1}
    made = published(tmp_path / "hf", layers=1, **sizes)
    assert_loads(made.folder, made.model, monkeypatch, caplog)
    assert main(["import", str(made.folder), str(tmp_path / "ckpt")]) == 0
    # Without the files that came along, an export cuts its files as for a run.
    for file in (tmp_path / "ckpt" / "hf").iterdir():
        file.unlink()
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--check"]) == 0
    assert "note" not in capsys.readouterr().out
    assert load_file(tmp_path / "out" / WEIGHTS).keys() == load_file(made.folder / WEIGHTS).keys()
    assert_loads(tmp_path / "out", made.model, monkeypatch, caplog)
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "none"), "--mtp-inside", "--without-mtp"]) == 2


def test_they_are_left_out_on_request(tmp_path, monkeypatch, capsys, caplog):
    made = published(tmp_path / "hf")
    further = "model.layers.3.eh_proj.weight"
    values = load_file(made.folder / WEIGHTS)[further]
    assert main(["import", str(made.folder), str(tmp_path / "without"), "--without-mtp", "--check"]) == 0
    assert "ignored (multi-token prediction): model.layers.3." in capsys.readouterr().out
    listed = json.loads((tmp_path / "without" / "hf" / MANIFEST_FILE).read_text())["tensors"][further]
    assert listed["passed_over"] == "multi-token prediction"
    assert listed["sha256"] == hashlib.sha256(values.numpy().tobytes()).hexdigest()
    assert read_meta(tmp_path / "without").model["mtp_layers"] == 0
    assert main(["import", str(made.folder), str(tmp_path / "with")]) == 0
    capsys.readouterr()
    assert main(["export", str(tmp_path / "with"), str(tmp_path / "b"), "--without-mtp", "--check"]) == 0
    assert "ignored (multi-token prediction): layers.3." in capsys.readouterr().out
    assert main(["export", str(tmp_path / "without"), str(tmp_path / "a"), "--check"]) == 0
    for out in (tmp_path / "a", tmp_path / "b"):
        assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
        assert_loads(out, made.model, monkeypatch, caplog)
    assert main(["export", str(tmp_path / "without"), str(tmp_path / "c"), "--mtp-inside"]) == 2
    assert "--mtp-inside has no effect" in capsys.readouterr().err


def test_a_folder_need_not_repeat_embedding_and_head(tmp_path):
    folder = published(tmp_path / "hf").folder
    echo = ".3.embed_tokens.weight", ".4.shared_head.head.weight"
    _edit(folder, lambda t: [t.pop(name) for name in [*t] if name.endswith(echo)])
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    assert_same_folder(folder, tmp_path / "again")


def test_tensors_that_transformers_counts_but_does_not_save_are_noted(tmp_path, capsys):
    """It writes num_nextn_predict_layers=1 beside a model that it loaded without that layer."""
    folder = add_tokenizer(save_model(make_model("deepseek-v3"), tmp_path / "hf"))
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert read_model_config(folder).mtp_layers == 0
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    assert "note: config.json has num_nextn_predict_layers=1, but the folder holds none" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    assert_same_folder(folder, tmp_path / "again")


@pytest.mark.parametrize("is_split", [False, True])
def test_names_are_known_without_torch(tmp_path, is_split):
    folder = published(tmp_path / "hf", shard=is_split).folder
    assert set(tensor_names(folder)) - {"__metadata__"} == open_hf_folder(folder).tensors.keys()
    assert tensor_names(tmp_path) is None
    (tmp_path / WEIGHTS).write_bytes(b"\xff" * 20)
    assert tensor_names(tmp_path) is None


def test_inference_reads_no_further_layers(tmp_path):
    made = published(tmp_path / "hf")
    cfg = Config(run=RunConfig(dtype="float32"), model=find_source(str(made.folder)).model)
    model = build_model(cfg)
    model.set_positions(torch.arange(SEQ_LEN))
    load_hf_weights(made.folder, dict(model.named_parameters()), dict(model.named_buffers()))
    tokens = tokens_of(2, SEQ_LEN)
    with torch.no_grad():
        found = model.eval()(tokens).transpose(0, 1)
    torch.testing.assert_close(found, logits_of(made.model, tokens), rtol=1e-5, atol=1e-5)


EMBEDDING, HEAD = "model.layers.4.embed_tokens.weight", "model.layers.3.shared_head.head.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "one tensor missing": (
        lambda f: _edit(f, lambda t: t.pop("model.layers.4.hnorm.weight")),
        "tensor model.layers.4.hnorm.weight is missing",
    ),
    "one expert missing": (
        lambda f: _edit(f, lambda t: t.pop("model.layers.3.mlp.experts.7.up_proj.weight")),
        "tensor model.layers.3.mlp.experts.7.up_proj.weight is missing",
    ),
    "one layer missing": (
        lambda f: _edit(f, lambda t: [t.pop(name) for name in [*t] if ".layers.4." in name]),
        "tensor model.layers.4.eh_proj.weight is missing",
    ),
    "misshapen": (
        lambda f: _edit(f, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(24, 47)})),
        "tensor model.layers.3.eh_proj.weight has shape [24, 47], config.json means [24, 48]",
    ),
    "another embedding": (
        lambda f: _edit(f, lambda t: t[EMBEDDING].flatten()[-1:].add_(1)),
        f"tensor {EMBEDDING} must equal model.embed_tokens.weight, and differs",
    ),
    "another head": (
        lambda f: _edit(f, lambda t: t.update({HEAD: t[HEAD][:-1].clone()})),
        f"tensor {HEAD} must equal lm_head.weight, and differs",
    ),
    "fewer counted": (
        lambda f: _edit_config(f, num_nextn_predict_layers=1),
        "tensor model.layers.4.eh_proj.weight is of multi-token prediction, of which config.json counts "
        "num_nextn_predict_layers=1; correct it, or import with --without-mtp",
    ),
    "none counted": (lambda f: _edit_config(f, num_nextn_predict_layers=0), "counts num_nextn_predict_layers=0"),
    "more counted": (
        lambda f: _edit_config(f, num_nextn_predict_layers=3),
        "tensor model.layers.5.eh_proj.weight is missing",
    ),
    "a number that cannot be": (
        lambda f: _edit_config(f, num_nextn_predict_layers=-1),
        "num_nextn_predict_layers=-1, which should be 0 to 10000",
    ),
    "no number": (
        lambda f: _edit_config(f, num_nextn_predict_layers="1"),
        "num_nextn_predict_layers='1', which should be a whole number",
    ),
    "in two files": (
        lambda f: save_file({EMBEDDING: torch.zeros(2)}, f / APART),
        f"tensor {EMBEDDING} is in two files, {WEIGHTS} and {APART}",
    ),
    "a layer among ours": (
        lambda f: _edit(f, lambda t: t.update({"model.layers.2.enorm.weight": torch.zeros(24)})),
        "tensor model.layers.2.enorm.weight has no place in this deepseek_v3 model",
    ),
}


def _edit_config(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return published(tmp_path_factory.mktemp("sound") / "hf").folder


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_folder_is_one_message_and_nothing_written(sound, tmp_path, capsys, fault):
    break_it, message = FAULTS[fault]
    folder = tmp_path / "hf"
    folder.mkdir()
    for file in sound.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    break_it(folder)
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_other_families_have_no_place_for_them(tmp_path, monkeypatch, capsys):
    """A Mixtral with a further layer, trained here."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(
        "[model]\nlayers = 2\nhidden_size = 16\nattention = { num_heads = 2, num_kv_heads = 1 }\nffn = "
        "{ moe = { num_experts = 4, intermediate_size = 8 } }\nmtp_layers = 1\n"
    )
    _train(Path("run"), "recipe.toml")
    assert main(["export", "run", "out"]) == 2
    assert "no family of Hugging Face models has layers of multi-token prediction" in capsys.readouterr().err
    assert main(["export", "run", "out", "--family", "mixtral"]) == 2
    assert "--without-mtp leaves those layers out" in capsys.readouterr().err
    assert not Path("out").exists()
    assert main(["export", "run", "out", "--without-mtp", "--check"]) == 0
    _, info = transformers.AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not any(info.values()), info
