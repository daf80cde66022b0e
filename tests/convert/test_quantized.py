"""Folders in block-wise FP8 and MXFP4: they are read as the bfloat16 weights that they stand for, bit by bit."""

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moefold.cli.main import main
from moefold.convert import quantized_tensors
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.quantized_tensors import E2M1_VALUES, quantize_fp8, quantize_mxfp4
from moefold.convert.weight_sources import HfSource
from moefold.errors import ConfigError
from tests.convert.hf_models import make_model, save_model
from tests.convert.regions import full_region

pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
WEIGHTS = "model.safetensors"
BLOCK = (16, 10)
"""Divides no matrix of the models: the last blocks are smaller."""
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def rewrite(folder: Path, quantization: dict[str, object] | None, tensors: dict[str, Tensor]) -> Path:
    """Replace the weights of a folder, and say how they are quantised."""
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    config |= {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def fp8_pair(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and the values that they stand for, block by block."""
    rows, columns = weight.shape
    codes, values = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            box = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = weight[box].abs().max() / 448
            codes[box] = (weight[box] / scales[i, j]).to(torch.float8_e4m3fn)
            values[box] = codes[box].float() * scales[i, j]
    return codes, scales, values


def fp8_folders(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """A quantised folder, and a plain folder of the same values."""
    model = make_model(name)
    plain = {key: value.float() for key, value in load_file(save_model(model, tmp_path / "fp8") / WEIGHTS).items()}
    save_model(model, tmp_path / "plain")
    quantized: dict[str, Tensor] = {}
    for key, value in plain.items():
        is_projection = any(part in key for part in ("proj", "indexer.w")) and "weights_proj" not in key
        if (value.dim() == 2 and is_projection) or (".w" in key and "experts" in key):
            quantized[key], quantized[f"{key}_scale_inv"], plain[key] = fp8_pair(value)
        else:
            quantized[key] = value.bfloat16() if "bias" not in key else value
        plain[key] = plain[key].bfloat16() if "bias" not in key else plain[key]
    return rewrite(tmp_path / "fp8", FP8, quantized), rewrite(tmp_path / "plain", None, plain)


def mxfp4_folders(tmp_path: Path) -> tuple[Path, Path]:
    """Draw random codes and scales, and return them with the values that transformers computes from them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = make_model("gpt-oss", hidden_size=96, intermediate_size=64)
    quantized = load_file(save_model(model, tmp_path / "mxfp4", dtype=torch.bfloat16) / WEIGHTS)
    plain = load_file(save_model(model, tmp_path / "plain", dtype=torch.bfloat16) / WEIGHTS)
    generator = torch.Generator().manual_seed(5)
    for key in [key for key in plain if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = plain[key].shape
        shape = (experts, columns, rows // 32, 16)
        blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 131, shape[:-1], dtype=torch.uint8, generator=generator)
        del quantized[key]
        quantized |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        plain[key] = convert_moe_packed_tensors(blocks, scales)
        assert plain[key].shape == (experts, rows, columns)
    return rewrite(tmp_path / "mxfp4", MXFP4, quantized), rewrite(tmp_path / "plain", None, plain)


FOLDERS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "deepseek-v32": lambda path: fp8_folders(path, "deepseek-v32"),
    "minimax-m2": lambda path: fp8_folders(path, "minimax-m2"),
    "gpt-oss": mxfp4_folders,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_quantised_folder_is_its_bfloat16_folder(tmp_path, name):
    """Import and export give the plain tensors, and config.json no longer names the quantisation."""
    quantized, plain = FOLDERS[name](tmp_path)
    arguments = ["--no-tokenizer", "--check"]
    assert main(["import", str(quantized), str(tmp_path / "ckpt"), *arguments]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--check"]) == 0
    found, expected = load_file(tmp_path / "again" / WEIGHTS), load_file(plain / WEIGHTS)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert main(["import", str(tmp_path / "again"), str(tmp_path / "once-more"), *arguments]) == 0


@pytest.mark.parametrize("name", ["minimax-m2", "gpt-oss"])
def test_any_part_of_a_weight_equals_the_part_of_the_whole(tmp_path, name):
    source = HfSource(open_hf_folder(FOLDERS[name](tmp_path)[0]))
    for key, shape in source.shapes.items():
        whole = source.read(key, full_region(shape))
        part = tuple(slice(size // 3, size - size // 4) for size in shape)
        assert torch.equal(source.read(key, part), whole[part]), key


@pytest.mark.parametrize("name", FOLDERS)
def test_an_export_quantises_the_weights_that_it_read(tmp_path, name):
    """Codes of MXFP4 stand for the same values again. Codes of FP8 have other blocks and differ by their precision."""
    quantized, plain = FOLDERS[name](tmp_path)
    kind = "mxfp4" if name == "gpt-oss" else "fp8"
    assert main(["import", str(quantized), str(tmp_path / "ckpt"), "--no-tokenizer"]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--quantize", kind, "--check"]) == 0
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == kind
    names = load_file(quantized / WEIGHTS).keys()
    assert load_file(tmp_path / "again" / WEIGHTS).keys() == names
    assert main(["import", str(tmp_path / "again"), str(tmp_path / "once-more"), "--no-tokenizer", "--check"]) == 0
    first, second = (HfSource(open_hf_folder(folder)) for folder in (plain, tmp_path / "again"))
    for key, shape in first.shapes.items():
        expected, found = (source.read(key, full_region(shape)).float() for source in (first, second))
        # Half a step of three bits of mantissa of the largest magnitude, and the rounding to bfloat16.
        tolerance = 0.0 if kind == "mxfp4" else 0.04 * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0.04 if kind == "fp8" else 0.0, atol=tolerance)


def test_fp8_blocks_equal_the_definition(monkeypatch):
    monkeypatch.setattr(quantized_tensors, "FP8_BLOCK", 16)
    weight = torch.randn(40, 23, generator=torch.Generator().manual_seed(3))
    weight[:16, :16] = 0.0
    codes, scales = quantize_fp8(weight)
    assert (scales.shape, scales[0, 0]) == ((3, 2), 1.0)
    for i, j in product(range(3), range(2)):
        box = slice(16 * i, 16 * i + 16), slice(16 * j, 16 * j + 16)
        largest = weight[box].abs().max()
        assert scales[i, j] == (largest / 448 if largest > 0 else 1)
        assert torch.equal(codes[box].float(), (weight[box] / scales[i, j]).to(torch.float8_e4m3fn).float())


def test_mxfp4_codes_are_the_nearest_even_ones():
    """Every value of a group of 32, against all 16 codes."""
    values = torch.randn(3, 64, 5, generator=torch.Generator().manual_seed(3))
    values[0, :32, 0] = 0.0
    # Ties between two codes: 0.25, 1.25, 2.5 and 5 with scale 1.
    values[1, :32, 1] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 7.9] + [0.0] * 21)
    packed, exponents = quantize_mxfp4(values)
    table = [*E2M1_VALUES, *(-value for value in E2M1_VALUES)]
    for e, group, row in product(range(3), range(2), range(5)):
        part = values[e, 32 * group : 32 * group + 32, row].tolist()
        largest = max(map(abs, part))
        scale = 2.0 ** (math.floor(math.log2(largest)) - 2) if largest else 2.0**-127
        assert 2.0 ** (int(exponents[e, row, group]) - 127) == scale
        codes = [(int(byte) >> shift) & 15 for byte in packed[e, row, group] for shift in (0, 4)]
        for value, code in zip(part, codes, strict=True):
            errors = [abs(abs(value) / scale - magnitude) for magnitude in E2M1_VALUES]
            best = [i for i, error in enumerate(errors) if error == min(errors)]
            assert code % 8 == (best[0] if len(best) == 1 else next(i for i in best if i % 2 == 0)), (value, code)
            assert value == 0 or (table[code] <= 0) == (value < 0) or table[code] == 0


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("mixtral", "mxfp4", "--quantize mxfp4 is incompatible with family mixtral; choose fp8 or none"),
        ("gpt-oss", "fp8", "--quantize fp8 is incompatible with family gpt_oss; choose mxfp4 or none"),
        ("gpt-oss", "mxfp4", "one scale for 32 inputs, and the experts have 24 in model.layers.0.mlp.experts.gate_up"),
        ("granite-moe", "fp8", "--quantize fp8 needs a tensor for each expert, and family granitemoe stores"),
    ],
)
def test_a_quantisation_that_does_not_fit_is_refused(tmp_path, capsys, name, kind, message):
    folder = save_model(make_model(name), tmp_path / "hf")
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--no-tokenizer"]) == 0
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "again"), "--quantize", kind]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def _change(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    return rewrite(folder, None, tensors)


KEY = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{KEY}_scale_inv"), f"tensor {KEY} of type F8_E4M3 lacks its other part"),
        (
            lambda tensors: tensors.update({f"{KEY}_scale_inv": torch.ones(1, 1)}),
            f"tensor {KEY} does not fit the shape \\[24, 48\\] of its values",
        ),
    ],
)
def test_a_part_that_is_missing_or_wrong_is_named(tmp_path, change, message):
    folder = _change(fp8_folders(tmp_path, "minimax-m2")[0], change)
    with pytest.raises(ConfigError, match=message):
        open_hf_folder(folder)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq"}, "quantised by quant_method='gptq'; moefold reads 'fp8' in blocks and 'mxfp4'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size=\\[128\\]; moefold reads blocks of two"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2'; moefold reads 'e4m3'"),
        (7, "quantization_config=7, which should be an object"),
    ],
)
def test_another_quantisation_is_refused(tmp_path, quantization, message):
    folder = save_model(make_model("mixtral"), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(ConfigError, match=message):
        open_hf_folder(folder)
