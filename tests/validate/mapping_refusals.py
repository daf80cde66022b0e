"""Mappings and pipelines that are refused, with their messages, and accepted ones.

Settings are overrides of the default recipe; those without a section belong to [parallel]. "..." in a message stands
for a part that is left out.
"""

FOLDS = {
    "world_size=8 tp=3": (
        "parallel.tp=3 must divide world_size/pp=8; choose one of 1, 2, 4, 8, or make parallel.world_size a multiple "
        "of 3"
    ),
    "world_size=8 ep=16": (
        "parallel.ep=16 must divide world_size/(etp*pp)=8; choose one of 1, 2, 4, 8, or make parallel.world_size a "
        "multiple of 16"
    ),
    "order=tp-cp": (
        "parallel.order='tp-cp' must name each of tp, cp, dp, pp once, slowest to fastest, joined by '-'; the default"
        " is 'pp-dp-cp-tp'"
    ),
}

PLACED = "world_size=4 ep=2 context=planned parallel.context.placement=balanced"
BY_DOCUMENT = "world_size=2 cp=2 context=planned parallel.context.placement=documents data.document_end=0"
BALANCED_HOSTS = "world_size=8 cp=2 context=planned parallel.context.hosts=balanced"
PLACEMENTS = {
    f"{PLACED} data.kind=preference data.path=a align.method=dpo train.eval_every=0": (
        "parallel.context.placement='balanced' splits samples between ranks, and data.kind='preference' has losses "
        "and columns "
        "of whole samples; choose placement='samples'"
    ),
    "world_size=2 cp=2 context=planned model.layers=4x(chunk) model.attention_chunk_size=4": (
        "parallel.context='planned' plans attention within documents, and model.layers='4x(chunk)' has layers "
        "'chunk', which divide them into chunks; choose parallel.context='ring'"
    ),
    f"{PLACED} data.kind=task rl.group_size=4": (
        "parallel.context.placement='balanced' splits samples between ranks, and rollouts have columns of whole "
        "samples; "
        "choose placement='samples'"
    ),
    f"{PLACED} data.document_end=0 moe.capacity_factor=1.0": (
        "parallel.context.placement='balanced' with moe.capacity_factor=1.0 would drop other tokens than "
        "placement='samples': "
        "a capacity counts a micro-batch, whose tokens are on all ranks; set capacity_factor=0.0 (dropless), or "
        "choose placement='samples'"
    ),
    f"{BY_DOCUMENT} moe.capacity_factor=1.0 moe.drop_scope=sub_sequence": (
        "parallel.context.placement='documents' with moe.capacity_factor=1.0 would drop other tokens than "
        "placement='samples': "
        "a capacity counts one rank's part of a sample; set capacity_factor=0.0 (dropless), or choose "
        "placement='samples'"
    ),
    f"{PLACED} data.document_end=0 moe.choice=sinkhorn": (
        "parallel.context.placement='balanced' with moe.choice='sinkhorn' would balance other tokens than "
        "placement='samples': "
        "it reads the tokens of a micro-batch, which are on all ranks; choose moe.choice='topk', or choose "
        "placement='samples'"
    ),
}

MAPPINGS = {
    "world_size=4 context=planned parallel.context.hosts=balanced parallel.context.pool=1 data.document_end=0": (
        "parallel.context.pool=1 leaves all work on its rank, as hosts='home' does; choose one of "
        "2, 4, 0 for all ranks, or hosts='home'"
    ),
    f"{BALANCED_HOSTS} parallel.context.pool=3 data.document_end=0": (
        "parallel.context.pool=3 must be a multiple of parallel.cp=2 that divides dp*cp=8; choose one of 2, 4, 8, or "
        "0 for all ranks"
    ),
    f"{BALANCED_HOSTS} parallel.context.block=512 data.document_end=0 train.seq_len=256": (
        "parallel.context.block=512 must be at most train.seq_len=256, as no document of a sample is longer; choose "
        "256 or less"
    ),
    f"{BALANCED_HOSTS} data.kind=task rl.group_size=4": (
        "parallel.context.hosts='balanced' needs the documents of all ranks, and each rank packs only its own "
        "rollouts; choose hosts='home'"
    ),
    "world_size=4 etp=4 model.hidden_size=66 model.attention.head_dim=8 model.ffn.moe.bias=true": (
        "parallel.etp=4 must divide model.hidden_size=66; choose model.hidden_size=64 or 68, or parallel.etp=1 or 2"
    ),
    "world_size=8 tp=8 model.attention.num_heads=12 model.attention.num_kv_heads=2 model.attention.head_dim=32": (
        "parallel.tp=8 must divide model.attention.num_heads=12; choose model.attention.num_heads=8 or 16, or "
        "parallel.tp=1, 2 or 4"
    ),
    "world_size=3 tp=3 model.layers=4x(linear) model.linear_attention=short_convolution model.hidden_size=64 "
    "model.vocab_size=258 train.seq_len=96 moe.z_loss=0": (
        "parallel.tp=3 must divide model.hidden_size=64; choose model.hidden_size=63 or 66"
    ),
    "world_size=4 tp=4 model.attention.num_heads=24 model.attention.num_kv_heads=6 model.attention.head_dim=32": (
        "parallel.tp=4 must divide model.attention.num_kv_heads=6, or be a multiple of it (key and value heads are "
        "then "
        "replicated); choose model.attention.num_kv_heads=4 or 8, or parallel.tp=1 or 2"
    ),
    "world_size=4 tp=4 model.layers=2x(dense,moe) model.ffn.dense.intermediate_size=1022": (
        "parallel.tp=4 must divide model.ffn.dense.intermediate_size=1022; choose "
        "model.ffn.dense.intermediate_size=1020 or 1024, or "
        "parallel.tp=1 or 2"
    ),
    "world_size=4 tp=4 model.ffn.moe.shared.intermediate_size=6": (
        "parallel.tp=4 must divide model.ffn.moe.shared.intermediate_size=6; choose "
        "model.ffn.moe.shared.intermediate_size=4 or 8, or parallel.tp=1 or 2"
    ),
    # 3 + 3 + 3 + 0 rows.
    "world_size=4 tp=4 model.vocab_size=9": (
        "parallel.tp=4 leaves the last rank without a row of model.vocab_size=9; choose model.vocab_size=10, or "
        "parallel.tp=1 or 2"
    ),
    "world_size=8 cp=8 context=ulysses model.attention.num_heads=4 model.attention.head_dim=32": (
        "parallel.cp=8 must divide num_heads/tp=4 with parallel.context='ulysses', which gives each rank "
        "whole heads; choose parallel.context='ring' or 'allgather', or parallel.cp=1, 2 or 4"
    ),
    "world_size=8 ep=8 model.ffn.moe.num_experts=6": (
        "parallel.ep=8 must divide model.ffn.moe.num_experts=6; choose model.ffn.moe.num_experts=8, or parallel.ep=1 "
        "or 2"
    ),
    "world_size=4 etp=4 model.ffn.moe.intermediate_size=510": (
        "parallel.etp=4 must divide model.ffn.moe.intermediate_size=510; choose model.ffn.moe.intermediate_size=508 "
        "or 512, or "
        "parallel.etp=1 or 2"
    ),
    "world_size=2 ep=2 model.layers=4x(dense)": (
        "parallel.ep=2 needs MoE layers, and model.layers='4x(dense)' has none; name 'moe' in model.layers, or "
        "parallel.ep=1"
    ),
    "world_size=2 etp=2 model.layers=4x(dense)": (
        "parallel.etp=2 needs MoE layers, and model.layers='4x(dense)' has none; name 'moe' in model.layers, or "
        "parallel.etp=1"
    ),
    "world_size=8 pp=8": (
        "parallel.pp=8 must be at most the 4 layers of the model, one for each stage; choose model.layers=8, or "
        "parallel.pp=1, 2 or 4"
    ),
    "world_size=8 pp=8 model.layers=dense,moe,moe,moe": (
        "parallel.pp=8 must be at most the 4 layers of the model, one for each stage; choose model.layers='2 x (dense, "
        "3 moe)', or parallel.pp=1, 2 or 4"
    ),
    "world_size=4 pp=4 schedule=interleaved virtual_stages=2": (
        "parallel.pp=4 * parallel.virtual_stages=2 must be at most the 4 layers of the model, one for each stage; "
        "choose model.layers=8, or parallel.pp=1 or 2"
    ),
    "world_size=4 tp=2 cp=2 train.seq_len=254": (
        "train.seq_len=254 must be divisible by cp*tp=2*2=4; choose 252 or 256"
    ),
    "world_size=2 tp=2 train.seq_len=1": ("train.seq_len=1 must be divisible by cp*tp=1*2=2; choose 2"),
    "world_size=8 cp=8 train.seq_len=248": (
        "train.seq_len=248 must be divisible by 2*cp=16, the chunks that balance parallel.context='ring'; choose 240 "
        "or 256"
    ),
    "world_size=2 cp=2 context=allgather train.seq_len=6": (
        "train.seq_len=6 must be divisible by 2*cp=4, the chunks that balance parallel.context='allgather'; choose 4 "
        "or 8"
    ),
    "world_size=4 ep=2 etp=2 dispatcher=local": (
        "parallel.dispatcher='local' needs ep=etp=1, and parallel.ep=2, parallel.etp=2; choose 'alltoall' or "
        "'allgather'"
    ),
    "world_size=2 tp=2 dispatcher=allgather": (
        "parallel.dispatcher='allgather' sends tokens between the ranks of ep and etp, and parallel.ep=1, "
        "parallel.etp=1; choose 'alltoall' or 'auto', or ep or etp of 2 or more"
    ),
    "world_size=1 dispatcher=deepep": (
        "parallel.dispatcher='deepep' sends tokens between the ranks of ep and etp, and parallel.ep=1, "
        "parallel.etp=1; choose 'alltoall' or 'auto', or ep or etp of 2 or more"
    ),
    "world_size=2 etp=2 dispatcher=leastloaded": (
        "parallel.dispatcher='leastloaded' moves routed tokens between the ranks of ep, and parallel.ep=1; choose "
        "'alltoall', or ep of 2 or more"
    ),
    "world_size=2 ep=2 dispatcher=leastloaded moe.capacity_factor=1.0 moe.pad_to_capacity=true": (
        "moe.pad_to_capacity=true gives every rank the same load, so parallel.dispatcher='leastloaded' would move "
        "nothing; choose pad_to_capacity=false, or dispatcher='alltoall'"
    ),
    "world_size=2 ep=2 dispatcher=leastloaded parallel.dispatcher.threshold=2.0": (
        "parallel.dispatcher.threshold=2.0 must be below parallel.ep=2, the most mean loads that one rank can have; "
        "the "
        "published value is 1.3"
    ),
    "world_size=4 ep=4 dispatcher=leastloaded parallel.dispatcher.capacity=1.5": (
        "parallel.dispatcher.capacity=1.5 must be at most threshold=1.3: a smaller load needs no relief; choose "
        "1.0 to 1.3"
    ),
    "world_size=4 ep=4 dispatcher=leastloaded parallel.dispatcher.min_tokens=1000": (
        "parallel.dispatcher.min_tokens=1000 must be at most 564, the most routed tokens of one expert that a rank "
        "could take "
        "over of the 1024 tokens of ep*etp=4 ranks; choose 1 to 564"
    ),
    "world_size=2 tp=2 ep=2 dispatcher=leastloaded model.ffn.moe.top_k=4 parallel.dispatcher.min_tokens=257": (
        "parallel.dispatcher.min_tokens=257 must be at most 256..."
    ),
    "world_size=2 pp=2 schedule=interleaved": (
        "parallel.schedule='interleaved' needs parallel.virtual_stages of 2 or more, and it is 1; choose "
        "virtual_stages=2, or schedule='1f1b'"
    ),
    "world_size=2 pp=2 virtual_stages=2": (
        "parallel.virtual_stages=2 needs parallel.schedule='interleaved', and it is '1f1b'; choose "
        "schedule='interleaved' or 'zero-bubble', or virtual_stages=1"
    ),
    "world_size=1 schedule=interleaved virtual_stages=2": (
        "parallel.schedule='interleaved' needs parallel.pp of 2 or more, and it is 1; choose schedule='1f1b' with "
        "virtual_stages=1, or pp=2"
    ),
    "world_size=4 tp=2 train.micro_batch_size=2 train.global_batch_size=10": (
        "train.global_batch_size=10 must be divisible by train.micro_batch_size*dp=2*2=4 (dp = "
        "world_size/(tp*cp*pp)); choose 8 or 12, or set parallel.elastic=true, which fills the last ranks up with "
        "padding"
    ),
    "world_size=4 elastic=true train.global_batch_size=6 moe.trace_every=1": (
        "train.global_batch_size=6 is not a multiple of train.micro_batch_size*dp=1*4, and moe.trace_every is "
        "incompatible with the padding that fills it up; choose 4 or 8, or leave moe.trace_every out"
    ),
    "world_size=4 elastic=true train.global_batch_size=3": (
        "train.global_batch_size=3 must be divisible by train.micro_batch_size*dp=1*4=4 (dp = "
        "world_size/(tp*cp*pp)); choose 4"
    ),
    "world_size=4 pp=4 train.micro_batch_size=4": (
        "parallel.schedule='1f1b' needs at least pp=4 micro-batches, and train.global_batch_size=8 gives each "
        "data-parallel rank 2; choose train.global_batch_size=16, micro_batch_size=2, or schedule='gpipe'"
    ),
    "world_size=4 pp=4 train.global_batch_size=3": (
        "parallel.schedule='1f1b' needs at least pp=4 micro-batches, and train.global_batch_size=3 gives each "
        "data-parallel rank 3; choose train.global_batch_size=4, or schedule='gpipe'"
    ),
    "world_size=4 pp=2 schedule=interleaved virtual_stages=2 train.global_batch_size=10": (
        "parallel.schedule='interleaved' with pp=2 runs micro-batches in 2 equal rounds, and "
        "train.global_batch_size=10 gives each data-parallel rank 5; choose train.global_batch_size=8 or 12"
    ),
}

PIPELINES = {
    "world_size=2 pp=2 schedule=zbv": (
        "parallel.schedule='zbv' needs parallel.virtual_stages of 2, and it is 1; choose virtual_stages=2, or "
        "schedule='zero-bubble'"
    ),
    "world_size=2 pp=2 schedule=dualpipev virtual_stages=3 model.layers=8": (
        "parallel.schedule='dualpipev' has exactly 2 stages on each rank, and parallel.virtual_stages=3; choose "
        "virtual_stages=2, or schedule='zero-bubble'"
    ),
    "world_size=2 pp=2 schedule=dualpipev virtual_stages=2 train.global_batch_size=3": (
        "parallel.schedule='dualpipev' needs at least 2*pp=4 micro-batches, and train.global_batch_size=3 gives each "
        "data-parallel rank 3; choose train.global_batch_size=4, or schedule='zbv'"
    ),
    "world_size=2 pp=2 schedule=zero-bubble train.global_batch_size=5": (
        "parallel.schedule='zero-bubble' with pp=2 runs micro-batches in 2 equal rounds..."
    ),
    "world_size=2 pp=2 schedule=csv": (
        "parallel.schedule='csv' needs parallel.schedule.path, its file; or choose 'zero-bubble'"
    ),
    "world_size=1 schedule=csv parallel.schedule.path=rows.csv": (
        "parallel.schedule='csv' needs parallel.pp of 2 or more, and it is 1; choose schedule='1f1b', or pp=2"
    ),
    "world_size=8 pp=8 pipeline_layout=auto model.layers=4": (
        "parallel.pipeline_layout='auto' splits the embedding, 4 layers and the loss, and "
        "parallel.pp*parallel.virtual_stages=8 are more; choose model.layers=6, or fewer stages"
    ),
    "world_size=1 pipeline_layout=Ett|ttL model.layers=4": (
        "parallel.pipeline_layout='Ett|ttL': it has 2 stages, and parallel.pp*parallel.virtual_stages=1; the first | "
        "too many is at character 4"
    ),
}

ACCEPTED = [
    # Heads of softmax attention do not matter where no layer has them.
    "world_size=3 tp=3 model.layers=4x(linear) model.linear_attention.num_key_heads=3 "
    "model.linear_attention.num_value_heads=3 "
    "model.ffn.moe.intermediate_size=96 model.vocab_size=258 train.seq_len=96",
    "world_size=8 tp=8",
    "world_size=8 tp=8 model.vocab_size=32002",
    "world_size=4 tp=4 model.vocab_size=10",
    "world_size=8 tp=2 cp=2 context=ulysses",
    "world_size=8 cp=8 context=ulysses",
    "world_size=4 cp=4 context=ulysses model.attention.num_heads=24 model.attention.num_kv_heads=6 "
    "model.attention.head_dim=32",
    "world_size=2 cp=2 context=ulysses train.seq_len=6",
    "world_size=4 pp=4",
    "world_size=4 pp=4 schedule=gpipe train.global_batch_size=1",
    "world_size=2 pp=2 schedule=interleaved virtual_stages=2 train.global_batch_size=1",
    "world_size=8 tp=2 ep=2 etp=2 dispatcher=allgather",
    "world_size=8 tp=2 ep=2 etp=2 dispatcher=leastloaded moe.capacity_factor=1.0",
    "world_size=4 ep=4 dispatcher=leastloaded parallel.dispatcher.min_tokens=564",
    "world_size=1 dispatcher=local context=ulysses zero=3 schedule=gpipe",
    "world_size=4 tp=4 model.ffn.dense.intermediate_size=1024 model.layers=4x(dense)",
    "world_size=2 etp=1 model.ffn.moe.intermediate_size=511",
    "world_size=2 pp=2 schedule=zero-bubble",
    "world_size=2 pp=2 schedule=zero-bubble virtual_stages=4 model.layers=8",
    "world_size=2 pp=2 schedule=zbv virtual_stages=2 model.layers=8 train.global_batch_size=1",
    "world_size=2 pp=2 schedule=csv parallel.schedule.path=rows.csv virtual_stages=3 model.layers=8",
    "world_size=1 schedule=zero-bubble",
    "world_size=6 pp=6 pipeline_layout=auto model.layers=4 train.global_batch_size=12",
]
