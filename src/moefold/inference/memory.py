"""How much memory a wish needs at least, and what to say where there is less."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.metrics.memory import GIB
from moefold.parallel.stage_plan import plan_stages

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def cache_bytes(cfg: Config, num_tokens: int, batch_size: int) -> int:
    """What is kept of all tokens of a batch on the rank that has most layers: latents, or keys and values."""
    m, p = cfg.model, cfg.parallel
    if m.attention == "mla":
        width = m.kv_lora_rank + m.qk_rope_head_dim
    else:
        width = m.num_query_groups * 2 * (m.head_dim or m.hidden_size // m.num_attention_heads) // p.tp
    # Layers of multi-token prediction do not decode.
    layers = Counter(rank for i, rank in plan_stages(cfg).rank_of_layers(m.num_layers).items() if i < m.num_layers)
    return num_tokens * batch_size * max(layers.values()) * width * ITEM_BYTES[cfg.run.dtype]


def batch_bytes(cfg: Config) -> int:
    """Ids of a batch (tokens, labels, whether they count) and the logits of it on one rank."""
    tokens = cfg.train.micro_batch_size * cfg.train.seq_len
    logits = tokens // cfg.parallel.cp * (cfg.model.vocab_size // cfg.parallel.tp) * ITEM_BYTES[cfg.run.dtype]
    return tokens * (2 * 8 + 1) + logits


def device_bytes(device: torch.device) -> int:
    """Memory of the device, used or not: of the GPU, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def refuse_too_large(what: str, needed_bytes: int, device: torch.device, way_out: str) -> None:
    """Refuse what no memory of this device could hold, before anything is reserved.

    Args:
        what: what is asked for.
        needed_bytes: the least that it takes.
        device: of this rank.
        way_out: what to ask for instead.

    Raises:
        ConfigError: it is more than the device has.
    """
    if needed_bytes > (there := device_bytes(device)):
        owner = "its GPU" if device.type == "cuda" else "the machine"
        needed_gib, there_gib = needed_bytes / GIB, there / GIB
        raise ConfigError(
            f"{what} needs {needed_gib:,.1f} GiB on each rank, and {owner} has {there_gib:,.1f} GiB; {way_out}"
        )


@contextmanager
def memory_or(way_out: str) -> Iterator[None]:
    """Inside, memory that ends on the way is one message.

    Raises:
        ConfigError: it did.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not is_memory:
            raise
        reason = str(error).strip().partition("\n")[0].partition(". GPU")[0]
        raise ConfigError(f"there is not enough memory ({reason}); {way_out}") from error
