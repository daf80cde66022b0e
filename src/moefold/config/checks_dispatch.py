"""What DeepEP cannot do, as far as it is known without torch: refused where it is named, the reason where it is not."""

import importlib.util
from collections.abc import Iterator

from moefold.config.checks_model import has_moe_layers
from moefold.config.schema import Config
from moefold.errors import ConfigError

DEEPEP_PACKAGE = "deep_ep"
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


def validate_deepep(cfg: Config) -> Iterator[str]:
    """DeepEP, where it is named and has work, can do what the recipe asks."""
    if _requests_deepep(cfg):
        for obstacle in deepep_unsupported_reasons(cfg):
            yield f"parallel.dispatcher='deepep' cannot run: {obstacle}; choose 'alltoall', or 'auto'"


def is_deepep_installed() -> bool:
    """Whether the package can be imported; it is not."""
    return importlib.util.find_spec(DEEPEP_PACKAGE) is not None


def check_dispatch_package(cfg: Config) -> None:
    """DeepEP is installed where the recipe names it.

    Raises:
        ConfigError: it is not.
    """
    if _requests_deepep(cfg) and not is_deepep_installed():
        raise ConfigError(
            f"parallel.dispatcher='deepep' needs the package {DEEPEP_PACKAGE}, which is not installed: build it from "
            "github.com/deepseek-ai/DeepEP, or choose 'alltoall', or 'auto'"
        )


def check_dispatch_device(cfg: Config, device_type: str) -> None:
    """The ranks will run on GPUs where the recipe names DeepEP.

    Raises:
        ConfigError: they will not.
    """
    if _requests_deepep(cfg) and device_type != "cuda":
        raise ConfigError(
            "parallel.dispatcher='deepep' needs CUDA GPUs, and the ranks would run on the CPU; "
            "choose 'alltoall', or 'auto'"
        )


def _requests_deepep(cfg: Config) -> bool:
    p = cfg.parallel
    return p.dispatcher == "deepep" and p.ep * p.etp > 1 and has_moe_layers(cfg.model)
