"""One step of a made-up run, for the tests of those who show or store it."""

from moefold.metrics.definitions import step_values
from moefold.metrics.moe_metrics import MoELayerMetrics
from moefold.parallel.memory_tracking import MemoryByPart

LAYER = MoELayerMetrics(
    layer=1,
    load=1.25,
    load_cv=0.5,
    dead_experts=2,
    dropped_fraction=0.125,
    router_entropy=1.75,
    aux_loss=0.01,
    z_loss=0.0,
    bias_min=-0.25,
    bias_max=None,
    zero_fraction=0.0,
)

MEMORY = MemoryByPart(
    peak_bytes={"weights": [2**31, 2**30], "experts": [2**20, 2**21]}, current_bytes={"weights": [2**31, 2**30]}
)

STEP = step_values(
    {
        "step": 1,
        "loss": 2.5,
        "aux_loss": 0.01,
        "z_loss": 0.0,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "tokens": 2048,
        "tokens_consumed": 2560,
        "step_time_s": 0.5,
        "tokens_per_s": 4096.0,
        "tflops_per_rank": 0.0213,
        "mfu": None,
        "memory_gib": 0.4,
        "expert_load": (1.5, 1.25),
        "dropped_fraction": 0.0,
        "mtp_loss": 0.0,
        "indexer_loss": 0.0,
        "save_s": 0.0,
        "moe_layers": (),
    }
)
