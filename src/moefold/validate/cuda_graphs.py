"""Rules on CUDA graphs: what they capture has fixed shapes and addresses, and no work of the host."""

from collections.abc import Callable, Iterator

from moefold.config.chosen import chosen
from moefold.config.groups.schedule import SchedulePart
from moefold.config.model import ModelConfig, has_moe_layers
from moefold.config.moe import MoEConfig
from moefold.config.run import RunConfig
from moefold.config.schema import Config
from moefold.errors import ConfigError

RECOMPUTE_OUTSIDE_ATTENTION = ("moe", "dense_mlp", "shared_experts", "expert_activation")
"""Parts that may be recomputed where attention is captured."""
GROUPED_MM_ALIGNMENT = 8
"""bfloat16 widths that are multiples of this are 16 bytes aligned, as torch's grouped_mm requires."""

Obstacle = tuple[str, bool, str]
"""A setting, whether a recipe has it, and why it does not go with graphs."""


def validate_cuda_graphs(cfg: Config) -> Iterator[str]:
    """Check that what is captured has fixed shapes, addresses and memory, and no communication or host work."""
    if not cfg.run.uses_cuda_graphs:
        return
    for setting, is_present, reason in (*_obstacles(cfg), *_OBSTACLES_BY_MODE[cfg.run.cuda_graphs](cfg)):
        if is_present:
            yield (
                f"run.cuda_graphs={cfg.run.cuda_graphs!r} does not go with {setting}: {reason}; set "
                "run.cuda_graphs='none', or change that"
            )
    if cfg.run.device == "cpu":
        yield _needs_cuda(cfg.run, "cpu")


def _obstacles(cfg: Config) -> Iterator[Obstacle]:
    """Return the obstacles to every graph."""
    p = cfg.parallel
    yield f"parallel.tp={p.tp}", p.tp > 1, "its collectives would be captured"
    yield f"parallel.cp={p.cp}", p.cp > 1, "its collectives would be captured"
    yield "parallel.overlap_experts=true", p.overlap_experts, "a graph cannot be captured inside a backward pass"
    low = cfg.train.precision
    yield f"train.precision={low!r}", low != "dtype", "a replay would not quantise new weights"
    yield "documents", has_documents(cfg), "their attention masks change with each micro-batch"
    top_k = cfg.model.selected_keys
    yield f"model.index_topk={top_k}", top_k > 0, "the indexer's loss is recorded, and its blocks chosen, by the host"
    every = cfg.metrics.memory_every
    yield f"metrics.memory_every={every}", every > 0, "memory of a graph is allocated once and belongs to no step"
    offload = list(cfg.train.offload)
    yield f"train.offload={offload}", bool(offload), "what a graph saves for its backward pass stays in its memory"


def _module_obstacles(cfg: Config) -> Iterator[Obstacle]:
    """Return the obstacles to graphs of attention."""
    p = cfg.parallel
    yield "parallel.zero=3", p.zero == 3 and p.world_size > 1, "a graph keeps the weights that ZeRO 3 frees"
    splits_backward = p.pp > 1 and chosen(cfg, SchedulePart).splits_backward
    late = "a delayed weight gradient reads memory that the next replay overwrites"
    yield f"parallel.schedule='{p.schedule}'", splits_backward, late
    pattern = f"model.attention_pattern={cfg.model.attention_pattern!r}"
    recomputed = "linear attention is recomputed in the backward pass, and each graph would keep the memory for it"
    yield pattern, cfg.model.has_linear_attention, recomputed
    captured = [part for part in cfg.train.recompute if part not in RECOMPUTE_OUTSIDE_ATTENTION]
    saved = "what a graph saves for its backward pass stays in its memory"
    yield f"train.recompute={captured}", bool(captured), saved


def _router_obstacles(cfg: Config) -> Iterator[Obstacle]:
    """Return the obstacles to graphs of attention and routers."""
    yield from _module_obstacles(cfg)
    yield "a model without MoE layers", not has_moe_layers(cfg.model), "it has no router"
    recomputes_router = "moe" in cfg.train.recompute
    yield "train.recompute=['moe']", recomputes_router, "what the router saves stays in the memory of its graph"
    yield from _routing_trace_obstacles(cfg.moe)


def _full_obstacles(cfg: Config) -> Iterator[Obstacle]:
    """Return the obstacles to graphs of whole micro-batches."""
    world_size = cfg.parallel.world_size
    sharded = "FSDP and the exchanges of several ranks are work of the host, outside of a graph"
    yield f"parallel.world_size={world_size}", world_size > 1, sharded
    yield from _routing_trace_obstacles(cfg.moe)
    needs_padding = has_moe_layers(cfg.model) and not cfg.moe.pad_to_capacity and _reads_counts(cfg.run, cfg.model)
    kernels = f"run.kernels={cfg.run.kernels!r} with run.dtype={cfg.run.dtype!r}"
    yield kernels, needs_padding, "their experts read the token counts on the host, without moe.pad_to_capacity"


def _routing_trace_obstacles(moe: MoEConfig) -> Iterator[Obstacle]:
    every = moe.trace_every
    yield f"moe.trace_every={every}", every > 0, "choices are recorded by the host"
    yield f"moe.replay={moe.replay!r}", bool(moe.replay), "choices are replayed by the host"


def _reads_counts(run: RunConfig, model: ModelConfig) -> bool:
    """Return whether the experts on a GPU read the token counts on the host: without kernels and grouped_mm."""
    if run.kernels == "triton":
        return False
    if run.dtype != "bfloat16":
        return True
    widths = (model.experts.token_size(model.hidden_size), model.experts.width)
    return run.kernels == "plain" and any(width % GROUPED_MM_ALIGNMENT for width in widths)


_OBSTACLES_BY_MODE: dict[str, Callable[[Config], Iterator[Obstacle]]] = {
    "attention": _module_obstacles,
    "attention_router": _router_obstacles,
    "full": _full_obstacles,
}


def has_documents(cfg: Config) -> bool:
    """Return whether the samples of a recipe may hold several documents."""
    return cfg.data.has_documents or cfg.data.kind == "program"


def check_cuda_graphs_device(run: RunConfig, device_type: str) -> None:
    """Check that the ranks' devices have CUDA graphs, if the recipe asks for them.

    Raises:
        ConfigError: they have not.
    """
    if run.uses_cuda_graphs and device_type != "cuda":
        raise ConfigError(_needs_cuda(run, device_type))


def check_graphed_loss(run: RunConfig, metric_names: list[str]) -> None:
    """Check that the loss function does not record metrics, which it would do once, where it is captured.

    Args:
        metric_names: the metrics that the loss function declares.

    Raises:
        ConfigError: it has metrics, and is captured.
    """
    if run.cuda_graphs == "full" and metric_names:
        raise ConfigError(
            f"run.cuda_graphs='full' does not go with the metrics {metric_names} of the loss function: they are "
            "recorded by the host; set run.cuda_graphs to 'attention_router', or use a loss without metrics"
        )


def _needs_cuda(run: RunConfig, device_type: str) -> str:
    return (
        f"run.cuda_graphs={run.cuda_graphs!r} needs a CUDA device, and the device is {device_type!r}; set "
        "run.cuda_graphs='none'"
    )


CUDA_GRAPH_RULES = (validate_cuda_graphs,)
"""CUDA graphs are refused where what they captured would change, communicate, or not be kept."""
