"""A model that a test of the bench computes in milliseconds."""

SIZES = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.vocab_size=64",
    "model.layer_pattern=M",
    "model.num_experts=8",
    "model.top_k=2",
    "model.moe_ffn_hidden_size=24",
    "train.seq_len=16",
    "train.micro_batch_size=2",
    "train.global_batch_size=2",
]
