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
    attention: Literal["gqa", "mla"] = "gqa"
    """gqa: groups of heads share keys and values. mla: one latent makes those of all heads (DeepSeek-V2)."""
    q_lora_rank: int = 0
    """Width of the latent from which queries come (mla); 0: straight from the hidden state."""
    kv_lora_rank: int = 64
    """Width of the latent from which keys and values come (mla)."""
    qk_nope_head_dim: int = 32
    """Width of the part of a query and key head that RoPE leaves alone (mla)."""
    qk_rope_head_dim: int = 16
    """Width of the rotated part, whose key all heads share (mla)."""
    v_head_dim: int = 32
    """Width of a value head (mla)."""
    ffn_hidden_size: int = 1024
    """Inner width of the SwiGLU of dense layers."""
    vocab_size: int = 256
    """Rows of the embedding, V."""
    layer_pattern: str = "M"
    """D (dense) and M (mixture of experts), each with an optional count; repeats to num_layers: M, DM, D3M58."""
    mtp_layers: int = 0
    """Further tokens that each position predicts at training, each through a layer of its own behind the others, of
    the kind of the last one (multi-token prediction, arXiv:2412.19437 sec. 2.2); 0: none."""
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
    moe_bias: bool = False
    """Biases on the gate, up and down projections of each routed expert (gpt-oss)."""
    moe_activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """Of the routed experts. clamped_swiglu: (min(max(up, -l), l) + 1) * g * sigmoid(a * g), g = min(gate, l)."""
    swiglu_alpha: float = 1.702
    """Gain a of the sigmoid of clamped_swiglu; the default is that of gpt-oss."""
    swiglu_limit: float = 7.0
    """Limit l of clamped_swiglu; the default is that of gpt-oss."""
    router_bias: bool = False
    """A learned bias on the router's logits (gpt-oss)."""
    shared_expert_gate: bool = False
    """Scale the shared expert's output by a learned sigmoid gate (Qwen2-MoE)."""
    qk_norm: bool = False
    """RMSNorm over the queries and over the keys before RoPE (Qwen3)."""
    qk_norm_width: Literal["head", "all_heads"] = "head"
    """What one root mean square is of: each head by itself, or all heads of a token together (OLMoE)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    attention_output_bias: bool = False
    """A bias on the output projection of attention (gpt-oss)."""
    attention_sinks: bool = False
    """A learned logit for each head that takes its share of the softmax and gives nothing (gpt-oss)."""
    attention_pattern: str = "F"
    """F (full) and W (within model.sliding_window), each with an optional count; repeats to num_layers: F, WF, W5F."""
    sliding_window: int = 0
    """Tokens that a token sees in a layer of kind W, itself and those right before it; 0 means no such layers."""
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm but those of latents (mla), which is 1e-6."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_fraction: float = 1.0
    """Part of each head that is rotated, in (0, 1]."""
    rope_interleaved: bool = False
    """Which dims make a pair: neighbours, 2i and 2i+1 (DeepSeek), or, if false, i and i + half (Llama)."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """Stretch of the rotary frequencies for contexts longer than the original one."""
    rope_scaling_factor: float = 1.0
    """Factor of the stretch, at least 1."""
    rope_original_seq_len: int = 8192
    """Context length before the stretch (llama3, yarn)."""
    rope_low_freq_factor: float = 1.0
    """Wavelengths above original/low are stretched in full (llama3)."""
    rope_high_freq_factor: float = 4.0
    """Wavelengths below original/high are left alone (llama3)."""
    rope_beta_fast: float = 32.0
    """Pairs that turn more often than this in the original context are left alone (yarn, arXiv:2309.00071)."""
    rope_beta_slow: float = 1.0
    """Pairs that turn less often than this in the original context are stretched in full (yarn)."""
    rope_truncate: bool = True
    """Round the pairs between which yarn blends outwards to whole ones (gpt-oss does not)."""
    rope_attention_factor: float = 0.0
    """Factor of the rotated parts of queries and keys (yarn); 0: m(rope_mscale) / m(rope_mscale_all_dim) where both
    are given, else m(1), with m(x) = 0.1 * x * ln(rope_scaling_factor) + 1."""
    rope_mscale: float = 0.0
    """See rope_attention_factor; 0: not given."""
    rope_mscale_all_dim: float = 0.0
    """See rope_attention_factor; 0: not given. With mla, m(rope_mscale_all_dim) squared scales the scores."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections use init_std / sqrt(2 * num_layers)."""

    upcycle_from: str = ""
    """A dense checkpoint or Hugging Face folder, whose feed-forward layers the experts are copies or slices of."""
    upcycle_router: Literal["group", "expert", "zero"] = "group"
    """The new routers: one random row for each whole copy of the dense layer, one for each expert, or zeros."""
    upcycle_scaling: bool = True
    """Scale the copies so that those a token is sent to add up to the dense layer (arXiv:2410.07524)."""
    upcycle_noise: float = 0.0
    """Add normal noise of so many standard deviations of each copy to it; 0 adds none."""

    @property
    def head_size(self) -> int:
        """Width of one query and key head, D."""
        if self.attention == "mla":
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotated_size(self) -> int:
        """Dims of one head that RoPE turns."""
        return self.qk_rope_head_dim if self.attention == "mla" else round(self.head_size * self.rope_fraction)

    @property
    def num_key_value_heads(self) -> int:
        """Key/value heads that attention sees: the query groups, or with mla as many as there are query heads."""
        return self.num_attention_heads if self.attention == "mla" else self.num_query_groups

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of each layer in order, "D" or "M"."""
        unit = expand_layer_pattern(self.layer_pattern)
        return tuple(unit[i % len(unit)] for i in range(self.num_layers))

    @property
    def all_layer_kinds(self) -> tuple[str, ...]:
        """`layer_kinds`, and behind them those of the layers of multi-token prediction."""
        return self.layer_kinds + self.layer_kinds[-1:] * self.mtp_layers

    @property
    def moe_layer_numbers(self) -> tuple[int, ...]:
        """The layers that route tokens to experts, those of multi-token prediction included."""
        return tuple(i for i, kind in enumerate(self.all_layer_kinds) if kind == "M")

    @property
    def embeds_twice(self) -> bool:
        """Whether the last pipeline stage needs the embedding as well as the first."""
        return self.tie_embeddings or self.mtp_layers > 0

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Tokens that a token sees at most in each layer, in order; 0: all before it."""
        return layer_windows(self.attention_pattern, self.sliding_window, self.num_layers)

    @property
    def all_layer_windows(self) -> tuple[int, ...]:
        """`layer_windows`, and behind them those of the layers of multi-token prediction."""
        return self.layer_windows + self.layer_windows[-1:] * self.mtp_layers


LAYER_KINDS = "DM"
ATTENTION_KINDS = "FW"
MOST_LAYERS = 100_000
"""No count in a pattern is larger, so that spelling out a stranger's needs no memory to speak of."""


def expand_layer_pattern(pattern: str, kinds: str = LAYER_KINDS) -> str:
    """Spell a layer pattern out: "D3M2" -> "DDDMM".

    Raises:
        ValueError: the pattern is empty or holds anything but the two `kinds` and positive counts behind them.
    """
    spelled, digits = "", ""
    for char in pattern + "\0":
        if char.isdigit() and spelled:
            digits += char
            continue
        if digits:
            if not 0 < int(digits) <= MOST_LAYERS:
                raise ValueError(f"a count of {int(digits)} in layer pattern {pattern!r}")
            spelled += spelled[-1] * (int(digits) - 1)
            digits = ""
        if char == "\0":
            break
        if char not in kinds:
            raise ValueError(f"unexpected {char!r} in layer pattern {pattern!r}; {_spelling(kinds)}")
        spelled += char
    if not spelled:
        raise ValueError(f"an empty layer pattern; {_spelling(kinds)}")
    return spelled


def layer_windows(attention_pattern: str, sliding_window: int, num_layers: int) -> tuple[int, ...]:
    """Tokens that a token sees at most in each layer, in order; 0: all before it."""
    unit = expand_layer_pattern(attention_pattern, ATTENTION_KINDS)
    return tuple(sliding_window if unit[i % len(unit)] == "W" else 0 for i in range(num_layers))


def _spelling(kinds: str) -> str:
    first, second = kinds[0], kinds[1]
    return f"use {first} and {second}, with counts: {second}, {first}{second}, {first}3{second}58"


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
    | next stage. auto: balanced by operations, then by weights. Empty: layers cut evenly."""
    zero: Literal[0, 1, 2, 3] = 1
    """0 replicate; 1 shard optimizer state; 2 and gradients; 3 and parameters."""
    dispatcher: Literal["auto", "local", "allgather", "alltoall", "leastloaded", "deepep"] = "alltoall"
    """How tokens reach their experts. local: ep = etp = 1. leastloaded: alltoall that relieves overloaded ranks.
    deepep: the kernels of that package, for GPUs. auto: deepep where it can run, else alltoall; the log says which."""
    overlap_experts: bool = False
    """Work on two micro-batches at a time, the forward pass of one beside the backward pass of another, so that each
    hides the dispatch and the combine of the other ([pipeline.md](pipeline.md)). Keeps more micro-batches in memory."""
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
    """Whose matrices Muon updates; AdamW has the others, and always embeddings, head, norms, biases and gates."""
    muon_momentum: float = 0.95
    """Decay of the momentum of Muon, which looks ahead (Nesterov)."""
    muon_ns_steps: int = 5
    """Newton-Schulz steps with which Muon makes a matrix orthogonal."""
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
    """Memory of a rank that recompute "auto" may fill, by formula; 0: nine tenths of the GPU's, and refused on CPU."""
    offload: tuple[str, ...] = ()
    """Parts of the layers whose activations are outside of memory between the passes: norms, core_attention, dense_mlp,
    expert_activation, shared_experts, moe, layer ([memory.md](memory.md)). Bit for bit the same result."""
    offload_to: Literal["host", "ssd"] = "host"
    """host: memory of the host, for GPUs. ssd: a file in offload_dir that has no name and goes with the process."""
    offload_optimizer: Literal["none", "host", "ssd"] = "none"
    """Where the moments of the optimizer are between steps: with the weights, in memory of the host (for GPUs), or in
    mapped files in offload_dir. Bit for bit the same result."""
    offload_dir: str = ""
    """Folder on a local disk (ssd); made if there is none."""
    offload_min_kib: int = 1024
    """A smaller block of activations, or moment of one parameter on one rank, stays, in KiB."""
    offload_limit_gib: float = 0.0
    """Most that a rank offloads at a time, in GiB; what is beyond stays in memory. 0: no limit."""
    offload_waits: bool = False
    """Let the forward pass wait for the copies: what is offloaded takes as little memory however slow they are. false:
    what cannot be copied out and back before it is needed stays in memory."""
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
    init_from: str = ""
    """Weights to start a new run with: an imported or any other checkpoint, a run (its newest), or a Hugging Face
    folder."""


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
