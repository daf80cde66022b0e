"""CUDA graphs are refused where what they captured would change, communicate, or not be kept."""

import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config
from moefold.validate.train import check_cuda_graphs_device

GRAPHS = "run.cuda_graphs=attention"


@pytest.mark.parametrize(
    ("settings", "obstacle"),
    [
        ("parallel.world_size=2 parallel.tp=2", "parallel.tp=2: its collectives would be captured"),
        ("parallel.world_size=2 parallel.cp=2", "parallel.cp=2: its collectives would be captured"),
        ("parallel.world_size=2 parallel.zero=3", "parallel.zero=3: a graph keeps the weights that ZeRO 3 frees"),
        (
            "parallel.world_size=2 parallel.pp=2 parallel.schedule=zero-bubble model.num_layers=4",
            "parallel.schedule='zero-bubble': a delayed weight gradient reads memory that the next replay overwrites",
        ),
        ("parallel.overlap_experts=true", "parallel.overlap_experts=true: a graph cannot be captured inside"),
        ("train.precision=mxfp8", "train.precision='mxfp8': a replay would not quantise new weights"),
        ("data.document_end=0", "documents: their attention masks change with each micro-batch"),
        ("data.kind=sft data.path=chats.jsonl", "documents: their attention masks"),
        ("metrics.memory_every=2", "metrics.memory_every=2: memory of a graph is allocated once"),
        ('train.recompute=["layer"]', "train.recompute=['layer']: what a graph saves for its backward pass stays"),
        ('train.recompute=["norms","moe"]', "train.recompute=['norms']: what a graph saves"),
        ('train.offload=["moe"]', "train.offload=['moe']: what a graph saves"),
    ],
)
def test_an_obstacle_is_named(settings, obstacle):
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, [GRAPHS, *settings.split()]))
    message = f"run.cuda_graphs='attention' does not go with {obstacle}"
    assert message in str(error.value)
    assert "; set run.cuda_graphs='none', or change that" in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "parallel.world_size=2 parallel.pp=2",
        "parallel.world_size=2 parallel.zero=2 parallel.ep=2",
        'train.recompute=["moe"]',
        "parallel.zero=3",
        "model.qk_norm=true run.compile=blocks",
    ],
)
def test_fixed_shapes_and_addresses_are_accepted(settings):
    check_config(load_config(None, [GRAPHS, *settings.split()]))


def test_a_cpu_has_no_graphs():
    message = "run.cuda_graphs='attention' needs a CUDA device, and the device is 'cpu'; set run.cuda_graphs='none'"
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, [GRAPHS, "run.device=cpu"]))
    assert str(error.value) == message
    cfg = load_config(None, [GRAPHS])
    check_cuda_graphs_device(cfg, "cuda")
    with pytest.raises(ConfigError) as error:
        check_cuda_graphs_device(cfg, "cpu")
    assert str(error.value) == message
