"""Routing, training, data and memory that are refused, with their messages, and accepted ones.

Settings are overrides of the default recipe; those without a section belong to [parallel]. "..." in a message stands
for a part that is left out.
"""

ROUTING = {
    "moe.replay=runs/a moe.choice=sinkhorn": (
        "moe.replay='runs/a' has chosen the experts already, and moe.choice='sinkhorn' would choose others; choose "
        "moe.choice='topk', or leave replay out"
    ),
    "model.ffn.moe.top_k=1": (
        'model.ffn.moe.top_k=1 with model.ffn.moe.router.softmax="post" weighs every choice with 1, so the router '
        "gets no gradient "
        'from the loss; set model.ffn.moe.router.softmax="pre", or model.ffn.moe.top_k=2 or more'
    ),
    "model.ffn.moe.top_k=1 model.ffn.moe.router=sigmoid": (
        "model.ffn.moe.top_k=1 with model.ffn.moe.router.normalize=true weighs every choice with 1, so the router "
        "gets no gradient "
        "from the loss; set model.ffn.moe.router.normalize=false, or model.ffn.moe.top_k=2 or more"
    ),
    "model.ffn.moe.top_k=9": ("model.ffn.moe.top_k=9 must be at most model.ffn.moe.num_experts=8; choose 1 to 8"),
    "model.ffn.moe.router.num_groups=3 model.ffn.moe.router.top_groups=2": (
        "model.ffn.moe.router.num_groups=3 must divide model.ffn.moe.num_experts=8; choose 1, 2, 4 or 8, or "
        "model.ffn.moe.num_experts=6 or 9"
    ),
    "model.ffn.moe.router.top_groups=2": (
        "model.ffn.moe.router.top_groups=2 must be at most model.ffn.moe.router.num_groups=1; choose 1 to 1"
    ),
    "model.ffn.moe.router.num_groups=4 model.ffn.moe.router.top_groups=1 model.ffn.moe.top_k=4": (
        "model.ffn.moe.router.top_groups=1 groups of 2 experts are fewer than model.ffn.moe.top_k=4 experts; choose "
        "top_groups of 2 or more,"
        " or top_k of 2 or less"
    ),
    "model.ffn.moe.router.num_groups=4 model.ffn.moe.router.top_groups=4": (
        "model.ffn.moe.router.top_groups=4 of model.ffn.moe.router.num_groups=4 limits nothing; choose top_groups "
        "below 4, or leave both out"
    ),
    "model.ffn.moe.router.num_groups=8 model.ffn.moe.router.top_groups=4 model.ffn.moe.router=sigmoid": (
        "model.ffn.moe.router='sigmoid' scores a group by its two best experts, and "
        "model.ffn.moe.router.num_groups=8 makes groups of "
        "one; choose num_groups of 4 or less"
    ),
    "moe.choice=quantile": (
        "moe.choice='quantile' stores its thresholds in the expert bias, with which evaluation and generation route, "
        "and model.ffn.moe.router.expert_bias=false; set model.ffn.moe.router.expert_bias=true"
    ),
    "moe.choice=quantile model.ffn.moe.router.expert_bias=true model.ffn.moe.top_k=8": (
        "moe.choice='quantile' has nothing to balance: model.ffn.moe.top_k=8 is every expert; choose top_k of at "
        "most 7, or "
        "choice='topk'"
    ),
    "moe.choice=sinkhorn model.ffn.moe.router.expert_bias=true": (
        "model.ffn.moe.router.expert_bias=true contradicts moe.choice='sinkhorn', which balances the experts by "
        "itself; choose "
        "expert_bias=false, or choice='topk'"
    ),
    "moe.choice=round_robin model.ffn.moe.router.expert_bias=true": (
        "model.ffn.moe.router.expert_bias=true contradicts moe.choice='round_robin', which reads no score; choose "
        "expert_bias=false,"
        " or choice='topk'"
    ),
    "moe.choice=sinkhorn model.ffn.moe.router.num_groups=4 model.ffn.moe.router.top_groups=2": (
        "model.ffn.moe.router.num_groups=4 contradicts moe.choice='sinkhorn', which balances the experts by itself; "
        "leave num_groups"
        " and top_groups out, or choose choice='topk'"
    ),
    "moe.choice=skewed model.ffn.moe.router.num_groups=4 model.ffn.moe.router.top_groups=2": (
        "model.ffn.moe.router.num_groups=4 contradicts moe.choice='skewed', which reads no score; leave num_groups "
        "and top_groups "
        "out, or choose choice='topk'"
    ),
    "moe.choice=skewed model.ffn.moe.top_k=8": (
        "moe.choice='skewed' assigns all other experts to the remaining tokens, so model.ffn.moe.top_k=8 must be below "
        "model.ffn.moe.num_experts=8; choose top_k of at most 7"
    ),
    "moe.choice=skewed model.ffn.moe.top_k=1 model.ffn.moe.num_experts=1 model.ffn.moe.router.softmax=pre": (
        "moe.choice='skewed' needs more experts than expert 0, and model.ffn.moe.num_experts=1; choose 2 or more"
    ),
    "moe.capacity_factor=0.4": (
        "moe.capacity_factor=0.4 with model.ffn.moe.top_k=2 gives all experts together a capacity below the number "
        "of tokens,"
        " so some would reach no expert; choose 0.5 or more, or 0.0 (dropless)"
    ),
    "moe.eval_capacity_factor=0.3 model.ffn.moe.top_k=3 train.eval_every=5": (
        "moe.eval_capacity_factor=0.3 with model.ffn.moe.top_k=3 gives all experts together a capacity below the "
        "number of "
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

_LORA = "lora.rank=4 model.layers=2x(dense,moe)"
ADAPTERS = {
    f"{_LORA} lora.targets=['wq_up','attention']": (
        "lora.targets='wq_up' names no matrix of this model that can be adapted; choose all, attention, dense_mlp, "
        "experts, wq, wk, wv, wo, w_gate, w_up, w_down"
    ),
    f"{_LORA} lora.targets=['wq','wq']": (
        "lora.targets=['wq', 'wq'] names a target twice; name another, or leave it out once"
    ),
    f"{_LORA} lora.targets=[]": "lora.targets=[] adapts nothing; name all, attention, dense_mlp, experts, wq, wk,...",
    "lora.rank=300": (
        "lora.rank=300 must be at most 256, the smaller side of layers.0.attention.wq [256, 256]; choose a lower rank, "
        "or lora.targets without it"
    ),
    "lora.rank=4 model.layers=4x(linear/dense) lora.targets=['attention']": (
        "lora.targets='attention' names no matrix of this model that can be adapted; choose all, dense_mlp, w_gate,..."
    ),
    f"{_LORA} train.precision=fp8-blockwise": (
        "train.precision='fp8-blockwise' has no kernels for experts with adapters; choose lora.targets without experts,"
        " or train.precision='dtype'"
    ),
    f"{_LORA} world_size=4 ep=4 dispatcher=leastloaded": (
        "parallel.dispatcher='leastloaded' moves the weights of experts between ranks, and not their adapters; choose "
        "lora.targets without experts, or parallel.dispatcher='alltoall'"
    ),
    f"{_LORA} run.cuda_graphs=attention": (
        "run.cuda_graphs='attention' does not record adapters; set run.cuda_graphs='none'"
    ),
    f"{_LORA} model.attention.indexer.top_k=64 train.indexer_stage=warmup": (
        "train.indexer_stage='warmup' trains only the indexers, and lora.rank=4 only adapters; choose one of them"
    ),
    f"{_LORA} checkpoint.upcycle.dense=runs/a": (
        'checkpoint.upcycle={ dense = "runs/a" } makes weights that no folder has, and lora.rank=4 needs a base; run '
        "moefold upcycle, and name its result in checkpoint.init_from"
    ),
}

TRAINING = {
    "data.document_end=256": (
        "data.document_end=256 must be below model.vocab_size=256; choose an id of the vocabulary, or -1 for samples "
        "of one document"
    ),
    "train.lr_schedule.min_lr=1e-3": (
        "train.lr_schedule.min_lr=0.001 must be at most train.lr=0.0003, the default of pretraining; choose 0.0 to "
        "0.0003"
    ),
    "checkpoint.every=200 checkpoint.keep_every=500": (
        "checkpoint.keep_every=500 must be a multiple of checkpoint.every=200: only such steps have a checkpoint; "
        "choose 400 or 600, or another every"
    ),
    "train.warmup_steps=101": ("train.warmup_steps=101 must be at most run.steps=100; choose 0 to 100"),
    "train.lr_schedule=wsd train.warmup_steps=50 train.lr_schedule.decay_steps=51": (
        "train.lr_schedule.decay_steps=51 and train.warmup_steps=50 must fit into run.steps=100; choose decay_steps of "
        "at most 50"
    ),
    "train.eval_every=5 data.validation_fraction=0": (
        "train.eval_every=5 needs held-out text, and data.validation_fraction=0.0 holds out none; choose "
        "validation_fraction=0.05, or eval_every=0"
    ),
    "model.mtp_layers=16 train.seq_len=16": (
        "model.mtp_layers=16 must be below train.seq_len=16: no position has a target so far ahead; choose 0 to 15"
    ),
    "train.optimizer=muon train.optimizer.groups=[]": (
        "train.optimizer.groups=[] leaves Muon nothing; name some of 'attention', 'dense_mlp', 'experts', "
        "'shared_experts', 'router', 'mtp', or choose optimizer='adamw'"
    ),
    'train.optimizer=muon train.optimizer.groups=["embedding","router","router"]': (
        "2 settings cannot work:\n"
        "  train.optimizer.groups has 'embedding', which is not a group of matrices; choose from 'attention', "
        "'dense_mlp', 'experts', 'shared_experts', 'router', 'mtp'\n"
        "  train.optimizer.groups names 'router' 2 times; name it once"
    ),
    'train.optimizer=muon train.optimizer.groups=["mtp"]': (
        "train.optimizer.groups has 'mtp', and the model has no such matrices: model.mtp_layers=0; leave 'mtp' out, or "
        "leave groups out for all groups"
    ),
    'train.optimizer=muon train.optimizer.groups=["attention","shared_experts","dense_mlp"] model.layers=4': (
        "2 settings cannot work:\n"
        "  train.optimizer.groups has 'dense_mlp', and the model has no such matrices: no layer of model.layers "
        "is 'dense'; leave 'dense_mlp' out, or leave groups out for all groups\n"
        "  train.optimizer.groups has 'shared_experts', and the model has no such matrices: "
        "model.ffn.moe.shared=none; leave 'shared_experts' out, or leave groups out for all groups"
    ),
    'train.optimizer=muon train.optimizer.groups=["router"] model.layers=4x(dense)': (
        "train.optimizer.groups has 'router', and the model has no such matrices: no layer of model.layers is "
        "'moe'; leave 'router' out, or leave groups out for all groups"
    ),
    "train.optimizer.moment_dtype=bfloat16 train.optimizer.beta2=0.99": (
        "train.optimizer.beta2=0.99 must be at most 0.98 with train.optimizer.moment_dtype='bfloat16': what a step "
        "adds would be lost in rounding; choose beta2=0.98 or less, or moment_dtype='float32'"
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
        "data.streaming=true has no effect: nothing reads it with data.kind='python-docs'; set "
        "data.kind='huggingface', or leave streaming out"
    ),
    "data.kind=text data.path=a data.column=b": (
        "data.column='b' has no effect: nothing reads it with data.kind='text'; set data.kind='huggingface', or leave "
        "column out"
    ),
    "data.weights=[1]": (
        "data.weights=[1.0] has no effect: nothing reads it with data.kind='python-docs'; set data.kind='text', "
        "'tokens', 'huggingface', 'sft' or 'preference', or leave weights out"
    ),
    "data.kind=huggingface data.path=owner/name data.overlong=refuse": (
        "data.overlong='refuse' has no effect: nothing reads it with data.kind='huggingface'; set data.kind='sft' or "
        "'preference', or leave overlong out"
    ),
    "data.kind=huggingface data.path=owner/name data.chat_template=a": (
        "data.chat_template='a' has no effect: nothing reads it with data.kind='huggingface'; set data.kind='sft', "
        "'preference' or 'prompts', or leave chat_template out"
    ),
    "data.kind=huggingface data.path=owner/name data.document_index=true": (
        "data.document_index=true has no effect: nothing reads it with data.kind='huggingface'; set "
        "data.kind='tokens', or leave document_index out"
    ),
    "data.kind=sft data.path=chats.jsonl data.document_end=3": (
        "data.document_end=3 has no effect: nothing reads it with data.kind='sft'; set data.kind='python-docs', "
        "'text', 'tokens', 'synthetic' or 'huggingface', or leave document_end out"
    ),
    "data.kind=tokens data.path=a data.document_index=true data.document_end=3": (
        "data.document_end=3 has no effect: nothing reads it with data.document_index=true; set "
        "data.document_index=false, or leave document_end out"
    ),
    "data.kind=sft data.path=chats.jsonl data.split=test": (
        "data.split='test' has no effect: nothing reads it with data.kind='sft'; set data.kind='huggingface', or leave "
        "split out"
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
        "data.kind=\"preference\" needs a loss for pairs, and align.method='none' is none; choose dpo, ipo, kto, simpo"
    ),
    f"{_PREFERENCE} align.method=dpo data.weights=[1]": (
        "align.method='dpo' reads its rows as one data set; leave data.weights out, and name the files in data.path"
    ),
    f"{_PREFERENCE} align.method=ipo model.mtp_layers=1": (
        "align.method='ipo' has no loss for the MTP layers, as they would learn the rejected completions too, and "
        "model.mtp_layers=1; set it to 0"
    ),
    **{
        f"{_SCORED} align.method=filter align.method.threshold={threshold}": (
            f'align.method.threshold={threshold!r} must be a number, a quantile from "q0" to "q1" such as "q0.8", '
            'or "best"'
        )
        for threshold in ("good", "q1.5", "qx")
    },
    f"{_SCORED} align.method=condition align.method.template={{prompt}}": (
        "align.method.template='{prompt}' lacks {reward}; write both {prompt} and {reward}, or {reward:.2f} for 2 "
        "digits"
    ),
    f"{_SCORED} align.method=condition align.method.template={{reward}}{{prompt}}{{x}}": (
        "align.method.template='{reward}{prompt}{x}' has the field {x}; only {prompt} and {reward} are filled in"
    ),
    f"{_SCORED} align.method=condition align.method.template={{prompt}}{{reward:.2q}}": (
        "align.method.template='{prompt}{reward:.2q}' cannot be filled in (Unknown format code 'q' for object of type "
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
        "train.offload has 'dense_mlp', and no layer of model.layers is 'dense'; leave it out"
    ),
    'train.offload=["shared_experts"]': (
        "train.offload has 'shared_experts', and model.ffn.moe.shared is none; leave it out"
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
        "train.recompute has 'attention', which is not a part of a layer; choose from 'norms', ..."
    ),
    'train.recompute=["moe","moe"]': ("train.recompute names 'moe' 2 times; name it once"),
    'train.recompute=["mla_up"]': ("train.recompute has 'mla_up', and model.attention is not 'mla'; leave it out"),
    'train.recompute=["dense_mlp"]': (
        "train.recompute has 'dense_mlp', and no layer of model.layers is 'dense'; leave it out"
    ),
    'train.recompute=["moe"] model.layers=4x(dense)': (
        "train.recompute has 'moe', and no layer of model.layers is 'moe'; leave it out"
    ),
    'train.recompute=["shared_experts"]': (
        "train.recompute has 'shared_experts', and model.ffn.moe.shared is none; leave it out"
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
    "model.hidden_size=100 model.attention.head_dim=16",
    "model.attention.num_kv_heads=1",
    "model.attention.num_kv_heads=8",
    "model.attention.rope_fraction=0.5",
    "model.rope.scaling=ntk model.rope.scaling.factor=8 model.layers=3x(full),nope",
    "model.rope.scaling=yarn model.rope.scaling.factor=8 model.rope.scaling.beta_fast=1 model.rope.scaling.beta_slow=1",
    "model.attention.head_dim=100 model.attention.rope_fraction=0.58",
    "model.rope.scaling=linear model.rope.scaling.factor=2",
    "model.rope.scaling=longrope model.attention.head_dim=2 model.rope.scaling.short_factors=[1] "
    "model.rope.scaling.long_factors=[2]",
    "model.ffn.moe.router.softmax=sparsemixer model.ffn.moe.top_k=1 model.norm=layernorm model.head_bias=true",
    "model.rope.scaling=llama3 model.rope.scaling.factor=8 model.rope.scaling.original_seq_len=4096",
    "model.rope.scaling=yarn model.rope.scaling.factor=8 model.rope.scaling.mscale=1 "
    "model.rope.scaling.mscale_all_dim=1",
    "model.attention=mla model.hidden_size=100 model.attention.num_heads=3",
    "model.layers=4x(dense)",
    "model.ffn.moe.top_k=8",
    "model.ffn.moe.router.num_groups=4 model.ffn.moe.router.top_groups=2",
    "model.ffn.moe.router.num_groups=8 model.ffn.moe.router.top_groups=4",
    "model.ffn.moe.router.num_groups=4 model.ffn.moe.router.top_groups=2 model.ffn.moe.router=sigmoid "
    "model.ffn.moe.router.expert_bias=true moe.aux_kind=sequence",
    "model.ffn.moe.router.num_groups=4 model.ffn.moe.router.top_groups=2 moe.choice=quantile "
    "model.ffn.moe.router.expert_bias=true",
    "model.ffn.moe.router.expert_bias=true moe.aux_loss=0.0",
    "moe.choice=sinkhorn moe.choice.iterations=1",
    "moe.choice=round_robin",
    "moe.choice=skewed moe.choice.share=1.0 model.ffn.moe.top_k=7",
    "moe.capacity_factor=0.5",
    "moe.capacity_factor=3.9",
    "moe.capacity_factor=4.0 moe.pad_to_capacity=true",
    "moe.capacity_factor=1.0 moe.pad_to_capacity=true moe.drop_scope=sub_sequence world_size=2 tp=2",
    "moe.capacity_factor=1.0 moe.pad_to_capacity=true moe.drop_policy=position",
    "moe.eval_capacity_factor=1.0 train.eval_every=5 moe.drop_policy=position",
    "moe.input_jitter=0.01 moe.router_dtype=float64",
    "train.lr_schedule.min_lr=3e-4",
    "train.warmup_steps=100",
    "train.lr_schedule=wsd train.warmup_steps=50 train.lr_schedule.decay_steps=50",
    "data.validation_fraction=0",
    "train.eval_every=1000",
    'train.optimizer=muon train.optimizer.groups=["experts","router"]',
    'train.optimizer=muon train.optimizer.groups=["mtp"] model.mtp_layers=1',
    'train.optimizer=muon train.optimizer.groups=["shared_experts"] model.ffn.moe.shared.intermediate_size=8',
    "train.optimizer=muon model.layers=4x(dense)",
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
    "data.kind=preference data.path=pairs.jsonl data.overlong=refuse align.method=kto align.method.desirable_weight=2",
    "data.kind=sft data.path=scored.jsonl align.method=filter align.method.threshold=q0.8 model.mtp_layers=1",
    "data.kind=sft data.path=scored.jsonl align.method=filter align.method.threshold=0.5",
    "data.kind=sft data.path=scored.jsonl align.method=condition align.method.template={reward:+.1f}{prompt}{{}}",
    "faults.nonfinite=rollback checkpoint.every=5",
    "faults.spike=rollback checkpoint.every=5",
]
