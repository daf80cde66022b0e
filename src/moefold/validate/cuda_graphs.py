"""Rules on CUDA graphs: captured work has fixed shapes and addresses, and no work of the host."""

from collections.abc import Iterable, Iterator

from moefold.config.chosen import chosen_in
from moefold.config.groups.schedule import SchedulePart
from moefold.config.model import ModelConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.metrics import MetricsConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting

RECOMPUTE_OUTSIDE_ATTENTION = ("moe", "dense_mlp", "shared_experts", "expert_activation")
"""Parts that may be recomputed if attention is captured."""
GROUPED_MM_ALIGNMENT = 8
"""bfloat16 widths that are multiples of this are 16 bytes aligned, as torch's grouped_mm requires."""

Obstacle = tuple[str, bool, str]
"""Setting, whether a recipe has it, and the reason why it is incompatible with graphs."""


def validate_cuda_graphs(
    run: RunConfig, model: ModelConfig, parallel: ParallelConfig, moe: MoEConfig, train: TrainConfig
) -> Iterator[Problem]:
    """Check that captured work has fixed shapes, addresses and memory, and no communication or host work."""
    if not run.uses_cuda_graphs:
        return
    by_mode = _OBSTACLES_BY_MODE[run.cuda_graphs]
    yield from _refusals(run, (*_obstacles(model, parallel, train), *by_mode(run, model, parallel, moe, train)))
    if run.device == "cpu":
        yield Problem("", None, _needs_cuda(run, "cpu"))


def validate_graphed_data(run: RunConfig, data: DataConfig, metrics: MetricsConfig) -> Iterator[Problem]:
    """Check that data and metrics are the same for every replay of a graph."""
    if run.uses_cuda_graphs:
        yield from _refusals(run, _data_obstacles(data, metrics))


def _refusals(run: RunConfig, obstacles: Iterable[Obstacle]) -> Iterator[Problem]:
    for setting, is_present, reason in obstacles:
        if is_present:
            rule = f"is incompatible with {setting}: {reason}"
            yield Problem("run.cuda_graphs", run.cuda_graphs, rule, "set run.cuda_graphs='none', or change that")


def _obstacles(model: ModelConfig, p: ParallelConfig, train: TrainConfig) -> Iterator[Obstacle]:
    yield str(Setting("parallel.tp", p.tp)), p.tp > 1, "its collectives would be captured"
    yield f"parallel.cp={p.cp}", p.cp > 1, "its collectives would be captured"
    yield "parallel.overlap_experts=true", p.overlap_experts, "a graph cannot be captured inside a backward pass"
    low = train.precision
    yield f"train.precision={low!r}", low != "dtype", "a replay would not quantise new weights"
    top_k = model.selected_keys
    yield (
        f"model.attention.indexer.top_k={top_k}",
        top_k > 0,
        "the indexer's loss is recorded, and its blocks chosen, by the host",
    )
    offload = list(train.offload)
    yield f"train.offload={offload}", bool(offload), "what a graph saves for its backward pass stays in its memory"


def _data_obstacles(data: DataConfig, metrics: MetricsConfig) -> Iterator[Obstacle]:
    yield "documents", data.may_have_documents, "their attention masks change with each micro-batch"
    every = metrics.memory_every
    yield f"metrics.memory_every={every}", every > 0, "memory of a graph is allocated once and belongs to no step"


def _module_obstacles(
    run: RunConfig, model: ModelConfig, p: ParallelConfig, moe: MoEConfig, train: TrainConfig
) -> Iterator[Obstacle]:
    """Return the obstacles to graphs of attention."""
    yield "parallel.zero=3", p.zero == 3 and p.world_size > 1, "a graph keeps the weights that ZeRO 3 frees"
    splits_backward = p.pp > 1 and chosen_in(p, SchedulePart).splits_backward
    obstacle = "a delayed weight gradient reads memory that the next replay overwrites"
    yield f"parallel.schedule='{p.schedule}'", splits_backward, obstacle
    pattern = f"model.layers={model.layers!r}"
    recomputed = "linear attention is recomputed in the backward pass, and each graph would keep the memory for it"
    yield pattern, model.has_linear_attention, recomputed
    captured = [part for part in train.recompute if part not in RECOMPUTE_OUTSIDE_ATTENTION]
    saved = "what a graph saves for its backward pass stays in its memory"
    yield f"train.recompute={captured}", bool(captured), saved


def _router_obstacles(
    run: RunConfig, model: ModelConfig, p: ParallelConfig, moe: MoEConfig, train: TrainConfig
) -> Iterator[Obstacle]:
    """Return the obstacles to graphs of attention and routers."""
    yield from _module_obstacles(run, model, p, moe, train)
    yield "a model without MoE layers", not model.has_moe_layers, "it has no router"
    recomputes_router = "moe" in train.recompute
    yield "train.recompute=['moe']", recomputes_router, "what the router saves stays in the memory of its graph"
    yield from _routing_trace_obstacles(moe)


def _full_obstacles(
    run: RunConfig, model: ModelConfig, p: ParallelConfig, moe: MoEConfig, train: TrainConfig
) -> Iterator[Obstacle]:
    """Return the obstacles to graphs of whole micro-batches."""
    world_size = p.world_size
    sharded = "FSDP and the exchanges of several ranks are work of the host, outside of a graph"
    yield str(Setting("parallel.world_size", world_size)), world_size > 1, sharded
    yield from _routing_trace_obstacles(moe)
    needs_padding = model.has_moe_layers and not moe.pad_to_capacity and _reads_counts(run, model)
    kernels = f"{Setting('run.kernels', run.kernels)} with {Setting('run.dtype', run.dtype)}"
    yield kernels, needs_padding, "their experts read the token counts on the host, without moe.pad_to_capacity"


def _routing_trace_obstacles(moe: MoEConfig) -> Iterator[Obstacle]:
    every = moe.trace_every
    yield f"moe.trace_every={every}", every > 0, "choices are recorded by the host"
    yield f"moe.replay={moe.replay!r}", bool(moe.replay), "choices are replayed by the host"


def _reads_counts(run: RunConfig, model: ModelConfig) -> bool:
    """Return whether the experts on a GPU read the token counts on the host: they do without kernels and grouped_mm."""
    if run.kernels == "triton":
        return False
    if run.dtype != "bfloat16":
        return True
    widths = (model.experts.token_size(model.hidden_size), model.experts.intermediate_size)
    return run.kernels == "plain" and any(width % GROUPED_MM_ALIGNMENT for width in widths)


_OBSTACLES_BY_MODE = {"attention": _module_obstacles, "attention_router": _router_obstacles, "full": _full_obstacles}


def check_cuda_graphs_device(run: RunConfig, device_type: str) -> None:
    """Check that the ranks' devices have CUDA graphs, if the recipe asks for them.

    Raises:
        ConfigError: a device has no CUDA graphs.
    """
    if run.uses_cuda_graphs and device_type != "cuda":
        raise ConfigError(_needs_cuda(run, device_type))


def check_graphed_loss(run: RunConfig, metric_names: list[str]) -> None:
    """Check that a captured loss function records no metrics: it would record them only once, at the capture.

    Raises:
        ConfigError: a captured loss function has metrics.
    """
    if run.cuda_graphs == "full" and metric_names:
        rule = f"is incompatible with the metrics {metric_names} of the loss function: they are recorded by the host"
        way_out = "set run.cuda_graphs to 'attention_router', or use a loss without metrics"
        raise ConfigError(Problem("run.cuda_graphs", "full", rule, way_out))


def _needs_cuda(run: RunConfig, device_type: str) -> str:
    return (
        f"run.cuda_graphs={run.cuda_graphs!r} needs a CUDA device, and the device is {device_type!r}; set "
        "run.cuda_graphs='none'"
    )


CUDA_GRAPH_RULES = (validate_cuda_graphs, validate_graphed_data)
"""Rules that refuse CUDA graphs whose captured work would change, communicate, or not be kept."""
