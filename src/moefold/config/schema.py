"""The recipe as frozen, typed data. The text under each field is its help; `config/load.py` validates it.

Nothing here imports torch, so that a wrong recipe is answered at once.
"""

from dataclasses import dataclass, field
from typing import Literal

from moefold.config.model import ModelConfig as ModelConfig


def has_moe_layers(model: ModelConfig) -> bool:
    """Whether any layer routes tokens to experts; for a legal layer pattern."""
    return "M" in model.layer_pattern


def has_dense_layers(model: ModelConfig) -> bool:
    """Whether any layer has a plain SwiGLU; for a legal layer pattern."""
    return "D" in model.layer_pattern


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """What runs, for how long, and where it writes."""

    dir: str = "runs/run"
    """Folder of this run: config.json, metrics.jsonl, checkpoints/, loss.png. Where it holds another run, that one
    stays as it is, and this one takes DIR-2, DIR-3, ... ([checkpoints.md](checkpoints.md))."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    steps: int = 100
    """Optimizer steps in all, those before a resume included."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where a GPU is visible, else cpu."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Compute type. Master weights, gradients and moments are float32 (float64 with float64)."""
    deterministic: bool = False
    """Bit-equal repeats: refuse every kernel that has no deterministic form."""
    check_memory: bool = True
    """Refuse, before any rank starts, a step that by formula needs more memory than this machine or its GPUs have
    ([memory.md](memory.md#what-is-refused-before-it-starts)). false: start it anyway."""
    kernels: Literal["auto", "plain", "triton", "c"] = "auto"
    """Who computes experts and routing ([kernels.md](kernels.md)). plain: operations of torch. triton: fused kernels.
    c: on a CPU, products, norms, rotations, the gate of experts and causal attention, built by its C compiler. auto:
    triton on CUDA in bfloat16 if the package is there, c on a CPU if a compiler is there, else plain; the log says
    which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the two views of the ranks are cut. dp and edp follow from world_size."""

    mapping: Literal["given", "auto"] = "given"
    """auto: `moefold train` plans the axes that the recipe leaves out ([planner.md](planner.md)); `parallel = "auto"`
    above all sections is short for it. Without world_size, all ranks of the launcher, or all devices of the machine."""
    world_size: int = 1
    """Ranks in all."""
    tp: int = 1
    """Tensor parallelism of attention and dense layers, with sequence parallelism."""
    cp: int = 1
    """Context parallelism: each rank holds seq_len / cp tokens of a sample."""
    pp: int = 1
    """Pipeline stages (ranks); both views share them."""
    ep: int = 1
    """Expert parallelism: each rank holds num_experts / ep experts."""
    etp: int = 1
    """Expert tensor parallelism: each expert's inner width is cut into etp parts."""
    order: str = "pp-dp-cp-tp"
    """Rank order of the attention view, slowest to fastest axis."""
    moe_order: str = "pp-edp-ep-etp"
    """Rank order of the MoE view, slowest to fastest axis."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev", "csv"] = "1f1b"
    """Pipeline schedule ([pipeline.md](pipeline.md)). interleaved needs virtual_stages of 2 or more, zbv and dualpipev
    need 2; csv reads schedule_csv."""
    virtual_stages: int = 1
    """Model chunks on each pipeline rank."""
    schedule_csv: str = ""
    """File with the order of work of each pipeline rank (schedule "csv")."""
    pipeline_layout: str = ""
    """What stands on which stage, as "Ett|(ttt|)*2tL": E embedding, t layer, m layer of multi-token prediction, L loss,
    | next stage. auto: quick and not too full, by formula. Empty: layers cut evenly."""
    zero: Literal[0, 1, 2, 3] = 1
    """0 replicate; 1 shard optimizer state; 2 and gradients; 3 and parameters."""
    dispatcher: Literal["auto", "local", "allgather", "alltoall", "leastloaded", "deepep"] = "alltoall"
    """How tokens reach their experts. local: ep = etp = 1. leastloaded: alltoall that relieves overloaded ranks.
    deepep: the kernels of that package, for GPUs. auto: deepep where it can run, else alltoall; the log says which."""
    overlap_experts: bool = False
    """Work on two micro-batches at a time, the forward pass of one beside the backward pass of another, so that each
    hides the dispatch and the combine of the other ([pipeline.md](pipeline.md)). Keeps more micro-batches in memory."""
    overlap_tp: bool = False
    """Tokens travel round the tp ranks beside the products of attention and dense layers, a rank's share at a time,
    instead of before and behind them ([kernels.md](kernels.md)). For GPUs; the products are smaller by tp."""
    context: Literal["ring", "allgather", "ulysses"] = "ring"
    """How attention sees the whole sequence under cp."""
    elastic: bool = False
    """Under torchrun or srun, take world_size from the launcher: dp and edp follow from the ranks that there are, also
    after a restart with fewer nodes; the global batch stays. Ranks that moefold starts are as many as world_size."""

    @property
    def dp(self) -> int:
        """Data-parallel degree of the attention view."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel degree of the experts."""
        return self.world_size // (self.etp * self.ep * self.pp)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """How tokens choose, what balances their choice, and token dropping."""

    capacity_factor: float = 0.0
    """0: dropless. Else each expert takes at most ceil(tokens * top_k / num_experts * capacity_factor) copies."""
    eval_capacity_factor: float = -1.0
    """The capacity factor of evaluation; -1: that of training. 0: dropless."""
    drop_policy: Literal["probs", "position"] = "probs"
    """What an over-full expert keeps: the most probable copies (a later token may then displace an earlier one: not
    causal), or the first by position. Evaluate "probs" with eval_capacity_factor=0."""
    drop_scope: Literal["full_sequence", "sub_sequence"] = "full_sequence"
    """Decide over the whole micro-batch (same drops under every mapping), or over the rank's own tokens."""
    pad_to_capacity: bool = False
    """Give every expert its capacity of rows from each rank, zeros behind the copies: static shapes. Where cp*tp > 1
    with drop_scope "sub_sequence" alone, as ranks that share a capacity would each have to make room for all of it."""
    aux_loss: float = 0.01
    """Coefficient of the load-balancing loss (arXiv:2101.03961); 0 turns it off, and so does a choice but topk."""
    aux_kind: Literal["micro_batch", "sequence", "global_batch", "last_global_batch"] = "micro_batch"
    """Over which tokens the load is to be even: a micro-batch, each sample, or the global batch (arXiv:2501.11873),
    as far as it has come (depends on dp) or as it was in the last step (last_global_batch; the same for every dp)."""
    llep_threshold: float = 1.3
    """Dispatcher leastloaded: move copies where the busiest ep rank has more than this times the mean load."""
    llep_capacity: float = 1.1
    """Dispatcher leastloaded: move so many that no rank has more than this times the mean load, if it can be."""
    llep_min_tokens: int = 64
    """Dispatcher leastloaded: fewest copies worth sending an expert's weights along; about 1024 on a GPU."""
    z_loss: float = 0.0
    """Coefficient of the mean squared log-sum-exp of the router logits (arXiv:2202.08906); 0 turns it off."""
    bias_update_rate: float = 1e-3
    """Step of model.expert_bias: up for an expert with fewer copies than the mean of the step, down for more; 0: the
    bias stays, as in the last part of DeepSeek-V3's training (arXiv:2412.19437 sec. 4.2)."""
    choice: Literal["topk", "sinkhorn", "quantile", "round_robin", "skewed"] = "topk"
    """topk: best scores. sinkhorn, quantile: balanced in training, where a token's experts then depend on later tokens
    too (not causal). round_robin, skewed: forced, for benchmarks."""
    sinkhorn_iterations: int = 20
    """Rounds of row and column scaling of the logits of a micro-batch (choice "sinkhorn")."""
    skew: float = 0.8
    """Part of the tokens that go to expert 0, among others (choice "skewed")."""
    input_jitter: float = 0.0
    """Multiply what the router reads by noise from 1-x to 1+x in training (arXiv:2101.03961); 0 turns it off."""
    router_dtype: Literal["float32", "float64"] = "float32"
    """Least precision of the router's maths; with run.dtype="float64" it is float64 anyway."""
    weight_in_expert: bool = False
    """Apply the routing weights between the gate and the outer projection of an expert, not to its results: the results
    are then not kept for the backward pass. Exact; costs one number a row in the exchange."""
    dispatch_precision: Literal["dtype", "fp8-blockwise"] = "dtype"
    """Of the rows that experts are sent ([fp8.md](fp8.md)); dtype: run.dtype. fp8-blockwise: e4m3, with a scale for 128
    values, half the bytes of bfloat16. Rounded under every mapping; results and gradients travel in run.dtype."""
    trace_every: int = 0
    """Write each token's experts into RUN_DIR/routing every so many steps, a byte or two for each choice; 0 never."""
    replay: str = ""
    """A run with a trace, whose choices to use again, step by step; their weights are computed from the live scores."""

    @property
    def aux_coefficient(self) -> float:
        """`aux_loss` where the experts are chosen by their scores alone; else the choice balances, and this is 0."""
        return self.aux_loss if self.choice == "topk" else 0.0


MUON_GROUPS = ("attention", "dense_mlp", "experts", "shared_experts", "router", "mtp")
"""The matrices of the layers by their part in them; mtp: the projection of multi-token prediction."""


RECOMPUTE_PARTS = (
    "norms",
    "core_attention",
    "mla_up",
    "dense_mlp",
    "expert_activation",
    "shared_experts",
    "moe",
    "layer",
)
"""What of a layer may run again in the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Batch, optimizer, schedule and evaluation."""

    seq_len: int = 256
    """Tokens of a sample, S."""
    micro_batch_size: int = 1
    """Samples that go through the model together, B."""
    global_batch_size: int = 8
    """Samples of one optimizer step over all ranks."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW (arXiv:1711.05101), or Muon (arXiv:2502.16982) for the matrices of muon_groups and AdamW for the rest."""
    muon_groups: tuple[str, ...] = MUON_GROUPS
    """Whose matrices Muon updates, of those that the model has; AdamW has the others, and always embeddings, head,
    norms, biases and gates."""
    muon_momentum: float = 0.95
    """Decay of the momentum of Muon, which looks ahead (Nesterov)."""
    muon_ns_steps: int = 5
    """Newton-Schulz steps with which Muon makes a matrix orthogonal."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0. Shrinks in proportion, with decay_steps, where the command line sets run.steps so
    low that it does not fit; the log says so. Refused if it is set there itself and does not fit."""
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; wsd stays at the peak until the last decay_steps."""
    decay_steps: int = 0
    """Length of the final linear decay of wsd; 0 means a tenth of the steps."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices; norms and biases have none."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Epsilon of AdamW."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the moments between steps (float32: float64 with run.dtype="float64"); steps are computed in the wider
    type of the weights. bfloat16 needs decays of at most 0.98, and rounds: mappings then agree to its 8 bits."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    recompute: tuple[str, ...] = ()
    """Parts of the layers that are not kept but made again in the backward pass: norms, core_attention, mla_up,
    dense_mlp, expert_activation, shared_experts, moe, layer ([memory.md](memory.md)). Bit for bit the same result.
    auto, by itself: those that fit a step into memory_budget_gib at the least work."""
    memory_budget_gib: float = 0.0
    """Memory of a rank that recompute "auto" may fill, by formula; 0: nine tenths of the smallest GPU's, and
    refused on CPU."""
    offload: tuple[str, ...] = ()
    """Parts of the layers whose activations are outside of memory between the passes: norms, core_attention, dense_mlp,
    expert_activation, shared_experts, moe, layer ([memory.md](memory.md)). Bit for bit the same result."""
    offload_to: Literal["host", "ssd"] = "host"
    """host: memory of the host, for GPUs. ssd: a file in offload_dir that has no name and goes with the process."""
    offload_optimizer: Literal["none", "host", "ssd"] = "none"
    """Where the moments of the optimizer are between steps: with the weights, in memory of the host (for GPUs), or in
    mapped files in offload_dir. Bit for bit the same result."""
    offload_dir: str = ""
    """Folder on a local disk (ssd); made if there is none, in a folder that is there."""
    offload_min_kib: int = 1024
    """A smaller block of activations, or moment of one parameter on one rank, stays, in KiB."""
    offload_limit_gib: float = 0.0
    """Most that a rank offloads at a time, in GiB; what is beyond stays in memory. 0: no limit. On the host a block
    counts as the power of two that torch takes for it."""
    offload_waits: bool = False
    """Let the forward pass wait for the copies: what is offloaded takes as little memory however slow they are. false:
    what cannot be copied out and back before it is needed stays in memory."""
    precision: Literal["dtype", "fp8-blockwise", "mxfp8", "nvfp4"] = "dtype"
    """Of the operands of the layers' matrix products, forwards and backwards ([fp8.md](fp8.md)); dtype: run.dtype.
    Embedding, head, router, norms and attention scores stay in run.dtype, master weights in float32."""
    loss_chunk: int = 0
    """Tokens of a rank whose logits are in memory at a time; the backward pass makes them again. 0: all of a
    micro-batch, once. -1: as many as 2**24 logits are, at least 256, and once if that is all."""
    mtp_loss: float = 0.3
    """Coefficient of the mean loss of the further tokens (model.mtp_layers)."""
    eval_every: int = 0
    """Evaluate on held-out text every so many steps and after the last; 0 never."""
    eval_samples: int = 16
    """Held-out samples of one evaluation, each once; of fewer, all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the tokens come from."""

    kind: Literal["python-docs", "text", "tokens", "synthetic", "huggingface", "sft"] = "python-docs"
    """python-docs: text of this Python. text: files or folders. tokens: memory-mapped ids. synthetic: made up.
    huggingface: any source of the package `datasets`. sft: conversations to fine-tune on ([data.md](data.md))."""
    path: str | tuple[str, ...] = ""
    """File or folder, or a list of them (text, tokens, sft); huggingface: also a name on the hub."""
    weights: tuple[float, ...] = ()
    """Share of each path in the samples, in any unit; empty: paths are joined, so that each counts by its size."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json."""
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """Type of the ids in a .bin file; .npy files carry their own."""
    validation_fraction: float = 0.05
    """Part of the tokens (sft: of the conversations) held out for evaluation."""
    document_end: int = -1
    """Id of the token that ends a document, 0 with the tokenizer "bytes": attention then stays within a document, and
    its first token is no target. -1: a sample counts as one document."""
    document_index: bool = False
    """As document_end, with the documents that `moefold tokenize` noted beside the tokens (tokens)."""
    corrupt: Literal["fatal", "skip"] = "fatal"
    """What happens to files that cannot be read to their end: fatal refuses the run, skip leaves them out, each as a
    whole, and names them in the log; token files also when they break later ([data.md](data.md#corrupt-files))."""
    shuffle: bool = True
    """Visit the samples of each epoch in an order drawn from run.seed."""
    column: str = "text"
    """Column that holds the text (huggingface)."""
    split: str = "train"
    """Split to train on (huggingface)."""
    validation_split: str = ""
    """Split to evaluate on instead of a part of `split` (huggingface)."""
    subset: str = ""
    """Configuration of a data set on the hub that has several (huggingface)."""
    revision: str = ""
    """Commit, tag or branch of a data set on the hub; a commit alone always means the same text (huggingface)."""
    streaming: bool = False
    """Tokenise while training, in bounded memory and without a cache (huggingface)."""
    chat_template: str = ""
    """File of a Jinja chat template; empty: the tokenizer's own, ChatML for bytes (sft)."""
    overlong: Literal["cut", "refuse"] = "cut"
    """What happens to conversations beyond seq_len + 1 tokens (sft)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to save and where to resume from."""

    dir: str = ""
    """Folder of the checkpoints; empty means RUN_DIR/checkpoints."""
    every: int = 500
    """Save every so many steps; 0: not between the first step and the last. A run of fewer steps saves at its end."""
    at_end: bool = True
    """Save after the last step, if checkpoint.every has not just done so."""
    keep: int = 10
    """Complete checkpoints to keep, the newest; older ones are deleted after each save. 0 keeps all."""
    keep_every: int = 0
    """Keep those of every so many steps too, whatever `keep` says; 0 for none."""
    verify: bool = True
    """Before a resume compare every file with the hash that was taken when it was written; else its size alone."""
    async_save: bool = False
    """Write while training goes on, from a copy in host memory: as much again as a rank's weights and moments."""
    resume: str = "auto"
    """auto: the newest complete checkpoint of dir, if any. never: start anew. Else the path of a checkpoint."""
    init_from: str = ""
    """Weights to start a new run with: an imported or any other checkpoint, a run (its newest), or a Hugging Face
    folder."""

    @property
    def saves(self) -> bool:
        """Whether the run saves at all. If so, it saves too when SIGINT or SIGTERM stops it."""
        return self.every > 0 or self.at_end


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """Where the metrics go beside metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard events into RUN_DIR/tensorboard (needs the extra `track`)."""
    wandb: bool = False
    """Log to Weights & Biases, the resolved recipe as its config (needs the extra `track`)."""
    wandb_project: str = ""
    """Project of Weights & Biases; empty: WANDB_PROJECT of the environment, else moefold."""
    wandb_entity: str = ""
    """User or team that owns the project; empty: WANDB_ENTITY, else the default of the account."""
    wandb_name: str = ""
    """Name of the run there; empty: WANDB_NAME, else the name of the folder run.dir."""
    wandb_group: str = ""
    """Group that the run is shown in; empty: WANDB_RUN_GROUP, else none."""
    wandb_tags: tuple[str, ...] = ()
    """Tags of the run; empty: WANDB_TAGS (with commas between them), else none."""
    per_layer: bool = False
    """Give the trackers a curve for each MoE layer, besides the mean and the maximum over the layers."""
    peak_tflops: float = 0.0
    """Peak of one rank's device in TFLOP/s for the MFU; 0 looks up a bfloat16 run's device, null if unknown."""
    memory_every: int = 0
    """Note what every rank has in memory by part, at its peak and behind the passes, every so many steps; 0 never. Such
    a step is slower ([memory.md](memory.md))."""
    expert_counts_every: int = 1
    """Write each expert's copies into RUN_DIR/expert_counts.bin every so many steps, for `moefold inspect`; 0 never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultsConfig:
    """What is done about failures in a run ([failures.md](failures.md), [silent-faults.md](silent-faults.md))."""

    timeout_s: float = 600.0
    """End the run, naming the rank that is late, when a rank makes no progress for so many seconds. Longer than the
    longest single thing that a rank does: joining, loading, the first step with its compilation, saving."""
    check_dispatch: bool = False
    """Before each dispatch and combine let the ranks compare step, layer, shape and row counts, so that a mismatch is
    named instead of hanging; costs an all-gather each."""
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient norm of NaN or infinity, which never reaches the weights. stop: end the run and say where it
    was. skip: leave the step out. rollback: load the newest checkpoint and go on without that batch."""
    spike: Literal["ignore", "log", "skip", "rollback", "stop"] = "log"
    """The same for a loss or gradient norm far above those of the last steps; log: say so and train on."""
    spike_factor: float = 10.0
    """A spike lies so many standard deviations above the median of the last steps; the deviation is judged by the
    median distance from the median (the Hampel identifier), and is at least 1 % of the median."""
    spike_window: int = 50
    """Steps that a spike is measured against; fewer are not judged."""
    max_skips: int = 10
    """Most steps that are skipped in a row; the next one stops the run."""
    max_rollbacks: int = 3
    """Most rollbacks of a run; the next one stops it."""
    straggler_factor: float = 1.3
    """Name a rank whose own work takes more than so many times the median of its pipeline stage in 12 of 16 steps;
    0 turns it off, and the timing of ranks in metrics.jsonl with it."""
    replica_check_every: int = 0
    """Compare replicas every so many steps: that ranks hold the same bytes where they should, and how far losses and
    gradients of data-parallel replicas go apart; 0 never. The bytes are compared before each save too. A difference of
    bytes ends the run and names the rank."""

    @property
    def actions(self) -> tuple[str, str]:
        """What is done about both kinds of faults."""
        return self.nonfinite, self.spike


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole recipe."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that one data-parallel rank works through in a step."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.parallel.dp)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.train.global_batch_size * self.train.seq_len
