"""Weight initialisation from (seed, name) only: every parallel mapping starts from the same model."""

import hashlib
import math

import torch
from torch import Tensor, nn

from moefold.comm.sharded_tensor import local_slice, region_of
from moefold.config.model import ModelConfig
from moefold.cost.adapter_spec import is_adapter
from moefold.cost.layer_spec import model_weights

EXPERT_PARAMETERS = tuple(f"experts.{kind}_{name}" for kind in "wb" for name in ("gate", "up", "down"))
EXPERT_ADAPTERS = ".experts.lora."
DECAY_RATES = (1.0, 16.0)
"""Range of exp(a_log), the decay rates of linear attention (arXiv:2405.21060, as in the code of arXiv:2412.06464)."""
TIME_STEPS = (1e-3, 1e-1)
"""Range of softplus(dt_bias), drawn uniformly in its logarithm (the same sources)."""


@torch.no_grad()
def init_weights(module: nn.Module, cfg: ModelConfig, seed: int) -> None:
    """Initialise the local shards of all parameters, and zero all buffers, without communication.

    Integer buffers keep their dtype. All other buffers become float32, for any dtype of the weights.

    Matrices are normal with init_std (output projections init_std / sqrt(2 * num_layers), as in GPT-2), norms one
    (zero-centred norms zero), biases zero. The convolutions and decays of linear attention have the ranges of their
    papers. A `ParamSpec` may give other values. The B of adapters is zero, and the A uniform within 1 / sqrt(inputs),
    as in the library PEFT. Each logical tensor, and each single expert, has its own generator, seeded by (seed, name),
    and is drawn in float32 on the CPU. At most one whole logical tensor is in memory at a time.
    """
    for name, parameter in module.named_parameters():
        for whole_name, shape, index, view in logical_parts(name, parameter):
            view.copy_(initial_values(whole_name, shape, cfg, seed)[index])
    for submodule in module.modules():
        for leaf, buffer in list(submodule.named_buffers(recurse=False)):
            dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
            setattr(submodule, leaf, torch.zeros(buffer.shape, dtype=dtype, device=buffer.device))


def logical_parts(name: str, parameter: Tensor) -> list[tuple[str, tuple[int, ...], tuple[slice, ...], Tensor]]:
    """Return the logical tensors of a parameter of this rank: the parameter itself, or one tensor for each expert.

    Returns:
        For each: name, global shape, slices of this rank's part, and its values, which share the parameter's memory.
    """
    values, starts = local_slice(parameter)
    index = region_of(values, starts)
    if not name.endswith(EXPERT_PARAMETERS) and EXPERT_ADAPTERS not in name:
        return [(name, tuple(parameter.shape), index, values)]
    first = starts[0]
    expert_shape = tuple(parameter.shape[1:])
    return [(f"{name}.{first + i}", expert_shape, index[1:], values[i]) for i in range(values.shape[0])]


def initial_values(name: str, shape: tuple[int, ...], cfg: ModelConfig, seed: int) -> Tensor:
    """Return the whole logical tensor of a name: the same on every rank, and under every mapping."""
    if is_adapter(name):
        return _initial_adapter(name, shape, seed)
    weights = model_weights(cfg)
    # A name ends with a number for one of several experts, and with a word for rows that are drawn separately.
    spec = weights.get(name) or weights[name.rpartition(".")[0]]
    if spec.initial:
        rows = torch.tensor(spec.initial).view(-1, *[1] * (len(shape) - 1))
        return rows.expand(shape).clone()
    drawn = spec.drawn
    if drawn is None and not spec.is_matrix:
        drawn = "ones" if spec.part == "norms" and not cfg.norm.zero_centered else "zeros"
    generator = torch.Generator().manual_seed(seed_for(seed, name))
    match drawn:
        case "ones" | "zeros":
            return torch.full(shape, float(drawn == "ones"))
        case "convolution":
            bound = shape[1] ** -0.5
            return torch.empty(shape).uniform_(-bound, bound, generator=generator)
        case "decay_rate":
            return torch.empty(shape).uniform_(*DECAY_RATES, generator=generator).log()
        case "time_step":
            steps = torch.empty(shape).uniform_(*map(math.log, TIME_STEPS), generator=generator).exp()
            # The inverse of softplus.
            return steps + torch.log(-torch.expm1(-steps))
    std = cfg.init_std / math.sqrt(2 * cfg.num_layers) if drawn == "output" else cfg.init_std
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _initial_adapter(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return A [r, in] ([in, r] for an expert), or B, which is zero."""
    if [word for word in name.split(".") if not word.isdigit()][-1].endswith("_b"):
        return torch.zeros(shape)
    inputs = shape[0] if EXPERT_ADAPTERS in name else shape[1]
    generator = torch.Generator().manual_seed(seed_for(seed, name))
    return torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)


@torch.no_grad()
def draw_adapter_outputs(module: nn.Module, cfg: ModelConfig, seed: int) -> None:
    """Draw the local shards of the B of all adapters from a normal distribution with init_std, without communication.

    With the B of a new run, which is zero, the A of every adapter has a gradient of zero: a comparison of gradients
    would show nothing.
    """
    for name, parameter in module.named_parameters():
        if not is_adapter(name) or not name.endswith("_b"):
            continue
        for whole_name, shape, index, view in logical_parts(name, parameter):
            generator = torch.Generator().manual_seed(seed_for(seed, whole_name))
            view.copy_(torch.empty(shape).normal_(0.0, cfg.init_std, generator=generator)[index])


def seed_for(seed: int, name: str) -> int:
    """Return a 63-bit generator seed for a named object of the whole model."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
