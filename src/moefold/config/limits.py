"""Upper bounds of recipe values, checked before anything is derived from the values.

Each bound is far above what any machine runs. Keys without an entry have the default bound of their type.
"""

from math import inf
from typing import Any, get_args

from moefold.config.model import MAX_LAYERS
from moefold.errors import ConfigError

MAX_RANKS = 2**30
MAX_STEPS = 10**9
MAX_SAMPLE_TOKENS = 2**24
"""Tokens per sample."""
MAX_MICRO_BATCHES = 2**16
"""Micro-batches per data-parallel rank and step: schedules are lists of them."""
MAX_CHARACTERS = 10_000
"""Length of a string."""
MAX_INTEGER_BITS = 200
"""Largest integer that an error message prints in digits."""
MAX_NESTING_DEPTH = 8
"""Nesting depth of lists in a value; no key takes more than one level."""

MAX_INTEGER = 2**53
"""Default bound of integers: exact in JSON and float64."""
MAX_NUMBER = 1e15

_MAX_WIDTH = 2**20
MAX_BY_KEY: dict[str, int] = {
    "run.seed": 2**63 - 1,
    "run.steps": MAX_STEPS,
    "model.num_layers": MAX_LAYERS,
    "model.mtp_layers": MAX_LAYERS,
    **dict.fromkeys(
        (
            "model.hidden_size",
            "model.moe_hidden_size",
            "model.num_attention_heads",
            "model.num_query_groups",
            "model.head_dim",
            "model.q_lora_rank",
            "model.kv_lora_rank",
            "model.qk_nope_head_dim",
            "model.qk_rope_head_dim",
            "model.v_head_dim",
            "model.num_experts",
            "model.zero_experts",
            "model.top_k",
            "model.num_groups",
            "model.top_groups",
            "model.linear_num_key_heads",
            "model.linear_num_value_heads",
            "model.linear_key_head_dim",
            "model.linear_value_head_dim",
            "model.linear_gate_rank",
            "model.linear_conv_kernel",
            "model.index_heads",
            "model.index_head_dim",
        ),
        _MAX_WIDTH,
    ),
    **dict.fromkeys(
        (
            "model.ffn_hidden_size",
            "model.moe_ffn_hidden_size",
            "model.shared_expert_ffn_hidden_size",
        ),
        2**26,
    ),
    **dict.fromkeys((f"parallel.{key}" for key in ("world_size", "tp", "cp", "ep", "etp")), MAX_RANKS),
    "parallel.pp": 4096,
    "parallel.virtual_stages": MAX_LAYERS,
    "model.vocab_size": 2**31,
    **dict.fromkeys(("train.seq_len", "model.index_topk", "parallel.attention_block"), MAX_SAMPLE_TOKENS),
    "train.micro_batch_size": 2**22,
    "train.global_batch_size": 2**22,
    **dict.fromkeys(("train.warmup_steps", "train.decay_steps", "train.eval_every"), MAX_STEPS),
    "train.eval_samples": 2**26,
    "train.muon_ns_steps": 100,
    "moe.sinkhorn_iterations": 10_000,
    "faults.spike_window": 10**6,
    "faults.timeout_s": 10**8,
}
"""Upper bound of each key, by name."""


def max_magnitude(section: str, key: str, hint: Any) -> float | None:
    """Return the largest magnitude of a key of this type, or None for a key that takes no number."""
    if hint not in (int, float):
        return None
    return MAX_BY_KEY.get(f"{section}.{key}", MAX_INTEGER if hint is int else MAX_NUMBER)


def value_unsupported_reason(section: str, key: str, hint: Any, value: Any) -> str:
    """Return the size rule that a value breaks, or which character of it no text can have; "" if neither."""
    maximum = max_magnitude(section, key, hint)
    if isinstance(value, int | float) and maximum is not None and abs(value) > maximum and abs(value) != inf:
        bound = f"{maximum}" if isinstance(maximum, int) else f"{maximum:.15g}"
        return f"must be at most {bound}" if value > 0 else f"must be at least -{bound}"
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if isinstance(text, str) and len(text) > MAX_CHARACTERS:
            return f"has {len(text)} characters, and must have at most {MAX_CHARACTERS}"
        if isinstance(text, str) and "\0" in text:
            return "has a NUL character, which no path and no name can have"
        if isinstance(text, str) and (reason := non_unicode_reason(text)):
            return reason
    numbers = value if isinstance(value, list) and float in get_args(hint) else []
    if any(isinstance(number, int | float) and not abs(number) <= MAX_NUMBER for number in numbers):
        return f"must hold numbers of at most {MAX_NUMBER:.0e}"
    return ""


def non_unicode_reason(text: str) -> str:
    """Return which part of a text is not Unicode: a byte of a file name that is not UTF-8; "" if there is none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Python's file names have surrogates in the place of such bytes (PEP 383).
        is_byte = 0xDC80 <= code <= 0xDCFF
        what = f"the byte 0x{code - 0xDC00:02X}, which is not UTF-8" if is_byte else f"a lone surrogate U+{code:04X}"
        return f"has {what}; rename the file or folder, or link to it by a name in UTF-8"
    return ""


def is_oversized(value: Any, max_depth: int = MAX_NESTING_DEPTH) -> bool:
    """Return whether an integer is too large to print, or lists and tables are nested too deep."""
    if isinstance(value, int):
        return value.bit_length() > MAX_INTEGER_BITS
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return max_depth == 0 or any(is_oversized(entry, max_depth - 1) for entry in inner)


def check_at_most(name: str, value: int, maximum: int) -> None:
    """Check a number of the command line against the upper bound of its recipe key.

    Raises:
        ConfigError: the number is larger.
    """
    if value > maximum:
        shown = value if value.bit_length() <= MAX_INTEGER_BITS else f"({value.bit_length()} bits)"
        raise ConfigError(f"{name} {shown} must be at most {maximum}")


def parse_count(text: str) -> int | None:
    """Return the integer of a string of decimal digits, at most MAX_INTEGER, or None for any other text."""
    if not (text.isascii() and text.isdecimal()):
        return None
    digits = text.lstrip("0") or "0"
    return int(digits) if len(digits) <= len(str(MAX_INTEGER)) else MAX_INTEGER
