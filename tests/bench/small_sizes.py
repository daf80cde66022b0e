"""Sizes that a test of the bench computes in milliseconds: a model, and the operations of a probe."""

from moefold.bench.device_probe import ProbeSizes

SIZES = [
    "model.layers=2",
    "model.hidden_size=32",
    "model.attention.num_heads=4",
    "model.attention.num_kv_heads=2",
    "model.vocab_size=64",
    "model.ffn.moe.num_experts=8",
    "model.ffn.moe.top_k=2",
    "model.ffn.moe.intermediate_size=24",
    "train.seq_len=16",
    "train.micro_batch_size=2",
    "train.global_batch_size=2",
]

SMALLEST_SIZES = ProbeSizes(
    copy_bytes=1 << 20,
    gemms=((64, 64, 16), (64, 64, 128)),
    seq_lens=(32, 64),
    attention_tokens=64,
    heads=2,
    experts=(64, 32, 32, 4),
    collective_bytes=(1 << 8, 1 << 12),
)
"""Sizes that show that everything runs, in a second. Their times say nothing."""
