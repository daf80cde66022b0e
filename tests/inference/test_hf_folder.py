"""Hugging Face folders: evaluated and continued as transformers does it, under mappings."""

import json
from pathlib import Path

import pytest
import torch

from moefold.cli.main import main
from moefold.errors import ConfigError
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import EngineSettings, Request
from moefold.inference.sampling import SamplingParams
from moefold.inference.scoring import evaluate
from moefold.inference.source import find_source
from moefold.inference.token_dataset import TokenDataset
from tests.inference.example import opened, row_of_ids
from tests.slow import slow

pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
from tests.convert.hf_models import make_model, save_model

PROMPTS = ([3, 14, 15, 9, 26, 5], [35], [8, 9, 7])


def evaluate_and_continue(folder: Path, mapping: dict[str, int]) -> tuple[float, list[list[int]]]:
    """(mean loss, greedy tokens) of one rank."""
    found = evaluate(opened(folder, "evaluate", mapping, 16, 2), TokenDataset(row_of_ids(64), 16, False))
    engine = GenerationEngine(
        opened(folder, "generate", mapping, 24, 1).model, EngineSettings(cache_gib=0), SamplingParams(temperature=0.0)
    )
    completions = engine.generate([Request(prompt=tuple(prompt), max_tokens=8) for prompt in PROMPTS])
    return found.loss, [list(completion.tokens) for completion in completions]


CASES = [
    ("mixtral-tied", {"pp": 2, "world_size": 2}),
    ("llama", {}),
    ("gpt-oss", {"tp": 2, "etp": 2, "world_size": 2}),
    ("deepseek-v2", {}),
    ("deepseek-v3", {"tp": 2, "ep": 2, "world_size": 2}),
    *slow(
        [
            ("olmoe", {"tp": 2, "world_size": 2}),
            ("mixtral-tied", {"tp": 2, "ep": 2, "world_size": 2}),
            ("deepseek-v2", {"pp": 2, "world_size": 2}),
            ("qwen2-moe", {"tp": 2, "etp": 2, "world_size": 2}),
        ]
    ),
]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "mapping"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_a_folder_computes_the_same_as_transformers(pool, tmp_path, name, mapping):
    theirs = make_model(name)
    folder = save_model(theirs, tmp_path / name)
    ids = torch.from_numpy(row_of_ids(64).astype("int64")).view(4, 16)
    with torch.no_grad():
        logits = theirs(input_ids=ids).logits
    loss = float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    expected = [
        theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
        for prompt in PROMPTS
    ]
    for found_loss, tokens in pool.run(mapping.get("world_size", 1), evaluate_and_continue, folder, mapping):
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert tokens == [row[0, len(p) :].tolist() for row, p in zip(expected, PROMPTS, strict=True)]


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_sizes_read_from_a_folder(tmp_path, dtype, name):
    folder = save_model(make_model("mixtral"), tmp_path / "model", dtype=dtype)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    source = find_source(str(folder))
    assert (source.kind, source.dtype, source.eos_ids) == ("huggingface", name, frozenset({7, 9}))
    assert source.model.ffn.moe.num_experts == 6


@pytest.mark.parametrize(
    ("generation", "ends"), [(None, {2}), ([], {2}), ([7, 99], {7}), ("7", None), (7.0, None), (True, None), (-1, None)]
)
def test_ends_of_generation_config_are_ids_of_the_model_or_refused(tmp_path, generation, ends):
    folder = save_model(make_model("mixtral", eos_token_id=2), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    if ends is None:
        with pytest.raises(ConfigError, match="generation_config.json: eos_token_id=.* must be an id"):
            find_source(str(folder))
    else:
        assert find_source(str(folder)).eos_ids == ends


@pytest.mark.parametrize("given", ["2048", 1.5, -1, True])
def test_a_context_that_is_not_a_number_is_one_message(tmp_path, given):
    folder = save_model(make_model("mixtral"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": given}))
    with pytest.raises(ConfigError, match="max_position_embeddings="):
        find_source(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": None}))
    assert find_source(str(folder)).context == 2048


def test_a_model_of_one_choice_that_weighs_1_is_read_and_not_trained(pool, tmp_path, capsys, monkeypatch):
    """transformers computes it; only a router that is to learn needs a gradient."""
    monkeypatch.chdir(tmp_path)
    theirs = make_model("mixtral", num_experts_per_tok=1)
    folder = save_model(theirs, tmp_path / "hf")
    ids = torch.from_numpy(row_of_ids(64).astype("int64")).view(4, 16)
    with torch.no_grad():
        logits = theirs(input_ids=ids).logits
    loss = float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    assert pool.run(1, evaluate_and_continue, folder, {})[0][0] == pytest.approx(loss, rel=1e-5)
    assert main(["import", "hf", "ckpt", "--no-tokenizer"]) == 0
    refusal = 'model.ffn.moe.top_k=1 with model.ffn.moe.router.softmax="post" weighs every choice with 1'
    assert f"note: moefold train rejects this model: {refusal}" in capsys.readouterr().out
    assert main(["export", "ckpt", "again"]) == 0
    assert main(["train", "ckpt/recipe.toml", "data.kind=synthetic"]) == 2
    assert refusal in capsys.readouterr().err
