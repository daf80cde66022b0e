"""Sizes and options of models that are refused, with their messages.

Settings are overrides of the default recipe; those without a section belong to [parallel]. "..." in a message stands
for a part that is left out.
"""

SIZES = {
    "model.hidden_size=100 model.attention.num_heads=8": (
        "model.attention.num_heads=8 must divide model.hidden_size=100 when model.attention.head_dim is 0; choose 1, "
        "2, 4, 5, "
        "10 or 20 heads, model.hidden_size=96 or 104, or set model.attention.head_dim"
    ),
    "model.attention.num_kv_heads=3": (
        "model.attention.num_kv_heads=3 must divide model.attention.num_heads=8; choose 1, 2, 4 or 8"
    ),
    "model.attention.head_dim=7": (
        "model.attention.head_dim=7 must be even, because RoPE rotates pairs; choose 6 or 8"
    ),
    "model.hidden_size=24": (
        "model.attention.num_heads=8 makes heads of hidden_size/num_heads=3 dims, which must be even, "
        "because RoPE rotates pairs; set model.attention.head_dim to 2 or 4"
    ),
    "model.attention.rope_fraction=0.3": (
        "model.attention.rope_fraction=0.3 of a head of 32 is 9.6 dimensions, which must be a positive even number; "
        "choose 0.25"
        " (8 dimensions) or 0.3125 (10 dimensions)"
    ),
    "model.attention.head_dim=4 model.attention.rope_fraction=0.25": (
        "...choose 0.5 (2 dimensions) or 1 (4 dimensions)"
    ),
    "model.rope.scaling=linear": (
        "model.rope.scaling='linear' changes nothing with model.rope.scaling.factor=1.0; give a factor above 1, or "
        "choose 'none'"
    ),
    "model.rope.scaling=llama3 model.rope.scaling.factor=8 model.rope.scaling.low_freq_factor=5": (
        "model.rope.scaling.low_freq_factor=5.0 must be at most model.rope.scaling.high_freq_factor=4.0; the "
        "published pair is 1.0 and "
        "4.0"
    ),
    "model.rope.scaling=yarn model.rope.scaling.factor=8 model.rope.scaling.beta_slow=40": (
        "model.rope.scaling.beta_slow=40.0 must be at most model.rope.scaling.beta_fast=32.0; the published pair is "
        "1.0 and 32.0"
    ),
    "model.rope.scaling=yarn model.rope.scaling.factor=8 model.rope.scaling.original_seq_len=6": (
        "...so that some frequencies are scaled and some are not; choose 7 to 2010619"
    ),
    "model.rope.scaling=yarn model.rope.scaling.factor=8 model.rope.scaling.mscale=1": (
        "model.rope.scaling.mscale=1.0 is divided by the factor of model.rope.scaling.mscale_all_dim, not given; "
        "give both or neither"
    ),
    "model.rope.scaling=yarn model.rope.scaling.factor=8 model.rope.scaling.mscale_all_dim=1": (
        "model.rope.scaling.mscale_all_dim=1.0 divides the factor of model.rope.scaling.mscale, which is not given; "
        "give both or "
        "neither"
    ),
    "model.rope.scaling=yarn model.rope.scaling.factor=8 model.rope.scaling.attention_factor=1.1 "
    "model.rope.scaling.mscale=1 "
    "model.rope.scaling.mscale_all_dim=1": (
        "model.rope.scaling.mscale=1.0 has no effect with model.rope.scaling.attention_factor=1.1, which it would "
        "only derive; leave "
        "one of them out"
    ),
    "model.attention=mla model.attention.qk_rope_head_dim=5": (
        "model.attention.qk_rope_head_dim=5 must be even, because RoPE rotates pairs; choose 4 or 6"
    ),
    "model.layers=": (
        "model.layers='' is not understood from '' on; write layers such as \"3 dense, 5 moe\" or \"12 x (3 linear, "
        'full)", in lower case, with one level of brackets'
    ),
    "model.layers=２moe": "model.layers='２moe' is not understood from '２moe' on; write layers such as...",
    "model.layers=dense,": "model.layers='dense,' is not understood from 'dense,' on; write layers such as...",
    "model.layers=2x(2x(dense))": "model.layers='2x(2x(dense))' is not understood from '2x(2x(dense))' on; write...",
    "model.layers=0x(dense)": "model.layers='0x(dense)' must be 1 to 10000 layers, and each count at least 1",
    "model.layers=dens": "...shared, moe, dense; did you mean 'dense'?",
    "model.layers=9999x(dense,moe)": ("model.layers='9999x(dense,moe)' must be 1 to 10000 layers..."),
    "model.layers=0": ("model.layers=0 must be 1 to 10000 layers"),
    "model.layers=full,delta": (
        "model.layers='full,delta' names 'delta'; the names are full, window, chunk, linear, rope, nope, own, "
        "shared, moe, "
        "dense"
    ),
    "model.layers=dense/moe": (
        "model.layers='dense/moe' has both 'dense' and 'moe' in 'dense/moe', of which a layer has one"
    ),
    "model.layers=linear/nope": (
        "model.layers='linear/nope' has 'linear/nope', and linear attention has no RoPE and selects no keys"
    ),
    "model.layers=shared": (
        "model.layers='shared' has layers 'shared', and model.attention.indexer=none selects no keys; ..."
    ),
    "model.preset=deepseek-v3 model.layers=4": (
        "model.layers=4 does not say which layers; write them by name, such as '3 dense, moe'"
    ),
    "model.layer_pattern=D": ("model.layer_pattern is model.layers now: write model.layers='4 dense'"),
    "model.num_layers=8": ("model.num_layers is model.layers now: write model.layers=8"),
    "model.norm.zero_centered=true model.norm=layernorm": (
        "model.norm.zero_centered=true is incompatible with model.norm='layernorm', whose weights start at 1; set "
        "zero_centered=false, or norm='rmsnorm'"
    ),
    "model.rope.scaling=longrope model.rope.scaling.long_factors=[1,2] model.attention.head_dim=4": (
        "model.rope.scaling.short_factors has 0 numbers, and model.rope.scaling='longrope' needs one for each of the "
        "2 pairs "
        "of dims that RoPE rotates; give 2"
    ),
    "model.rope.scaling=longrope model.rope.scaling.long_factors=[1] "
    "model.rope.scaling.short_factors=[0] model.attention.head_dim=2": (
        "model.rope.scaling.short_factors has the number 0.0, and divides frequencies; give finite numbers above 0"
    ),
    "model.rope.scaling=longrope model.rope.scaling.long_factors=[1] model.rope.scaling.short_factors=[1] "
    "model.attention.head_dim=2 "
    "model.rope.scaling.original_seq_len=1": (
        "model.rope.scaling.original_seq_len=1 has the logarithm 0, by which the attention factor of longrope "
        "divides; give "
        "the context length of the first training, or short_mscale and long_mscale"
    ),
    "model.ffn.moe.router.softmax=sparsemixer moe.choice=round_robin": (
        "model.ffn.moe.router.softmax='sparsemixer' is incompatible with moe.choice='round_robin': it chooses only "
        "by the logits, "
        "and the weights of a token have no fixed sum; choose choice='topk', or softmax='pre'"
    ),
    "model.ffn.moe.router.softmax=sparsemixer model.ffn.moe.router.expert_bias=true": (
        "model.ffn.moe.router.softmax='sparsemixer' is incompatible with model.ffn.moe.router.expert_bias=true: it "
        "chooses only by the logits, "
        "and the weights of a token have no fixed sum; choose expert_bias=false, or softmax='pre'"
    ),
    "model.ffn.moe.router.softmax=sparsemixer model.ffn.moe.router.num_groups=4 model.ffn.moe.router.top_groups=2": (
        "model.ffn.moe.router.softmax='sparsemixer' is incompatible with model.ffn.moe.router.num_groups=4: it chooses "
        "only by the logits, and "
        "the weights of a token have no fixed sum; choose num_groups=1, or softmax='pre'"
    ),
    "model.ffn.moe.router.softmax=sparsemixer checkpoint.upcycle.dense=runs/a": (
        "model.ffn.moe.router.softmax='sparsemixer' weighs the experts of a token without a fixed sum, so that they "
        "do not add up to the dense layer of checkpoint.upcycle={ dense = \"runs/a\" }; choose 'pre' or 'post'"
    ),
    "model.norm.zero_centered=true model.attention=mla": (
        "model.norm.zero_centered=true is incompatible with model.attention='mla', whose latents have other norms; set "
        "zero_centered=false, or attention='gqa'"
    ),
    "model.norm.zero_centered=true model.attention.qk_norm={} model.attention.qk_norm.over=all_heads": (
        "model.norm.zero_centered=true is incompatible with model.attention.qk_norm.over='all_heads', a norm of "
        "another kind; set "
        "zero_centered=false, or over='head'"
    ),
    "model.layers=2x(linear,full) model.linear_attention.num_key_heads=3": (
        "model.linear_attention.num_value_heads=4 must be a multiple of model.linear_attention.num_key_heads=3, each "
        "of which serves as "
        "many; choose 3 or 6"
    ),
    "model.layers=2x(linear,full) model.linear_attention.conv_kernel=6 train.seq_len=16 "
    "parallel.world_size=4 parallel.cp=4": (
        "train.seq_len=16 gives segments of 2 tokens with parallel.cp=4 and parallel.context='ring', which must hold "
        "the 5 tokens before one of model.linear_attention.conv_kernel=6; choose train.seq_len=40"
    ),
    "model.attention.indexer.top_k=300": (
        "model.attention.indexer.top_k=300 must be at most train.seq_len=256, as no token sees more keys; choose 256 "
        "or less, or model.attention.indexer=none for dense attention"
    ),
    "model.attention.indexer.top_k=8 model.attention.indexer.head_dim=16": (
        "model.attention.indexer.head_dim=16 must be at least 32, the dims of a head that have RoPE; choose 32 or more"
    ),
    "model.attention.indexer.top_k=8 model.layers=2x(window,full) model.sliding_window=8": (
        "model.attention.indexer.top_k=8 selects all keys of model.sliding_window=8; choose less than 8, or "
        "model.layers without 'window'"
    ),
    "model.attention.indexer.top_k=8 model.layers=2x(shared,full)": (
        "model.layers='2x(shared,full)' begins with a layer 'shared', which attends to the keys that a layer "
        "before it selects; let "
        "the first layer of softmax attention have its own"
    ),
    "model.attention.indexer.top_k=8 model.layers=2x(full,window/shared) model.sliding_window=9": (
        "model.layers='2x(full,window/shared)' lets layer 1 attend to the keys that layer 0 selects, and "
        "model.sliding_window holds for one of them; let layer 1 have its own"
    ),
    "model.attention.indexer.top_k=8 model.layers=full,2x(shared),full parallel.world_size=2 parallel.pp=2": (
        "model.layers='full,2x(shared),full' lets layer 2 attend to the keys that layer 0 selects, and pipeline "
        "stage 1 of 2 "
        "begins with layer 2; choose parallel.pipeline_layout='auto', or stages that begin with one of the layers 0, 3"
    ),
    "model.attention.indexer.top_k=8 model.layers=full,3x(shared) parallel.world_size=4 parallel.pp=4 "
    "parallel.pipeline_layout=auto": (
        "model.layers='full,3x(shared)' has 1 groups of layers that share a selection of keys, each on one "
        "pipeline stage, "
        "and parallel.pp*parallel.virtual_stages=4 stages are more than these, the embedding and the loss; choose 3 or "
        "less"
    ),
    "model.attention.indexer.top_k=8 train.indexer_stage=warmup train.indexer_loss=0": (
        "train.indexer_stage='warmup' trains only the indexers, and train.indexer_loss=0.0 trains nothing; choose 1.0"
    ),
    "model.preset=deepseek-v3.2 model.layers=4x(linear) train.indexer_stage=warmup train.seq_len=2048": (
        "train.indexer_stage='warmup' trains only the indexers, and linear attention, all layers of "
        "model.layers='4x(linear)', has none; name 'full' in it, or leave indexer_stage out"
    ),
    "model.attention.indexer.top_k=8 train.indexer_stage=warmup data.kind=task rl.group_size=4": (
        "train.indexer_stage='warmup' freezes the weights that rl.group_size=4 would train; choose 'sparse', or leave "
        "rl.group_size=4 out"
    ),
    "model.attention.indexer.top_k=8 parallel.world_size=2 parallel.cp=2": (
        "parallel.context='ring' with parallel.cp=2 is incompatible with model.attention.indexer.top_k=8, which "
        "selects among the keys "
        "of the whole sequence; choose 'allgather', or parallel.cp=1"
    ),
    "model.attention.indexer.top_k=8 parallel.world_size=2 parallel.cp=2 parallel.context=planned "
    "data.document_end=0": (
        "parallel.context='planned' is incompatible with model.attention.indexer.top_k=8, which selects among the keys "
        "of the whole "
        "sequence; choose 'allgather' with parallel.cp=2 or more, or leave parallel.context out"
    ),
    'model.attention.indexer.top_k=8 train.recompute=["core_attention"]': (
        "train.recompute has 'core_attention', and the sparse attention of model.attention.indexer.top_k=8 does not "
        "have it as a "
        "part; leave it out"
    ),
    "model.attention.indexer.top_k=8 run.cuda_graphs=attention run.device=cuda": (
        "run.cuda_graphs='attention' is incompatible with model.attention.indexer.top_k=8: the indexer's loss is "
        "recorded, and its "
        "blocks chosen, by the host; set run.cuda_graphs='none', or change that"
    ),
    "model.rope.scaling=ntk": (
        "model.rope.scaling='ntk' changes nothing with model.rope.scaling.factor=1.0; give a factor above 1, or choose "
        "'none'"
    ),
    "model.rope.scaling=ntk model.rope.scaling.factor=2 model.attention.head_dim=2": (
        "model.rope.scaling='ntk' needs more than the 2 dimensions that RoPE rotates; choose 'linear', or more "
        "dimensions"
    ),
    "model.attention.qk_norm={} model.attention.qk_norm.after_rope=true model.rope.interleaved=true": (
        "model.attention.qk_norm.after_rope=true is incompatible with model.rope.interleaved=true, whose rotation "
        "reorders the "
        "dims; choose interleaved=false"
    ),
    "model.ffn.moe.zero_experts=4 model.ffn.moe.router.num_groups=2 model.ffn.moe.router.top_groups=1": (
        "model.ffn.moe.zero_experts=4 is incompatible with model.ffn.moe.router.num_groups=2, as zero-computation "
        "experts are in no group; leave "
        "num_groups and top_groups out, or zero_experts"
    ),
    "model.ffn.moe.zero_experts=4 checkpoint.upcycle.dense=dense": (
        'model.ffn.moe.zero_experts=4 is incompatible with checkpoint.upcycle={ dense = "dense" }: each token would '
        "lose the part of the dense layer that it routes to them; leave one of them out"
    ),
    "model.ffn.moe.zero_experts=4 model.ffn.moe.router.expert_bias=true model.ffn.moe.active_experts=3": (
        "model.ffn.moe.active_experts=3.0 must be at most model.ffn.moe.top_k=2, the choices of a token; choose a "
        "number up to 2"
    ),
    "model.ffn.moe.shortcut=true model.layers=2x(moe,dense)": (
        "model.ffn.moe.shortcut=true adds the shared expert in the layer, and model.ffn.moe.shared is none; "
        "set model.ffn.moe.shared.intermediate_size"
    ),
    "model.ffn.moe.shortcut=true model.ffn.moe.shared.intermediate_size=64": (
        "model.ffn.moe.shortcut=true adds the routed output of a layer after the next one, which is dense, and "
        "model.layers=4 has layers 'moe' without a 'dense' one after them; choose '2 x (moe, dense)'"
    ),
    "model.ffn.moe.shortcut=true model.layers=2x(moe,dense) model.ffn.moe.shared.intermediate_size=64 "
    "model.residual=post": (
        "model.ffn.moe.shortcut=true is incompatible with model.residual='post': the routed output would be added "
        "without a norm; set residual='pre'"
    ),
    "model.ffn.moe.shortcut=true model.layers=2x(moe,dense) model.ffn.moe.shared.intermediate_size=64 "
    "parallel.world_size=4 "
    "parallel.pp=4": (
        "model.ffn.moe.shortcut=true adds the routed output of a layer after the next one on the same pipeline "
        "stage, and "
        "stage 0 of 4 ends with layer 0, a layer 'moe'; choose parallel.pp and virtual_stages that give each "
        "stage whole "
        "pairs, or parallel.pipeline_layout"
    ),
    "model.ffn.moe.shortcut=true model.layers=moe,dense model.ffn.moe.shared.intermediate_size=64 "
    "parallel.world_size=4 "
    "parallel.pp=4 parallel.pipeline_layout=auto ": (
        "model.ffn.moe.shortcut=true keeps a layer 'moe' and the dense one after it on one pipeline stage, and "
        "parallel.pp*parallel."
        "virtual_stages=4 stages are more than these 1 groups of layers, the embedding and the loss; choose 3 or less"
    ),
    "model.layers=4x(chunk)": (
        "model.layers='4x(chunk)' has layers 'chunk', which attend within model.attention_chunk_size=0 tokens; "
        "set model.attention_chunk_size, or choose 'full'"
    ),
    "model.attention=mla model.layers=2x(chunk,full) model.attention_chunk_size=4": (
        "model.layers='2x(chunk,full)' has layers 'chunk', and model.attention='mla' has no chunks; choose "
        "'full' or 'window'"
    ),
    "model.layers=4x(chunk) model.attention_chunk_size=4 model.attention.indexer.top_k=2": (
        "model.layers='4x(chunk)' has layers 'chunk', and model.attention.indexer.top_k=2 selects keys of the "
        "whole document; "
        "choose 'full' or 'window', or indexer='none'"
    ),
    "model.attention.qk_norm={} model.attention.qk_norm.weight=false model.attention.qk_norm.over=all_heads": (
        "model.attention.qk_norm.weight=false is incompatible with model.attention.qk_norm.over='all_heads', whose "
        "norm has weights; set "
        "over='head'"
    ),
    "model.attention.qk_norm={} model.attention.qk_norm.in_nope=false model.layers=2x(full,nope)": (
        "model.attention.qk_norm.in_nope=false is incompatible with model.attention.qk_norm.weight=true: layers "
        "without RoPE would have other "
        "parameters than those with it; set weight=false, or in_nope=true"
    ),
    'train.recompute=["core_attention"] model.layers=4x(linear)': (
        "train.recompute has 'core_attention', and all layers of model.layers='4x(linear)' have linear attention; "
        "leave it out"
    ),
    'train.recompute=["norms"] model.residual=post': (
        "train.recompute has 'norms', and model.residual='post' has no norms of inputs; leave it out"
    ),
    "model.layers=2x(window,full)": (
        "model.layers='2x(window,full)' has layers 'window', which attend to model.sliding_window=0 tokens; set "
        "model.sliding_window, or choose 'full'"
    ),
}
