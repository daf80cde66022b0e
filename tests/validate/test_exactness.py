"""Every setting that makes sampling inexact is named, and those that do not are not."""

from pathlib import Path
from typing import Any

import pytest

from moefold.config.schema import Config
from moefold.ops.cpu import attention
from moefold.recipe import load_config
from moefold.validate.exactness import MAX_EXACT_HEAD_DIM, MAX_EXACT_SEQ_LEN, inexact_settings
from tests.inference.example import KINDS
from tests.model.transformers_families import SIZES
from tests.models import config_of


def recipe(sections: dict[str, dict[str, Any]]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "run": {"dtype": "bfloat16"},
        "model": SIZES,
        "train": {"seq_len": 64, "global_batch_size": 8, "micro_batch_size": 1},
        "data": {"kind": "synthetic"},
    }
    return config_of({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


EXACT: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "float32": {"run": {"dtype": "float32", "kernels": "c"}},
    "pp": {"parallel": {"world_size": 2, "pp": 2}},
    "dp and ep": {"parallel": {"world_size": 4, "ep": 4}},
    "tp and etp of two": {"parallel": {"world_size": 4, "tp": 2, "etp": 2, "ep": 2}},
    "windows and sinks": {"model": KINDS["gpt-oss"]},
    "latent heads": {"model": KINDS["deepseek-v3"], "rollout": {"cache": "heads"}},
    "sampled under another ep and pp": {
        "rl": {"group_size": 4},
        "parallel": {"world_size": 4, "ep": 4},
        "rollout": {"ep": 2, "pp": 2},
    },
    "split backward with a chunked loss": {
        "parallel": {"world_size": 2, "pp": 2, "schedule": "zero-bubble"},
        "train": {"loss_chunk": 32, "global_batch_size": 8, "seq_len": 64, "micro_batch_size": 1},
    },
}


@pytest.mark.parametrize("case", EXACT)
def test_exact_recipes_have_no_line(case):
    assert inexact_settings(recipe(EXACT[case]), "cpu") == ()


INEXACT: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"run": {"dtype": "float64"}}, "run.dtype='float64'"),
    ({"run": {"kernels": "plain"}}, "run.kernels='plain'"),
    ({"run": {"compile": "blocks"}}, "run.compile='blocks'"),
    ({"train": {"precision": "fp8-blockwise"}}, "train.precision='fp8-blockwise'"),
    ({"parallel": {"world_size": 2, "pp": 2, "schedule": "zero-bubble"}}, "parallel.schedule='zero-bubble'"),
    ({"parallel": {"world_size": 4, "tp": 4}}, "parallel.tp=4"),
    ({"parallel": {"world_size": 4, "etp": 4}}, "parallel.etp=4"),
    ({"parallel": {"world_size": 2, "tp": 2}, "rl": {"group_size": 4}, "rollout": {"tp": 1}}, "rollout.tp=1"),
    ({"parallel": {"world_size": 2, "cp": 2}}, "parallel.cp=2"),
    ({"model": {**SIZES, "layers.attention": "chunk", "attention_chunk_size": 96}}, "model.attention_chunk_size=96"),
    ({"parallel": {"world_size": 2, "ep": 2, "dispatcher": "allgather"}}, "parallel.dispatcher='allgather'"),
    ({"parallel": {"world_size": 2, "ep": 2, "dispatcher": "dedup_alltoall"}}, "parallel.dispatcher='dedup_alltoall'"),
    ({"moe": {"dispatch_precision": "fp8-blockwise"}}, "moe.dispatch_precision='fp8-blockwise'"),
    ({"model": KINDS["deepseek-v3"]}, "rollout.cache='latents'"),
    ({"model": {"attention.head_dim": 512}}, "model.attention.head_dim=512"),
    ({"model": KINDS["linear"]}, "model.layers='linear, full, linear'"),
    ({"train": {"seq_len": 32768}}, "train.seq_len=32768"),
    ({"moe": {"capacity_factor": 1.5}}, "moe.capacity_factor=1.5"),
    ({"moe": {"choice": "sinkhorn"}}, "moe.choice='sinkhorn'"),
    ({"moe": {"input_jitter": 0.01}}, "moe.input_jitter=0.01"),
    ({"model": {"ffn.moe.router.softmax": "sparsemixer"}}, "model.ffn.moe.router.softmax.samples=true"),
    ({"moe": {"replay": "old"}}, "moe.replay='old'"),
    ({"moe": {"router_dtype": "float64"}}, "moe.router_dtype='float64'"),
]


@pytest.mark.parametrize(("sections", "line"), INEXACT, ids=[line for _, line in INEXACT])
def test_only_the_inexact_setting_is_named(sections, line):
    (found,) = inexact_settings(recipe(sections), "cpu")
    assert found.startswith(f"{line}: ")


def test_devices_and_machines_without_the_kernels_are_inexact():
    (found,) = inexact_settings(recipe({}), "cuda")
    assert found.startswith("run.device='cuda': ")
    (found,) = inexact_settings(recipe({}), "cpu", has_c_kernels=False)
    assert found.startswith("run.kernels='auto': ")


def test_the_limits_of_exact_attention_equal_the_kernel():
    assert (attention.MAX_SEQ_LEN, attention.MAX_HEAD_DIM) == (MAX_EXACT_SEQ_LEN, MAX_EXACT_HEAD_DIM)


@pytest.mark.parametrize("name", ["sort", "countdown", "prorl"])
def test_recipes_of_rl_on_a_cpu_are_exact_on_every_processor(name):
    cfg = load_config(Path(__file__).parents[2] / "recipes" / f"{name}.toml", [])
    assert (cfg.run.device, cfg.run.kernels) == ("cpu", "c")
    assert inexact_settings(cfg, "cpu") == ()
