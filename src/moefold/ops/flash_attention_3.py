"""FlashAttention 3 (arXiv:2407.08608) on Hopper: it replaces torch's flash attention if the results agree.

torch has a registry of flash attention implementations (`torch.nn.attention.register_flash_attention_impl`). The active
one computes torch's flash operators, and so sliding windows, documents and the blocks of context parallelism.
"""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import attention

from moefold.message_text import first_line
from moefold.ops.block_attention import CudaFlash, FlashMask, Mask, disagreement, random_tensors
from moefold.ops.documents import Segments

IMPLEMENTATION = "FA3"
PACKAGE = "flash_attn_interface"
"""Module of the package flash-attn-3, with the kernels."""
CAPABILITY = (9, 0)
"""The only compute capability of its kernels."""
NUM_TOKENS = 256
WINDOW_LEFT = 50
SECOND_DOCUMENT = 100
"""Tokens of the probe, keys before a query in its window, and the start of its second document."""


def use_flash_attention_3(device: torch.device) -> str:
    """Activate FlashAttention 3 where installed, if its results agree, and return a log message, "" without kernels."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return ""
    if importlib.util.find_spec(PACKAGE) is None:
        return ""
    reason = activate_if_it_agrees(IMPLEMENTATION, lambda: flash_disagreement(device, torch.bfloat16))
    return f"not FlashAttention 3, as {reason}" if reason else f"flash attention of {IMPLEMENTATION}"


def activate_if_it_agrees(implementation: str, find_disagreement: Callable[[], str]) -> str:
    """Activate a registered implementation of flash attention in this process, unless it fails or differs.

    An implementation that is already active stays.

    Args:
        implementation: name in torch's registry.
        find_disagreement: returns how the active implementation differs from the definition, "" if it agrees.

    Returns:
        The reason why it is not active, "" if it is.
    """
    active = attention.current_flash_attention_impl()
    if active is not None:
        return "" if active == implementation else f"{active} is active"
    try:
        attention.activate_flash_attention_impl(implementation)
    except (ImportError, RuntimeError, ValueError) as error:
        return f"it cannot be activated: {first_line(error)}"
    reason = find_disagreement()
    if reason:
        attention.restore_flash_attention_impl()
    return reason


class _Case(NamedTuple):
    """A mask of the probe, in the form of the flash kernel and in the form of the definition."""

    name: str
    flash_mask: FlashMask
    mask: Mask


def flash_disagreement(device: torch.device, dtype: torch.dtype) -> str:
    """Compare torch's flash attention with the definition on small tensors. Return how it differs, "" if it agrees."""
    inputs = random_tensors([(NUM_TOKENS, 1, 4, 64)] * 2 + [(NUM_TOKENS, 1, 2, 64)] * 2, device, dtype)
    for case in _cases(device):
        fault = disagreement(CudaFlash(), inputs, case.flash_mask, case.mask)
        if fault:
            return f"it {fault} ({case.name})"
    return ""


def _cases(device: torch.device) -> list[_Case]:
    token = torch.arange(NUM_TOKENS, device=device)
    distance = token[:, None] - token
    is_causal = distance >= 0
    in_window = (is_causal & (distance <= WINDOW_LEFT)).unsqueeze(0)
    is_second = token >= SECOND_DOCUMENT
    in_document = (is_causal & (is_second[:, None] == is_second)).unsqueeze(0)
    bounds = torch.tensor((0, SECOND_DOCUMENT, NUM_TOKENS), dtype=torch.int32, device=device)
    segments = Segments(bounds, max(SECOND_DOCUMENT, NUM_TOKENS - SECOND_DOCUMENT))
    return [
        _Case("causal", FlashMask(True), "causal"),
        _Case("all keys", FlashMask(False), "all"),
        _Case("sliding window", FlashMask(True, WINDOW_LEFT), in_window),
        _Case("documents", FlashMask(True, segments=segments), in_document),
    ]
