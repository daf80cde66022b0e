"""Import, then export: every byte is there again, and transformers loads it."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, counted
from moefold.cli.main import main
from moefold.config.base.limits import FORMAT
from moefold.convert.export_folder import max_positions
from moefold.convert.families.hf_config import find_family, parse_model_config
from moefold.convert.hf_shards import MANIFEST_FILE
from tests.convert.hf_folders import (
    add_tokenizer,
    assert_same_folder,
    import_and_export,
    loaded_in_silence,
    split_weights,
)
from tests.convert.hf_models import (
    ALL_MODELS,
    ALL_MODELS_SOME_SLOW,
    MODELS,
    ONE_FOR_EACH_RULE,
    config_of,
    logits_of,
    make_model,
    save_model,
    tokens_of,
)
from tests.models import edit_model, model_of
from tests.slow import slow


def folder_of(tmp_path: Path, name: str, **how: object) -> Path:
    return add_tokenizer(save_model(make_model(name), tmp_path / "hf", **how))


@pytest.mark.parametrize("name", ONE_FOR_EACH_RULE)
def test_import_then_export_gives_the_same_files(tmp_path, name):
    folder = folder_of(tmp_path, name, dtype=torch.bfloat16 if "moe" in name else torch.float32)
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again")]) == 0
    assert_same_folder(folder, tmp_path / "again")


@pytest.mark.parametrize("name", [name for name in ALL_MODELS if name in MODELS])
def test_a_written_config_means_the_model_that_was_read(name):
    """The folders of this file get the config.json that they were read from."""
    keys = json.loads(config_of(name).to_json_string(use_diff=False))
    model = parse_model_config(keys, Path("hf"))
    again = parse_model_config(find_family(keys, Path("hf")).write(model), Path("hf"))
    if model.attention.kind == "gqa":
        # A folder may leave it out; it is always written.
        model = edit_model(model, {"attention.head_dim": model.softmax_attention.head_dim})
        again = edit_model(again, {"attention.head_dim": again.softmax_attention.head_dim})
    assert again == model


def test_shards_come_back_as_they_were(tmp_path):
    folder = folder_of(tmp_path, "qwen2-moe", shard="8KB")
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again")]) == 0
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert_same_folder(folder, tmp_path / "again")
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "one"), "--shard-size", "0", "--check"]) == 0
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "cut"), "--shard-size", "9KB", "--check"]) == 0
    tensors = {name: t for file in (tmp_path / "cut").glob("*.safetensors") for name, t in load_file(file).items()}
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)
    assert max(path.stat().st_size for path in (tmp_path / "cut").glob("*.safetensors")) < 12_000


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_stacked_experts_come_back_stacked(tmp_path, name):
    """Some tools write the experts of a layer as one tensor, as transformers has them in memory."""
    model = make_model(name)
    folder = add_tokenizer(save_model(model, tmp_path / "hf"))
    stacked = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(stacked, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    assert_same_folder(folder, tmp_path / "again")


@pytest.mark.parametrize("is_split", [True, *slow([(False,)])])
def test_a_head_that_repeats_the_embedding_comes_back(tmp_path, capsys, is_split):
    folder = add_tokenizer(save_model(make_model("llama-tied"), tmp_path / "hf"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if is_split:
        split_weights(folder, tensors)
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0
    assert "ignored (the embedding again): lm_head.weight\n" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    assert_same_folder(folder, tmp_path / "again")
    manifest = (tmp_path / "again" / MANIFEST_FILE).read_text()
    assert manifest == (tmp_path / "ckpt" / "hf" / MANIFEST_FILE).read_text()
    assert main(["import", str(tmp_path / "again"), str(tmp_path / "once-more"), "--check"]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "half"), "--dtype", "bfloat16", "--check"]) == 0


def test_messages_are_true_and_their_commands_can_be_typed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path, "llama", shard="8KB").rename("hf x")
    assert main(["import", "hf x", "my ckpt"]) == 0
    assert "train from it: moefold train 'my ckpt/recipe.toml'\n" in capsys.readouterr().out
    assert main(["export", "my ckpt", "again"]) == 0
    weights = list(Path("again").glob("*.safetensors"))
    others = sum(path.is_file() for path in Path("again").iterdir()) - len(weights)
    assert len(weights) > 3
    assert f"; {others} other files" in capsys.readouterr().out
    assert main(["export", "my ckpt/recipe.toml", "once more"]) == 2
    assert "'my ckpt/recipe.toml' is a file; name a run, or a folder of checkpoints" in capsys.readouterr().err


def test_computed_tensors_are_listed_and_not_written_again(tmp_path, capsys):
    folder = add_tokenizer(save_model(make_model("llama"), tmp_path / "hf"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**tensors, name: torch.ones(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    assert f"ignored (computed, not stored): {name}\n" in capsys.readouterr().out
    listed = json.loads((tmp_path / "ckpt" / "hf" / MANIFEST_FILE).read_text())["tensors"]
    assert [key for key, entry in listed.items() if entry["passed_over"]] == [name]
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == tensors.keys()


def test_a_consolidated_file_next_to_the_weights_is_not_read(tmp_path):
    folder = add_tokenizer(save_model(make_model("mixtral"), tmp_path / "hf"))
    tensors = load_file(folder / "model.safetensors")
    save_file({"layers.0.x": torch.ones(2)}, folder / "consolidated.safetensors")
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_index_config_and_metadata_are_the_same_after_a_round_trip(tmp_path):
    """As other tools write them: fewer sizes, other spaces, a type that the tensors do not have, words of their own."""
    folder = folder_of(tmp_path, "qwen2-moe", shard="30KB", dtype=torch.bfloat16)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    files = sorted(folder.glob("*.safetensors"))
    save_file(load_file(files[0]), files[0], metadata={"maker": "x", "format": "pt"})
    save_file(load_file(files[1]), files[1])
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    assert_same_folder(folder, tmp_path / "again")
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "one"), "--shard-size", "0"]) == 0
    assert not list((tmp_path / "one").glob("*.index.json"))


@pytest.mark.parametrize("name", ALL_MODELS_SOME_SLOW)
def test_transformers_computes_the_same_with_an_export(tmp_path, monkeypatch, caplog, name):
    """Config.json is made from [model] only, as for a run without import.

    With the files that came along, an export is the folder that transformers wrote, to the byte, and a manifest.
    """
    model = make_model(name)
    folder = add_tokenizer(save_model(model, tmp_path / "hf"))
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    shutil.rmtree(tmp_path / "ckpt" / "hf")
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again")]) == 0
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    loaded = loaded_in_silence(tmp_path / "again", monkeypatch, caplog, **how)
    tokens = tokens_of(2, 16)
    torch.testing.assert_close(logits_of(loaded, tokens), logits_of(model, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-tied", "float32"),
        ("mixtral", "bfloat16"),
        ("gpt-oss", "float32"),
        ("deepseek-v3", "bfloat16"),
        *slow(
            [
                ("llama-tied", "bfloat16"),
                ("mixtral", "float32"),
                *(("qwen2-moe", dtype) for dtype in ("bfloat16", "float32")),
                ("gpt-oss", "bfloat16"),
                ("deepseek-v3", "float32"),
            ]
        ),
    ],
)
def test_transformers_loads_an_export_in_another_type(tmp_path, monkeypatch, caplog, name, dtype):
    model = make_model(name)
    folder = add_tokenizer(save_model(model, tmp_path / "hf"))
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--dtype", dtype, "--check"]) == 0
    loaded = loaded_in_silence(tmp_path / "again", monkeypatch, caplog)
    assert loaded.dtype == getattr(torch, dtype)
    found, expected = loaded.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    for key, value in found.items():
        # The bias of the choice of experts is never rounded. transformers may load a router's weights into float32.
        written = expected[key] if key.endswith("correction_bias") else expected[key].to(getattr(torch, dtype))
        assert value.dtype in (written.dtype, torch.float32), key
        assert torch.equal(value, written.to(value.dtype)), key


@pytest.mark.parametrize(("kind", "length"), [("none", 2048), ("linear", 2048), ("llama3", 100), ("yarn", 100)])
def test_a_stretched_model_takes_as_many_positions_as_its_rotation_reaches(kind, length):
    model = model_of({"rope.scaling": kind, "rope.scaling.factor": 2.5, "rope.scaling.original_seq_len": 40})
    fields = {"states": counted(), "format": FORMAT, "model": {}, "parallel": {}}
    assert max_positions(model, CheckpointMeta(order={}, **fields)) == length
    assert max_positions(model, CheckpointMeta(order={"seq_len": 4096}, **fields)) == 4096


def test_the_manifest_lists_every_tensor_with_its_hash(tmp_path):
    folder = folder_of(tmp_path, "mixtral")
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again")]) == 0
    manifest = json.loads((tmp_path / "again" / MANIFEST_FILE).read_text())
    assert manifest == json.loads((tmp_path / "ckpt" / "hf" / MANIFEST_FILE).read_text())
    tensors = load_file(tmp_path / "again" / "model.safetensors")
    assert manifest["tensors"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        listed = manifest["tensors"][name]
        assert listed["shape"] == list(tensor.shape)
        assert listed["dtype"] == "F32"
        assert listed["sha256"] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


@pytest.mark.parity
@pytest.mark.parametrize("world_size", [3, *slow([(2,)])])
def test_ranks_share_the_work(pool, tmp_path, world_size):
    folder = folder_of(tmp_path, "qwen2-moe", dtype=torch.bfloat16, shard="30KB")
    pool.run(world_size, import_and_export, folder, tmp_path / "ckpt", tmp_path / "again")
    assert_same_folder(folder, tmp_path / "again")
    assert len(list((tmp_path / "ckpt").glob("*.distcp"))) == world_size
