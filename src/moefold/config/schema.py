"""Recipe schema: frozen, typed dataclasses, validated by `config/load.py`.

The docstring under each field is the help of its recipe key. Torch-free, so that a wrong recipe is refused at once.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from moefold.config.align import AlignConfig
from moefold.config.field import BELOW_ONE, POSITIVE, SHARE, Bound, Most, ReadIf, at_least
from moefold.config.limits import MAX_RANKS, MAX_SAMPLE_TOKENS, MAX_STEPS
from moefold.config.lora import LoraConfig
from moefold.config.model import ModelConfig
from moefold.config.part import KindOf, Part
from moefold.config.patterns import MAX_LAYERS
from moefold.config.rl import RewardConfig, RLConfig, RolloutConfig
from moefold.config.sites import SitesConfig


def has_moe_layers(model: ModelConfig) -> bool:
    """Return whether any layer of a legal layer pattern is an MoE layer."""
    return any(layer.ffn.is_routed for layer in model.layers)


def has_dense_layers(model: ModelConfig) -> bool:
    """Return whether any layer of a legal layer pattern is dense (SwiGLU)."""
    return not all(layer.ffn.is_routed for layer in model.layers)


LARGE_LOGITS = 1 << 28
"""Logits of a micro-batch on a rank above which train.loss_chunk = -1 computes them in chunks: 1 GiB in float32."""
LOSS_CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits of a loss chunk with train.loss_chunk = -1 by device: 64 MiB, and 1 GiB, in float32."""
MIN_LOSS_CHUNK_TOKENS = 256
"""Minimum tokens of a loss chunk with train.loss_chunk = -1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Duration, device, compute type and output folder of a run."""

    dir: Annotated[str, Bound("must name a folder", bool)] = "runs/run"
    """Run folder: config.json, metrics.jsonl, checkpoints/, loss.png. If it already holds another run, that run is kept
    and this one is written to DIR-2, DIR-3, ... ([checkpoints.md](checkpoints.md))."""
    seed: Annotated[
        int, Bound("must be at least 0 and below 2**63", lambda seed: 0 <= seed < 2**63), Most(2**63 - 1)
    ] = 0
    """Seed of the initial weights and of the data order."""
    steps: Annotated[int, at_least(1), Most(MAX_STEPS)] = 100
    """Total optimizer steps, including those before a resume."""
    epochs: Annotated[float, at_least(0, "0: run.steps")] = 0.0
    """Length in passes over the training data, instead of run.steps: the steps follow from its samples and
    train.global_batch_size, rounded up, and the log says them. For data of known length. 0: run.steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where a GPU is visible, else cpu."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Compute type. Master weights, gradients and optimizer moments are float32 (float64 with float64)."""
    deterministic: bool = False
    """Bitwise reproducible runs: refuse every kernel without a deterministic implementation."""
    check_memory: bool = True
    """Before any rank starts, refuse a step whose estimated peak memory exceeds the memory of this machine or its GPUs
    ([memory.md](memory.md#what-is-refused-before-it-starts)). false: start it anyway."""
    kernels: Literal["auto", "plain", "triton", "c"] = "auto"
    """Kernels of experts and routing ([kernels.md](kernels.md)). plain: torch operations. triton: fused kernels. c: CPU
    kernels for GEMMs, norms, RoPE, expert activations and causal attention, built by the machine's C compiler. auto:
    triton on CUDA in bfloat16 if the package is installed, c on a CPU with a compiler, else plain; the log names the
    choice."""
    compile: Literal["none", "blocks"] = "none"
    """blocks: fuse element-wise parts of the layers by torch.compile in training: QK norm with RoPE, and the SwiGLU of
    dense layers and shared experts ([kernels.md](kernels.md#torchcompile)). They replace the kernels of run.kernels."""
    cuda_graphs: Literal["none", "attention", "attention_router", "full"] = "none"
    """Replay passes from CUDA graphs, without the host's launches ([kernels.md](kernels.md#cuda-graphs)). attention: of
    each attention. attention_router: of each attention and each router. full: of a whole micro-batch, on one GPU. For
    CUDA, without tensor and context parallelism in a graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Degrees of both views of the ranks (attention and MoE). dp and edp follow from world_size."""

    mapping: Literal["given", "auto"] = "given"
    """auto: `moefold train` plans the axes that the recipe leaves out ([planner.md](planner.md)); `parallel = "auto"`
    at the top level is short for it. Without world_size: all ranks of the launcher, or all devices of the machine."""
    world_size: Annotated[int, at_least(1), Most(MAX_RANKS)] = 1
    """Total number of ranks."""
    tp: Annotated[int, at_least(1), Most(MAX_RANKS)] = 1
    """Tensor parallelism of attention and dense layers, with sequence parallelism."""
    cp: Annotated[int, at_least(1), Most(MAX_RANKS)] = 1
    """Context parallelism: each rank holds seq_len / cp tokens of a sample."""
    pp: Annotated[int, at_least(1), Most(4096)] = 1
    """Pipeline-parallel ranks; both views share them."""
    ep: Annotated[int, at_least(1), Most(MAX_RANKS)] = 1
    """Expert parallelism: each rank holds num_experts / ep experts."""
    etp: Annotated[int, at_least(1), Most(MAX_RANKS)] = 1
    """Expert tensor parallelism: each expert's inner width is sharded over etp ranks."""
    order: str = "pp-dp-cp-tp"
    """Rank order of the attention view, slowest to fastest axis."""
    moe_order: str = "pp-edp-ep-etp"
    """Rank order of the MoE view, slowest to fastest axis."""
    schedule: Annotated[str | Part, KindOf("schedule")] = "1f1b"
    """Pipeline schedule ([pipeline.md](pipeline.md)). interleaved needs virtual_stages of 2 or more, zbv and dualpipev
    need 2; csv reads schedule_csv."""
    virtual_stages: Annotated[int, at_least(1), Most(MAX_LAYERS)] = 1
    """Model chunks on each pipeline rank (virtual pipeline stages)."""
    schedule_csv: str = ""
    """File with the actions of each pipeline rank, in order (schedule "csv")."""
    pipeline_layout: str = ""
    """Stage of each part of the model, as "Ett|(ttt|)*2tL": E embedding, t layer, m MTP (multi-token prediction) layer,
    L loss, | next stage. auto: the estimated fastest layout that fits into memory. Empty: layers split evenly."""
    zero: Literal[0, 1, 2, 3] = 1
    """0 replicate; 1 shard optimizer state; 2 and gradients; 3 and parameters."""
    dispatcher: Annotated[str | Part, KindOf("dispatcher")] = "alltoall"
    """Token dispatcher of the MoE layers. local: ep = etp = 1. leastloaded: alltoall that relieves overloaded ranks.
    dedup_alltoall: alltoall that sends a token once to each rank, whatever the number of its experts there.
    deepep: kernels of the DeepEP package, for GPUs. symm_mem: an all-to-all over symmetric memory (NVSHMEM) that never
    waits for the host, for GPUs. auto: deepep where it can run, else alltoall; the log names the choice."""
    receive_factor: Annotated[float, at_least(1)] = 2.0
    """Dispatcher symm_mem: rows that an ep rank has room to receive in a micro-batch, over the rows of balanced
    routing. A step that needs more stops the run."""
    overlap_experts: bool = False
    """Overlap the forward pass of one micro-batch with the backward pass of another, so that the computation of each
    hides the dispatch and combine of the other ([pipeline.md](pipeline.md)). Keeps more micro-batches in memory."""
    overlap_tp: Annotated[bool, ReadIf("parallel.tp")] = False
    """Overlap tensor-parallel communication with the GEMMs of attention and dense layers: the tp ranks pass one shard
    of the tokens at a time round a ring, instead of one all-gather before and one reduce-scatter after the GEMM
    ([kernels.md](kernels.md)). For GPUs; each GEMM is smaller by a factor of tp."""
    context: Annotated[str | Part, KindOf("context")] = "ring"
    """Context-parallel attention under cp: how each rank attends to the whole sequence. planned: with documents, only
    visible pairs are computed and only the rows that they need are sent ([documents.md](documents.md))."""
    placement: Literal["samples", "documents", "balanced"] = "samples"
    """Tokens of a rank (context "planned"). samples: two chunks of each sample. documents: two chunks of each document
    of its samples. balanced: documents of all dp x cp ranks, whole where they fit, so that few keys are sent."""
    attention_hosts: Literal["home", "balanced"] = "home"
    """Ranks that compute the attention of a token (context "planned"). home: the rank that holds it. balanced: rows of
    queries leave ranks with too much attention work, and their outputs return (arXiv:2510.18121)."""
    attention_tolerance: Annotated[
        float,
        Bound("must lie between 0 and 1: 0.1 keeps 10 % above the mean", lambda tolerance: 0 <= tolerance <= 1),
        ReadIf("parallel.attention_hosts=balanced"),
    ] = 0.1
    """Attention work above the mean that a rank keeps, over the mean (attention_hosts "balanced")."""
    attention_pool: Annotated[int, at_least(0, "0: all ranks"), ReadIf("parallel.attention_hosts=balanced")] = 0
    """Ranks that share attention work, a multiple of cp that divides dp*cp; 0: all (attention_hosts "balanced")."""
    attention_block: Annotated[
        int,
        at_least(1),
        Most(MAX_SAMPLE_TOKENS),
        ReadIf("parallel.attention_hosts=balanced parallel.placement=documents"),
    ] = 128
    """Tokens, from the start of a document, at whose multiples it may be split between ranks (placement "documents",
    attention_hosts "balanced")."""
    elastic: bool = False
    """Under torchrun or srun, take world_size from the launcher: dp and edp follow from the available ranks, also after
    a restart with fewer nodes; the global batch stays. Without a launcher, moefold starts world_size ranks."""

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
    """Routing of tokens, load balancing and token dropping."""

    capacity_factor: Annotated[float, at_least(0, "0: dropless")] = 0.0
    """0: dropless. Else each expert takes at most ceil(tokens * top_k / num_experts * capacity_factor) routed
    tokens."""
    eval_capacity_factor: Annotated[
        float,
        Bound(
            "must be at least 0 (0: dropless), or -1 (as moe.capacity_factor)",
            lambda factor: factor >= 0 or factor == -1,
        ),
        ReadIf("train.eval_every"),
    ] = -1.0
    """Capacity factor of evaluation; -1: as in training. 0: dropless."""
    drop_policy: Literal["probs", "position"] = "probs"
    """Routed tokens that an expert over capacity keeps: the most probable ones (a later token may then displace an
    earlier one: not causal), or the first by position. Evaluate "probs" with eval_capacity_factor=0."""
    drop_scope: Literal["full_sequence", "sub_sequence"] = "full_sequence"
    """Drop tokens over the whole micro-batch (same drops under every mapping), or over the rank's own tokens."""
    pad_to_capacity: bool = False
    """Pad the input of every expert with zeros to its capacity, from each rank: static shapes. If cp*tp > 1, only with
    drop_scope "sub_sequence", because ranks that share a capacity would each need a buffer for all of it."""
    aux_loss: Annotated[float, at_least(0, "0: off")] = 0.01
    """Coefficient of the load-balancing loss (arXiv:2101.03961); 0 turns it off, and so does any choice other than
    topk."""
    aux_kind: Annotated[str | Part, KindOf("balance_scope")] = "micro_batch"
    """Tokens over which the load is balanced: a micro-batch, each sample, or the global batch (arXiv:2501.11873),
    either accumulated so far in the step (global_batch; depends on dp) or of the last step (last_global_batch; the same
    for every dp)."""
    llep_threshold: Annotated[float, at_least(1)] = 1.3
    """Dispatcher leastloaded: move routed tokens where the busiest ep rank has more than this times the mean load."""
    llep_capacity: Annotated[float, at_least(1)] = 1.1
    """Dispatcher leastloaded: target load of a rank after the move, as a multiple of the mean load."""
    llep_min_tokens: Annotated[int, at_least(1)] = 64
    """Dispatcher leastloaded: minimum number of routed tokens for which an expert's weights are sent; about 1024 on a
    GPU."""
    z_loss: Annotated[float, at_least(0, "0: off")] = 0.0
    """Coefficient of the mean squared log-sum-exp of the router logits (arXiv:2202.08906); 0 turns it off."""
    bias_update_rate: Annotated[float, at_least(0, "0: the bias stays"), ReadIf("lora.rank=0")] = 1e-3
    """Step size of model.expert_bias: up for an expert with fewer routed tokens than the mean of the step, down for
    more; 0: the bias stays fixed, as in the last part of DeepSeek-V3's training (arXiv:2412.19437 sec. 4.2)."""
    choice: Annotated[str | Part, KindOf("choice")] = "topk"
    """Choice of experts. topk: best scores. sinkhorn, quantile: balanced in training, where a token's experts then also
    depend on later tokens (not causal). round_robin, skewed: forced, for benchmarks."""
    sinkhorn_iterations: Annotated[int, at_least(1), Most(10_000)] = 20
    """Sinkhorn iterations (row and column scaling) on the logits of a micro-batch (choice "sinkhorn")."""
    skew: Annotated[float, SHARE] = 0.8
    """Fraction of the tokens that have expert 0 among their experts (choice "skewed")."""
    input_jitter: Annotated[
        float, Bound("must lie in [0, 1): at least 0 (0: off) and below 1", lambda part: 0 <= part < 1)
    ] = 0.0
    """Multiply the router's input by noise from 1-x to 1+x in training (arXiv:2101.03961); 0 turns it off."""
    sparsemixer_sampling: bool = True
    """Sample the choices of model.router_softmax="sparsemixer" in training; false: the best experts, as in
    evaluation."""
    router_dtype: Annotated[Literal["float32", "float64"], ReadIf("run.dtype!=float64")] = "float32"
    """Minimum precision of the router's computation; with run.dtype="float64" it is float64."""
    weight_in_expert: Annotated[bool, ReadIf("model.router_probs_on_input=false")] = False
    """Apply the routing weights between the activation and the down projection of an expert instead of to its output:
    the outputs are then not saved for backward. Exact; costs one more number per routed token in the all-to-all."""
    dispatch_precision: Annotated[str | Part, KindOf("wire")] = "dtype"
    """Number format in which routed tokens are dispatched ([fp8.md](fp8.md)); dtype: run.dtype. fp8-blockwise: e4m3
    with one scale per 128 values, half the bytes of bfloat16. The same rounding under every mapping; expert outputs and
    gradients are sent in run.dtype."""
    trace_every: Annotated[int, at_least(0, "0: never")] = 0
    """Write each token's experts to RUN_DIR/routing every this many steps, one or two bytes per choice; 0: never."""
    replay: str = ""
    """Run with a routing trace, whose expert choices are replayed step by step; the routing weights are computed from
    the current scores."""


MUON_GROUPS = ("attention", "dense_mlp", "experts", "shared_experts", "router", "mtp")
"""Groups of the layers' weight matrices; mtp: the input projection of multi-token prediction."""


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
"""Parts of a layer that can be recomputed in the backward pass (activation checkpointing)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Batch, optimizer, learning-rate schedule, memory savings and evaluation."""

    seq_len: Annotated[int, at_least(1), Most(MAX_SAMPLE_TOKENS)] = 256
    """Tokens per sample, S."""
    micro_batch_size: Annotated[int, at_least(1), Most(2**22)] = 1
    """Samples per micro-batch, B."""
    global_batch_size: Annotated[int, at_least(1), Most(2**22)] = 8
    """Samples per optimizer step over all ranks."""
    optimizer: Annotated[str | Part, KindOf("optimizer")] = "adamw"
    """AdamW (arXiv:1711.05101), or Muon (arXiv:2502.16982) for the matrices of muon_groups and AdamW for the rest.
    spsa: two forward passes and no backward pass, to fine-tune with little memory ([spsa.md](spsa.md))."""
    muon_groups: tuple[str, ...] = MUON_GROUPS
    """Groups of matrices that Muon updates, of those that the model has; AdamW updates the others, and always
    embeddings, head, norms, biases and gates."""
    muon_momentum: Annotated[float, BELOW_ONE] = 0.95
    """Decay of Muon's Nesterov momentum."""
    muon_ns_steps: Annotated[int, at_least(1), Most(100)] = 5
    """Newton-Schulz iterations with which Muon orthogonalises a matrix."""
    spsa_eps: Annotated[float, POSITIVE] = 1e-3
    """Factor of the normal numbers z that the two passes of SPSA add to and subtract from the weights
    (arXiv:2305.17333)."""
    spsa_max_gradient: Annotated[float, POSITIVE] = 10.0
    """Largest magnitude of the gradient projected on z, which SPSA rounds to one of 255 equidistant values
    (arXiv:2306.10015); larger ones are clamped."""
    lr: Annotated[float, POSITIVE] = 3e-4
    """Peak learning rate ([defaults by method](recipe.md#learning-rates-by-method))."""
    min_lr: Annotated[float, at_least(0)] = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: Annotated[int, at_least(0), Most(MAX_STEPS)] = 0
    """Steps of linear warm-up from 0. Where the command line sets run.steps too low for it, warmup_steps and
    decay_steps shrink in proportion, and the log reports it. Refused if the command line sets it too and it does not
    fit."""
    lr_schedule: Annotated[str | Part, KindOf("lr_schedule")] = "cosine"
    """Shape of the schedule after the warm-up; wsd stays at the peak until the last decay_steps."""
    decay_steps: Annotated[int, at_least(0), Most(MAX_STEPS)] = 0
    """Length of the final linear decay of wsd; 0: a tenth of the steps."""
    weight_decay: Annotated[float, at_least(0)] = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: Annotated[float, BELOW_ONE] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, BELOW_ONE] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, POSITIVE] = 1e-8
    """Epsilon of AdamW."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage type of the optimizer moments between steps (float32: float64 with run.dtype="float64"); updates are
    computed in the type of the master weights. bfloat16 needs decays of at most 0.98 and rounds: mappings then agree to
    its 8 bits."""
    reset_moments_every: Annotated[int, at_least(0, "0: never")] = 0
    """Zero the optimizer moments after every this many steps, with the step count of AdamW's bias correction; weights
    and learning rate go on ([memory.md](memory.md#resets-of-the-optimizer-state)). 0: never."""
    gradient_delay: Literal[0, 1] = 0
    """1: an update takes the gradients of the step before, clipped there, and the first step updates nothing
    (arXiv:2606.30634). It is the training of a pipeline with two versions of the weights (PipeDream-2BW,
    arXiv:2006.09503), to measure what the delay costs in loss; no communication is hidden by it
    ([design/044](design/044-gradient-delay.md)). 0: no delay."""
    delay_correction: Annotated[float, at_least(0, "0: none"), ReadIf("train.gradient_delay")] = 0.0
    """Factor c of the correction of a delay: with u(t) what the optimizer subtracts, weights x become
    x - u(t) - c * (u(t) - u(t-1)). 1 in arXiv:2606.30634; 0: none."""
    clip_grad: Annotated[float, at_least(0, "0: off")] = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""
    recompute: tuple[str, ...] = ()
    """Parts of the layers that are not saved for backward but recomputed (activation checkpointing): norms,
    core_attention, mla_up, dense_mlp, expert_activation, shared_experts, moe, layer ([memory.md](memory.md)).
    Bitwise the same result. auto, alone in the list: the cheapest set of parts with which a step fits into
    memory_budget_gib."""
    memory_budget_gib: Annotated[float, at_least(0, "0: the device's")] = 0.0
    """Estimated peak memory per rank that recompute "auto" may use; 0: 90 % of the smallest GPU's memory, and refused
    on CPU."""
    offload: tuple[str, ...] = ()
    """Parts of the layers whose activations are offloaded between the passes: norms, core_attention, dense_mlp,
    expert_activation, shared_experts, moe, layer ([memory.md](memory.md)). Bitwise the same result."""
    offload_to: Annotated[Literal["host", "ssd"], ReadIf("train.offload")] = "host"
    """host: host memory, for GPUs. ssd: an unnamed file in offload_dir that is deleted with the process."""
    offload_optimizer: Literal["none", "host", "ssd"] = "none"
    """Where the optimizer moments are stored between steps: with the weights, in host memory (for GPUs), or in
    memory-mapped files in offload_dir. Bitwise the same result."""
    offload_dir: str = ""
    """Folder on a local disk (ssd), created if its parent folder exists."""
    offload_min_kib: Annotated[int, at_least(0, "0: all"), ReadIf("train.offload train.offload_optimizer")] = 1024
    """Minimum size of an offloaded block of activations, or of one parameter's moment on one rank, in KiB; smaller ones
    stay in memory."""
    offload_limit_gib: Annotated[float, at_least(0, "0: no limit"), ReadIf("train.offload")] = 0.0
    """Maximum that a rank offloads at a time, in GiB; the rest stays in memory. 0: no limit. In host memory a block
    counts as the power of two that torch allocates for it."""
    offload_waits: Annotated[bool, ReadIf("train.offload")] = False
    """Let the forward pass wait for the copies: memory use is then minimal however slow the copies are. false: what
    cannot be copied out and back in time stays in memory."""
    precision: Literal["dtype", "fp8-blockwise", "mxfp8", "nvfp4"] = "dtype"
    """Number format of the operands of the layers' GEMMs, forward and backward ([fp8.md](fp8.md)); dtype: run.dtype.
    Embedding, head, router, norms and attention scores stay in run.dtype, master weights in float32."""
    loss_chunk: Annotated[
        int, Bound("must be at least 0 (0: all), or -1 (automatic)", lambda tokens: tokens >= -1)
    ] = -1
    """Tokens of a rank whose logits are in memory at a time; the backward pass recomputes them. 0: all tokens of a
    micro-batch, without recomputation. -1: as 0 up to 2**28 logits (1 GiB in float32) of a micro-batch on a rank;
    above, as many tokens as give 2**28 logits on a GPU and 2**24 on a CPU, at least 256, and the log says so."""
    mtp_loss: Annotated[float, POSITIVE, ReadIf("model.mtp_layers")] = 0.3
    """Coefficient of the mean MTP (multi-token prediction) loss (model.mtp_layers)."""
    indexer_stage: Annotated[Literal["sparse", "warmup"], ReadIf("model.index_topk")] = "sparse"
    """Stage of sparse attention (model.index_topk). warmup: attention is dense, and only the indexers learn, from the
    attention probabilities over all keys. sparse: attention over selected keys; the model and the indexers learn."""
    indexer_loss: Annotated[float, at_least(0, "0: the indexers do not learn"), ReadIf("model.index_topk")] = 1.0
    """Coefficient of the indexers' loss: the KL divergence of an indexer's softmax from the attention probabilities,
    mean over the tokens without padding, sum over the layers. No other weight has a gradient from it; 0: the indexers
    do not learn."""
    eval_every: Annotated[int, at_least(0, "0: never"), Most(MAX_STEPS)] = 0
    """Evaluate on held-out text every this many steps and after the last one; 0: never."""
    eval_samples: Annotated[int, at_least(1), Most(2**26), ReadIf("train.eval_every")] = 16
    """Held-out samples per evaluation, each once; all of them if there are fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Source of the training tokens."""

    kind: Literal[
        "python-docs", "text", "tokens", "synthetic", "huggingface", "sft", "preference", "program", "task", "prompts"
    ] = "python-docs"
    """python-docs: documentation texts of this Python. text: files or folders. tokens: memory-mapped ids. synthetic:
    generated. huggingface: any source of the package `datasets`. sft: conversations for supervised fine-tuning
    ([data.md](data.md)). preference: pairs of completions, or completions with a label
    ([alignment.md](alignment.md)). program: samples that a Python program passes to `train_model`
    ([api.md](api.md)). task: problems generated from run.seed, with their answers, or without them for reinforcement
    learning. prompts: JSON lines for reinforcement learning ([rl.md](rl.md))."""
    path: Annotated[str | tuple[str, ...], ReadIf("data.kind=text|tokens|huggingface|sft|preference|prompts")] = ""
    """File or folder, or a list of them (text, tokens, sft, preference, prompts); huggingface: also a name on the
    hub. May be remote ([remote.md](remote.md))."""
    task: Annotated[Literal["sort", "add", "countdown"], ReadIf("data.kind=task")] = "sort"
    """Problems of kind "task". sort: sort digits. add: add two numbers. countdown: combine all given numbers by + - *
    to a target."""
    task_size: Annotated[int, at_least(1), ReadIf("data.kind=task")] = 4
    """Digits to sort, digits of each summand, or numbers to combine (task)."""
    weights: Annotated[tuple[float, ...], ReadIf("data.kind=text|tokens|huggingface|sft|preference")] = ()
    """Sampling weight of each path, in any unit; empty: paths are concatenated, so that each counts by its size."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json or its folder, which may be remote or hf://ORG/NAME."""
    token_dtype: Annotated[Literal["uint16", "uint32", "int32", "int64"], ReadIf("data.kind=tokens")] = "uint16"
    """Type of the ids in a .bin file; .npy files store their own."""
    validation_fraction: Annotated[float, BELOW_ONE, ReadIf("data.kind!=program")] = 0.05
    """Fraction of the tokens (sft, preference: of the rows; task, prompts: of the prompts) held out for evaluation."""
    document_end: Annotated[
        int,
        Bound("must be at least 0, or -1 (a sample is one document)", lambda token: token >= -1),
        ReadIf("data.kind=python-docs|text|tokens|synthetic|huggingface"),
        ReadIf("data.document_index=false"),
    ] = -1
    """Id of the token that ends a document, 0 with the tokenizer "bytes": attention is then masked to the document, and
    its first token is no target. -1: a sample counts as one document."""
    document_index: Annotated[bool, ReadIf("data.kind=tokens")] = False
    """Mask attention as document_end does, at the document boundaries that `moefold tokenize` recorded next to the
    tokens (tokens)."""
    packing: Annotated[Literal["concatenate", "best_fit"], ReadIf("data.kind=python-docs|text|tokens|huggingface")] = (
        "concatenate"
    )
    """How documents become samples. concatenate: the stream of all documents is split every seq_len tokens. best_fit:
    no document of up to seq_len + 1 tokens is split, and padding fills the rest of a sample (arXiv:2404.10830;
    python-docs, text, tokens, huggingface)."""
    corrupt: Annotated[Literal["fatal", "skip"], ReadIf("data.kind=text|tokens|huggingface|sft|preference")] = "fatal"
    """Handling of files that cannot be read to their end: fatal refuses the run; skip leaves out each such file as a
    whole and lists it in the log, token files also when they become unreadable during the run
    ([data.md](data.md#corrupt-files))."""
    shuffle: Annotated[bool, ReadIf("data.kind!=program"), ReadIf("data.kind!=task")] = True
    """Visit the samples of each epoch in an order drawn from run.seed."""
    column: Annotated[str, ReadIf("data.kind=huggingface")] = "text"
    """Column with the text (huggingface)."""
    split: Annotated[str, ReadIf("data.kind=huggingface")] = "train"
    """Split to train on (huggingface)."""
    validation_split: Annotated[str, ReadIf("data.kind=huggingface")] = ""
    """Split to evaluate on instead of a part of `split` (huggingface)."""
    subset: Annotated[str, ReadIf("data.kind=huggingface")] = ""
    """Configuration of a hub data set that has several (huggingface)."""
    revision: Annotated[str, ReadIf("data.kind=huggingface")] = ""
    """Commit, tag or branch of a hub data set; only a commit always gives the same text (huggingface)."""
    streaming: Annotated[bool, ReadIf("data.kind=huggingface")] = False
    """Tokenise during training, in bounded memory and without a cache (huggingface)."""
    chat_template: Annotated[str, ReadIf("data.kind=sft|preference|prompts")] = ""
    """File with a Jinja chat template; empty: the tokenizer's own, ChatML for bytes (sft, preference, prompts)."""
    overlong: Annotated[Literal["cut", "refuse"], ReadIf("data.kind=sft|preference")] = "cut"
    """Handling of conversations (preference: pairs) longer than seq_len + 1 tokens (sft, preference)."""
    skip_bad_rows: Annotated[bool, ReadIf("data.kind=sft|preference|prompts")] = False
    """Skip rows that are no conversation, pair or prompt, that the template refuses, or that lack the reward or the
    columns of the verifier, and log their number; false: the first one ends the run (sft, preference, prompts)."""

    @property
    def drops_files(self) -> bool:
        """Return whether token files that become unreadable during the run are left out."""
        return self.kind == "tokens" and self.corrupt == "skip"

    @property
    def has_conversations(self) -> bool:
        """Return whether the samples are conversations or pairs of them."""
        return self.kind in ("sft", "preference")

    @property
    def has_prompts(self) -> bool:
        """Return whether reinforcement learning can take its prompts from the data."""
        return self.kind in ("task", "prompts")

    @property
    def has_documents(self) -> bool:
        """Return whether attention is masked at document boundaries."""
        return self.document_end >= 0 or self.document_index or self.has_conversations or self.has_prompts

    @property
    def reads_rows(self) -> bool:
        """Return whether the data are JSON lines of conversations, pairs or prompts."""
        return self.has_conversations or self.kind == "prompts"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoint folder, intervals and resume."""

    dir: str = ""
    """Folder of the checkpoints; empty: RUN_DIR/checkpoints. May be remote, such as s3://BUCKET/RUN
    ([remote.md](remote.md))."""
    every: Annotated[int, at_least(0, "0: never")] = 500
    """Save every this many steps; 0: not between the first step and the last. A shorter run saves at its end."""
    at_end: bool = True
    """Save after the last step, unless checkpoint.every has just done so."""
    keep: Annotated[int, at_least(0, "0: all"), ReadIf("checkpoint.every!=0 checkpoint.at_end=true")] = 10
    """Number of newest complete checkpoints to keep; older ones are deleted after each save. 0 keeps all."""
    keep_every: Annotated[int, at_least(0, "0: none"), ReadIf("checkpoint.keep!=0")] = 0
    """Also keep the checkpoint of every this many steps, whatever `keep` is; 0: none."""
    keep_best: Annotated[bool, ReadIf("checkpoint.keep!=0"), ReadIf("checkpoint.every!=0")] = False
    """Also keep the checkpoint with the lowest held-out loss, whatever `keep` is; RUN/best names it in the commands
    that read a model ([checkpoints.md](checkpoints.md#the-best-checkpoint)). checkpoint.every must be a multiple of
    train.eval_every."""
    verify: Annotated[bool, ReadIf("checkpoint.resume!=never")] = True
    """Before a resume, compare every file with the hash recorded when it was written. false: compare only its size."""
    async_save: Annotated[bool, ReadIf("checkpoint.every!=0 checkpoint.at_end=true")] = False
    """Write during training from a copy in host memory, which is as large as a rank's weights and moments."""
    peer_every: Annotated[int, at_least(0, "0: never"), ReadIf("faults.on_loss=regroup")] = 0
    """Copy each rank's state to its host memory, and its shards to the host memory of a rank of another replica, every
    this many steps ([checkpoints.md](checkpoints.md#snapshots-in-the-memory-of-peers)); 0: never."""
    resume: str = "auto"
    """auto: the newest complete checkpoint of dir, if any. never: start from scratch. Else the path of a checkpoint."""
    init_from: str = ""
    """Initial weights of a new run: an imported or any other checkpoint, a run (its newest), or a Hugging Face
    folder. May be remote, or hf://ORG/NAME ([remote.md](remote.md#the-hugging-face-hub))."""
    ignore_keys: Annotated[tuple[str, ...], ReadIf("checkpoint.init_from model.upcycle_from rl.reference")] = ()
    """Keys of the JSON files of a Hugging Face folder with initial weights that moefold does not know, and that change
    nothing ([conversion.md](conversion.md#keys-of-json-files))."""

    @property
    def saves(self) -> bool:
        """Return whether the run saves at all; if so, it also saves when a signal stops it."""
        return self.every > 0 or self.at_end


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """Outputs of metrics in addition to metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard events to RUN_DIR/tensorboard (needs the extra `track`)."""
    wandb: bool = False
    """Log to Weights & Biases, with the resolved recipe as its config (needs the extra `track`)."""
    wandb_project: Annotated[
        str,
        Bound(
            "must have at most 128 characters, and none of / \\ # ? % :",
            lambda name: len(name) <= 128 and not set(name) & set("/\\#?%:"),
        ),
        ReadIf("metrics.wandb"),
    ] = ""
    """Weights & Biases project; empty: environment variable WANDB_PROJECT, else moefold."""
    wandb_entity: Annotated[str, ReadIf("metrics.wandb")] = ""
    """User or team that owns the project; empty: WANDB_ENTITY, else the account's default."""
    wandb_name: Annotated[str, ReadIf("metrics.wandb")] = ""
    """Display name of the run; empty: WANDB_NAME, else the name of the folder run.dir."""
    wandb_group: Annotated[str, ReadIf("metrics.wandb")] = ""
    """Group of the run; empty: WANDB_RUN_GROUP, else none."""
    wandb_tags: Annotated[
        tuple[str, ...],
        Bound("must be a list of tags of 1 to 64 characters", lambda tags: all(1 <= len(tag) <= 64 for tag in tags)),
        ReadIf("metrics.wandb"),
    ] = ()
    """Tags of the run; empty: WANDB_TAGS (separated by commas), else none."""
    per_layer: Annotated[bool, ReadIf("metrics.tensorboard metrics.wandb")] = False
    """Send TensorBoard and Weights & Biases one curve per MoE layer, besides the mean and the maximum over the
    layers."""
    peak_tflops: Annotated[float, at_least(0, "0: look the device up")] = 0.0
    """Peak TFLOP/s of one rank's device, for MFU; 0: looked up for a bfloat16 run's device, null if unknown."""
    memory_every: Annotated[int, at_least(0, "0: never")] = 0
    """Record every rank's memory by part, at its peak and after the passes, every this many steps; 0: never. Such a
    step is slower ([memory.md](memory.md))."""
    expert_counts_every: Annotated[int, at_least(0, "0: never")] = 1
    """Write each expert's routed tokens to RUN_DIR/expert_counts.bin every this many steps, for `moefold inspect`; 0:
    never."""
    rollouts_every: Annotated[int, at_least(0, "0: never"), ReadIf("rl.group_size")] = 10
    """Write prompts, completions and rewards to RUN_DIR/rollouts.jsonl every this many steps of reinforcement learning;
    0: never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultsConfig:
    """Handling of failures during a run ([failures.md](failures.md), [silent-faults.md](silent-faults.md))."""

    timeout_s: Annotated[float, at_least(1), Most(10**8)] = 600.0
    """End the run and name the late rank when a rank makes no progress for this many seconds. Must exceed the longest
    single operation of a rank: joining, loading, the first step with its compilation, saving."""
    check_dispatch: bool = False
    """Before each dispatch and combine, compare step, layer, shape and row counts across the ranks, so that a mismatch
    is reported instead of hanging; costs one all-gather each."""
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """Handling of a NaN or infinite loss or gradient norm, which never reaches the weights. stop: end the run and
    report the location. skip: skip the step. rollback: load the newest checkpoint and continue without that batch."""
    spike: Literal["ignore", "log", "skip", "rollback", "stop"] = "log"
    """Handling of a loss or gradient norm far above the last steps' values, as in `nonfinite`; log: report it and
    continue."""
    spike_factor: Annotated[float, POSITIVE, ReadIf("faults.spike!=ignore")] = 10.0
    """Spike threshold: standard deviations above the median of the last steps; the deviation is estimated from the
    median absolute deviation (Hampel identifier), and is at least 1 % of the median."""
    spike_window: Annotated[int, at_least(3), Most(10**6), ReadIf("faults.spike!=ignore")] = 50
    """Number of last steps that a spike is compared with; no detection before there are as many."""
    max_skips: Annotated[int, at_least(1), ReadIf("faults.nonfinite=skip faults.spike=skip")] = 10
    """Maximum number of consecutive skipped steps; the next one stops the run."""
    max_rollbacks: Annotated[int, at_least(1), ReadIf("faults.nonfinite=rollback faults.spike=rollback")] = 3
    """Maximum number of rollbacks of a run; the next one stops it."""
    straggler_factor: Annotated[
        float,
        Bound("must be above 1, or 0 (off)", lambda factor: factor > 1 or factor == 0),
        ReadIf("parallel.world_size"),
    ] = 1.3
    """Report a rank whose own work takes more than this factor times the median of its pipeline stage in 12 of 16
    steps; 0 turns it off, and the timing of ranks in metrics.jsonl with it."""
    replica_check_every: Annotated[int, at_least(0, "0: never"), ReadIf("parallel.world_size")] = 0
    """Compare replicas every this many steps: whether ranks that should hold identical bytes do, and how far losses and
    gradients of data-parallel replicas diverge; 0: never. The bytes are also compared before each save. A difference of
    bytes ends the run and names the rank."""
    on_loss: Literal["stop", "regroup"] = "stop"
    """Handling of a lost rank: its process was killed, or its machine is gone. stop: end the job; the same command
    resumes. regroup: the other ranks go on in their processes, with fewer data-parallel replicas and the same global
    batch, from memory or the last checkpoint ([failures.md](failures.md#continuing-without-a-restart))."""
    min_ranks: Annotated[int, at_least(1), ReadIf("faults.on_loss=regroup")] = 1
    """Fewest ranks to go on with after a regroup; with fewer, the job ends."""

    @property
    def regroups(self) -> bool:
        """Return whether the job goes on without a lost rank."""
        return self.on_loss == "regroup"

    @property
    def actions(self) -> tuple[str, str]:
        """Actions for non-finite values and for spikes."""
        return self.nonfinite, self.spike


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Complete recipe: one dataclass per section."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    align: AlignConfig = field(default_factory=AlignConfig)
    lora: Annotated[LoraConfig, ReadIf("lora.rank")] = field(default_factory=LoraConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    rl: Annotated[RLConfig, ReadIf("rl.group_size")] = field(default_factory=RLConfig)
    rollout: Annotated[RolloutConfig, ReadIf("rl.group_size")] = field(default_factory=RolloutConfig)
    reward: Annotated[RewardConfig, ReadIf("rl.group_size")] = field(default_factory=RewardConfig)
    sites: SitesConfig = field(default_factory=SitesConfig)

    @property
    def is_rl(self) -> bool:
        """Return whether the recipe is reinforcement learning."""
        return self.rl.group_size > 0

    @property
    def trains_indexers_only(self) -> bool:
        """Return whether only the indexers of sparse attention learn: their warm-up stage."""
        return self.model.index_topk > 0 and self.train.indexer_stage == "warmup"

    @property
    def trains_adapters_only(self) -> bool:
        """Return whether only low-rank adapters learn."""
        return self.lora.rank > 0

    @property
    def freezes_weights(self) -> bool:
        """Return whether the weights of the model are frozen, except for indexers' weights in their warm-up stage."""
        return self.trains_indexers_only or self.trains_adapters_only

    @property
    def num_job_ranks(self) -> int:
        """Ranks of the job: those that train, and those that only sample rollouts."""
        return self.parallel.world_size + self.rollout.ranks

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per data-parallel rank and step, including micro-batches of padding alone."""
        return -(-self.train.global_batch_size // (self.train.micro_batch_size * self.parallel.dp))

    @property
    def may_pad_batch(self) -> bool:
        """Return whether the last data-parallel ranks may have micro-batches of padding, so that dp need not divide."""
        return self.parallel.elastic

    @property
    def num_padding_micro_batches(self) -> int:
        """Micro-batches of padding alone in a step, on the last data-parallel ranks; 0 if dp divides the batch."""
        return self.num_micro_batches * self.parallel.dp - self.train.global_batch_size // self.train.micro_batch_size

    @property
    def vocab_rows(self) -> int:
        """Rows of the vocabulary on a rank, V/tp rounded up."""
        return -(-self.model.vocab_size // self.parallel.tp)

    def loss_chunk_tokens(self, device_type: str) -> int:
        """Return the number of tokens whose logits are in memory at a time; 0: all of a micro-batch."""
        if self.train.loss_chunk >= 0:
            return self.train.loss_chunk
        if self.loss_tokens * self.vocab_rows <= LARGE_LOGITS:
            return 0
        logits = LOSS_CHUNK_LOGITS.get(device_type, LOSS_CHUNK_LOGITS["cpu"])
        return max(MIN_LOSS_CHUNK_TOKENS, logits // self.vocab_rows)

    @property
    def loss_tokens(self) -> int:
        """Tokens of a micro-batch whose losses a rank computes: tensor parallelism shards the vocabulary."""
        return self.train.seq_len * self.train.micro_batch_size // self.parallel.cp

    @property
    def tokens_per_step(self) -> int:
        """Tokens per global batch."""
        return self.train.global_batch_size * self.train.seq_len
