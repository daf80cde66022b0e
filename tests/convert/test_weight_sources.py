"""Hugging Face folders read into models: the logits equal transformers' logits, under any mapping."""

import json
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.weight_sources import HfSource, load_hf_weights
from moefold.errors import ConfigError
from moefold.parallel.parallelize import parallelize
from moefold.validate.config import check_config
from tests.convert.hf_models import ALL_MODELS, FILED, logits_of, make_model, save_model, tokens_of
from tests.convert.our_logits import SEQ_LEN, our_logits, recipe
from tests.convert.regions import full_region
from tests.slow import slow

assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
"""A float64 tolerance: transformers computes norms, routers and angles in float32 whatever the weights are."""


@pytest.mark.parametrize("name", [name for name in ALL_MODELS if name not in FILED])
def test_logits_equal_transformers(tmp_path, name):
    theirs = make_model(name)
    folder = save_model(theirs, tmp_path / name)
    tokens = tokens_of(2, SEQ_LEN)
    assert_close(our_logits(folder, tokens), logits_of(theirs.double(), tokens))


def test_shards_and_bfloat16_are_read(tmp_path):
    theirs = make_model("qwen3-moe")
    folder = save_model(theirs, tmp_path / "model", dtype=torch.bfloat16, shard="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    tokens = tokens_of(2, SEQ_LEN)
    assert_close(our_logits(folder, tokens), logits_of(theirs.double(), tokens))


def _loaded_everywhere(cfg: Config, folder: Path) -> str:
    """The first parameter whose shard on this rank is not its part of the folder's tensor, or empty if all are."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    load_hf_weights(folder, model.named_parameters, model.named_buffers)
    source = HfSource(open_hf_folder(folder))
    for name, parameter in model.named_parameters.items():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        if not torch.equal(full.float(), source.read(name, full_region(source.shapes[name])).float()):
            return f"rank {dist.get_rank()}: {name}"
    return ""


MAPPINGS = [
    {"world_size": 2, "tp": 2, "ep": 2},
    {"world_size": 2, "tp": 2, "etp": 2},
    {"world_size": 2, "cp": 2, "zero": 3},
    {"world_size": 2, "pp": 2},
]
FOLDED = {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2}


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "mapping"),
    [
        *product(["qwen2-moe"], MAPPINGS),
        ("mixtral-tied", MAPPINGS[-1]),
        *slow([*product(["mixtral-tied"], MAPPINGS[:-1]), *product(["mixtral-tied", "qwen2-moe"], [FOLDED])]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{key}{n}" for key, n in value.items()),
)
def test_every_rank_reads_its_part(pool, tmp_path, name, mapping):
    folder = save_model(make_model(name, num_hidden_layers=2), tmp_path / name)
    cfg = replace(recipe(folder), parallel=ParallelConfig(**mapping))
    assert pool.run(mapping["world_size"], _loaded_everywhere, cfg, folder) == [""] * mapping["world_size"]


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_a_layer_that_config_json_does_not_count_is_refused(tmp_path, name):
    folder = save_model(make_model(name), tmp_path / "hf")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    counted = config["num_hidden_layers"] - 1
    layer_types = {key: value[:counted] for key, value in config.items() if key.endswith("layer_types") and value}
    file.write_text(json.dumps(config | layer_types | {"num_hidden_layers": counted}))
    refusal = rf"tensor model\.layers\.{counted}\.\S+ is of a layer after the {counted} layers that config\.json counts"
    with pytest.raises(ConfigError, match=refusal):
        our_logits(folder, tokens_of(2, SEQ_LEN))
    # Of DeepSeek-V3 this layer and the next one are counted as layers of multi-token prediction.
    with pytest.raises(ConfigError, match=rf"tensor model\.layers\.{counted}\.\S+ is (of a layer after|missing)"):
        HfSource(open_hf_folder(folder), leaves_out_mtp=False)
