"""How much memory a wish needs beside the weights, and what to say where it ends. Torch-free at import."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.launch.out_of_memory import oom_reason
from moefold.parallel.stage_plan import plan_stages

EVAL_OOM_HINT = "give a smaller --batch-size or --seq-len, or cut the model with parallel.tp and pp"
GENERATE_OOM_HINT = "give a smaller --max-tokens or fewer prompts, or cut the model with parallel.tp and pp"
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def kv_cache_bytes(cfg: Config, num_tokens: int, batch_size: int) -> int:
    """What is kept of all tokens of a batch on the rank that has most layers: latents, or keys and values."""
    m, p = cfg.model, cfg.parallel
    if m.attention == "mla":
        width = m.kv_lora_rank + m.qk_rope_head_dim
    else:
        width = m.num_query_groups * 2 * (m.head_dim or m.hidden_size // m.num_attention_heads) // p.tp
    # Layers of multi-token prediction do not decode.
    layers = Counter(rank for i, rank in plan_stages(cfg).rank_of_layers(m.num_layers).items() if i < m.num_layers)
    return num_tokens * batch_size * max(layers.values()) * width * DTYPE_BYTES[cfg.run.dtype]


def batch_bytes(cfg: Config) -> int:
    """Ids of a batch (tokens, labels, whether they count) and the logits of it on one rank."""
    tokens = cfg.train.micro_batch_size * cfg.train.seq_len
    logits = tokens // cfg.parallel.cp * (cfg.model.vocab_size // cfg.parallel.tp) * DTYPE_BYTES[cfg.run.dtype]
    return tokens * (2 * 8 + 1) + logits


@contextmanager
def explain_oom(hint: str) -> Iterator[None]:
    """Inside, memory that ends on the way is one message.

    Raises:
        ConfigError: it did.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (reason := oom_reason(error)):
            raise
        raise ConfigError(f"there is not enough memory ({reason}); {hint}") from error
