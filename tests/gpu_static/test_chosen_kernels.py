"""Test that training on the pretended device chooses kernels by time, and that the next run finds them."""

import json
import logging
from dataclasses import replace
from importlib.util import find_spec

import pytest

from moefold.comm.groups import ParallelGroups
from moefold.data.dataset import DataRequest
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import EngineSettings, Request
from moefold.inference.sampling import SamplingParams
from moefold.launch.ranks import init_distributed, single_rank_env
from moefold.model.weight_init import init_weights
from moefold.ops import autotune
from moefold.ops.triton import experts as triton_experts
from moefold.parallel.inference_model import InferenceModel
from moefold.parallel.kernels.timed import settle_choices
from moefold.parallel.paged_decoder import decoding_notice
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from tests.gpu_static.pretended_cases import TILED
from tests.gpu_static.pretended_cuda import pretended_cuda
from tests.verify.recipes import tiny

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")


def _two_steps(cfg):
    """Return the losses of two steps, the messages before and after the first, and the choices."""
    with pretended_cuda(), init_distributed(single_rank_env(), "cuda") as device:
        groups = ParallelGroups.create(check_config(cfg), device)
        model = parallelize(cfg, groups)
        training = TrainingStep(model, cfg)
        data = DataRequest.of(cfg).open()
        loader = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
        losses = []
        for i in range(2):
            losses.append(training.run(loader.batch(i), i + 1).loss)
            if i == 0:
                settled = settle_choices(model.autotuner, device, groups.world)
        return losses, model.message, settled, model.autotuner.choices


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    """The interpreter takes half a second for a launch: one small layer, one timed run, one tiling of two."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(autotune, "NUM_WARMUP_RUNS", 0)
    monkeypatch.setattr(autotune, "NUM_TIMED_RUNS", 1)
    monkeypatch.setattr(triton_experts, "supports_grouped_mm", lambda *args: False)
    two = triton_experts.tile_configs
    monkeypatch.setattr(triton_experts, "tile_configs", lambda x: two(x)[1:])
    cfg = tiny(
        model=TILED | {"layers": 1, "ffn.moe.num_experts": 2},
        train={"global_batch_size": 1, "micro_batch_size": 1, "seq_len": 16},
    )
    run = replace(cfg.run, dtype="bfloat16", kernels="triton", device="cuda", deterministic=False)
    return replace(cfg, run=run)


def _generated(cfg):
    """The tokens of a prompt, and how a model for inference decodes."""
    with pretended_cuda(), init_distributed(single_rank_env(), "cuda") as device:
        model = InferenceModel.build(cfg, ParallelGroups.create(check_config(cfg), device))
        with model.writing_weights():
            init_weights(model.stage, cfg.model, cfg.run.seed)
        engine = GenerationEngine(model, EngineSettings(slots=1), SamplingParams(temperature=0))
        (done,) = engine.generate([Request(prompt=(1, 2, 3), max_tokens=2, eos_ids=frozenset())])
        return done.tokens, decoding_notice(model)


@pytest.mark.slow
def test_generation_records_and_names_its_measurements(recipe, caplog):
    with caplog.at_level(logging.INFO):
        tokens, message = _generated(recipe)
    assert "recorded times" not in message
    assert "kernels by measured time: " in caplog.text
    assert "product by " in caplog.text
    assert "; recorded in " in caplog.text
    assert "pages of 1 layer: read by flash attention" in caplog.text
    assert message.endswith("; pages of 1 layer: read by flash attention")
    again, message = _generated(recipe)
    assert again == tokens
    assert "recorded times of NVIDIA H100 that is pretended" in message


@pytest.mark.slow
def test_a_second_run_measures_nothing(recipe, caplog, monkeypatch):
    with caplog.at_level(logging.WARNING):
        losses, recalled, settled, choices = _two_steps(recipe)
    assert "recorded times" not in recalled
    assert {key.op for key in choices} >= {"causal attention", "fc1 activation", "product", "weights"}
    for key, name in choices.items():
        assert f"{key.op} by " in settled
        assert name in settled
    # The CPU below the pretended device has no cuDNN.
    assert "causal attention: 'cuDNN' is not used" in caplog.text
    assert "not used, as they raise: causal attention by cuDNN" in settled
    path = settled.rpartition("recorded in ")[2]
    with open(path) as file:
        recorded = json.load(file)
    assert recorded["environment"]["device"] == "NVIDIA H100 that is pretended"
    assert not any(operation.startswith("causal attention") for operation in recorded["ms"])

    timed = []
    median_ms = autotune._median_ms
    monkeypatch.setattr(autotune, "_median_ms", lambda candidate: timed.append(1) or median_ms(candidate))
    again = _two_steps(recipe)
    # Only the attention whose backend raised.
    assert len(timed) == 3
    assert again[0] == losses
    assert f"kernels by {sum(map(len, recorded['ms'].values()))} recorded times of NVIDIA H100" in again[1]
    assert again[3] == choices
