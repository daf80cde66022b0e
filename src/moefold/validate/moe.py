"""Rules between the settings of the router, of its balance and of token dropping.

What DeepEP cannot do, as far as it is known without torch: refused where it is named, the reason where it is not.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator

from moefold.config.schema import Config, ModelConfig, MoEConfig, has_moe_layers
from moefold.config.suggestions import nearest_multiples, nearest_numbers
from moefold.errors import ConfigError
from moefold.topology.dispatchers import DispatcherSpec, dispatcher_of
from moefold.topology.layout import divisors

FORCED_CHOICES = ("round_robin", "skewed")
"""Choices that read no score."""


def validate_routing(cfg: Config) -> Iterator[str]:
    """Everything about routing; a model without MoE layers has none of it."""
    if not has_moe_layers(cfg.model):
        return
    if cfg.model.top_k > cfg.model.num_experts:
        yield (
            f"model.top_k={cfg.model.top_k} must be at most model.num_experts={cfg.model.num_experts}; "
            f"choose 1 to {cfg.model.num_experts}"
        )
        return
    yield from _validate_expert_groups(cfg.model)
    yield from _validate_choice(cfg.model, cfg.moe)
    yield from _validate_capacity(cfg.model, cfg.moe)
    yield from _validate_padding(cfg)
    yield from _validate_replay(cfg.moe)


def _validate_replay(moe: MoEConfig) -> Iterator[str]:
    """A trace and a balancing rule cannot both choose."""
    if moe.replay and moe.choice != "topk":
        yield (
            f"moe.replay={moe.replay!r} has chosen the experts already, and moe.choice={moe.choice!r} would choose "
            "others; choose moe.choice='topk', or leave replay out"
        )


def validate_router_gradient(cfg: Config) -> Iterator[str]:
    """One choice that is divided by its own sum weighs 1, whatever the router thinks: such a model only computes."""
    model = cfg.model
    if model.top_k > 1 or not has_moe_layers(model):
        return
    if model.router_score == "softmax" and model.router_softmax == "post":
        key, way_out = 'model.router_softmax="post"', 'model.router_softmax="pre"'
    elif model.router_score != "softmax" and model.router_normalize:
        key, way_out = "model.router_normalize=true", "model.router_normalize=false"
    else:
        return
    yield (
        f"model.top_k=1 with {key} weighs every choice with 1, so the router gets no gradient from the loss; "
        f"set {way_out}, or model.top_k=2 or more"
    )


def _validate_expert_groups(model: ModelConfig) -> Iterator[str]:
    """Groups are equal parts of the experts, and the best of them hold enough experts."""
    groups, top, experts = model.num_groups, model.top_groups, model.num_experts
    if groups == 1 and top == 1:
        return
    if experts % groups:
        yield (
            f"model.num_groups={groups} must divide model.num_experts={experts}; choose "
            f"{nearest_numbers(groups, divisors(experts))}, or model.num_experts={nearest_multiples(experts, groups)}"
        )
        return
    size = experts // groups
    if top > groups:
        yield f"model.top_groups={top} must be at most model.num_groups={groups}; choose 1 to {groups}"
    elif top * size < model.top_k:
        yield (
            f"model.top_groups={top} groups of {size} experts are fewer than model.top_k={model.top_k} experts; "
            f"choose top_groups of {-(-model.top_k // size)} or more, or top_k of {top * size} or less"
        )
    elif top == groups:
        yield (
            f"model.top_groups={top} of model.num_groups={groups} limits nothing; choose top_groups below {groups}, "
            "or leave both out"
        )
    if size == 1 and model.router_score != "softmax":
        yield (
            f"model.router_score={model.router_score!r} judges a group by its two best experts, and model.num_groups="
            f"{groups} makes groups of one; choose num_groups of {experts // 2} or less"
        )


def _validate_choice(model: ModelConfig, moe: MoEConfig) -> Iterator[str]:
    """What balances the choice does not contradict what chooses."""
    name = f"moe.choice={moe.choice!r}"
    if moe.choice == "quantile" and not model.expert_bias:
        yield (
            f"{name} leaves its thresholds in the expert bias, which evaluation and generation route with, and "
            "model.expert_bias=false; set model.expert_bias=true"
        )
    if moe.choice == "quantile" and model.top_k == model.num_experts:
        yield (
            f"{name} has nothing to balance: model.top_k={model.top_k} is every expert; choose top_k of at most "
            f"{model.num_experts - 1}, or choice='topk'"
        )
    if moe.choice in ("sinkhorn", *FORCED_CHOICES):
        why = "balances the experts by itself" if moe.choice == "sinkhorn" else "reads no score"
        if model.expert_bias:
            yield f"model.expert_bias=true contradicts {name}, which {why}; choose expert_bias=false, or choice='topk'"
        if model.num_groups > 1:
            yield (
                f"model.num_groups={model.num_groups} contradicts {name}, which {why}; "
                "leave num_groups and top_groups out, or choose choice='topk'"
            )
    if moe.choice == "skewed" and model.top_k >= model.num_experts:
        yield (
            f"{name} deals all but expert 0 out to the other tokens, so model.top_k={model.top_k} must be below "
            f"model.num_experts={model.num_experts}; choose top_k of at most {model.num_experts - 1}"
            if model.num_experts > 1
            else f"{name} needs experts beside expert 0, and model.num_experts=1; choose 2 or more"
        )


def _validate_capacity(model: ModelConfig, moe: MoEConfig) -> Iterator[str]:
    """A capacity lets every token reach an expert, and can be reached."""
    for key in ("capacity_factor", "eval_capacity_factor"):
        factor = getattr(moe, key)
        if factor > 0 and factor * model.top_k < 1:
            least = math.ceil(100 / model.top_k) / 100
            yield (
                f"moe.{key}={factor} with model.top_k={model.top_k} gives all experts together room for fewer copies "
                f"than there are tokens, so some would reach no expert; choose {least} or more, or 0.0 (dropless)"
            )
            continue
        enough = model.num_experts / model.top_k
        if factor >= enough and not moe.pad_to_capacity:
            yield (
                f"moe.{key}={factor} lets every expert take every token, and so drops nothing; choose less than "
                f"num_experts/top_k={enough:g}, or 0.0 (dropless)"
            )


def _validate_padding(cfg: Config) -> Iterator[str]:
    """Only a capacity can be padded to, and only one that a rank has to itself."""
    moe, p = cfg.moe, cfg.parallel
    if moe.pad_to_capacity and moe.drop_scope == "full_sequence" and p.cp * p.tp > 1:
        yield (
            f"moe.pad_to_capacity=true with moe.drop_scope='full_sequence' would pad to cp*tp={p.cp * p.tp} times the "
            "rows: the ranks share one capacity, and each of them must have room for all of it; choose "
            "drop_scope='sub_sequence', or pad_to_capacity=false"
        )
    if moe.pad_to_capacity and moe.capacity_factor == 0:
        yield (
            "moe.pad_to_capacity=true needs a capacity, and moe.capacity_factor=0.0 sets none; "
            "set moe.capacity_factor=1.0 or more, or pad_to_capacity=false"
        )


ROUTING_RULES = (validate_routing,)
TRAINING_ONLY_RULES = (validate_router_gradient,)
"""Of training alone."""


ALIGNMENT_BYTES = 16
"""DeepEP's kernels move tokens in units of so many bytes."""
FP8_BLOCK = 128
"""Values to a scale of rows in 8 bits."""


def deepep_unsupported_reasons(cfg: Config) -> Iterator[str]:
    """Why the settings rule DeepEP out, one phrase each."""
    p, model = cfg.parallel, cfg.model
    if p.etp > 1:
        yield f"deep_ep moves whole experts' tokens, and parallel.etp={p.etp} cuts the experts"
    if cfg.moe.pad_to_capacity:
        yield "deep_ep sends what there is, and moe.pad_to_capacity=true pads"
    if cfg.run.dtype != "bfloat16":
        yield f"deep_ep carries bfloat16, and run.dtype={cfg.run.dtype!r}"
    if model.hidden_size * 2 % ALIGNMENT_BYTES:
        yield (
            f"deep_ep moves tokens in units of {ALIGNMENT_BYTES} bytes, and model.hidden_size={model.hidden_size} is "
            f"no multiple of {ALIGNMENT_BYTES // 2}"
        )
    if cfg.moe.dispatch_precision != "dtype" and model.hidden_size % FP8_BLOCK:
        yield (
            f"deep_ep has a scale for {FP8_BLOCK} values, and with moe.dispatch_precision="
            f"{cfg.moe.dispatch_precision!r} model.hidden_size={model.hidden_size} is no multiple of that"
        )
    if cfg.faults.check_dispatch:
        yield "deep_ep keeps its row counts to itself, and faults.check_dispatch=true compares them"
    if p.overlap_experts:
        yield "deep_ep waits for its rows where it sends them, and parallel.overlap_experts=true works meanwhile"
    if cfg.run.device == "cpu":
        yield "deep_ep needs CUDA GPUs, and run.device='cpu'"


UNSUPPORTED_REASONS: dict[str, Callable[[Config], Iterator[str]]] = {"deepep": deepep_unsupported_reasons}
"""By the name of a dispatcher that needs a package of kernels: why the settings rule it out, one phrase each."""


def validate_dispatch_kernels(cfg: Config) -> Iterator[str]:
    """Check that the kernels of a dispatcher, where it is named and has work, can do what the recipe asks."""
    name = cfg.parallel.dispatcher
    if requests_dispatch_kernels(cfg):
        for obstacle in UNSUPPORTED_REASONS[name](cfg):
            yield f"parallel.dispatcher={name!r} cannot run: {obstacle}; choose 'alltoall', or 'auto'"


def is_kernel_package_installed(spec: DispatcherSpec) -> bool:
    """Check that the package of a dispatcher's kernels can be imported, without importing it."""
    return importlib.util.find_spec(spec.kernel_package) is not None


def check_dispatch_package(cfg: Config) -> None:
    """DeepEP is installed where the recipe names it.

    Raises:
        ConfigError: it is not.
    """
    spec = dispatcher_of(cfg)
    if requests_dispatch_kernels(cfg) and not is_kernel_package_installed(spec):
        raise ConfigError(
            f"parallel.dispatcher={spec.name!r} needs the package {spec.kernel_package}, which is not installed: build "
            f"it from {spec.package_source}, or choose 'alltoall', or 'auto'"
        )


def check_dispatch_device(cfg: Config, device_type: str) -> None:
    """The ranks will run on GPUs where the recipe names DeepEP.

    Raises:
        ConfigError: they will not.
    """
    if requests_dispatch_kernels(cfg) and device_type != "cuda":
        raise ConfigError(
            f"parallel.dispatcher={cfg.parallel.dispatcher!r} needs CUDA GPUs, and the ranks would run on the CPU; "
            "choose 'alltoall', or 'auto'"
        )


def requests_dispatch_kernels(cfg: Config) -> bool:
    """Check that the recipe names a dispatcher with a package of kernels, and that tokens leave their rank."""
    p = cfg.parallel
    return bool(dispatcher_of(cfg).kernel_package) and p.ep * p.etp > 1 and has_moe_layers(cfg.model)
