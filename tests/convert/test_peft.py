"""Adapters in PEFT's format: a recorded folder of PEFT, export and import, and refusals."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.checkpoint.streaming_io import CheckpointSource
from moefold.cli.main import main
from moefold.config.sections.lora import LoraConfig
from moefold.convert.adapters.peft import split_targets
from moefold.convert.adapters.peft_names import read_stacked, stacked_parameters, write_stacked
from moefold.convert.families.families import FAMILIES
from moefold.convert.families.hf_config import find_family, read_hf_config, read_model_config
from moefold.cost.adapter_spec import adapted_weights, adapter_names, adapter_weights
from moefold.inference.source import find_source
from tests.convert.hf_models import make_model, save_model
from tests.convert.spoiled_checkpoint import spoil_stored

RECORDED = Path(__file__).parent / "peft_qwen3"
"""Written by PEFT 0.21.2: random adapters of q_proj, o_proj and up_proj, r=2, lora_alpha=3, of a small Qwen3."""
STACKED = Path(__file__).parent / "peft_qwen3_moe"
"""The same of q_proj and of stacked experts (target_parameters gate_up_proj and down_proj) of a small Qwen3-MoE."""
TRAIN = ["run.device=cpu", "run.dtype=float32", "data.kind=synthetic", "train.seq_len=16", "train.global_batch_size=2"]
TRAIN += ["run.steps=2", "train.lr=0.05"]
RESUME = ["run.dir=new", "checkpoint.resume=run/checkpoints/step-000002"]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: values for file in sorted(folder.glob("*.safetensors")) for name, values in load_file(file).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a small Qwen3 (hf), a small MoE (moe), its import (base) and a run of adapters on it (run)."""
    path = tmp_path_factory.mktemp("peft")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        save_model(make_model("qwen3"), path / "hf", dtype=torch.float32)
        save_model(make_model("mixtral"), path / "moe", dtype=torch.float32)
        save_model(make_model("qwen3-moe"), path / "stacked", dtype=torch.float32)
        assert main(["import", "moe", "base", "--no-tokenizer"]) == 0
        assert main(["train", "base/recipe.toml", *TRAIN, "lora.rank=4", "run.dir=run"]) == 0
    return path


def test_a_folder_of_peft_is_read(folder, tmp_path, monkeypatch):
    """Merged, each weight is W + lora_alpha / r * B A of PEFT's tensors. All others are the base's."""
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(RECORDED), "adapters", "--base", str(folder / "hf")]) == 0
    assert main(["export", "adapters", "merged", "--merge", "--check"]) == 0
    base = _tensors(folder / "hf")
    merged = _tensors(tmp_path / "merged")
    recorded = _tensors(RECORDED)
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if f"{module}.lora_A.weight" in recorded:
            product = recorded[f"{module}.lora_B.weight"].double() @ recorded[f"{module}.lora_A.weight"].double()
            expected = (weight.double() + 3 / 2 * product).float()
        assert torch.allclose(merged[name], expected, rtol=1e-6, atol=1e-7), name
    assert main(["export", "adapters", "again"]) == 0
    again = _tensors(tmp_path / "again")
    assert all(torch.equal(again[name], values) for name, values in recorded.items())
    assert again.keys() == recorded.keys()


def test_adapters_of_stacked_experts_are_read(folder, tmp_path, monkeypatch):
    """Each expert is W + lora_alpha / r * B A, as `ParamWrapper.get_delta_weight` of PEFT computes it."""
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(STACKED), "adapters", "--base", str(folder / "stacked")]) == 0
    assert main(["export", "adapters", "merged", "--merge"]) == 0
    base = _tensors(folder / "stacked")
    merged = _tensors(tmp_path / "merged")
    recorded = _tensors(STACKED)
    experts = "base_model.model.model.layers.1.mlp.experts"
    deltas = []
    for prefix, inputs, outputs in ((f"{experts}.base_layer", 24, 24), (experts, 12, 24)):
        a_ERI = recorded[f"{prefix}.lora_A.weight"].reshape(6, 2, inputs)
        b_ORE = recorded[f"{prefix}.lora_B.weight"].reshape(outputs, 2, 6)
        deltas.append(1.5 * torch.einsum("o r e, e r i -> e o i", b_ORE, a_ERI))
    for e in range(6):
        parts = {"gate_proj": deltas[0][e, :12], "up_proj": deltas[0][e, 12:], "down_proj": deltas[1][e]}
        for leaf, delta in parts.items():
            name = f"model.layers.1.mlp.experts.{e}.{leaf}.weight"
            assert torch.allclose(merged[name], base[name] + delta, rtol=1e-5, atol=1e-6), name


def test_adapters_of_gate_and_up_alone_stay_stacked(folder, tmp_path, monkeypatch):
    """PEFT (0.21) loses them if each expert has its own: it looks for them under the name of the inner module."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STACKED, "gate_up")
    outer = {name: values for name, values in _tensors(STACKED).items() if ".experts.base_layer." in name}
    recorded = {name.replace(".base_layer", ""): values for name, values in outer.items()}
    save_file(recorded, tmp_path / "gate_up" / "adapter_model.safetensors")
    assert main(["import", "gate_up", "adapters", "--base", str(folder / "stacked")]) == 0
    assert main(["export", "adapters", "again"]) == 0
    again = _tensors(tmp_path / "again")
    assert again.keys() == recorded.keys()
    deltas = [
        _delta(*(tensors[f"base_model.model.model.layers.1.mlp.experts.lora_{x}.weight"] for x in "AB"), 6)
        for tensors in (recorded, again)
    ]
    assert torch.allclose(*deltas, rtol=1e-6, atol=1e-7)
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["experts.gate_up_proj"]
    assert config["rank_pattern"] == {"experts.gate_up_proj": 4}


def test_plain_initial_weights_and_metadata_are_no_obstacle(folder, tmp_path, capsys):
    _spoil(folder, tmp_path / "peft", init_lora_weights="gaussian", unsloth_version="1", output_gain=2)
    words = ["import", str(tmp_path / "peft"), str(tmp_path / "out"), "--base", str(folder / "hf")]
    assert main([*words, "--ignore-key", "output_gain"]) == 0
    assert "adapter_config.json has keys that are ignored: " in (text := capsys.readouterr().out)
    assert "output_gain=2" in text
    assert "unsloth_version='1'" in text


def test_pickled_adapters_are_refused(folder, tmp_path, capsys):
    shutil.copytree(RECORDED, tmp_path / "peft")
    (tmp_path / "peft" / "adapter_model.safetensors").rename(tmp_path / "peft" / "adapter_model.bin")
    assert main(["import", str(tmp_path / "peft"), str(tmp_path / "out"), "--base", str(folder / "hf")]) == 2
    assert "holds pickled weights (adapter_model.bin), which can run code" in capsys.readouterr().err


def test_adapters_that_are_no_numbers_are_refused(folder, tmp_path, capsys):
    adapters = shutil.copytree(RECORDED, tmp_path / "adapters")
    tensors = load_file(adapters / "adapter_model.safetensors")
    next(values for name, values in tensors.items() if ".layers.1." in name)[0] = torch.inf
    save_file(tensors, adapters / "adapter_model.safetensors")
    assert main(["import", str(adapters), str(tmp_path / "ck"), "--base", str(folder / "hf")]) == 2
    assert "tensor layers.1." in (error := capsys.readouterr().err)
    assert "has NaN or infinite values" in error
    assert not (tmp_path / "ck").exists()


def test_trained_adapters_that_are_no_numbers_are_not_exported(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(RECORDED), "adapters", "--base", str(folder / "hf")]) == 0
    name, values = next(iter(_tensors(RECORDED).items()))
    spoil_stored(tmp_path / "adapters", values)
    for options in ((), ("--merge",)):
        assert main(["export", "adapters", "again", *options]) == 2
        assert "has NaN or infinite values" in (error := capsys.readouterr().err)
        assert (name in error) == (not options)
        assert not (tmp_path / "again").exists()


def test_modules_named_like_experts_are_targeted_by_their_weights():
    dense = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj"]
    experts = [f"model.layers.1.mlp.experts.{e}.gate_proj" for e in range(2)]
    weights = ["model.layers.0.mlp.gate_proj.weight"]
    family = FAMILIES["qwen3_moe"]
    assert split_targets(dense, experts, [], family) == (["gate_proj", "q_proj"], weights)
    assert split_targets(dense, [], [], family) == (["q_proj"], weights)
    assert split_targets(dense, [], [], FAMILIES["qwen3"]) == (["gate_proj", "q_proj"], [])


def _delta(a: torch.Tensor, b: torch.Tensor, experts: int) -> torch.Tensor:
    """B A of each expert, as `ParamWrapper.get_delta_weight` of PEFT computes it for a parameter [E, o, i]."""
    return torch.einsum("o r e, e r i -> e o i", b.reshape(len(b), -1, experts), a.reshape(experts, -1, a.shape[1]))


@pytest.mark.parametrize("matrices", ["w_gate w_up w_down", "w_gate w_down", "w_up", "w_down"])
@pytest.mark.parametrize("name", ["qwen2-moe", "granite-moe", "kimi-linear", "gpt-oss", "llama4"])
def test_adapters_of_stacked_experts_are_written(tmp_path, name, matrices):
    """B A of a parameter has B A of each of our matrices at its place, else 0; and it is read as it was written."""
    made = make_model(name)
    made.config.save_pretrained(tmp_path)
    model = read_model_config(tmp_path)
    weights = {name: w for name, w in adapted_weights(model, LoraConfig(rank=3)).items() if w.is_expert}
    parameters = stacked_parameters(model, find_family(read_hf_config(tmp_path), tmp_path), weights)
    shapes = {name: pair.shape for name, pair in adapter_weights(model, LoraConfig(rank=3)).items()}
    adapters = {
        name: tuple(torch.randn(shapes[part], dtype=torch.float64) for part in adapter_names(name))
        for name in weights
        if name.rpartition(".")[2] in matrices.split()
    }
    written = write_stacked(adapters, parameters)
    read = read_stacked(written, parameters, 3)
    assert read.keys() == {part for name in adapters for part in adapter_names(name)}
    for name, pair in adapters.items():
        assert all(torch.equal(read[part], ours) for part, ours in zip(adapter_names(name), pair, strict=True))
    for module, several in parameters.items():
        adapted = [each for each in several if any(piece.name in adapters for piece in each.pieces)]
        for each, wrapper in zip(
            adapted, (["", ".base_layer"] if len(adapted) == 1 else [".base_layer", ""]), strict=False
        ):
            pair = [written.pop(f"base_model.model.{module}{wrapper}.lora_{x}.weight") for x in "AB"]
            shape = made.get_parameter(each.hf_name).shape
            delta = _delta(*pair, shape[0])
            # PEFT takes the last dim for the inputs, but in modules with this attribute.
            if getattr(made.get_submodule(module), "is_transposed", False):
                delta = delta.transpose(1, 2)
            assert delta.shape == shape
            for piece in each.pieces:
                a, b = adapters.get(piece.name, (torch.zeros(1, 1, 1).double(),) * 2)
                assert torch.allclose(delta[piece.hf_region()].permute(piece.dims), a @ b, rtol=1e-12, atol=1e-12)
    assert not written


def test_targets_are_named_as_the_model_of_transformers_has_them():
    found = split_targets(["model.layers.1.attention.dense"], [], [], FAMILIES["bailing_hybrid"])
    assert found == (["dense", "o_proj"], [])


def test_modules_named_like_others_are_targeted_by_their_whole_names():
    adapted = [f"model.layers.{i}.self_attn.{name}" for i in (1, 3) for name in ("q_proj", "out_proj")]
    found = split_targets(adapted, [], ["model.layers.0.conv.out_proj"], FAMILIES["lfm2_moe"])
    assert found == (["model.layers.1.self_attn.out_proj", "model.layers.3.self_attn.out_proj", "q_proj"], [])


def test_experts_that_transformers_has_no_parameter_of_are_refused(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(make_model("longcat-flash"), tmp_path / "hf", dtype=torch.float32)
    words = ["checkpoint.init_from=hf", "lora.rank=2", 'lora.targets=["experts.w_up"]', "run.dir=run"]
    assert main(["import", "hf", "base", "--no-tokenizer"]) == 0
    assert main(["train", "base/recipe.toml", *TRAIN, *words]) == 0
    assert main(["export", "run", "out"]) == 2
    assert (
        "PEFT has no place for adapters of w_up of the experts of longcat_flash: export with" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_trained_adapters_go_out_and_in(folder, tmp_path, monkeypatch, capsys):
    """Every expert is a module of PEFT. Adapters that are read again have the same bits, and training goes on."""
    monkeypatch.chdir(tmp_path)
    run = str(folder / "run")
    assert main(["export", run, "peft"]) == 0
    assert main(["import", "peft", "again", "--base", str(folder / "base")]) == 0
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 16.0)
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj", "w1", "w2", "w3"]
    assert config["base_model_name_or_path"] == str(folder / "moe")
    assert "Low-rank adapters of a mixtral model" in (tmp_path / "peft" / "README.md").read_text()
    expert = "base_model.model.model.layers.1.block_sparse_moe.experts.5.w2.lora_A.weight"
    assert load_file(tmp_path / "peft" / "adapter_model.safetensors")[expert].shape == (4, 20)
    first, second = (CheckpointSource(path) for path in (next(Path(run).glob("checkpoints/step-*")), Path("again")))
    assert first.shapes == second.shapes
    for name, shape in first.shapes.items():
        region = tuple(slice(0, size) for size in shape)
        assert torch.equal(first.read(name, region), second.read(name, region)), name
    # The model was made for longer sequences than the run has.
    longest = json.loads((folder / "moe" / "config.json").read_text())["max_position_embeddings"]
    assert find_source(run).context == longest > 16
    capsys.readouterr()
    assert main(["train", "again/recipe.toml", *TRAIN, "run.dir=on"]) == 0
    text = capsys.readouterr().out
    assert f"weights from {folder / 'base'}; adapters from {tmp_path / 'again'}" in text
    assert "parameters in adapters of rank 4 are trained" in text


def _spoil(folder: Path, target: Path, **keys: object) -> None:
    shutil.copytree(RECORDED, target)
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_dora": True}, "has use_dora=True, which moefold does not compute; it reads False"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank_pattern={'q_proj': 4}, which moefold does not compute"),
        ({"rank_pattern": {"mlp.experts.gate_up_proj": 4}}, "gives some modules another scale than lora_alpha / r, by"),
        ({"peft_type": "IA3"}, "has peft_type='IA3'; moefold reads low-rank adapters, LORA"),
        ({"r": 0}, "has r=0 and lora_alpha=3, which are not sizes of adapters"),
        ({"r": 3}, "has adapters of another model: base_model.model.model.layers.0"),
        *(
            (
                {"init_lora_weights": kind},
                f"has init_lora_weights={kind!r}, with which PEFT changes the base",
            )
            for kind in ("pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga", "another")
        ),
        (
            {"layer_replication": [[0, 1]]},
            "layer_replication=[[0, 1]], which PEFT's LoRA has",
        ),
        (
            {"alora_invocation_tokens": [5]},
            "alora_invocation_tokens=[5], which PEFT's LoRA has",
        ),
        ({"output_gain": 2}, "has output_gain=2, which moefold does not know; if the model computes the same without"),
    ],
)
def test_other_kinds_of_adapters_are_refused(folder, tmp_path, capsys, keys, message):
    _spoil(folder, tmp_path / "peft", **keys)
    assert main(["import", str(tmp_path / "peft"), str(tmp_path / "out"), "--base", str(folder / "hf")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_adapters_of_another_model_are_refused(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(RECORDED), "out", "--base", str(folder / "moe")]) == 2
    assert "has adapters of modules that this model lacks or that cannot be adapted: " in capsys.readouterr().err
    assert main(["import", str(RECORDED), "out"]) == 2
    assert "which is not a folder here; name the model's folder with --base DIR" in capsys.readouterr().err
    _spoil(folder, tmp_path / "part")
    tensors = load_file(RECORDED / "adapter_model.safetensors")
    kept = {name: values for name, values in tensors.items() if ".layers.2." not in name}
    save_file(kept, tmp_path / "part" / "adapter_model.safetensors")
    assert main(["import", "part", "out", "--base", str(folder / "hf")]) == 2
    assert "as it only adapts some layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "base", "out", "--merge"], "--merge has no effect: 'base' has all weights; leave it out"),
        (["export", "run", "out", "--quantize", "fp8"], "--quantize has no effect on adapters"),
        (["import", "moe", "out", "--base", "base"], "--base names the base weights of adapters, and 'moe' has none"),
        (["import", "gone", "out", "--base", "base"], "'gone' does not exist or is not a folder"),
        (["merge", "run", "run", "--out", "out"], "only has adapters, whose products are not averaged with them"),
        (["train", "base/recipe.toml", *TRAIN, *RESUME], "only has adapters of rank 4, and lora.rank=0 trains all"),
        (
            ["train", "base/recipe.toml", *TRAIN, "lora.rank=2", *RESUME],
            "has other adapters: lora.rank 4 there, 2 here; set [lora] as it was, or another run.dir",
        ),
        (
            ["train", "base/recipe.toml", *TRAIN, "lora.rank=4", "run.dir=new", "lora.init_from=base"],
            "lora.init_from='base' has no adapters; name a checkpoint of a run with lora.rank, or leave it out",
        ),
        (
            ["train", "base/recipe.toml", *TRAIN, "lora.rank=4", "run.dir=new", "checkpoint.init_from="],
            "lora.rank=4 trains adapters of given weights, and checkpoint.init_from names none; set it to a",
        ),
        (
            ["train", "base/recipe.toml", *TRAIN, "lora.rank=4", "lora.init_from=run", "checkpoint.init_from=moe"],
            "and checkpoint.init_from='moe' has others; set checkpoint.init_from=",
        ),
    ],
)
def test_options_without_effect_or_match_are_refused(folder, monkeypatch, capsys, words, message):
    monkeypatch.chdir(folder)
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "all") for name in ("mixtral", "qwen3", "deepseek-v2", "olmoe", "qwen3-moe")),
        *((name, "all") for name in ("qwen2-moe", "phi-moe", "lfm2-moe", "kimi-linear", "bailing-hybrid", "hy-v3")),
        *((name, "all") for name in ("granite-moe", "gpt-oss", "llama4")),
        *((name, "experts") for name in ("qwen3-5-moe", "granite-moe-shared", "llama4")),
        ("qwen2-moe", "experts.w_down"),
        ("qwen3-moe", "experts.w_gate"),
        ("mixtral", "experts.w_down"),
        ("deepseek-v3", 'experts.w_gate", "experts.w_up'),
    ],
)
def test_peft_computes_the_merged_model(tmp_path, monkeypatch, name, target):
    """Train adapters, and compare the logits of PEFT's model with the merged export's logits. Then import again."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    save_model(make_model(name), tmp_path / "hf", dtype=torch.float32)
    assert main(["import", "hf", "base", "--no-tokenizer"]) == 0
    targets = f'lora.targets=["{target}"]'
    assert main(["train", "base/recipe.toml", *TRAIN, "lora.rank=4", targets, "run.dir=run"]) == 0
    assert main(["export", "run", "peft"]) == 0
    assert main(["export", "run", "merged", "--merge"]) == 0
    ids = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    base = AutoModelForCausalLM.from_pretrained("hf", dtype=torch.float32)
    with torch.no_grad():
        plain = base(ids).logits
        merged = AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)(ids).logits
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adapted = peft.PeftModel.from_pretrained(base, "peft")(ids).logits
    assert not [each for each in caught if "missing adapter keys" in str(each.message)]
    assert (plain - merged).abs().max() > 1e-2
    assert torch.allclose(adapted, merged, rtol=1e-4, atol=1e-4)
    # PEFT saves stacked adapters of stacked experts.
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("hf", dtype=torch.float32), "peft")
    loaded.save_pretrained("saved")
    for source, target in (("peft", "first"), ("saved", "second")):
        assert main(["import", source, target, "--base", "base"]) == 0
    first, second = (CheckpointSource(tmp_path / folder) for folder in ("first", "second"))
    assert first.shapes == second.shapes
    for adapter, shape in first.shapes.items():
        region = tuple(slice(0, size) for size in shape)
        assert torch.equal(first.read(adapter, region), second.read(adapter, region)), adapter
