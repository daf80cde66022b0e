"""The MoE layers of other frameworks: which of them can compute ours here, and why the others do not compete."""

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

from moefold.bench.shape import BenchPart
from moefold.config.schema import Config, ModelConfig
from moefold.model.moe.layer import MoELayer

Dtype = torch.dtype
MAX_RELATIVE_DIFFERENCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the result for a token, relative, by its type: routers are float32 or wider, sums are in another order."""
MIN_AGREEING_SHARE = 0.99
"""Of the tokens: where two experts are as good, the order of a sum decides between them."""


class PeerUnavailableError(Exception):
    """A peer is not in the race; the message says why."""


@dataclass(frozen=True)
class Peer:
    """A framework whose MoE layer may be raced.

    Attributes:
        name: of its package.
        module: what shows that it is installed.
        builder: module whose `build(ours, model, dtype)` makes its layer with our weights, [S, B, H] to the same.
        unsupported_reason: why it cannot compute a model in a type on a kind of device; empty if it can.
    """

    name: str
    module: str
    builder: str
    unsupported_reason: Callable[[ModelConfig, Dtype, str], str]

    @property
    def title(self) -> str:
        """In the table; installed peers alone."""
        return f"{self.name} {version(self.name)}"


def unavailable_reason(peer: Peer, cfg: Config, part: BenchPart, device: torch.device) -> str:
    """Why a peer does not compete, as far as that is known without its code; empty if it may."""
    if not _is_installed(peer.module):
        return "not installed"
    if part != "layer":
        return "compared by its MoE layer alone, in the shapes that end in -layer"
    return _common_unsupported_reason(cfg.model) or peer.unsupported_reason(
        cfg.model, getattr(torch, cfg.run.dtype), device.type
    )


def build_peer_layer(peer: Peer, ours: MoELayer, cfg: Config, x: Tensor) -> nn.Module:
    """Its layer with our weights, once it has computed what ours does.

    Args:
        peer: who.
        ours: the layer to copy.
        cfg: sizes.
        x: hidden states [S, B, H] of the type of the run.

    Raises:
        AbsentError: its version has no such layer, or its results differ.
    """
    # They tell of each optional package that is missing, and of each type that autocast does not have.
    warnings.filterwarnings("ignore", module=re.escape(peer.module))
    try:
        layer: nn.Module = import_module(peer.builder).build(ours, cfg.model, x.dtype)
    except (ImportError, AttributeError, TypeError) as error:
        raise PeerUnavailableError(f"version {version(peer.name)} is not one that the bench knows: {error}") from error
    with torch.no_grad():
        theirs = layer(x)
        expected = ours(x)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    apart = (theirs.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    difference = float(apart.quantile(MIN_AGREEING_SHARE))
    # A result that is not a number differs as well.
    if not difference <= MAX_RELATIVE_DIFFERENCE[x.dtype]:
        raise PeerUnavailableError(f"its results differ from ours by {difference:.1%}: it computes something else")
    return layer


def num_weight_copies(cfg: Config, part: BenchPart, device: torch.device) -> int:
    """How often a race has the weights in memory: ours, those of transformers, and those of each peer that competes."""
    return 2 + sum(not unavailable_reason(peer, cfg, part, device) for peer in PEERS)


def torchtitan_unsupported_reason(model: ModelConfig, dtype: Dtype, device_type: str) -> str:
    """See `Peer.lacks`."""
    if dtype != torch.bfloat16:
        return "its experts multiply in bfloat16 alone (--dtype bfloat16)"
    if model.router_score == "softmax" and model.num_groups > 1:
        return "it takes groups by their two best experts, where softmax takes them by the best one"
    return ""


def megatron_unsupported_reason(model: ModelConfig, dtype: Dtype, device_type: str) -> str:
    """See `Peer.lacks`."""
    if device_type != "cpu":
        return "its fast experts need transformer-engine, with which the bench has no contestant that has run"
    if which("g++") is None:
        return "its gate is compiled with g++, which is missing"
    if model.expert_bias:
        return "its expert bias needs CUDA"
    if model.num_groups > 1:
        return "its groups are not taken as ours are"
    if model.router_score == "sigmoid" and not model.router_normalize:
        return "its sigmoid scores are always normalised"
    one_of_softmax = model.top_k == 1 and model.router_score == "softmax" and model.router_softmax == "post"
    return "it has no softmax over a single chosen expert" if one_of_softmax else ""


PEERS = (
    Peer("megatron-core", "megatron.core", "moefold.bench.megatron_layer", megatron_unsupported_reason),
    Peer("torchtitan", "torchtitan", "moefold.bench.torchtitan_layer", torchtitan_unsupported_reason),
)


def _common_unsupported_reason(model: ModelConfig) -> str:
    if model.router_score == "sqrtsoftplus":
        return "its router has no scores of sqrtsoftplus"
    has_biases = model.moe_bias or model.router_bias
    return "its experts are SwiGLU without biases" if has_biases or model.moe_activation != "swiglu" else ""


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
