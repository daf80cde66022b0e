"""Folders that cannot be imported: one message that names the fault, and nothing written."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.cli.main import main
from moefold.convert.families.hf_config import read_model_config
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.hf_shards import MANIFEST_FILE, copy_sidecar_files
from moefold.errors import ConfigError
from moefold.inference.load import load_model
from moefold.inference.settings import InferenceRequest, inference_config
from moefold.inference.source import find_source
from tests.convert.hf_folders import add_tokenizer
from tests.convert.hf_models import make_model, save_model
from tests.convert.spoiled_checkpoint import spoil_stored

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ATTENTION = "model.layers.1.self_attn.o_proj.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.4.w2.weight"


def _edit_config(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def _edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def _edit_header(folder: Path, change: Callable[[dict], object]) -> None:
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def _cut(folder: Path, size: int) -> None:
    with (folder / WEIGHTS).open("r+b") as opened:
        opened.truncate(size)


def _shard(folder: Path, files: dict[str, list[str]], weight_map: dict[str, str] | None = None) -> None:
    """Spread the tensors over files, `files` first and the rest in rest.safetensors, with an index."""
    tensors = load_file(folder / WEIGHTS)
    named = {name for names in files.values() for name in names}
    rest = {"rest.safetensors": [name for name in tensors if name not in named]}
    for file, names in {**files, **rest}.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    right = {name: file for file, names in {**files, **rest}.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": right | (weight_map or {})}))
    (folder / WEIGHTS).unlink()


def _index_outside(folder: Path) -> None:
    _shard(folder, {"part.safetensors": [EXPERT]}, {EXPERT: "../part.safetensors"})
    (folder / "part.safetensors").rename(folder.parent / "part.safetensors")


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated data": (lambda f: _cut(f, (f / WEIGHTS).stat().st_size - 10), "lacks 10 bytes at its end"),
    "truncated header": (lambda f: _cut(f, 100), "was cut off in its header"),
    "empty file": (lambda f: _cut(f, 0), "is not a safetensors file"),
    "bytes too many": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes() + b"123"),
        "has 3 bytes at its end that no tensor owns",
    ),
    "header of another size": (
        lambda f: _edit_header(f, lambda header: header[EXPERT].update(shape=[24, 19])),
        f"tensor {EXPERT} does not fill the bytes",
    ),
    "header of broken places": (
        lambda f: _edit_header(
            f, lambda h: h[EXPERT].update(data_offsets=[float(x) for x in h[EXPERT]["data_offsets"]])
        ),
        "its header makes no sense",
    ),
    "header of a shape that is none": (
        lambda f: _edit_header(f, lambda header: header[EXPERT].update(shape=[-24, -20])),
        "its header makes no sense",
    ),
    "header without end": (
        lambda f: (f / WEIGHTS).write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000),
        "its header is not JSON",
    ),
    "header with a name of two lines": (
        lambda f: _edit_tensors(f, lambda t: t.update({"a\nb": torch.zeros(1)})),
        "holds a tensor of the name 'a\\nb', which is not a printable text",
    ),
    "config without end": (lambda f: (f / "config.json").write_text("[" * 200_000), "is not JSON"),
    "config of sizes that cannot be": (
        lambda f: _edit_config(f, vocab_size=2**40),
        "model.vocab_size=1099511627776 must be at most 2147483648",
    ),
    "expert removed": (lambda f: _edit_tensors(f, lambda t: t.pop(EXPERT)), f"tensor {EXPERT} is missing"),
    "tensor too many": (
        lambda f: _edit_tensors(f, lambda t: t.update({"model.extra.weight": torch.zeros(2)})),
        "tensor model.extra.weight has no place in this mixtral model",
    ),
    "tensor of another shape": (
        lambda f: _edit_tensors(f, lambda t: t.update({EXPERT: torch.zeros(24, 19)})),
        f"tensor {EXPERT} has shape [24, 19], config.json means [24, 20]",
    ),
    "tensor of another type": (
        lambda f: _edit_tensors(f, lambda t: t.update({EXPERT: t[EXPERT].half()})),
        "the parts of layers.1.ffn.experts.w_down have different types: F16, F32",
    ),
    "value that is not a number": (
        lambda f: _edit_tensors(f, lambda t: t[EXPERT][3].fill_(torch.nan)),
        f"tensor {EXPERT} has NaN or infinite values (20 of 480 that were read)",
    ),
    "value that is infinite": (
        lambda f: _edit_tensors(f, lambda t: t["model.norm.weight"][0].fill_(-torch.inf)),
        "tensor model.norm.weight has NaN or infinite values (1 of 24 that were read)",
    ),
    "quantised type": (
        lambda f: _edit_tensors(f, lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)})),
        f"tensor {EXPERT} has type F8_E4M3",
    ),
    "config of another width": (lambda f: _edit_config(f, intermediate_size=21), "config.json means [21, 24]"),
    "config of fewer experts": (lambda f: _edit_config(f, num_local_experts=5), "experts.5.w1.weight has no place"),
    "config of far more layers": (
        lambda f: _edit_config(f, num_hidden_layers=9_000),
        "config.json means 9000 layers, too many for 78 tensors",
    ),
    "config of far more experts": (
        lambda f: _edit_config(f, num_local_experts=10**6),
        "config.json means 1000000 experts, too many for 78 tensors",
    ),
    "config lacks a key": (lambda f: _edit_config(f, hidden_size=None), "config.json lacks hidden_size"),
    "config that cannot be": (lambda f: _edit_config(f, num_key_value_heads=4), "num_kv_heads=4 must divide"),
    "config of a wrong kind": (
        lambda f: _edit_config(f, hidden_size="24"),
        "hidden_size='24', which should be a whole",
    ),
    "other activation": (lambda f: _edit_config(f, hidden_act="gelu"), "hidden_act='gelu', which moefold does not"),
    "sliding window": (lambda f: _edit_config(f, sliding_window=0), "sliding_window=0, which should be 1 or more"),
    "other rope": (
        lambda f: _edit_config(f, rope_parameters={"rope_type": "dynamic", "rope_theta": 1.0}),
        "rope_type='dynamic', which moefold does not compute",
    ),
    "quantised": (
        lambda f: _edit_config(f, quantization_config={"quant_method": "fp8"}),
        "has FP8 weights of weight_block_size=None",
    ),
    "unknown family": (lambda f: _edit_config(f, model_type="mixtrel"), "did you mean 'mixtral'?"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    "generation settings that are no object": (
        lambda f: (f / "generation_config.json").write_text("[]"),
        "generation_config.json' is not a JSON object",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "it has no config.json"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    "tokenizer of another kind": (
        lambda f: (f / "tokenizer.json").rename(f / "tokenizer.model"),
        "has tokenizer.model, but no tokenizer.json, which moefold reads text with; save one with transformers",
    ),
    "pickled weights": (_pickled, "holds pickled weights (pytorch_model.bin)"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "holds no weights"),
    "no index": (
        lambda f: (f / WEIGHTS).rename(f / "part.safetensors"),
        "nor model.safetensors.index.json; it has part.safetensors, which nothing names",
    ),
    "link to nothing": (
        lambda f: ((f / WEIGHTS).unlink(), (f / WEIGHTS).symlink_to("gone")),
        "model.safetensors is a link to nothing: fetch the folder again",
    ),
    "index and single file": (lambda f: (f / INDEX).write_text("{}"), "has both model.safetensors and"),
    "index outside the folder": (_index_outside, "names files outside its folder: ../part.safetensors"),
    "index names a missing file": (
        lambda f: _shard(f, {}, {"other.weight": "gone.safetensors"}),
        "file gone.safetensors, which the index names, is missing",
    ),
    "index names a missing tensor": (
        lambda f: _shard(f, {}, {"other.weight": "rest.safetensors"}),
        "tensor other.weight is in the index but not in rest.safetensors",
    ),
    "tensor in the wrong file": (
        lambda f: _shard(f, {"part.safetensors": [EXPERT, "lm_head.weight"]}, {EXPERT: "rest.safetensors"}),
        f"tensor {EXPERT} of part.safetensors is not in the index",
    ),
}


BASE: dict[str, object] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "intermediate_size": 48,
    "num_experts_per_tok": 2,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8}
LATENT = {"n_routed_experts": 16, "n_shared_experts": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "first_k_dense_replace": 1}
FULL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": 8}
CONFIGS: dict[str, dict[str, object]] = {
    "mixtral": BASE | {"num_local_experts": 4},
    "qwen3_moe": BASE | EXPERTS,
    "gpt_oss": BASE | FULL | {"num_local_experts": 4},
    "deepseek_v3": BASE | LATENT | {"moe_intermediate_size": 8},
}
"""Smallest config.json of some families."""

WRONG_KEYS: list[tuple[str, dict[str, object], str]] = [
    ("mixtral", {"rope_theta": "abc"}, "rope_theta='abc', which should be a number"),
    ("mixtral", {"rope_theta": [1]}, "rope_theta=[1], which should be a number"),
    ("mixtral", {"rope_parameters": {"rope_theta": "x", "rope_type": "default"}}, "rope_theta='x', which should"),
    ("mixtral", {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, "lacks rope_theta"),
    ("mixtral", {"rope_scaling": {"rope_type": ["yarn"], "factor": 2}}, "rope_type=['yarn'], which moefold does not"),
    ("mixtral", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor='2', which should be a number"),
    ("mixtral", {"rope_scaling": "yarn"}, "rope_parameters='yarn', which should be an object"),
    ("mixtral", {"hidden_size": float("inf")}, "hidden_size=inf, which should be a whole number"),
    ("mixtral", {"hidden_size": float("nan")}, "hidden_size=nan, which should be a whole number"),
    ("mixtral", {"hidden_size": 10**400}, f"hidden_size={10**400}, which should be a whole number"),
    ("mixtral", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan, which should be a number"),
    ("mixtral", {"rms_norm_eps": 10**400}, f"rms_norm_eps={10**400}, which should be a number"),
    ("mixtral", {"num_attention_heads": 0}, "model.attention.num_heads=0 must be at least 1"),
    ("mixtral", {"model_type": ["mixtral"]}, "is of model_type ['mixtral'], which moefold does not know"),
    ("mixtral", {"model_type": None, "run": {"dir": "runs/x"}}, "is a run of moefold, not a Hugging Face folder; name"),
    ("mixtral", {"model_type": None}, "is of model_type None, which moefold does not know"),
    ("qwen3_moe", {"layer_types": [["a"]]}, "layer_types=[['a']], which moefold does not compute"),
    ("qwen3_moe", {"num_hidden_layers": 0}, "num_hidden_layers=0, which should be 1 to 10000"),
    ("qwen3_moe", {"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000, which should be 1 to 10000"),
    ("qwen3_moe", {"num_hidden_layers": "2"}, "num_hidden_layers='2', which should be a whole number"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0, which should be a whole number from 1 on"),
    ("qwen3_moe", {"mlp_only_layers": [[0]]}, "mlp_only_layers=[[0]], which should be a list of whole numbers"),
    ("qwen3_moe", {"norm_topk_prob": "false"}, "norm_topk_prob='false', which should be true or false"),
    ("gpt_oss", {"layer_types": [["a"], ["b"]]}, "layer_types=[['a'], ['b']], which moefold does not compute"),
    ("gpt_oss", {"sliding_window": "8"}, "sliding_window='8', which should be a whole number"),
    ("gpt_oss", {"sliding_window": None}, "lacks sliding_window"),
    ("deepseek_v3", {"first_k_dense_replace": True}, "first_k_dense_replace=True of num_hidden_layers=2"),
    ("deepseek_v3", {"first_k_dense_replace": [1]}, "first_k_dense_replace=[1] of num_hidden_layers=2"),
    ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts=0 of moe_intermediate_size=8"),
    ("deepseek_v3", {"n_group": "2", "topk_group": 1}, "n_group='2', which should be a whole number"),
    (
        "deepseek_v3",
        {"n_group": 3, "topk_group": 1},
        "model.ffn.moe.router.num_groups=3 must divide model.ffn.moe.num_experts=16",
    ),
]


@pytest.mark.parametrize(("family", "keys", "message"), WRONG_KEYS)
def test_a_wrong_key_of_config_json_is_named_with_its_value(tmp_path, family, keys, message):
    config = CONFIGS[family] | {"model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(ConfigError) as caught:
        read_model_config(tmp_path)
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return add_tokenizer(save_model(make_model("mixtral"), tmp_path_factory.mktemp("sound") / "hf"))


def _copy(sound: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "work" / "hf"
    folder.mkdir(parents=True)
    for file in sound.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_folder_is_one_message_and_nothing_written(sound, tmp_path, capsys, fault):
    break_it, message = FAULTS[fault]
    folder = _copy(sound, tmp_path)
    break_it(folder)
    (tmp_path / "out").mkdir()
    assert main(["import", str(folder), str(tmp_path / "out" / "ckpt")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("moefold: error: ")
    assert error.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())


def test_a_tensor_in_two_files_is_refused(sound, tmp_path, capsys):
    folder = _copy(sound, tmp_path)
    tensors = load_file(folder / WEIGHTS)
    _shard(folder, {"part.safetensors": [EXPERT]})
    save_file({EXPERT: tensors[EXPERT], "lm_head.weight": tensors["lm_head.weight"]}, folder / "part.safetensors")
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 2
    assert "tensor lm_head.weight is in two files, part.safetensors and rest.safetensors" in capsys.readouterr().err


def test_adapters_next_to_whole_weights_are_not_passed_over(sound, tmp_path):
    folder = _copy(sound, tmp_path)
    assert open_hf_folder(folder).tensors
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ConfigError, match=r"has adapters \(adapter_config\.json\), which transformers would apply"):
        open_hf_folder(folder)


def test_values_whose_sum_is_infinite_are_imported(sound, tmp_path):
    folder = _copy(sound, tmp_path)
    _edit_tensors(folder, lambda t: t[EXPERT].fill_(torch.finfo(torch.float32).max))
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0


def test_weights_that_are_no_numbers_are_not_evaluated(sound, tmp_path, capsys):
    folder = _copy(sound, tmp_path)
    _edit_tensors(folder, lambda t: t[EXPERT][3].fill_(torch.nan))
    np.save(tmp_path / "ids.npy", np.arange(9, dtype=np.uint16))
    words = ["--tokens", str(tmp_path / "ids.npy"), "--seq-len", "8", "--dtype", "float32"]
    assert main(["eval", str(folder), *words]) == 2
    assert f"tensor {EXPERT} has NaN or infinite values" in capsys.readouterr().err


def _load_error(folder: Path) -> str:
    """Load a model with the experts on two ranks and return the error of this rank."""
    source = find_source(str(folder))
    overrides = ("parallel.ep=2", "parallel.world_size=2")
    wish = InferenceRequest(overrides=overrides, dtype="float32", device="cpu", seq_len=8, batch_size=1)
    with pytest.raises(ConfigError) as refused:
        load_model(source, inference_config(source, wish, "eval"), torch.device("cpu"))
    return str(refused.value)


@pytest.mark.parity
def test_a_value_that_one_rank_reads_is_an_error_on_every_rank(pool, sound, tmp_path):
    folder = _copy(sound, tmp_path)
    _edit_tensors(folder, lambda t: t[EXPERT].fill_(torch.nan))
    errors = pool.run(2, _load_error, folder)
    assert errors[0] == errors[1]
    assert f"tensor {EXPERT} has NaN" in errors[0]


def test_a_folder_without_tokenizer_is_imported_on_request(sound, tmp_path):
    folder = _copy(sound, tmp_path)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--no-tokenizer"]) == 0


def test_a_flipped_bit_is_found_where_there_is_a_manifest(sound, tmp_path, capsys):
    assert main(["import", str(sound), str(tmp_path / "ckpt")]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "hf")]) == 0
    weights = tmp_path / "hf" / WEIGHTS
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "again")]) == 2
    assert "changed since its manifest was written: model.norm.weight" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_a_head_beside_tied_embeddings_must_equal_them(tmp_path, capsys):
    folder = add_tokenizer(save_model(make_model("llama-tied"), tmp_path / "hf"))
    _edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    _edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    assert main(["import", str(folder), str(tmp_path / "other")]) == 2
    assert "tensor lm_head.weight must equal model.embed_tokens.weight, and differs" in capsys.readouterr().err


MANIFESTS: dict[str, Callable[[dict], object]] = {
    "file outside": lambda m: m["tensors"][EXPERT].update(file="../../stolen.safetensors"),
    "absolute file": lambda m: m["tensors"][EXPERT].update(file="/stolen.safetensors"),
    "file of another kind": lambda m: m["tensors"][EXPERT].update(file="config.json"),
    "no file": lambda m: m["tensors"][EXPERT].pop("file"),
    "layout": lambda m: m.update(layout=7),
    "layout of no kind": lambda m: m.update(layout=[]),
    "family": lambda m: m.update(family=None),
}


@pytest.mark.parametrize("fault", MANIFESTS)
def test_a_broken_manifest_leads_nowhere(sound, tmp_path, capsys, fault):
    """The one in a checkpoint says which files an export writes."""
    assert main(["import", str(sound), str(tmp_path / "new" / "ckpt")]) == 0
    file = tmp_path / "new" / "ckpt" / "hf" / MANIFEST_FILE
    manifest = json.loads(file.read_text())
    MANIFESTS[fault](manifest)
    file.write_text(json.dumps(manifest))
    assert main(["export", str(tmp_path / "new" / "ckpt"), str(tmp_path / "new" / "hf")]) == 2
    assert f"{MANIFEST_FILE}' is broken" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*") if path.parent.name in ("new", tmp_path.name)) == [
        "ckpt",
        "new",
    ]


@pytest.mark.parametrize("options", [(), ("--dtype", "float16"), ("--quantize", "fp8")])
def test_weights_that_are_no_numbers_are_not_exported(sound, tmp_path, capsys, options):
    assert main(["import", str(sound), str(tmp_path / "ckpt")]) == 0
    values = load_file(sound / "model.safetensors")[ATTENTION]
    spoil_stored(tmp_path / "ckpt", values)
    assert main(["checkpoint", "verify", str(tmp_path / "ckpt")]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "out"), *options]) == 2
    message = f"tensor {ATTENTION} has NaN or infinite values (1 of {values.numel()} that were read)"
    assert message in (error := capsys.readouterr().err)
    assert "name an earlier checkpoint of the run" in error
    assert not (tmp_path / "out").exists()


def test_float16_that_would_lose_a_value_is_refused(tmp_path, capsys):
    folder = add_tokenizer(save_model(make_model("llama"), tmp_path / "hf"))
    _edit_tensors(folder, lambda t: t["model.norm.weight"][3:4].fill_(7e4))
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--dtype", "float16"]) == 2
    assert "tensor model.norm.weight has values that float16 cannot hold" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    spoil_stored(tmp_path / "ckpt", load_file(folder / WEIGHTS)["model.norm.weight"], torch.inf)
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "other"), "--dtype", "float16"]) == 2
    assert "tensor model.norm.weight has NaN or infinite values (1 of" in capsys.readouterr().err


@pytest.mark.parametrize(("out", "message"), [("/", "exists"), (".", "exists"), ("gone/..", "is not a name of a new")])
def test_a_name_that_is_not_a_new_folder(sound, tmp_path, monkeypatch, capsys, out, message):
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(sound), out]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_overwritten(sound, tmp_path, capsys):
    (tmp_path / "ckpt").mkdir()
    assert main(["import", str(sound), str(tmp_path / "ckpt")]) == 2
    assert "exists; name another folder, or remove it" in capsys.readouterr().err


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """As on a full disk, no file may grow beyond so many bytes inside; not even that which pytest reports into."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_message_and_leaves_not_even_new_parents(sound, tmp_path, capsys):
    assert main(["import", str(sound), str(tmp_path / "ckpt")]) == 0
    capsys.readouterr()
    with full_disk(10_000):
        status = main(["export", str(tmp_path / "ckpt"), str(tmp_path / "new" / "er" / "hf")])
    assert status == 2
    error = capsys.readouterr().err
    assert "hf' cannot be written: File too large" in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_companions_that_do_not_fit_are_one_message(sound, tmp_path):
    with full_disk(10), pytest.raises(ConfigError, match="cannot be copied to .*: File too large"):
        copy_sidecar_files(sound, tmp_path / "companions")


def test_copied_files_are_not_links_to_elsewhere(sound, tmp_path, capsys):
    """Else a stranger's folder would put a file of ours into an export that is published."""
    folder = _copy(sound, tmp_path)
    (tmp_path / "secret.json").write_text("mine")
    (folder / "extra.json").symlink_to(tmp_path / "secret.json")
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 2
    assert "extra.json is a link that leads out of the folder" in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists()


def test_the_links_of_a_cache_of_the_hub_are_followed(sound, tmp_path):
    cache = tmp_path / "models--x"
    (cache / "snapshots").mkdir(parents=True)
    folder = _copy(sound, tmp_path).rename(cache / "snapshots" / "abcd")
    blob = cache / "blobs" / "0123"
    blob.parent.mkdir()
    (folder / "config.json").rename(blob)
    (folder / "config.json").symlink_to("../../blobs/0123")
    assert "config.json" in copy_sidecar_files(folder, tmp_path / "copied")


@pytest.mark.parametrize("file", ["config.json", MANIFEST_FILE, WEIGHTS])
def test_json_that_is_nested_too_deep_is_one_message(sound, tmp_path, capsys, file):
    folder = _copy(sound, tmp_path)
    text = b"[" * 100_000
    (folder / file).write_bytes((len(text).to_bytes(8, "little") if file == WEIGHTS else b"") + text)
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "ckpt").exists()


def test_parents_that_were_there_stay(sound, tmp_path):
    (tmp_path / "there").mkdir()
    assert main(["import", str(tmp_path / "gone"), str(tmp_path / "there" / "new" / "ckpt")]) == 2
    folder = _copy(sound, tmp_path)
    (folder / MANIFEST_FILE).write_text("{")
    assert main(["import", str(folder), str(tmp_path / "there" / "new" / "ckpt")]) == 2
    assert not list((tmp_path / "there").iterdir())


def test_a_damaged_checkpoint_is_not_exported(sound, tmp_path, capsys):
    assert main(["import", str(sound), str(tmp_path / "ckpt")]) == 0
    (file,) = (tmp_path / "ckpt").glob("*.distcp")
    with file.open("r+b") as opened:
        opened.truncate(1000)
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "hf")]) == 2
    assert f"is damaged: file {file.name} has 1000 of " in capsys.readouterr().err
    assert main(["export", str(tmp_path / "hf"), str(tmp_path / "again")]) == 2
    assert "hf' does not exist; name a run, or a folder of checkpoints" in capsys.readouterr().err
    assert not list(tmp_path.glob("*hf*"))


def test_bytes_that_change_while_reading_leave_nothing(sound, tmp_path, capsys):
    """The zip of a chunk is broken, which only reading it shows, in the middle of the export."""
    assert main(["import", str(sound), str(tmp_path / "ckpt")]) == 0
    (file,) = (tmp_path / "ckpt").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    file.write_bytes(data)
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "hf"), "--no-verify"]) == 2
    assert "cannot be read: " in capsys.readouterr().err
    assert not list(tmp_path.glob("*hf*"))


@pytest.mark.parametrize(("spelled", "where"), [("./part.safetensors", ""), ("weights/part.safetensors", "weights")])
def test_an_index_may_name_its_files_by_paths_inside_the_folder(sound, tmp_path, spelled, where):
    folder = _copy(sound, tmp_path)
    _shard(folder, {"part.safetensors": [EXPERT]}, {})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][EXPERT] = spelled
    (folder / INDEX).write_text(json.dumps(index))
    (folder / where).mkdir(exist_ok=True)
    (folder / "part.safetensors").rename(folder / where / "part.safetensors")
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--check"]) == 0
    if where:
        (folder / where).rename(tmp_path / "elsewhere")
        (folder / where).symlink_to(tmp_path / "elsewhere")
        assert main(["import", str(folder), str(tmp_path / "again")]) == 2


def test_a_key_that_nothing_reads_is_refused_and_passes_by_name(sound, tmp_path, capsys):
    folder = _copy(sound, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    odd = {"final_logit_softcapping": 30.0, "unsloth_version": "1"}
    (folder / "config.json").write_text(json.dumps(config | odd))
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 2
    assert "final_logit_softcapping=30.0, which other families compute with; if" in capsys.readouterr().err
    words = ["import", str(folder), str(tmp_path / "ckpt"), "--ignore-key", "final_logit_softcapping", "--report"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "config.json, ignored: final_logit_softcapping=30.0, unsloth_version='1'" in text
    assert "config.json, read: " in text
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "hf"), "--check"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == config | odd


def test_other_bytes_of_a_tensor_are_found_while_they_are_read(sound, tmp_path, capsys):
    assert main(["import", str(sound), str(tmp_path / "ckpt")]) == 0
    (file,) = (tmp_path / "ckpt").glob("*.distcp")
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte[0] ^ 1]))
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "hf")]) == 2
    assert f"is damaged: file {file.name} has other content than was written" in capsys.readouterr().err
    assert not list(tmp_path.glob("*hf*"))
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "hf"), "--no-verify"]) == 0


def test_a_changed_description_is_found_before_it_is_read(sound, tmp_path, capsys):
    assert main(["import", str(sound), str(tmp_path / "ckpt")]) == 0
    index = tmp_path / "ckpt" / ".metadata"
    index.write_bytes(bytes(len(index.read_bytes())))
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "hf")]) == 2
    assert "is damaged: file .metadata has other content than was written" in capsys.readouterr().err
