"""Selection of the ops on this machine: torch or kernels (`run.kernels`), and their precision (`train.precision`)."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.errors import ConfigError
from moefold.message_text import Setting
from moefold.model.attention import CausalAttention, SelfAttention
from moefold.model.causal_blocks import HasAttentionKernel, HasBlockKernel
from moefold.model.kernels import Kernels
from moefold.model.linear import UnquantizedLinear
from moefold.model.module_wrapper import set_on_modules
from moefold.model.transformer import Transformer
from moefold.ops.autotune import Autotuner
from moefold.ops.cpu.experts import SequentialExpertOps
from moefold.ops.decode import DecodeChoice
from moefold.ops.gemm import TORCH_GEMM
from moefold.ops.kernel_support import check_kernel_device, triton_unsupported_reason
from moefold.ops.torch_experts import TORCH_EXPERT_OPS
from moefold.parallel.kernels.selected import SelectedKernels, triton_kernels

if TYPE_CHECKING:
    from moefold.ops.cpu.swiglu import CSwiGLU

logger = logging.getLogger(__name__)


def select_kernels(cfg: Config, device: torch.device) -> SelectedKernels:
    """Select the kernels of all layers of this rank.

    Raises:
        ConfigError: `run.kernels` or `run.compile` asks for kernels that cannot run here.
    """
    # "plain" asks for torch's own operations. Every rank must find the same here: they settle their choices together.
    is_plain = cfg.run.kernels == "plain"
    is_measured = device.type == "cuda" and not is_plain and not cfg.run.deterministic
    autotuner = Autotuner(is_enabled=is_measured, num_ranks=cfg.parallel.world_size)
    kernels = _uncompiled_kernels(cfg, device, autotuner, is_plain=is_plain)
    flash_attention = ""
    if device.type == "cuda":
        from moefold.ops.flash_attention_3 import use_flash_attention_3
        from moefold.ops.paged_flash import FlashPages

        flash_attention = use_flash_attention_3(device)
        reader = None if is_plain else FlashPages(fixed_order=cfg.run.deterministic)
        kernels = replace(kernels, page_reader=reader)
    message = "; ".join(filter(None, (kernels.message, flash_attention)))
    kernels = replace(kernels, message=message, autotuner=autotuner)
    if cfg.run.compile == "none":
        return kernels
    from moefold.ops.compiled import CompiledQKNormRope, CompiledSwiGLU, inductor_unsupported_reason

    reason = inductor_unsupported_reason(device.type)
    if reason:
        raise ConfigError(f"run.compile={cfg.run.compile!r} cannot run: {reason}; set run.compile='none'")
    compiled = f"run.compile={cfg.run.compile!r}: QK norm with RoPE, SwiGLU of dense layers"
    message = "; ".join(filter(None, (kernels.message, compiled)))
    return replace(kernels, qk_norm_rope=CompiledQKNormRope(), swiglu=CompiledSwiGLU(), message=message)


def _uncompiled_kernels(cfg: Config, device: torch.device, autotuner: Autotuner, *, is_plain: bool) -> SelectedKernels:
    if cfg.train.quantizes_gemms:
        from moefold.parallel.kernels.low_precision import low_precision_kernels

        return low_precision_kernels(cfg, device, autotuner)
    if is_plain:
        return SelectedKernels()
    check_kernel_device(cfg.run, device.type)
    if device.type == "cpu" and cfg.run.kernels in ("auto", "c"):
        return _cpu_kernels(cfg.run, cfg.model)
    if cfg.run.kernels == "auto" and device.type != "cuda":
        return SelectedKernels()
    reason = triton_unsupported_reason(cfg.run, device.type)
    if cfg.run.kernels == "auto" and (reason or cfg.run.dtype != "bfloat16"):
        # In float32 the Triton GEMMs would not use the tensor cores. Torch's GEMMs may.
        return SelectedKernels(
            message=f"{Setting('run.kernels', 'auto')}: plain, as {reason or Setting('run.dtype', cfg.run.dtype)}"
        )
    from moefold.ops.triton.experts import TritonExpertOps

    expert_ops = TritonExpertOps(autotuner)
    kernels = triton_kernels(cfg.run, cfg.model, cfg.parallel, cfg.moe, device, autotuner)
    return replace(
        kernels,
        expert_ops=expert_ops,
        swiglu=expert_ops,
        message=f"{Setting('run.kernels', cfg.run.kernels)}: triton{kernels.message}",
    )


def apply_kernels(stage: Transformer, kernels: SelectedKernels) -> None:
    """Set the selected kernels on the layers. Call it before `set_positions`.

    The embedding, the head and the routers compute in higher precision than the layers.
    """
    set_on_modules(stage, "kernels", kernels)
    for layer in stage.moe_layers().values():
        # Experts with adapters multiply rows that are sorted by expert.
        is_fused = layer.experts.lora is None or not kernels.expert_ops.fuses_permutation
        layer.experts.ops = kernels.expert_ops if is_fused else TORCH_EXPERT_OPS
        layer.dispatcher.use_permute_ops(kernels.permute_ops)
        layer.experts.activation = kernels.expert_activation or layer.experts.activation
    for module in stage.modules():
        if not isinstance(module, SelfAttention):
            continue
        core = module.core_attention
        if isinstance(core, HasAttentionKernel):
            core.kernel = kernels.attention
        if isinstance(core, HasBlockKernel):
            core.block_kernel = kernels.block_attention
        if isinstance(core, CausalAttention) and kernels.autotuner.is_enabled:
            core.tuner = kernels.autotuner
    if stage.is_last:
        stage.head.gemm = kernels.gemm
        stage.head.cross_entropy_ops = kernels.cross_entropy_ops


def _cpu_kernels(run: RunConfig, model: ModelConfig) -> SelectedKernels:
    """Select the C kernels that are fast on this CPU, if there is a compiler. float64 and non-SwiGLU use torch."""
    if run.dtype == "float64":
        return SelectedKernels()
    from moefold.ops.cpu.build import CompilerError

    try:
        kernels = _c_kernels(run, model)
    except CompilerError as error:
        if run.kernels == "c":
            raise ConfigError(
                f"{Setting('run.kernels', 'c')} cannot run: {error}; install gcc, or set {Setting('run.kernels')} to "
                "'auto' or 'plain'"
            ) from None
        return SelectedKernels(message=f"{Setting('run.kernels', 'auto')}: plain, as {error}")
    return replace(kernels, message=_c_message(run, model, kernels))


def _c_kernels(run: RunConfig, model: ModelConfig) -> SelectedKernels:
    """Return the C kernels of all parts of a layer.

    Raises:
        CompilerError: this machine cannot compile them.
    """
    from moefold.ops.cpu.build import build_libraries
    from moefold.ops.cpu.draw import CDraw
    from moefold.ops.cpu.norm import CNorm
    from moefold.ops.cpu.permute import CPermuteOps
    from moefold.ops.cpu.rope import CRope
    from moefold.ops.cpu.router import CSoftmax
    from moefold.ops.cpu.swiglu import CSwiGLU

    names = ("gemm", "swiglu", "norm", "rope", "attention", "paged_attention", "permute", "router", "decode", "draw")
    build_libraries(*names)
    kernels = SelectedKernels(
        permute_ops=CPermuteOps(), router_softmax=CSoftmax(), rope=CRope(), norm=CNorm(), draw=CDraw()
    )
    kernels = _with_c_gemms(kernels, run)
    activation = CSwiGLU()
    kernels = _with_c_attention(kernels, run, activation)
    if model.ffn.moe.activation.is_swiglu:
        kernels = replace(kernels, expert_activation=activation)
    return _with_c_linear_attention(kernels) if model.has_linear_attention else kernels


def _with_c_gemms(kernels: SelectedKernels, run: RunConfig) -> SelectedKernels:
    """Set the GEMMs of layers and experts."""
    from moefold.ops.cpu.gemm import CGemm

    gemm = CGemm()
    # "c" asks for one order of sums, also where another is faster on this processor.
    if not gemm.is_fast(getattr(torch, run.dtype)) and run.kernels != "c":
        return kernels
    return replace(kernels, gemm=gemm, expert_ops=SequentialExpertOps(gemm), linear_backend=UnquantizedLinear(gemm))


def _with_c_attention(kernels: SelectedKernels, run: RunConfig, activation: "CSwiGLU") -> SelectedKernels:
    """Set attention and whole layers of decoding, which compute with the other kernels and this activation."""
    from moefold.ops.cpu.attention import CAttention
    from moefold.ops.cpu.decode import CDecode
    from moefold.ops.cpu.paged_attention import CPagedAttention

    attention = CAttention()
    has_gemm = kernels.gemm is not TORCH_GEMM
    # With the GEMMs of training, sampling has the same bits. Otherwise the bits differ anyway, and time decides.
    kernels = replace(kernels, decode_choice=None if has_gemm or run.deterministic else DecodeChoice())
    if not attention.is_fast and run.kernels != "c":
        return kernels
    paged_attention = CPagedAttention(attention)
    others = kernels.norm, kernels.router_softmax, kernels.rope, kernels.permute_ops
    gemms = kernels.gemm, kernels.expert_ops, kernels.linear_backend
    decode = CDecode([activation, paged_attention, *others, *gemms])
    return replace(kernels, attention=attention, paged_attention=paged_attention, decode=decode)


def _with_c_linear_attention(kernels: SelectedKernels) -> SelectedKernels:
    """Set the kernels of linear attention, which only a model that has it imports."""
    from moefold.ops.cpu.build import build_libraries
    from moefold.ops.cpu.convolution import CConvolution
    from moefold.ops.cpu.linear_attention import LIBRARIES, CLinearAttention

    build_libraries(*LIBRARIES, "convolution")
    return replace(kernels, linear_attention=CLinearAttention(), convolution=CConvolution())


def _c_message(run: RunConfig, model: ModelConfig, kernels: SelectedKernels) -> str:
    """Return the log message about the parts of a layer that C kernels compute."""
    has_swiglu = kernels.expert_activation is not None
    has_attention = kernels.attention is not None
    has_gemm = kernels.gemm is not TORCH_GEMM
    parts = {
        "GEMMs": has_gemm,
        "expert activation": has_swiglu,
        "norms": True,
        "RoPE": True,
        "causal attention": has_attention,
        "linear attention": model.has_linear_attention,
        "whole layers of decoding": has_attention and has_gemm,
        "whole layers of decoding where they are faster": has_attention and not has_gemm,
    }
    message = f"{Setting('run.kernels', run.kernels)}: {', '.join(part for part in parts if parts[part])} in C"
    return message if has_swiglu else f"{message}; plain expert activation, as it is not SwiGLU"


def uses_c_kernels(kernels: Kernels) -> bool:
    """Return whether every part of a layer whose sums may depend on the number of tokens is computed in C."""
    return (
        kernels.attention is not None
        and kernels.paged_attention is not None
        and kernels.norm is not None
        and kernels.linear_backend is not None
        and kernels.gemm is not TORCH_GEMM
        and kernels.expert_ops is not TORCH_EXPERT_OPS
    )
