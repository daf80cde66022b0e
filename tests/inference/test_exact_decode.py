"""The sampler is the trainer: log-probabilities of the training forward pass and of decoding are equal by bits."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.cost.kv_cache import PAGE_POSITIONS
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import EngineSettings, Request
from moefold.inference.sampling import SamplingParams
from moefold.model.layer_cache import CacheSize
from moefold.model.linear import UnquantizedLinear
from moefold.model.loss import SoftmaxOptions
from moefold.ops.gemm import Gemm
from moefold.parallel.batch import Batch
from moefold.parallel.kernels import select
from moefold.parallel.paged_decoder import PagedDecoder, forward_chain
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.parallelize import parallelize
from moefold.validate.config import check_config
from moefold.validate.exactness import inexact_settings
from tests.inference.example import CPU, KINDS
from tests.model.transformers_families import FAMILIES, SIZES
from tests.models import config_of
from tests.ops.c_kernels import needs_compiler
from tests.slow import slow

pytestmark = [pytest.mark.parity, needs_compiler]

SHARPNESS = 8.0
"""Factor of the weights of head and routers, so that a difference of one bit shows in log-probabilities and choices."""
LATENT_HEADS = {k: v for k, v in KINDS["deepseek-v3"].items() if k != "mtp_layers"}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3-moe": FAMILIES["qwen3-moe"][0],
    "qwen2-moe": FAMILIES["qwen2-moe"][0],
    "qk-norm-of-all-heads": {
        "attention.qk_norm": {},
        "attention.qk_norm.over": "all_heads",
        "ffn.moe.router.softmax": "pre",
    },
    "latent": LATENT_HEADS,
    "gpt-oss": KINDS["gpt-oss"],
    "windows": {"layers.attention": "window, full", "sliding_window": 5},
    "llama4": {
        "layers.attention": "chunk, full",
        "attention_chunk_size": 64,
        "layers.position": "rope, nope",
        "attention.temperature.scale": 0.3,
        "attention.temperature.tokens": 5,
        "attention.qk_norm": {},
        "attention.qk_norm.weight": False,
        "attention.qk_norm.in_nope": False,
        "rope.interleaved": True,
        "ffn.moe.router": "sigmoid",
        "ffn.moe.router.normalize": False,
        "ffn.moe.probs_on_input": True,
    },
    "longcat": LATENT_HEADS
    | {
        "layers.ffn": "moe, dense",
        "layers": 4,
        "attention.scale_latents": True,
        "ffn.moe.shortcut": True,
        "ffn.moe.shared.intermediate_size": 16,
        "ffn.moe.zero_experts": 5,
        "ffn.moe.router.num_groups": 1,
        "ffn.moe.router.top_groups": 1,
    },
    "phi": {
        "norm": "layernorm",
        "head_bias": True,
        "attention.qkv_bias": True,
        "ffn.moe.router.softmax": "sparsemixer",
        "ffn.moe.router.softmax.jitter": 0.4,
        "rope.scaling": "longrope",
        "rope.scaling.factor": 2.0,
        "rope.scaling.original_seq_len": 64,
        "rope.scaling.short_factors": (1.0, 1.1, 1.2, 1.3),
        "rope.scaling.long_factors": (1.5, 2.0, 4.0, 9.0),
    },
    "options-of-families": {
        "attention.gate": {},
        "residual": "both",
        "layers.position": "rope, nope",
        "attention.qk_norm": {},
        "attention.qk_norm.after_rope": True,
        "attention.scale": 0.3,
        "embedding_multiplier": 1.7,
        "residual.multiplier": 0.6,
        "logits_divisor": 0.7,
        "ffn.moe.latent_size": 12,
        "ffn.moe.shared.intermediate_size": 16,
    },
}
PROMPTS = [tuple(i * i % 61 for i in range(70)), (35,), (8, 9, 7), tuple(range(20))]
"""The first one is longer than a page."""
SAMPLING = SamplingParams(temperature=1.3, seed=4)
REQUESTS = [
    Request(prompt=prompt, prompt_number=i, sample_number=j, max_tokens=16)
    for i, prompt in enumerate(PROMPTS)
    for j in (0, 1)
]


def recipe(model: str, dtype: str, **mapping: Any) -> Config:
    """A small model in training, whose samples hold the longest request."""
    return config_of(
        {
            "run": {"dtype": dtype, "seed": 5, "kernels": "c"},
            "model": SIZES | MODELS[model] | ({"ffn.moe.router.softmax.samples": False} if model == "phi" else {}),
            "train": {"seq_len": 100, "global_batch_size": len(REQUESTS), "micro_batch_size": 1},
            "parallel": mapping,
            "data": {"kind": "synthetic"},
        }
    )


class KeepLogProbs:
    """A loss that keeps the log-probabilities of the labels at a temperature."""

    terms = ("cross_entropy",)

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.kept: torch.Tensor | None = None
        self.of_samples: dict[int, torch.Tensor] = {}

    def __call__(self, output, columns):
        log_probs = -output.token_losses(columns["labels"], SoftmaxOptions(self.temperature)).loss
        self.kept = log_probs
        self.of_samples |= zip(columns["sample_ids"].tolist(), log_probs.detach(), strict=True)
        return log_probs.sum().unsqueeze(0)


def build(cfg: Config) -> ParallelModel:
    """A model in training with sharpened heads and routers, float32 masters."""
    model = parallelize(cfg, ParallelGroups.create(check_config(cfg), CPU))
    with torch.no_grad():
        for name, parameter in model.named_parameters.items():
            if name == "head.weight" or name.endswith("router.weight"):
                parameter.mul_(SHARPNESS)
    return model


def training_log_probs(
    model: ParallelModel, rows: list[tuple[int, ...]], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Log-probabilities of every next token of each row, in one forward pass of training with autograd."""
    (stage,) = model.stages
    stage.train()
    stage.loss = KeepLogProbs(temperature)
    found = []
    for row in rows:
        tokens = torch.tensor([row])
        stage.set_positions(torch.arange(len(row) - 1))
        stage(tokens[:, :-1], labels=tokens[:, 1:], sample_ids=torch.zeros(1, dtype=torch.int64))
        found.append(stage.loss.kept[0].detach())
    return found


def packed_log_probs(model: ParallelModel, rows: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """As `training_log_probs`, of all rows packed into one sample as its documents, and with another one beside it."""
    (stage,) = model.stages
    stage.train()
    stage.loss = KeepLogProbs(1.0)
    tokens = torch.tensor([[token for row in rows for token in row[:-1]]])
    labels = torch.tensor([[token for row in rows for token in row[1:]]])
    lengths = [len(row) - 1 for row in rows]
    firsts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    starts = firsts.repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
    stage.set_positions(torch.arange(sum(lengths)))
    stage(
        torch.cat((tokens, tokens.flip(1))),
        labels=torch.cat((labels, labels)),
        document_starts=torch.cat((starts, torch.zeros_like(starts))),
        sample_ids=torch.arange(2),
    )
    return list(stage.loss.kept[0].detach().split(lengths))


def compare(cfg: Config, settings: EngineSettings, sampling: SamplingParams = SAMPLING) -> tuple[float, float, int]:
    """(share of bit-equal log-probabilities, largest difference in nats, tokens) of sampling against training."""
    model = build(cfg)
    completions = GenerationEngine(model, settings, sampling).generate(REQUESTS)
    rows = [request.prompt + completion.tokens for request, completion in zip(REQUESTS, completions, strict=True)]
    trained = training_log_probs(model, rows, sampling.temperature)
    sampled = torch.cat([torch.tensor(completion.log_probs) for completion in completions])
    expected = torch.cat([x[-len(c.tokens) :] for x, c in zip(trained, completions, strict=True)])
    return (
        float((sampled == expected).double().mean()),
        float((sampled - expected).abs().max()),
        len(sampled),
    )


SETTINGS = {
    "whole prompts": EngineSettings(cache="heads"),
    "pieces": EngineSettings(cache="heads", slots=3, pass_tokens=7, share_prompts=False),
}


SAMPLED = [(model, dtype, settings) for model in MODELS for dtype in ("float32", "bfloat16") for settings in SETTINGS]
SLOW_MODELS = ("mixtral", "windows", "llama4", "longcat", "phi")
FAST_SAMPLED = [
    *[(model, "float32", "pieces") for model in MODELS if model not in SLOW_MODELS],
    ("gpt-oss", "bfloat16", "whole prompts"),
]


@pytest.mark.parametrize(
    ("model", "dtype", "settings"), [*FAST_SAMPLED, *slow([case for case in SAMPLED if case not in FAST_SAMPLED])]
)
def test_every_log_probability_equals_training(pool, model, dtype, settings):
    cfg = recipe(model, dtype)
    assert inexact_settings(replace(cfg, rollout=replace(cfg.rollout, cache="heads")), "cpu") == ()
    ((equal, largest, count),) = pool.run(1, compare, recipe(model, dtype), SETTINGS[settings])
    assert count == len(REQUESTS) * 16
    assert (equal, largest) == (1.0, 0.0)


def fused_heads(cfg: Config) -> tuple[bool, bool]:
    """Return whether the head is in C in a decoder, and after it."""
    model = build(cfg)
    head = model.stages[-1].head
    size = CacheSize(num_pages=1, page_positions=PAGE_POSITIONS)
    with forward_chain(model) as chain, PagedDecoder(chain, size):
        inside = head.fused is not None
    return inside, head.fused is not None


def test_a_head_is_in_c_after_layers_in_c_and_as_long_as_its_model_generates(pool):
    assert pool.run(1, fused_heads, recipe("qwen3-moe", "float32")) == [(True, False)]
    assert pool.run(1, fused_heads, recipe("latent", "float32")) == [(False, False)]


def compare_packed(cfg: Config) -> list[bool]:
    """Return whether each row has the same log-probabilities packed and by itself."""
    model = build(cfg)
    rows = [tuple((i * i + j) % 61 for i in range(length)) for j, length in enumerate((90, 2, 33, 65, 70))]
    alone = training_log_probs(model, rows)
    return [torch.equal(a, b) for a, b in zip(alone, packed_log_probs(model, rows), strict=True)]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("gpt-oss", "float32"),
        ("latent", "float32"),
        *slow([("qwen3-moe", "float32"), *((model, "bfloat16") for model in ("qwen3-moe", "latent", "gpt-oss"))]),
    ],
)
def test_packed_documents_have_the_bits_of_each_by_itself(pool, model, dtype):
    assert pool.run(1, compare_packed, recipe(model, dtype)) == [[True] * 5]


def sample_and_train(cfg: Config) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
    """Log-probabilities of each request of this rank: sampled, and of a training step of the mapping on the last stage.

    Both are of the sampled tokens.
    """
    model = build(cfg)
    dp, num_ranks = model.groups.attn.dp.rank, model.groups.attn.dp.size
    count = len(REQUESTS) // num_ranks
    numbers = list(range(dp * count, (dp + 1) * count))
    requests = [REQUESTS[number] for number in numbers]
    completions = GenerationEngine(model, SETTINGS["pieces"], SAMPLING).generate(requests)
    rows = [request.prompt + completion.tokens for request, completion in zip(requests, completions, strict=True)]
    loss = KeepLogProbs(SAMPLING.temperature)
    model.train()
    for stage in model.stages:
        stage.loss = loss
        stage.set_positions(model.positions)
    tokens = torch.zeros(count, cfg.train.seq_len + 1, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    labels = tokens[:, 1:].contiguous()
    columns = {"labels": labels, "weights": torch.ones(labels.shape), "sample_ids": torch.tensor(numbers)}
    model.forward_backward(Batch(tokens[:, :-1].contiguous(), columns))
    found: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for number, row, completion in zip(numbers, rows, completions, strict=True):
        trained = loss.of_samples.get(number)
        part = None if trained is None else trained[len(row) - 1 - len(completion.tokens) : len(row) - 1].clone()
        found[number] = torch.tensor(completion.log_probs), part
    return found


MAPPINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "pp2": ({"world_size": 2, "pp": 2}, True),
    "dp2": ({"world_size": 2}, True),
    "dp2-ep2": ({"world_size": 2, "ep": 2}, True),
    "dp2-ep2-pp2-zero3": ({"world_size": 4, "pp": 2, "ep": 2, "zero": 3}, True),
    "tp2-ep2": ({"world_size": 2, "tp": 2, "ep": 2}, False),
    "tp2-etp2": ({"world_size": 2, "tp": 2, "etp": 2}, False),
}
"""Mappings, and whether they have the bits of one rank."""


MAPPED = [(mapping, dtype) for mapping in MAPPINGS for dtype in ("float32", "bfloat16")]
FAST_MAPPED = [("dp2-ep2", "float32"), ("tp2-etp2", "bfloat16")]
"""Under pp: `train/test_rollout_loader.py`."""


@pytest.mark.parametrize(
    ("mapping", "dtype"), [*FAST_MAPPED, *slow([case for case in MAPPED if case not in FAST_MAPPED])]
)
def test_sampling_under_a_mapping_has_the_bits_of_training_under_it(pool, mapping, dtype):
    axes, is_that_of_one_rank = MAPPINGS[mapping]
    cfg = recipe("mixtral", dtype, **axes)
    assert inexact_settings(cfg, "cpu") == ()
    (alone,) = pool.run(1, sample_and_train, recipe("mixtral", dtype)) if is_that_of_one_rank else ({},)
    ranks = pool.run(axes["world_size"], sample_and_train, cfg)
    trained = 0
    for number in range(len(REQUESTS)):
        for rank in ranks:
            sampled, of_training = rank.get(number, (None, None))
            if of_training is not None:
                trained += 1
                assert torch.equal(sampled, of_training)
            if sampled is not None and is_that_of_one_rank:
                assert torch.equal(sampled, alone[number][0])
    assert trained >= len(REQUESTS)


UNDONE = ["router", "head", "linears", "decode attention", "training attention"]
"""Parts that are exact by the C kernels. A GEMM that sums by the number of rows replaces torch's, as torch's do on
some processors; attention by torch's operations, which sum keys in another order."""


class GemmByRows(Gemm):
    """GEMM whose order of summation depends on the number of rows, on every processor."""

    def is_faster_than_torch_mm(self, x: torch.Tensor) -> bool:
        """Return True: it must be used."""
        return True

    def matmul(self, x_MK: torch.Tensor, w_NK: torch.Tensor, out_MN: torch.Tensor | None = None) -> torch.Tensor:
        """Sum two parts of K, cut where the number of rows says."""
        cut = 1 + len(x_MK) % max(1, x_MK.shape[1] - 1)
        found = x_MK[:, :cut] @ w_NK[:, :cut].t() + x_MK[:, cut:] @ w_NK[:, cut:].t()
        return found if out_MN is None else out_MN.copy_(found)


def compare_without(cfg: Config, undone: str) -> tuple[float, float, int]:
    """As `compare`, with one part undone."""
    cpu_kernels = select._cpu_kernels

    def undo(run: RunConfig, model: ModelConfig) -> Any:
        kernels = cpu_kernels(run, model)
        changes: dict[str, Any] = {
            "router": {},
            "head": {"gemm": GemmByRows()},
            "linears": {"linear_backend": UnquantizedLinear(GemmByRows())},
            "decode attention": {"paged_attention": None},
            "training attention": {"attention": None},
        }
        return replace(kernels, **changes[undone])

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(select, "_cpu_kernels", undo)
        if undone == "router":
            from moefold.model.moe import router

            upcast_linear = router.upcast_linear
            patch.setattr(router, "upcast_linear", lambda x, w, gemm: upcast_linear(x, w, GemmByRows()))
        return compare(cfg, SETTINGS["pieces"])


@pytest.mark.parametrize("undone", UNDONE)
def test_without_one_of_the_kernels_bits_differ(pool, undone):
    ((equal, _, _),) = pool.run(1, compare_without, recipe("mixtral", "float32"), undone)
    assert equal < 1.0
