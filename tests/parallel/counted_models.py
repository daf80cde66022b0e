"""Models whose saved numbers for each token are counted by hand."""

from tests.models import model_of

H, A, G, D, F, FE, FS, E, K, V, T = 64, 4, 2, 16, 160, 96, 80, 4, 2, 8, 128
GQA = model_of(
    {
        "layers": 2,
        "layers.ffn": "dense, moe",
        "hidden_size": H,
        "attention.num_heads": A,
        "attention.num_kv_heads": G,
        "attention.head_dim": D,
        "ffn.dense.intermediate_size": F,
        "ffn.moe.intermediate_size": FE,
        "ffn.moe.shared.intermediate_size": FS,
        "ffn.moe.num_experts": E,
        "ffn.moe.top_k": K,
        "vocab_size": V,
    }
)
LATENT = model_of(
    {
        "layers": 2,
        "layers.ffn": "dense, moe",
        "hidden_size": H,
        "attention.num_heads": A,
        "attention": "mla",
        "attention.q_lora_rank": 24,
        "attention.kv_lora_rank": 20,
        "attention.qk_nope_head_dim": 12,
        "attention.qk_rope_head_dim": 4,
        "attention.v_head_dim": 16,
        "ffn.dense.intermediate_size": F,
        "ffn.moe.intermediate_size": FE,
        "ffn.moe.num_experts": E,
        "ffn.moe.top_k": K,
        "vocab_size": V,
    }
)
