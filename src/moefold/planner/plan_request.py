"""Plan requests from a model's name, a device's name and settings.

Messages name the options of `moefold plan`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from moefold.config.base.limits import check_at_most
from moefold.config.chosen import chosen_in
from moefold.config.groups.context import ContextPart
from moefold.config.keys.annotations import max_integer
from moefold.config.model import ModelConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.hardware import load_device
from moefold.errors import ConfigError
from moefold.message_text import Setting
from moefold.planner.cost_model.gemm import resolve_precision
from moefold.planner.cost_model.workload import RecordedRouting, workload_from_config
from moefold.planner.lengths.balance import DocumentLoads
from moefold.planner.lengths.samples import check_documents, open_document_samples
from moefold.planner.memory.budget import default_reserve_gib
from moefold.planner.planner import MAX_GPUS, PlanRequest, legal_context, read_model
from moefold.planner.search.constraints import FOLDED, Restriction
from moefold.planner.sites import resolve_sites

DEFAULT_SEQ_LEN = 4096
"""Tokens per sample of a model without a recipe."""
DEFAULT_BATCH_TOKENS = 2**22
"""Tokens per step of a model without a recipe."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Settings of a plan except the model and the device. None takes the value of the recipe."""

    num_gpus: int | None = None
    """None takes the recipe's."""
    seq_len: int | None = None
    """None takes the recipe's, or `DEFAULT_SEQ_LEN`."""
    global_batch_size: int | None = None
    """None takes the recipe's, or a power of two with at most `DEFAULT_BATCH_TOKENS` a step."""
    fix: Mapping[str, Any] = field(default_factory=dict)
    """Values of axes. Only mappings with them are searched."""
    overrides: Sequence[str] = ()
    """Settings `section.key=value` that override the recipe, or the defaults of a model without one."""
    precision: str | None = None
    """Number format of the GEMMs. None takes the recipe's, or bf16."""
    imbalance: float = 1.0
    """Routed tokens of the busiest expert-parallel rank over the mean."""
    capacity_factor: float | None = None
    """Token dropping. 0 is dropless. None takes the recipe's, or 0."""
    memory_reserve: float | None = None
    """GiB of each GPU to leave free. None leaves a share of its memory free."""
    cuda_graphs: Literal["none", "partial", "full"] = "none"
    """Part of the step that is captured."""
    flops: Literal["full", "causal"] = "full"
    """Attention in the FLOP count of the MFU."""
    mtp_flops: Literal["with", "without"] | None = None
    """Count multi-token prediction in the MFU: with or without. None: with."""
    method: str = FOLDED
    """Method of arXiv:2504.14960 that restricts the search. folded: no restriction."""
    offload: bool = False
    """Search offload of activations and moments to the host's memory too. Its cost is not measured."""
    trace: Path | None = None
    """Run folder whose recorded routing (moe.trace_every) is planned for."""
    lengths: str | None = None
    """Lengths of the documents: a histogram, a file, or a run folder. None: a sample is one document."""
    sites: int | None = None
    """Sites that train one model, each on `num_gpus`. None takes the recipe's."""
    site_link: float | None = None
    """Bytes per second between a site and the others, one way. None takes the device's, if it has any."""
    site_latency: float | None = None
    """Seconds of a message between sites. None takes the device's, or 0."""


def plan_request(model: str, gpu: str, options: PlanOptions) -> PlanRequest:
    """Build the request of a planner.

    Raises:
        ConfigError: the model, the device or a setting is wrong or missing.
    """
    device = load_device(gpu)
    base, model_spec = read_model(model, options.overrides)
    check_priced_stage(base.model, base.train, base.lora)
    is_recipe = model.endswith(".toml")
    num_gpus, seq_len, batch, assumed = _chosen_sizes(base.parallel, base.train, options, is_recipe=is_recipe)
    reserve = default_reserve_gib(device) if options.memory_reserve is None else options.memory_reserve
    if not 0 <= reserve < device.memory_gib:
        raise ConfigError(
            f"{Setting('--memory-reserve', reserve):g} must be at least 0 and below {device.memory_gib:g}, the GiB of "
            f"{device.name}"
        )
    check_imbalance(options.imbalance, base.model.ffn.moe.num_experts)
    factor = base.moe.capacity_factor if options.capacity_factor is None else options.capacity_factor
    base_with_precision, precision = resolve_precision(base, options.precision, device)
    cfg = replace(
        base_with_precision,
        run=replace(base.run, device="cpu" if device.name == "cpu" else "cuda"),
        moe=replace(base.moe, capacity_factor=factor),
        parallel=replace(
            base.parallel, world_size=num_gpus, mapping="given", context=legal_context(base.model, base.parallel)
        ),
        train=replace(base_with_precision.train, seq_len=seq_len, global_batch_size=batch),
    )
    cfg, site_link = resolve_sites(cfg, device, options.sites, options.site_link, options.site_latency)
    if options.lengths is not None and not is_recipe:
        # The samples of a bare model hold documents because the user says so.
        cfg = replace(cfg, data=replace(cfg.data, document_end=0))
    return PlanRequest(
        base_config=cfg,
        model_spec=model_spec,
        device=device,
        workload=workload_from_config(
            cfg.run,
            cfg.moe,
            cfg.train,
            precision,
            imbalance=options.imbalance,
            cuda_graphs=options.cuda_graphs,
            counts_causal_attention=options.flops == "causal",
            counts_mtp=_counts_mtp(options.mtp_flops, base.model),
            routing=None if options.trace is None else RecordedRouting(options.trace, base.model),
            attention=document_loads(options.lengths, cfg.parallel, cfg.train, cfg.data, cfg.rl),
        ),
        restriction=Restriction(dict(options.fix), options.method, options.offload),
        reserve_gib=reserve,
        site_link=site_link,
        assumed=assumed,
    )


def document_loads(
    lengths: str | None, parallel: ParallelConfig, train: TrainConfig, data: DataConfig, rl: RLConfig
) -> DocumentLoads | None:
    """Return the attention work of documents of given lengths under a recipe's context parallelism.

    Args:
        lengths: a histogram, a file or a run folder. None: a sample is one document, and None is returned.

    Raises:
        ConfigError: there are no such lengths, or the recipe has no documents.
    """
    if lengths is None:
        return None
    check_documents(data, rl, lengths)
    return DocumentLoads(open_document_samples(lengths, train.seq_len), train.seq_len, chosen_in(parallel, ContextPart))


def check_imbalance(value: float, num_experts: int) -> float:
    """Check and return the load of the busiest expert-parallel rank over the mean.

    Raises:
        ConfigError: the value is not in [1, num_experts]: all tokens on one of the experts is the worst case.
    """
    most = max(1, num_experts)
    if not 1 <= value <= most:
        raise ConfigError(
            f"{Setting('--imbalance', value):g} must be at least 1 and at most {most}, the number of experts: it is "
            "the busiest expert-parallel rank over the mean"
        )
    return value


def _chosen_sizes(
    parallel: ParallelConfig, train: TrainConfig, options: PlanOptions, *, is_recipe: bool
) -> tuple[int, int, int, dict[str, int]]:
    """Return the GPUs, the tokens of a sample and the samples of a step, and by option the assumed sizes.

    Raises:
        ConfigError: a size is missing, out of bounds, or set twice.
    """
    named = {word.partition("=")[0] for word in options.overrides}
    sizes = {
        "--num-gpus": ("parallel.world_size", options.num_gpus),
        "--seq-len": ("train.seq_len", options.seq_len),
        "--global-batch-size": ("train.global_batch_size", options.global_batch_size),
    }
    for option, (key, given) in sizes.items():
        if given is not None and key in named:
            raise ConfigError(f"{Setting(option, given)} and {key} set the same; leave one of them out")
    unsaid = {option for option, (key, given) in sizes.items() if not is_recipe and given is None and key not in named}
    if "--num-gpus" in unsaid:
        raise ConfigError(f"{Setting('--num-gpus')} is missing; set it, or give a recipe as MODEL, which supplies it")
    num_gpus = _in_bounds("--num-gpus", options.num_gpus, parallel.world_size, MAX_GPUS)
    default_len = DEFAULT_SEQ_LEN if "--seq-len" in unsaid else train.seq_len
    seq_len = _in_bounds("--seq-len", options.seq_len, default_len, max_integer("train", "seq_len"))
    default_batch = train.global_batch_size
    if "--global-batch-size" in unsaid:
        # A power of two, which data-parallel ranks and micro-batches can share evenly.
        default_batch = 1 << (max(1, DEFAULT_BATCH_TOKENS // seq_len).bit_length() - 1)
    max_batch = max_integer("train", "global_batch_size")
    batch = _in_bounds("--global-batch-size", options.global_batch_size, default_batch, max_batch)
    chosen = {"--seq-len": seq_len, "--global-batch-size": batch}
    return num_gpus, seq_len, batch, {option: size for option, size in chosen.items() if option in unsaid}


def _in_bounds(option: str, given: int | None, default: int, maximum: int) -> int:
    """Return the given number, or the default, if it is at least 1 and at most the maximum."""
    number = default if given is None else given
    if number < 1:
        raise ConfigError(f"{Setting(option, number)} must be at least 1")
    check_at_most(option, number, maximum)
    return number


def _counts_mtp(given: str | None, model: ModelConfig) -> bool:
    if given is not None and not model.mtp_layers:
        raise ConfigError(
            f"{Setting('--mtp-flops', given):s} has no effect: model.mtp_layers=0 turns multi-token prediction off; "
            "leave it out"
        )
    return given != "without"


def check_priced_stage(model: ModelConfig, train: TrainConfig, lora: LoraConfig) -> None:
    """Check that the time model has the passes of a recipe's training stage.

    Raises:
        ConfigError: the recipe trains only adapters, or is the warm-up of indexers, which has dense attention.
    """
    if lora.trains_adapters_only:
        raise ConfigError(
            f"lora.rank={lora.rank} has no predicted step time: the time model has the gradients of all weights; "
            "plan with lora.rank=0, whose mappings have room for adapters, and add [lora] to the recipe"
        )
    if model.trains_indexers_only(train):
        raise ConfigError(
            "train.indexer_stage='warmup' has no predicted step time: the time model has attention over selected keys "
            "alone; choose 'sparse' to price the stage that follows, or model.attention.indexer=none to price dense "
            "attention"
        )
