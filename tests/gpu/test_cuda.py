"""The same code on one GPU: the loss of a CPU run in float32, and training in bfloat16. Needs CUDA and NCCL."""

from dataclasses import replace

import pytest
import torch

from moefold.config.checks import check_config
from moefold.config.schema import Config
from moefold.data import open_dataset
from moefold.launch.place import Place
from moefold.launch.ranks import joined
from moefold.parallel.groups import ParallelGroups
from moefold.parallel.parallelize import parallelize
from moefold.train.batch import BatchLoader
from moefold.train.step import TrainingStep
from tests.verify.recipes import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _losses(cfg: Config, device_type: str, steps: int, port: int) -> list[float]:
    with joined(Place(0, 0, 1, "127.0.0.1", port), device_type) as device:
        groups = ParallelGroups.create(check_config(cfg), device)
        model = parallelize(cfg, groups)
        training = TrainingStep(model, cfg)
        data = open_dataset(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
        loader = BatchLoader(data.train, cfg, groups, model.positions)
        size = cfg.train.global_batch_size
        return [training.run(loader.batch(i * size), i + 1).loss for i in range(steps)]


def _recipe(dtype: str) -> Config:
    sizes = {"hidden_size": 64, "head_dim": 16, "moe_ffn_hidden_size": 64, "init_std": 0.05}
    cfg = tiny(model=sizes, train={"seq_len": 64, "global_batch_size": 8, "micro_batch_size": 4})
    return replace(cfg, run=replace(cfg.run, dtype=dtype, steps=20))


def test_float32_losses_equal_those_of_the_cpu():
    cfg = _recipe("float32")
    cpu, gpu = _losses(cfg, "cpu", 5, 29511), _losses(cfg, "cuda", 5, 29512)
    assert gpu == pytest.approx(cpu, rel=1e-4)


def test_routing_state_follows_the_device():
    """Expert bias, noise, thresholds and running load live where the tokens are."""
    cfg = _recipe("float32")
    model = replace(cfg.model, router_score="sigmoid", expert_bias=True, num_groups=4, top_groups=2)
    for port, choice in ((29515, "topk"), (29517, "quantile")):
        moe = replace(cfg.moe, aux_kind="global_batch", input_jitter=0.01, choice=choice)
        routed = replace(cfg, model=model, moe=moe)
        cpu, gpu = _losses(routed, "cpu", 5, port), _losses(routed, "cuda", 5, port + 1)
        assert gpu == pytest.approx(cpu, rel=1e-4)


def test_latent_attention_and_further_tokens_equal_those_of_the_cpu():
    cfg = _recipe("float32")
    sizes = {"attention": "mla", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    model = replace(cfg.model, v_head_dim=24, mtp_layers=1, rope_interleaved=True, **sizes)
    latent = replace(cfg, model=model)
    cpu, gpu = _losses(latent, "cpu", 5, 29519), _losses(latent, "cuda", 5, 29520)
    assert gpu == pytest.approx(cpu, rel=1e-4)


@pytest.mark.parametrize(("document_end", "port"), [(-1, 29521), (2, 29525)])
def test_gpt_oss_equals_that_of_the_cpu(document_end, port):
    """Sinks, windows tile by tile and by mask, biases and the clamped gate; with and without documents."""
    cfg = _recipe("float32")
    attention = {"attention_sinks": True, "attention_pattern": "WF", "attention_output_bias": True, "qkv_bias": True}
    experts = {"moe_bias": True, "moe_activation": "clamped_swiglu", "swiglu_limit": 0.1, "router_bias": True}
    for offset, window, seq_len in ((0, 5, 64), (2, 9, 320)):
        model = replace(cfg.model, vocab_size=8, sliding_window=window, **attention, **experts)
        train, data = replace(cfg.train, seq_len=seq_len), replace(cfg.data, document_end=document_end)
        limited = replace(cfg, model=model, train=train, data=data)
        cpu, gpu = (_losses(limited, kind, 5, port + offset + i) for i, kind in enumerate(("cpu", "cuda")))
        assert gpu == pytest.approx(cpu, rel=1e-4)
        half = _losses(replace(limited, run=replace(limited.run, dtype="bfloat16")), "cuda", 5, port + offset + 10)
        assert half == pytest.approx(cpu, rel=2e-2)


def test_bfloat16_trains_and_follows_float32():
    half, single = (_losses(_recipe(dtype), "cuda", 20, 29513 + i) for i, dtype in enumerate(("bfloat16", "float32")))
    assert half == pytest.approx(single, rel=2e-2)
    assert half[-1] < half[0]
