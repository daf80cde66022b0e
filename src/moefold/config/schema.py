"""The recipe as frozen, typed data. The text under each field is its help; `config/load.py` validates it.

Nothing here imports torch, so that a wrong recipe is answered at once.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """What runs, for how long, and where it writes."""

    dir: str = "runs/run"
    """Folder of this run: config.json, metrics.jsonl, checkpoints/, loss.png."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes and kinds of a decoder-only transformer. `preset` fills what the recipe leaves out."""

    preset: str = ""
    """A named shape (see `moefold train --help`); every key given beside it wins over the preset."""
    num_layers: int = 4
    """Transformer layers, L."""
    hidden_size: int = 256
    """Width of the residual stream, H."""
    num_attention_heads: int = 8
    """Query heads, A."""
    num_query_groups: int = 4
    """Key/value heads; equal to num_attention_heads for plain multi-head attention."""
    head_dim: int = 0
    """Width of one head, D; 0 means hidden_size / num_attention_heads."""
    ffn_hidden_size: int = 1024
    """Inner width of the SwiGLU of dense layers."""
    vocab_size: int = 256
    """Rows of the embedding, V."""
    layer_pattern: str = "M"
    """D (dense) and M (mixture of experts), each with an optional count; repeats to num_layers: M, DM, D3M58."""
    num_experts: int = 8
    """Experts of one MoE layer, E."""
    top_k: int = 2
    """Experts chosen for each token, K."""
    moe_ffn_hidden_size: int = 512
    """Inner width of one expert, F."""
    router_softmax: Literal["pre", "post"] = "post"
    """pre: softmax over all experts, then top-k. post: top-k of the logits, then softmax over the chosen (sum 1)."""
    router_score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """What makes a score of a logit: softmax over the experts, or each by itself (sigmoid: DeepSeek-V3)."""
    router_normalize: bool = True
    """Divide the scores of the chosen experts by their sum (sigmoid, sqrtsoftplus; of softmax, "post" does it)."""
    router_scaling_factor: float = 1.0
    """Factor of all routing weights (DeepSeek's routed_scaling_factor)."""
    num_groups: int = 1
    """Groups of neighbouring experts, for group-limited routing (DeepSeek-V2, V3); 1 means no limit."""
    top_groups: int = 1
    """Groups whose experts a token may choose from: those with the best scores."""
    expert_bias: bool = False
    """Add a bias to the scores of each expert for the choice alone, kept in balance (arXiv:2408.15664)."""
    shared_expert_ffn_hidden_size: int = 0
    """Inner width of the expert that sees every token; 0 means none."""
    shared_expert_gate: bool = False
    """Scale the shared expert's output by a learned sigmoid gate (Qwen2-MoE)."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before RoPE (Qwen3)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_fraction: float = 1.0
    """Part of each head that is rotated, in (0, 1]."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """Stretch of the rotary frequencies for contexts longer than the original one."""
    rope_scaling_factor: float = 1.0
    """Factor of the stretch, at least 1."""
    rope_original_seq_len: int = 8192
    """Context length before the stretch (llama3)."""
    rope_low_freq_factor: float = 1.0
    """Wavelengths above original/low are stretched in full (llama3)."""
    rope_high_freq_factor: float = 4.0
    """Wavelengths below original/high are left alone (llama3)."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections use init_std / sqrt(2 * num_layers)."""

    @property
    def head_size(self) -> int:
        """Width of one head, D."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of each layer in order, "D" or "M"."""
        unit = expand_layer_pattern(self.layer_pattern)
        return tuple(unit[i % len(unit)] for i in range(self.num_layers))


def expand_layer_pattern(pattern: str) -> str:
    """Spell a layer pattern out: "D3M2" -> "DDDMM".

    Raises:
        ValueError: the pattern is empty or holds anything but D, M and positive counts behind them.
    """
    spelled, digits = "", ""
    for char in pattern + "\0":
        if char.isdigit() and spelled:
            digits += char
            continue
        if digits:
            if int(digits) == 0:
                raise ValueError(f"a count of 0 in layer pattern {pattern!r}")
            spelled += spelled[-1] * (int(digits) - 1)
            digits = ""
        if char == "\0":
            break
        if char not in "DM":
            raise ValueError(
                f"unexpected {char!r} in layer pattern {pattern!r}; use D and M, with counts: M, DM, D3M58"
            )
        spelled += char
    if not spelled:
        raise ValueError("an empty layer pattern; use D and M, with counts: M, DM, D3M58")
    return spelled


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the two views of the ranks are cut. dp and edp follow from world_size."""

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
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Pipeline schedule; interleaved needs virtual_stages >= 2."""
    virtual_stages: int = 1
    """Model chunks on each pipeline rank."""
    zero: Literal[0, 1, 2, 3] = 1
    """0 replicate; 1 shard optimizer state; 2 and gradients; 3 and parameters."""
    dispatcher: Literal["auto", "local", "allgather", "alltoall", "leastloaded", "deepep"] = "alltoall"
    """How tokens reach their experts. local: ep = etp = 1. leastloaded: alltoall that relieves overloaded ranks.
    deepep: the kernels of that package, for GPUs. auto: deepep where it can run, else alltoall; the log says which."""
    context: Literal["ring", "allgather", "ulysses"] = "ring"
    """How attention sees the whole sequence under cp."""

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
    """Step of model.expert_bias: up for an expert with fewer copies than the mean of the step, down for more."""
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
    trace_every: int = 0
    """Write each token's experts into RUN_DIR/routing every so many steps, a byte or two for each choice; 0 never."""
    replay: str = ""
    """A run with a trace, whose choices to use again, step by step; their weights are computed from the live scores."""

    @property
    def aux_coefficient(self) -> float:
        """`aux_loss` where the experts are chosen by their scores alone; else the choice balances, and this is 0."""
        return self.aux_loss if self.choice == "topk" else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Batch, optimizer, schedule and evaluation."""

    seq_len: int = 256
    """Tokens of a sample, S."""
    micro_batch_size: int = 1
    """Samples that go through the model together, B."""
    global_batch_size: int = 8
    """Samples of one optimizer step over all ranks."""
    optimizer: Literal["adamw"] = "adamw"
    """AdamW (arXiv:1711.05101)."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
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
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    eval_every: int = 0
    """Evaluate on held-out text every so many steps and after the last; 0 never."""
    eval_samples: int = 16
    """Held-out samples of one evaluation, each once; of fewer, all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the tokens come from."""

    kind: Literal["python-docs", "text", "tokens", "synthetic"] = "python-docs"
    """python-docs: text of this Python. text: files or folders. tokens: memory-mapped ids. synthetic: made up."""
    path: str | tuple[str, ...] = ""
    """File or folder, or a list of them (text, tokens)."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json."""
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """Type of the ids in a .bin file; .npy files carry their own."""
    validation_fraction: float = 0.05
    """Part of the tokens held out for evaluation."""
    shuffle: bool = True
    """Visit the samples of each epoch in an order drawn from run.seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to save and where to resume from."""

    dir: str = ""
    """Folder of the checkpoints; empty means RUN_DIR/checkpoints."""
    every: int = 0
    """Save every so many steps and after the last; 0 never."""
    keep: int = 0
    """Complete checkpoints to keep, newest first; 0 keeps all."""
    keep_every: int = 0
    """Keep those of every so many steps too, whatever `keep` says; 0 for none."""
    verify: bool = True
    """Before a resume compare every file with the hash that was taken when it was written; else its size alone."""
    async_save: bool = False
    """Write while training goes on, from a copy in host memory: as much again as a rank's weights and moments."""
    resume: str = "auto"
    """auto: the newest complete checkpoint of dir, if any. never: start anew. Else the path of a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """Where the metrics go beside metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard events into RUN_DIR/tensorboard (needs the extra `track`)."""
    wandb: bool = False
    """Log to Weights & Biases (needs the extra `track`)."""
    peak_tflops: float = 0.0
    """Peak of one rank's device in TFLOP/s for the MFU; 0 looks up a bfloat16 run's device, null if unknown."""
    expert_counts_every: int = 1
    """Write each expert's copies into RUN_DIR/expert_counts.bin every so many steps, for `moefold inspect`; 0 never."""


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

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that one data-parallel rank works through in a step."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.parallel.dp)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.train.global_batch_size * self.train.seq_len
