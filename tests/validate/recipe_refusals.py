"""Models, routing, training, data and memory that are refused, with their messages, and accepted ones.

Settings are overrides of the default recipe; those without a section belong to [parallel]. "..." in a message stands
for a part that is left out.
"""

SIZES = {
    "model.hidden_size=100 model.num_attention_heads=8": (
        "model.num_attention_heads=8 must divide model.hidden_size=100 when model.head_dim is 0; choose 1, 2, 4, 5, "
        "10 or 20 heads, model.hidden_size=96 or 104, or set model.head_dim"
    ),
    "model.num_query_groups=3": (
        "model.num_query_groups=3 must divide model.num_attention_heads=8; choose 1, 2, 4 or 8"
    ),
    "model.head_dim=7": ("model.head_dim=7 must be even, because RoPE rotates pairs; choose 6 or 8"),
    "model.hidden_size=24": (
        "the head size hidden_size/num_attention_heads=3 must be even, because RoPE rotates pairs; choose 2 or 4"
    ),
    "model.rope_fraction=0.3": (
        "model.rope_fraction=0.3 of a head of 32 is 9.6 dimensions, which must be a positive even number; choose 0.25"
        " (8 dimensions) or 0.3125 (10 dimensions)"
    ),
    "model.head_dim=4 model.rope_fraction=0.25": ("...choose 0.5 (2 dimensions) or 1 (4 dimensions)"),
    "model.rope_scaling=linear": (
        "model.rope_scaling='linear' changes nothing with model.rope_scaling_factor=1.0; give a factor above 1, or "
        "choose 'none'"
    ),
    "model.rope_scaling=llama3 model.rope_scaling_factor=8 model.rope_low_freq_factor=5": (
        "model.rope_low_freq_factor=5.0 must be at most model.rope_high_freq_factor=4.0; the published pair is 1.0 and "
        "4.0"
    ),
    "model.rope_scaling=yarn model.rope_scaling_factor=8 model.rope_beta_slow=40": (
        "model.rope_beta_slow=40.0 must be at most model.rope_beta_fast=32.0; the published pair is 1.0 and 32.0"
    ),
    "model.rope_scaling=yarn model.rope_scaling_factor=8 model.rope_original_seq_len=6": (
        "...so that some frequencies are scaled and some are not; choose 7 to 2010619"
    ),
    "model.rope_scaling=yarn model.rope_scaling_factor=8 model.rope_mscale=1": (
        "model.rope_mscale=1.0 is divided by that of model.rope_mscale_all_dim, not given; give both or neither"
    ),
    "model.rope_scaling=yarn model.rope_scaling_factor=8 model.rope_mscale_all_dim=1": (
        "model.rope_mscale_all_dim=1.0 divides that of model.rope_mscale, which is not given; give both or neither"
    ),
    "model.rope_scaling=yarn model.rope_scaling_factor=8 model.rope_attention_factor=1.1 model.rope_mscale=1 "
    "model.rope_mscale_all_dim=1": (
        "model.rope_mscale=1.0 has no effect with model.rope_attention_factor=1.1, which it would only derive; leave "
        "one of them out"
    ),
    "model.attention=mla model.qk_rope_head_dim=5": (
        "model.qk_rope_head_dim=5 must be even, because RoPE rotates pairs; choose 4 or 6"
    ),
    "model.attention=mla model.qk_norm=true": (
        "model.qk_norm=true does not go with model.attention='mla', which normalises its latents; set qk_norm=false, "
        "or attention='gqa'"
    ),
    "model.attention=mla model.qkv_bias=true": (
        "model.qkv_bias=true does not go with model.attention='mla', which has no biases; set qkv_bias=false, or "
        "attention='gqa'"
    ),
    "model.layer_pattern=": ("model.layer_pattern: an empty layer pattern; use D and M, with counts: M, DM, D3M58"),
    "model.layer_pattern=MX": (
        "model.layer_pattern: unexpected 'X' in layer pattern 'MX'; use D and M, with counts: M, DM, D3M58"
    ),
    "model.layer_pattern=3M": (
        "model.layer_pattern: unexpected '3' in layer pattern '3M'; use D and M, with counts: M, DM, D3M58"
    ),
    "model.layer_pattern=DM0": ("model.layer_pattern: a count of 0 in layer pattern 'DM0'"),
    "model.attention_pattern=D": (
        "model.attention_pattern: unexpected 'D' in layer pattern 'D'; use F, W, C and L, with counts: W, FW, F3W58"
    ),
    "model.zero_centered_norms=true model.attention=mla": (
        "model.zero_centered_norms=true does not go with model.attention='mla', whose latents have other norms; set "
        "zero_centered_norms=false, or attention='gqa'"
    ),
    "model.zero_centered_norms=true model.qk_norm=true model.qk_norm_width=all_heads": (
        "model.zero_centered_norms=true does not go with model.qk_norm_width='all_heads', a norm of another kind; set "
        "zero_centered_norms=false, or qk_norm_width='head'"
    ),
    "model.attention_pattern=LF model.linear_num_key_heads=3": (
        "model.linear_num_value_heads=4 must be a multiple of model.linear_num_key_heads=3, each of which serves as "
        "many; choose 3 or 6"
    ),
    "model.attention_pattern=LF train.precision=fp8-blockwise run.dtype=bfloat16": (
        "train.precision='fp8-blockwise' does not go with model.attention_pattern='LF': linear attention has "
        "projections of one row for each head, narrower than a block of scales; set 'dtype', or choose a pattern "
        "without L"
    ),
    "model.attention_gate=true model.attention_gate_width=head train.precision=fp8-blockwise run.dtype=bfloat16": (
        "train.precision='fp8-blockwise' does not go with model.attention_gate_width='head', a projection of one row "
        "for each head, narrower than a block of scales; set precision='dtype', or attention_gate_width='dim'"
    ),
    "model.attention_pattern=LF model.linear_conv_kernel=6 train.seq_len=16 parallel.world_size=4 parallel.cp=4": (
        "train.seq_len=16 gives segments of 2 tokens with parallel.cp=4 and parallel.context='ring', which must hold "
        "the 5 tokens before one of model.linear_conv_kernel=6; choose train.seq_len=40"
    ),
    "model.index_topk=300": (
        "model.index_topk=300 must be at most train.seq_len=256, as no token sees more keys; choose 256 or less, or 0 "
        "for dense attention"
    ),
    "model.index_topk=8 model.index_head_dim=16": (
        "model.index_head_dim=16 must be at least 32, the dims of a head that have RoPE; choose 32 or more"
    ),
    "model.index_topk=8 model.attention_pattern=WF model.sliding_window=8": (
        "model.index_topk=8 selects all keys of model.sliding_window=8; choose less than 8, or a "
        "model.attention_pattern without W"
    ),
    "model.index_topk=8 train.indexer_stage=warmup train.indexer_loss=0": (
        "train.indexer_stage='warmup' trains the indexers alone, and train.indexer_loss=0.0 trains nothing; choose 1.0"
    ),
    "model.index_topk=8 train.indexer_stage=warmup data.kind=task rl.group_size=4": (
        "train.indexer_stage='warmup' freezes the weights that rl.group_size=4 would train; choose 'sparse', or leave "
        "rl.group_size=4 out"
    ),
    "model.index_topk=8 parallel.world_size=2 parallel.cp=2": (
        "parallel.context='ring' with parallel.cp=2 does not go with model.index_topk=8, which selects among the keys "
        "of the whole sequence; choose 'allgather', or parallel.cp=1"
    ),
    "model.index_topk=8 parallel.world_size=2 parallel.cp=2 parallel.context=planned data.document_end=0": (
        "parallel.context='planned' does not go with model.index_topk=8, which selects among the keys of the whole "
        "sequence; choose 'allgather' with parallel.cp=2 or more, or leave parallel.context out"
    ),
    'model.index_topk=8 train.recompute=["core_attention"]': (
        "train.recompute has 'core_attention', and the sparse attention of model.index_topk=8 does not have it as a "
        "part; leave it out"
    ),
    "model.index_topk=8 run.cuda_graphs=attention run.device=cuda": (
        "run.cuda_graphs='attention' does not go with model.index_topk=8: the indexer's loss is recorded, and its "
        "blocks chosen, by the host; set run.cuda_graphs='none', or change that"
    ),
    "model.attention_pattern=F5": (
        "model.attention_pattern='F5' repeats a layer 5 times, more than model.num_layers=4; shorten it"
    ),
    "model.rope_pattern=W": (
        "model.rope_pattern: unexpected 'W' in layer pattern 'W'; use R and N, with counts: N, RN, R3N58"
    ),
    "model.rope_pattern=RNRNR": (
        "model.rope_pattern='RNRNR' spells 5 layers, more than model.num_layers=4; shorten it or set model.num_layers=5"
    ),
    "model.rope_scaling=ntk": (
        "model.rope_scaling='ntk' changes nothing with model.rope_scaling_factor=1.0; give a factor above 1, or choose "
        "'none'"
    ),
    "model.rope_scaling=ntk model.rope_scaling_factor=2 model.head_dim=2": (
        "model.rope_scaling='ntk' needs more than the 2 dimensions that RoPE rotates; choose 'linear', or more "
        "dimensions"
    ),
    "model.qk_norm=true model.qk_norm_after_rope=true model.rope_interleaved=true": (
        "model.qk_norm_after_rope=true does not go with model.rope_interleaved=true, whose rotation reorders the "
        "dims; choose rope_interleaved=false"
    ),
    "model.zero_experts=4 model.num_groups=2 model.top_groups=1": (
        "model.zero_experts=4 does not go with model.num_groups=2, as zero-computation experts are in no group; leave "
        "num_groups and top_groups out, or zero_experts"
    ),
    "model.zero_experts=4 model.upcycle_from=dense": (
        "model.zero_experts=4 does not go with model.upcycle_from='dense': each token would lose the part of the dense "
        "layer that it routes to them; leave one of them out"
    ),
    "model.zero_experts=4 model.expert_bias=true model.active_experts=3": (
        "model.active_experts=3.0 must be at most model.top_k=2, the choices of a token; choose a number up to 2"
    ),
    "model.moe_shortcut=true model.layer_pattern=MD": (
        "model.moe_shortcut=true adds the shared expert in the layer, and model.shared_expert_ffn_hidden_size=0 means "
        "none; set shared_expert_ffn_hidden_size"
    ),
    "model.moe_shortcut=true model.shared_expert_ffn_hidden_size=64": (
        "model.moe_shortcut=true adds the routed output of a layer after the next one, which is dense, and "
        "model.layer_pattern='M' has layers M without a D after them in model.num_layers=4; choose 'MD' with an even "
        "number of layers"
    ),
    "model.moe_shortcut=true model.layer_pattern=MD model.shared_expert_ffn_hidden_size=64 model.norm_placement=post": (
        "model.moe_shortcut=true does not go with model.norm_placement='post': the routed output would be added "
        "without a norm; set norm_placement='pre'"
    ),
    "model.moe_shortcut=true model.layer_pattern=MD model.shared_expert_ffn_hidden_size=64 parallel.world_size=4 "
    "parallel.pp=4": (
        "model.moe_shortcut=true adds the routed output of a layer after the next one on the same pipeline stage, and "
        "stage 0 of 4 ends with layer 0, an M; choose parallel.pp and virtual_stages that give each stage whole pairs "
        "MD, or parallel.pipeline_layout"
    ),
    "model.moe_shortcut=true model.layer_pattern=MD model.shared_expert_ffn_hidden_size=64 parallel.world_size=2 "
    "parallel.pp=2 parallel.pipeline_layout=auto": (
        "parallel.pipeline_layout='auto' does not go with model.moe_shortcut=true, as it may part a layer M from the D "
        "after it; write the layout out, or leave it out"
    ),
    "model.attention_pattern=C2": (
        "model.attention_pattern='C2' has layers of kind C, which attend within model.attention_chunk_size=0 tokens; "
        "set model.attention_chunk_size, or choose 'F'"
    ),
    "model.attention=mla model.attention_pattern=CF model.attention_chunk_size=4": (
        "model.attention_pattern='CF' has layers of kind C, and model.attention='mla' has no chunks; choose 'F' or 'W'"
    ),
    "model.attention_pattern=C model.attention_chunk_size=4 model.index_topk=2": (
        "model.attention_pattern='C' has layers of kind C, and model.index_topk=2 selects keys of the whole document; "
        "choose 'F' or 'W', or index_topk=0"
    ),
    "model.qk_norm=true model.qk_norm_weight=false model.qk_norm_width=all_heads": (
        "model.qk_norm_weight=false does not go with model.qk_norm_width='all_heads', whose norm has weights; set "
        "qk_norm_width='head'"
    ),
    "model.qk_norm=true model.qk_norm_nope=false model.rope_pattern=RN": (
        "model.qk_norm_nope=false does not go with model.qk_norm_weight=true: layers without RoPE would have other "
        "parameters than those with it; set qk_norm_weight=false, or qk_norm_nope=true"
    ),
    "model.attention=mla model.attention_gate=true": (
        "model.attention_gate=true does not go with model.attention='mla', which has no gate; set attention_gate=false,"
        " or attention='gqa'"
    ),
    'train.recompute=["core_attention"] model.attention_pattern=L2': (
        "train.recompute has 'core_attention', and all layers of model.attention_pattern='L2' have linear attention; "
        "leave it out"
    ),
    'train.recompute=["norms"] model.norm_placement=post': (
        "train.recompute has 'norms', and model.norm_placement='post' has no norms of inputs; leave it out"
    ),
    "model.attention_pattern=WF": (
        "model.attention_pattern='WF' has layers of kind W, which attend to model.sliding_window=0 tokens; set "
        "model.sliding_window, or choose 'F'"
    ),
    "model.layer_pattern=D3M2": (
        "model.layer_pattern='D3M2' spells 5 layers, more than model.num_layers=4; shorten it or set model.num_layers=5"
    ),
    "model.layer_pattern=M999999999999": (
        "model.layer_pattern='M999999999999' repeats a layer 999999999999 times, more than model.num_layers=4; "
        "shorten it"
    ),
}

ROUTING = {
    "moe.replay=runs/a moe.choice=sinkhorn": (
        "moe.replay='runs/a' has chosen the experts already, and moe.choice='sinkhorn' would choose others; choose "
        "moe.choice='topk', or leave replay out"
    ),
    "model.top_k=1": (
        'model.top_k=1 with model.router_softmax="post" weighs every choice with 1, so the router gets no gradient '
        'from the loss; set model.router_softmax="pre", or model.top_k=2 or more'
    ),
    "model.top_k=1 model.router_score=sigmoid": (
        "model.top_k=1 with model.router_normalize=true weighs every choice with 1, so the router gets no gradient "
        "from the loss; set model.router_normalize=false, or model.top_k=2 or more"
    ),
    "model.top_k=9": ("model.top_k=9 must be at most model.num_experts=8; choose 1 to 8"),
    "model.num_groups=3 model.top_groups=2": (
        "model.num_groups=3 must divide model.num_experts=8; choose 1, 2, 4 or 8, or model.num_experts=6 or 9"
    ),
    "model.top_groups=2": ("model.top_groups=2 must be at most model.num_groups=1; choose 1 to 1"),
    "model.num_groups=4 model.top_groups=1 model.top_k=4": (
        "model.top_groups=1 groups of 2 experts are fewer than model.top_k=4 experts; choose top_groups of 2 or more,"
        " or top_k of 2 or less"
    ),
    "model.num_groups=4 model.top_groups=4": (
        "model.top_groups=4 of model.num_groups=4 limits nothing; choose top_groups below 4, or leave both out"
    ),
    "model.num_groups=8 model.top_groups=4 model.router_score=sigmoid": (
        "model.router_score='sigmoid' scores a group by its two best experts, and model.num_groups=8 makes groups of "
        "one; choose num_groups of 4 or less"
    ),
    "moe.choice=quantile": (
        "moe.choice='quantile' stores its thresholds in the expert bias, with which evaluation and generation route, "
        "and model.expert_bias=false; set model.expert_bias=true"
    ),
    "moe.choice=quantile model.expert_bias=true model.top_k=8": (
        "moe.choice='quantile' has nothing to balance: model.top_k=8 is every expert; choose top_k of at most 7, or "
        "choice='topk'"
    ),
    "moe.choice=sinkhorn model.expert_bias=true": (
        "model.expert_bias=true contradicts moe.choice='sinkhorn', which balances the experts by itself; choose "
        "expert_bias=false, or choice='topk'"
    ),
    "moe.choice=round_robin model.expert_bias=true": (
        "model.expert_bias=true contradicts moe.choice='round_robin', which reads no score; choose expert_bias=false,"
        " or choice='topk'"
    ),
    "moe.choice=sinkhorn model.num_groups=4 model.top_groups=2": (
        "model.num_groups=4 contradicts moe.choice='sinkhorn', which balances the experts by itself; leave num_groups"
        " and top_groups out, or choose choice='topk'"
    ),
    "moe.choice=skewed model.num_groups=4 model.top_groups=2": (
        "model.num_groups=4 contradicts moe.choice='skewed', which reads no score; leave num_groups and top_groups "
        "out, or choose choice='topk'"
    ),
    "moe.choice=skewed model.top_k=8": (
        "moe.choice='skewed' assigns all other experts to the remaining tokens, so model.top_k=8 must be below "
        "model.num_experts=8; choose top_k of at most 7"
    ),
    "moe.choice=skewed model.top_k=1 model.num_experts=1 model.router_softmax=pre": (
        "moe.choice='skewed' needs more experts than expert 0, and model.num_experts=1; choose 2 or more"
    ),
    "moe.capacity_factor=0.4": (
        "moe.capacity_factor=0.4 with model.top_k=2 gives all experts together a capacity below the number of tokens,"
        " so some would reach no expert; choose 0.5 or more, or 0.0 (dropless)"
    ),
    "moe.eval_capacity_factor=0.3 model.top_k=3 train.eval_every=5": (
        "moe.eval_capacity_factor=0.3 with model.top_k=3 gives all experts together a capacity below the number of "
        "tokens, so some would reach no expert; choose 0.34 or more, or 0.0 (dropless)"
    ),
    "moe.capacity_factor=4.0": (
        "moe.capacity_factor=4.0 lets every expert take every token, and so drops nothing; choose less than "
        "num_experts/top_k=4, or 0.0 (dropless)"
    ),
    "moe.eval_capacity_factor=5.0 train.eval_every=5": (
        "moe.eval_capacity_factor=5.0 lets every expert take every token, and so drops nothing; choose less than "
        "num_experts/top_k=4, or 0.0 (dropless)"
    ),
    "moe.capacity_factor=1.0 moe.pad_to_capacity=true world_size=8 cp=2 tp=4": (
        "moe.pad_to_capacity=true with moe.drop_scope='full_sequence' would pad to cp*tp=8 times the rows: the ranks "
        "share one capacity, and each would need a buffer for all of it; choose drop_scope='sub_sequence', or "
        "pad_to_capacity=false"
    ),
    "moe.pad_to_capacity=true": (
        "moe.pad_to_capacity=true needs a capacity, and moe.capacity_factor=0.0 sets none; set "
        "moe.capacity_factor=1.0 or more, or pad_to_capacity=false"
    ),
}

TRAINING = {
    "data.document_end=256": (
        "data.document_end=256 must be below model.vocab_size=256; choose an id of the vocabulary, or -1 for samples "
        "of one document"
    ),
    "train.min_lr=1e-3": ("train.min_lr=0.001 must be at most train.lr=0.0003; choose 0.0 to 0.0003"),
    "train.warmup_steps=101": ("train.warmup_steps=101 must be at most run.steps=100; choose 0 to 100"),
    "train.lr_schedule=wsd train.warmup_steps=50 train.decay_steps=51": (
        "train.decay_steps=51 and train.warmup_steps=50 must fit into run.steps=100; choose decay_steps of at most 50"
    ),
    "train.eval_every=5 data.validation_fraction=0": (
        "train.eval_every=5 needs held-out text, and data.validation_fraction=0.0 holds out none; choose "
        "validation_fraction=0.05, or eval_every=0"
    ),
    "model.mtp_layers=16 train.seq_len=16": (
        "model.mtp_layers=16 must be below train.seq_len=16: no position has a target so far ahead; choose 0 to 15"
    ),
    "train.optimizer=muon train.muon_groups=[]": (
        "train.muon_groups=[] leaves Muon nothing; name some of 'attention', 'dense_mlp', 'experts', "
        "'shared_experts', 'router', 'mtp', or choose optimizer='adamw'"
    ),
    'train.optimizer=muon train.muon_groups=["embedding","router","router"]': (
        "2 settings cannot work:\n"
        "  train.muon_groups has 'embedding', which is no group of matrices; choose from 'attention', 'dense_mlp', "
        "'experts', 'shared_experts', 'router', 'mtp'\n"
        "  train.muon_groups names 'router' 2 times; name it once"
    ),
    'train.optimizer=muon train.muon_groups=["mtp"]': (
        "train.muon_groups has 'mtp', and the model has no such matrices: model.mtp_layers=0; leave 'mtp' out, or "
        "leave muon_groups out for all groups"
    ),
    'train.optimizer=muon train.muon_groups=["attention","shared_experts","dense_mlp"] model.layer_pattern=M': (
        "2 settings cannot work:\n"
        "  train.muon_groups has 'dense_mlp', and the model has no such matrices: no layer of model.layer_pattern is "
        "D; leave 'dense_mlp' out, or leave muon_groups out for all groups\n"
        "  train.muon_groups has 'shared_experts', and the model has no such matrices: "
        "model.shared_expert_ffn_hidden_size=0; leave 'shared_experts' out, or leave muon_groups out for all groups"
    ),
    'train.optimizer=muon train.muon_groups=["router"] model.layer_pattern=D': (
        "train.muon_groups has 'router', and the model has no such matrices: no layer of model.layer_pattern is M; "
        "leave 'router' out, or leave muon_groups out for all groups"
    ),
    "train.moment_dtype=bfloat16 train.beta2=0.99": (
        "train.beta2=0.99 must be at most 0.98 with train.moment_dtype='bfloat16': what a step adds would be lost in "
        "rounding; choose beta2=0.98 or less, or moment_dtype='float32'"
    ),
    "train.loss_chunk=256 train.micro_batch_size=1 train.seq_len=512 cp=2 world_size=2": (
        "train.loss_chunk=256 must be below the 256 tokens of a rank, seq_len*micro_batch_size/cp=512*1/2: that is "
        "one chunk; choose 1 to 255, or 0 for all at once"
    ),
    "checkpoint.resume=": ("checkpoint.resume='' must be 'auto', 'never' or the path of a checkpoint"),
    "faults.nonfinite=rollback": (
        "faults.nonfinite='rollback' needs checkpoints to go back to, and checkpoint.every=500 saves none before the "
        "end of the run, run.steps=100; set checkpoint.every below 100, or faults.nonfinite='skip'"
    ),
    "faults.spike=rollback": (
        "faults.spike='rollback' needs checkpoints to go back to, and checkpoint.every=500 saves none before the end "
        "of the run, run.steps=100; set checkpoint.every below 100, or faults.spike='skip'"
    ),
}

DATA = {
    "data.kind=text data.packing=best_fit": (
        "data.packing='best_fit' packs documents, and the recipe does not say where they end; set data.document_end to "
        "the token that ends documents, or data.document_index=true for files of `moefold tokenize`"
    ),
    "data.kind=huggingface data.path=a data.packing=best_fit data.document_end=0 data.streaming=true": (
        "data.packing='best_fit' reads all documents before it packs them, and data.streaming=true reads each once; "
        "set streaming=false, or packing='concatenate'"
    ),
    "data.kind=tokens data.packing=best_fit data.document_end=0 data.corrupt=skip": (
        "data.packing='best_fit' packs the documents of all files together, and data.corrupt='skip' leaves files out; "
        "set corrupt='fatal', or packing='concatenate'"
    ),
    'data.kind=text data.path=["a","b"] data.weights=[1]': (
        "data.weights=[1.0] must have one number for each of the 2 paths of data.path; list as many, or leave weights"
        " out to join the paths by their sizes"
    ),
    "data.kind=text data.path=a data.weights=[1,2]": (
        "data.weights=[1.0, 2.0] must have one number for each of the 1 paths of data.path; list as many, or leave "
        "weights out to join the paths by their sizes"
    ),
    'data.kind=text data.path=["a","b"] data.weights=[1,0]': (
        "data.weights=[1.0, 0.0] must be greater than 0; leave out the paths without a share"
    ),
    'data.kind=text data.path=["a","b"] data.weights=[1,-2]': (
        "data.weights=[1.0, -2.0] must be greater than 0; leave out the paths without a share"
    ),
    "data.kind=huggingface data.path=owner/name data.column=": (
        "data.column='' must name the column of the text; the default is 'text'"
    ),
    "data.kind=huggingface data.path=owner/name data.split=": (
        "data.split='' must name a split; the default is 'train'"
    ),
    "data.kind=huggingface data.path=owner/name data.validation_split=train": (
        "data.validation_split='train' must not be the split that is trained on; leave it out to hold out "
        "data.validation_fraction of it"
    ),
    "data.kind=huggingface data.path=owner/name data.streaming=true train.eval_every=5": (
        "train.eval_every=5 needs held-out text, and a stream has no held-out part; set data.validation_split to a "
        "split of its own, or eval_every=0"
    ),
    "data.kind=huggingface data.path=owner/name data.streaming=true data.validation_fraction=0.2": (
        "data.validation_fraction=0.2 has no effect: a stream has no held-out part; set data.validation_split, or "
        "leave validation_fraction out"
    ),
    "data.kind=huggingface data.path=owner/name data.validation_split=test data.validation_fraction=0.2": (
        "data.validation_fraction=0.2 has no effect: data.validation_split is evaluated on; leave "
        "data.validation_split out, or leave validation_fraction out"
    ),
    "data.streaming=true": (
        "data.streaming=true has no effect: only data.kind='huggingface' reads it; choose data.kind='huggingface', or"
        " leave streaming out"
    ),
    "data.kind=text data.path=a data.column=b": (
        "data.column='b' has no effect: only data.kind='huggingface' reads it; choose data.kind='huggingface', or "
        "leave column out"
    ),
    "data.weights=[1]": (
        "data.weights=(1.0,) has no effect: data.kind has no paths; choose data.kind='text', 'tokens', "
        "'huggingface', 'sft' or 'preference', or leave weights out"
    ),
    "data.kind=huggingface data.path=owner/name data.overlong=refuse": (
        "data.overlong='refuse' has no effect: only data.kind='sft' and 'preference' read it; choose one of "
        "these, or leave overlong out"
    ),
    "data.kind=huggingface data.path=owner/name data.chat_template=a": (
        "data.chat_template='a' has no effect: only data.kind='sft', 'preference' and 'prompts' read it; choose one of "
        "these, or leave chat_template out"
    ),
    "data.kind=huggingface data.path=owner/name data.document_index=true": (
        "data.document_index=true has no effect: only data.kind='tokens' reads it; choose data.kind='tokens', or "
        "leave document_index out"
    ),
    "data.kind=sft data.path=chats.jsonl data.document_end=3": (
        "data.document_end=3 has no effect: the documents are known already; choose another data.kind, or "
        "data.document_index=false, or leave document_end out"
    ),
    "data.kind=tokens data.path=a data.document_index=true data.document_end=3": (
        "data.document_end=3 has no effect: the documents are known already; choose another data.kind, or "
        "data.document_index=false, or leave document_end out"
    ),
    "data.kind=sft data.path=chats.jsonl data.split=test": (
        "data.split='test' has no effect: only data.kind='huggingface' reads it; choose data.kind='huggingface', or "
        "leave split out"
    ),
}

_PREFERENCE = "data.kind=preference data.path=pairs.jsonl"
_SCORED = "data.kind=sft data.path=scored.jsonl"
ALIGNMENT = {
    "align.method=weight": (
        "align.method='weight' needs data.kind=\"sft\" with a reward in each row, and it is 'python-docs'; set it"
    ),
    f"align.method=dpo {_SCORED}": "align.method='dpo' needs data.kind=\"preference\", and it is 'sft'; set it",
    _PREFERENCE: (
        "data.kind=\"preference\" needs a loss for pairs, and align.method='none' is none; choose dpo, ipo, simpo, kto"
    ),
    f"{_PREFERENCE} align.method=dpo data.weights=[1]": (
        "align.method='dpo' reads its rows as one data set; leave data.weights out, and name the files in data.path"
    ),
    f"{_PREFERENCE} align.method=ipo model.mtp_layers=1": (
        "align.method='ipo' has no loss for the MTP layers, as they would learn the rejected completions too, and "
        "model.mtp_layers=1; set it to 0"
    ),
    **{
        f"{_SCORED} align.method=filter align.threshold={threshold}": (
            f'align.threshold={threshold!r} must be a number, a quantile from "q0" to "q1" such as "q0.8", or "best"'
        )
        for threshold in ("good", "q1.5", "qx")
    },
    f"{_SCORED} align.method=condition align.template={{prompt}}": (
        "align.template='{prompt}' lacks {reward}; write both {prompt} and {reward}, or {reward:.2f} for 2 digits"
    ),
    f"{_SCORED} align.method=condition align.template={{reward}}{{prompt}}{{x}}": (
        "align.template='{reward}{prompt}{x}' has the field {x}; only {prompt} and {reward} are filled in"
    ),
    f"{_SCORED} align.method=condition align.template={{prompt}}{{reward:.2q}}": (
        "align.template='{prompt}{reward:.2q}' cannot be filled in (Unknown format code 'q' for object of type "
        "'float'); write a brace of the text twice, as {{ or }}"
    ),
}

MEMORY = {
    'train.offload=["mla_up"] model.attention=mla': (
        "train.offload has 'mla_up', which saves nothing of its own; choose from..."
    ),
    'train.offload=["attention"]': (
        "train.offload has 'attention', which saves nothing of its own; choose from 'norms', 'core_attention', "
        "'dense_mlp', 'expert_activation', 'shared_experts', 'moe', 'layer'"
    ),
    'train.offload=["moe","moe"]': ("train.offload names 'moe' 2 times; name it once"),
    'train.offload=["dense_mlp"]': (
        "train.offload has 'dense_mlp', and no layer of model.layer_pattern is D; leave it out"
    ),
    'train.offload=["shared_experts"]': (
        "train.offload has 'shared_experts', and model.shared_expert_ffn_hidden_size=0 means none; leave it out"
    ),
    'train.offload=["moe","expert_activation"]': (
        "train.offload has 'expert_activation' and 'moe', which includes it; leave one of them out"
    ),
    'train.offload=["layer","norms"]': (
        "train.offload has 'norms' and 'layer', which includes it; leave one of them out"
    ),
    'train.offload=["core_attention"] train.recompute=["layer"]': (
        "train.offload has 'core_attention', of which train.recompute=['layer'] saves nothing; leave it out, or "
        "offload 'layer', whose input is saved"
    ),
    'train.offload=["layer"] train.offload_to=ssd': (
        "train.offload_to='ssd' needs train.offload_dir, a folder on a local disk, such as '/scratch/moefold'"
    ),
    'train.offload=["layer"] train.offload_min_kib=-1': ("train.offload_min_kib=-1 must be at least 0 (0: all)"),
    'train.offload=["layer"] train.offload_limit_gib=-1': (
        "train.offload_limit_gib=-1.0 must be at least 0 (0: no limit)"
    ),
    'train.recompute=["attention"]': (
        "train.recompute has 'attention', which is no part of a layer; choose from 'norms', ..."
    ),
    'train.recompute=["moe","moe"]': ("train.recompute names 'moe' 2 times; name it once"),
    'train.recompute=["mla_up"]': ("train.recompute has 'mla_up', and model.attention is not 'mla'; leave it out"),
    'train.recompute=["dense_mlp"]': (
        "train.recompute has 'dense_mlp', and no layer of model.layer_pattern is D; leave it out"
    ),
    'train.recompute=["moe"] model.layer_pattern=D': (
        "train.recompute has 'moe', and no layer of model.layer_pattern is M; leave it out"
    ),
    'train.recompute=["shared_experts"]': (
        "train.recompute has 'shared_experts', and model.shared_expert_ffn_hidden_size=0 means none; leave it out"
    ),
    'train.recompute=["expert_activation","moe"]': (
        "train.recompute has 'expert_activation' and 'moe', which recomputes it anyway; leave one of them out"
    ),
    'train.recompute=["auto"] train.memory_budget_gib=1 train.offload=["layer"]': (
        "train.recompute=['auto'] uses formulas, and how much of train.offload is offloaded at the peak depends on "
        "the disk; name parts, or leave train.offload out"
    ),
    'train.recompute=["layer","norms"]': (
        "train.recompute has 'norms' and 'layer', which recomputes it anyway; leave one of them out"
    ),
}


ACCEPTED = [
    "model.hidden_size=100 model.head_dim=16",
    "model.num_query_groups=1",
    "model.num_query_groups=8",
    "model.rope_fraction=0.5",
    "model.rope_scaling=ntk model.rope_scaling_factor=8 model.rope_pattern=R3N",
    "model.rope_scaling=yarn model.rope_scaling_factor=8 model.rope_beta_fast=1 model.rope_beta_slow=1",
    "model.head_dim=100 model.rope_fraction=0.58",
    "model.rope_scaling=linear model.rope_scaling_factor=2",
    "model.rope_scaling=llama3 model.rope_scaling_factor=8 model.rope_original_seq_len=4096",
    "model.rope_scaling=yarn model.rope_scaling_factor=8 model.rope_mscale=1 model.rope_mscale_all_dim=1",
    "model.attention=mla model.hidden_size=100 model.num_attention_heads=3",
    "model.layer_pattern=DM",
    "model.layer_pattern=DM3",
    "model.layer_pattern=DMM",
    "model.layer_pattern=D",
    "model.top_k=8",
    "model.num_groups=4 model.top_groups=2",
    "model.num_groups=8 model.top_groups=4",
    "model.num_groups=4 model.top_groups=2 model.router_score=sigmoid model.expert_bias=true moe.aux_kind=sequence",
    "model.num_groups=4 model.top_groups=2 moe.choice=quantile model.expert_bias=true",
    "model.expert_bias=true moe.aux_loss=0.0",
    "moe.choice=sinkhorn moe.sinkhorn_iterations=1",
    "moe.choice=round_robin",
    "moe.choice=skewed moe.skew=1.0 model.top_k=7",
    "moe.capacity_factor=0.5",
    "moe.capacity_factor=3.9",
    "moe.capacity_factor=4.0 moe.pad_to_capacity=true",
    "moe.capacity_factor=1.0 moe.pad_to_capacity=true moe.drop_scope=sub_sequence world_size=2 tp=2",
    "moe.capacity_factor=1.0 moe.pad_to_capacity=true moe.drop_policy=position",
    "moe.eval_capacity_factor=1.0 train.eval_every=5 moe.drop_policy=position",
    "moe.input_jitter=0.01 moe.router_dtype=float64",
    "model.layer_pattern=D",
    "train.min_lr=3e-4",
    "train.warmup_steps=100",
    "train.lr_schedule=wsd train.warmup_steps=50 train.decay_steps=50",
    "data.validation_fraction=0",
    "train.eval_every=1000",
    'train.optimizer=muon train.muon_groups=["experts","router"]',
    'train.optimizer=muon train.muon_groups=["mtp"] model.mtp_layers=1',
    'train.optimizer=muon train.muon_groups=["shared_experts"] model.shared_expert_ffn_hidden_size=8',
    "train.optimizer=muon model.layer_pattern=D",
    "data.document_end=255",
    "data.kind=huggingface data.path=owner/name data.streaming=true",
    "data.kind=huggingface data.path=owner/name data.streaming=true data.validation_split=test train.eval_every=5",
    (
        "data.kind=huggingface data.path=owner/name data.validation_fraction=0.0 data.validation_split=test "
        "train.eval_every=5"
    ),
    'data.kind=text data.path=["a","b"] data.weights=[1,2.5]',
    "data.kind=tokens data.path=a data.weights=[1] data.document_index=true",
    "data.kind=sft data.path=chats.jsonl data.overlong=refuse data.chat_template=t.jinja",
    "data.kind=preference data.path=pairs.jsonl data.overlong=refuse align.method=kto align.desirable_weight=2",
    "data.kind=sft data.path=scored.jsonl align.method=filter align.threshold=q0.8 model.mtp_layers=1",
    "data.kind=sft data.path=scored.jsonl align.method=filter align.threshold=0.5",
    "data.kind=sft data.path=scored.jsonl align.method=condition align.template={reward:+.1f}{prompt}{{}}",
    "faults.nonfinite=rollback checkpoint.every=5",
    "faults.spike=rollback checkpoint.every=5",
]
