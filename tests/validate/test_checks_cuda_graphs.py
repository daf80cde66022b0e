"""CUDA graphs are refused where their code would change, communicate, or not be kept."""

import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config
from moefold.validate.cuda_graphs import check_cuda_graphs_device, check_graphed_loss

OBSTACLES = [
    # (modes, settings, message)
    ("arf", "parallel.world_size=2 parallel.tp=2", "parallel.tp=2: its collectives would be captured"),
    ("arf", "parallel.world_size=2 parallel.cp=2", "parallel.cp=2: its collectives would be captured"),
    ("ar", "parallel.world_size=2 parallel.zero=3", "parallel.zero=3: a graph keeps the weights that ZeRO 3 frees"),
    (
        "ar",
        "parallel.world_size=2 parallel.pp=2 parallel.schedule=zero-bubble model.layers=4",
        "parallel.schedule='zero-bubble': a delayed weight gradient reads memory that the next replay overwrites",
    ),
    ("f", "parallel.world_size=2", "parallel.world_size=2: FSDP and the exchanges of several ranks are work of the"),
    ("f", "parallel.world_size=2 parallel.pp=2", "parallel.world_size=2: FSDP"),
    ("arf", "parallel.overlap_experts=true", "parallel.overlap_experts=true: a graph cannot be captured inside"),
    ("arf", "train.precision=mxfp8", "train.precision='mxfp8': a replay would not quantise new weights"),
    ("arf", "data.document_end=0", "documents: their attention masks change with each micro-batch"),
    ("arf", "data.kind=sft data.path=chats.jsonl", "documents: their attention masks"),
    ("arf", "metrics.memory_every=2", "metrics.memory_every=2: memory of a graph is allocated once"),
    ("ar", 'train.recompute=["layer"]', "train.recompute=['layer']: what a graph saves for its backward pass stays"),
    ("ar", 'train.recompute=["norms","moe"]', "train.recompute=['norms']: what a graph saves"),
    (
        "ar",
        "model.layers=2x(linear,full)",
        "model.layers='2x(linear,full)': linear attention is recomputed in the backward",
    ),
    ("r", 'train.recompute=["moe"]', "train.recompute=['moe']: what the router saves stays in the memory"),
    ("arf", 'train.offload=["moe"]', "train.offload=['moe']: what a graph saves"),
    ("rf", "moe.trace_every=1", "moe.trace_every=1: choices are recorded by the host"),
    ("rf", "moe.replay=runs/other", "moe.replay='runs/other': choices are replayed by the host"),
    ("r", "model.layers=4x(dense)", "a model without MoE layers: it has no router"),
    ("f", "run.dtype=float32", "run.kernels='auto' with run.dtype='float32': their experts read the token counts"),
    (
        "f",
        "run.kernels=plain model.ffn.moe.intermediate_size=36",
        "run.kernels='plain' with run.dtype='bfloat16': their",
    ),
    (
        "f",
        "run.kernels=plain model.ffn.moe.latent_size=36",
        "run.kernels='plain' with run.dtype='bfloat16': their experts",
    ),
]
MODES = {"a": "attention", "r": "attention_router", "f": "full"}


@pytest.mark.parametrize(("modes", "settings", "obstacle"), OBSTACLES)
def test_an_obstacle_is_named(modes, settings, obstacle):
    for mode in (MODES[letter] for letter in modes):
        with pytest.raises(ConfigError) as error:
            check_config(load_config(None, [f"run.cuda_graphs={mode}", *settings.split()]))
        message = f"run.cuda_graphs={mode!r} is incompatible with {obstacle}"
        assert message in str(error.value)
        assert "; set run.cuda_graphs='none', or change that" in str(error.value)


@pytest.mark.parametrize(
    ("modes", "settings"),
    [
        ("arf", ""),
        ("ar", "parallel.world_size=2 parallel.pp=2"),
        ("ar", "parallel.world_size=2 parallel.zero=2 parallel.ep=2"),
        ("af", 'train.recompute=["moe"]'),
        ("f", 'train.recompute=["layer"]'),
        ("arf", 'train.recompute=["shared_experts"] model.ffn.moe.shared.intermediate_size=64'),
        ("arf", "parallel.zero=3"),
        ("arf", "model.attention.qk_norm={} run.compile=blocks"),
        ("a", "moe.trace_every=1"),
        ("f", "run.dtype=float32 moe.capacity_factor=1.0 moe.pad_to_capacity=true"),
        ("f", "run.dtype=float32 run.kernels=triton"),
        ("f", "run.kernels=plain"),
        ("af", "model.layers=4x(dense)"),
    ],
)
def test_fixed_shapes_and_addresses_are_accepted(modes, settings):
    for mode in (MODES[letter] for letter in modes):
        check_config(load_config(None, [f"run.cuda_graphs={mode}", *settings.split()]))


@pytest.mark.parametrize("mode", MODES.values())
def test_a_cpu_has_no_graphs(mode):
    message = f"run.cuda_graphs={mode!r} needs a CUDA device, and the device is 'cpu'; set run.cuda_graphs='none'"
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, [f"run.cuda_graphs={mode}", "run.device=cpu"]))
    assert str(error.value) == message
    cfg = load_config(None, [f"run.cuda_graphs={mode}"])
    check_cuda_graphs_device(cfg.run, "cuda")
    with pytest.raises(ConfigError) as error:
        check_cuda_graphs_device(cfg.run, "cpu")
    assert str(error.value) == message


def test_a_captured_loss_function_has_no_metrics():
    cfg = load_config(None, ["run.cuda_graphs=full"])
    check_graphed_loss(cfg.run, [])
    check_graphed_loss(load_config(None, ["run.cuda_graphs=attention"]).run, ["accuracy"])
    with pytest.raises(ConfigError, match=r"metrics \['accuracy'\] of the loss function"):
        check_graphed_loss(cfg.run, ["accuracy"])
