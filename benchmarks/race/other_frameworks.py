"""MoE layers of other frameworks for the bench: availability, unsupported features and equality with our layer."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from shutil import which

import torch
from torch import Tensor, nn

from benchmarks.race.routing import softmax_kind
from moefold.bench.shape import BenchPart
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.model.moe.layer import MoELayer

Dtype = torch.dtype
MAX_RELATIVE_DIFFERENCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative difference of a token's output, by dtype: routers use at least float32, summation order differs."""
MIN_AGREEING_FRACTION = 0.99
"""Minimum fraction of equal tokens: rounding decides between equally good experts."""


class PeerUnavailableError(Exception):
    """Error for a peer that cannot be compared. The message is the reason."""


@dataclass(frozen=True)
class Peer:
    """Framework whose MoE layer may be compared.

    Attributes:
        name: package name.
        module: module that is imported to check the installation.
        builder: module whose `build(ours, model, dtype)` returns the framework's layer with our weights, a map of
            [S, B, H] to [S, B, H].
        unsupported_reason: returns the reason why the layer cannot compute a model in a dtype on a device type, or "".
    """

    name: str
    module: str
    builder: str
    unsupported_reason: Callable[[ModelConfig, Dtype, str], str]

    @property
    def title(self) -> str:
        """Name and version for the table. The peer must be installed."""
        return f"{self.name} {version(self.name)}"


def unavailable_reason(peer: Peer, cfg: Config, part: BenchPart, device: torch.device) -> str:
    """Return the reason why a peer cannot be compared, as far as known without importing it; else ""."""
    if not _is_installed(peer.module):
        return "not installed"
    if part != "layer":
        return "compared by its MoE layer only, in the shapes that end in -layer"
    return _common_unsupported_reason(cfg.model) or peer.unsupported_reason(
        cfg.model, getattr(torch, cfg.run.dtype), device.type
    )


def build_peer_layer(peer: Peer, ours: MoELayer, cfg: Config, x: Tensor) -> nn.Module:
    """Build a peer's layer with our weights, and check that its results equal ours.

    Args:
        peer: the framework.
        ours: the layer to copy.
        cfg: the recipe.
        x: hidden states [S, B, H] in the dtype of the run.

    Raises:
        PeerUnavailableError: the installed version fails, or its results differ.
    """
    # Peers warn about missing optional packages and dtypes that autocast does not support.
    warnings.filterwarnings("ignore", module=re.escape(peer.module))
    try:
        layer: nn.Module = import_module(peer.builder).build(ours, cfg.model, x.dtype)
        theirs = layer(x)
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        theirs.backward(torch.zeros_like(theirs))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise PeerUnavailableError(f"failed: version {version(peer.name)}: {reason}") from error
    layer.zero_grad()
    with torch.no_grad():
        expected = ours(x)
    relative_errors = (theirs.detach().double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    difference = float(relative_errors.quantile(MIN_AGREEING_FRACTION))
    # `not <=`: NaN counts as different.
    if not difference <= MAX_RELATIVE_DIFFERENCE[x.dtype]:
        raise PeerUnavailableError(
            f"failed: its results differ from ours by {difference:.1%}: it computes something else"
        )
    return layer


def num_weight_copies(cfg: Config, part: BenchPart, device: torch.device) -> int:
    """Return the number of weight copies in memory: our copy, transformers' and each compared peer's."""
    return 2 + sum(not unavailable_reason(peer, cfg, part, device) for peer in PEERS)


def torchtitan_unsupported_reason(model: ModelConfig, dtype: Dtype, device_type: str) -> str:
    """See `Peer.unsupported_reason`."""
    if dtype != torch.bfloat16:
        return "its experts support bfloat16 only (--dtype bfloat16)"
    if model.ffn.moe.router.kind == "softmax" and model.ffn.moe.router.num_groups > 1:
        return "it scores groups by their two best experts, where softmax routing uses the best one"
    return ""


def megatron_unsupported_reason(model: ModelConfig, dtype: Dtype, device_type: str) -> str:
    """See `Peer.unsupported_reason`."""
    if device_type != "cpu":
        return "its fast experts need transformer-engine, with which this bench has not been run"
    if which("g++") is None:
        return "its activation is compiled with g++, which is missing"
    if model.ffn.moe.router.expert_bias:
        return "its expert bias needs CUDA"
    if model.ffn.moe.router.num_groups > 1:
        return "its group-limited routing differs from ours"
    if model.ffn.moe.router.kind == "sigmoid" and not getattr(model.ffn.moe.router, "normalize", True):
        return "its sigmoid scores are always normalised"
    is_top1_softmax = (
        model.ffn.moe.top_k == 1 and model.ffn.moe.router.kind == "softmax" and softmax_kind(model) == "post"
    )
    return "it has no softmax over a single chosen expert" if is_top1_softmax else ""


PEERS = (
    Peer("megatron-core", "megatron.core", "benchmarks.race.megatron_layer", megatron_unsupported_reason),
    Peer("torchtitan", "torchtitan", "benchmarks.race.torchtitan_layer", torchtitan_unsupported_reason),
)


def _common_unsupported_reason(model: ModelConfig) -> str:
    if model.ffn.moe.router.kind == "sqrtsoftplus":
        return "its router has no sqrtsoftplus scores"
    if softmax_kind(model) == "sparsemixer":
        return "its router is no SparseMixer"
    if model.ffn.moe.zero_experts or model.ffn.moe.probs_on_input:
        return "it has neither zero-computation experts nor routing weights on inputs"
    has_biases = model.ffn.moe.bias or model.ffn.moe.router.bias
    return "its experts are SwiGLU without biases" if has_biases or model.ffn.moe.activation.kind != "swiglu" else ""


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
