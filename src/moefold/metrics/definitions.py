"""Definitions of all reported numbers: name, unit, what is counted, and the name that other frameworks give it.

`python -m tools.metrics_page > docs/metrics.md` writes the page. A test compares the table with the keys of
metrics.jsonl, of `moefold inspect --json` and with the words of a step's line. Torch-free.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Definition:
    """Definition of one number."""

    name: str
    """Key of a record; "*" stands for any key."""
    unit: str
    """Unit; empty for a ratio, a label or a number without one."""
    counts: str
    elsewhere: str = ""
    """Name and, where it differs, definition in Megatron-LM, torchtitan, transformers, TRL or vLLM; may be empty."""


@dataclass(frozen=True, slots=True)
class DefinitionGroup:
    """Numbers that are reported together."""

    title: str
    intro: str
    prefix: str
    """Path of the record of the numbers, with a dot at its end: "rl."; empty for the record itself."""
    definitions: tuple[Definition, ...]


def _definitions(*rows: tuple[str, ...]) -> tuple[Definition, ...]:
    """Make a table of rows of name, unit, what is counted and, in some, the name elsewhere."""
    return tuple(Definition(*row) for row in rows)


MISREAD = (
    "loss: without aux_loss, z_loss, mtp_loss and indexer_loss; the optimised total is the sum of the five",
    "aux_loss, z_loss: with their coefficients, summed over layers (Megatron: without, mean over layers)",
    "tokens, tokens_per_s: no padding; prompts and masked turns count; tokens leaves skipped updates out",
    "tflops_per_rank, mfu: attention counts in full, without causal or document mask; dropped tokens count",
    "step_time_s, tokens_per_s: of reinforcement learning they include sampling",
    "rl.reward: of the groups that were kept; with rl.mixed_only that is biased",
    "completion_tokens of serve, tokens of generate: without the end mark; rollouts and vLLM count it",
    'parameters: 4.19G are 4.19 billion, elsewhere "4.19B"',
    "lr: the last step of a decay has lr_schedule.min_lr; if that is 0, it changes nothing (transformers: above 0)",
    "eval_loss: tokens are dropped as moe.eval_capacity_factor says; moefold eval drops none by default",
    "memory_gib: the peak since the process started, not the peak of the step",
    "checkpointing blocked training for X s: of this process, not of the whole run",
)
"""Definitions that differ from what a reader may expect; the page and the help of `moefold inspect` begin with them."""

STEP = _definitions(
    ("step", "steps", "optimizer step, from 1; skipped updates count", "iteration (Megatron), global_step (HF)"),
    (
        "loss",
        "nats",
        "mean cross-entropy of the counted targets of the global batch, before the update; or the sum of `loss_terms`. "
        "Without aux_loss, z_loss, mtp_loss and indexer_loss: the optimised total is the sum of the five",
        "lm loss (Megatron); HF's loss includes the auxiliary loss with output_router_logits",
    ),
    (
        "aux_loss",
        "nats",
        "load-balancing loss: summed over layers, times `moe.aux_loss`",
        "load_balancing_loss (Megatron): without the coefficient, mean over layers",
    ),
    (
        "z_loss",
        "nats",
        "router z-loss: summed over layers, times `moe.z_loss`",
        "z_loss (Megatron): without the coefficient, mean over layers",
    ),
    (
        "mtp_loss",
        "nats",
        "loss of multi-token prediction: mean over depths, times `train.mtp_loss`",
        "mtp_1 loss, ... (Megatron): without the coefficient",
    ),
    ("indexer_loss", "nats", "KL divergence of the indexers: summed over layers, times `train.indexer_loss`"),
    (
        "grad_norm",
        "",
        "Euclidean norm of the gradient of the total over all parameters, before clipping. Without gradients: "
        "magnitude of the projected gradient, whose mean square equals the mean square of the norm",
        "grad norm (Megatron), grad_norm (HF)",
    ),
    (
        "projected_gradient",
        "",
        "of an optimizer without gradients: gradient along the perturbation, as rounded for the update; else null",
    ),
    (
        "lr",
        "",
        "rate of this step's update. The last step of a decay has `lr_schedule.min_lr`: at 0 it changes nothing",
        "learning rate (Megatron), learning_rate (HF, whose last step has a rate above 0)",
    ),
    (
        "tokens",
        "tokens",
        "trained on so far: input tokens of all ranks without padding, of updates that were applied. Prompts, masked "
        "turns, both completions of a pair and the last token of a sequence count; with sites, the tokens of this site",
        "num_tokens (TRL); n_tokens_seen (torchtitan) and num_input_tokens_seen (HF, by default) count padding",
    ),
    (
        "tokens_consumed",
        "tokens",
        "the same of all steps so far, skipped updates included",
        "consumed samples (Megatron) x sequence length, which counts padding",
    ),
    ("step_time_s", "s", "loading, sampling of rollouts, forward, backward, update; without evaluation and saving"),
    (
        "tokens_per_s",
        "tokens/s",
        "input tokens of this step without padding, of all ranks, over `step_time_s`; skipped updates count. With "
        "reinforcement learning the time includes sampling, and the tokens are those that are trained on",
        "throughput(tps) (torchtitan) is of one rank",
    ),
    (
        "tflops_per_rank",
        "TFLOP/s",
        "`tokens_per_s` x model FLOPs of a token over the ranks: GEMMs of forward and backward pass, attention to all "
        "train.seq_len keys (no causal or document mask), all top-k experts (dropped tokens too), no recomputation",
        "throughput per GPU (Megatron), tflops (torchtitan)",
    ),
    ("mfu", "", "`tflops_per_rank` over the peak of the device in bfloat16, 0 to 1; null if it is unknown", "mfu(%)"),
    (
        "memory_gib",
        "GiB",
        "largest peak of a rank since the process started, not of this step: allocated tensors on CUDA, resident "
        "memory on a CPU",
        "memory/max_active(GiB) (torchtitan) is since the last log",
    ),
    ("expert_load", "", "for each MoE layer: routed tokens of its busiest expert over the mean; 1 is balanced"),
    ("dropped_fraction", "", "dropped over all routed tokens; 0 without a capacity factor"),
    ("save_s", "s", "time that saving blocked training of this process since the previous step"),
    ("moe_layers", "", "one record for each MoE layer, see below"),
    (
        "eval_loss",
        "nats",
        "mean cross-entropy of the counted held-out targets, null between evaluations. Tokens are dropped by "
        "`moe.eval_capacity_factor`; `moefold eval` drops none by default",
        "lm loss validation (Megatron), eval_loss (HF)",
    ),
    ("skipped", "", 'why the update was skipped, "nonfinite" or "spike"; null if it was applied', "skipped iterations"),
    ("replicas", "", "agreement of replicas, see below; null but on steps of `faults.replica_check_every`"),
    ("offload", "", "activation offload, see below; null without"),
    ("memory_by_part", "", "bytes by part of the model, see below; null but on steps of `metrics.memory_every`"),
    ("rank_times", "", "times of the ranks, see below; null on one rank and with `faults.straggler_factor=0`"),
    (
        "attention_max_over_mean",
        "",
        "visible (query, key) pairs of the busiest dp x cp rank over the mean, over all micro-batches; null without "
        'documents or with other attention than `parallel.context="planned"`',
    ),
    ("attention_moved_rows", "rows", "queries computed by other ranks than those that hold them, over all layers"),
    ("attention_bytes", "bytes", "sent between ranks by planned attention, both passes, over layers and ranks"),
    ("loss_terms", "", "terms of a loss of several terms, by name; null for one term"),
    ("loss_metrics", "", "what a loss reports and does not minimise, by name; null without"),
    ("rl", "", "of the rollouts of the step, see below; null without reinforcement learning"),
    ("sites", "", "of a round of sites after the step, see below; null on other steps"),
    ("nonfinite", "", 'only if a number is not finite: its name, and "nan", "inf" or "-inf"; the number is null'),
)

LAYER = _definitions(
    ("layer", "", "its number in the model; MTP layers follow the others"),
    ("load", "", "routed tokens of the busiest expert over the mean, before any is dropped; 1 is balanced"),
    ("load_cv", "", "standard deviation of the experts' routed tokens over their mean; 0 is balanced"),
    ("dead_experts", "experts", "without a routed token in this step"),
    ("dropped_fraction", "", "dropped over all routed tokens"),
    ("zero_fraction", "", "share of the choices that are zero-computation experts, which `load` leaves out"),
    ("router_entropy", "nats", "mean over tokens of the entropy of the router's scores; ln(choices) if uniform"),
    ("aux_loss", "nats", "load-balancing loss of this layer, coefficient included"),
    ("z_loss", "nats", "router z-loss of this layer, coefficient included"),
    ("bias_min", "", "smallest expert bias that routed this step; null without `model.ffn.moe.router.expert_bias`"),
    ("bias_max", "", "largest expert bias that routed this step; null without `model.ffn.moe.router.expert_bias`"),
)

REPLICAS = _definitions(
    ("loss_dispersion", "", "standard deviation over mean of the losses of the dp replicas"),
    ("grad_norm_dispersion", "", "standard deviation over mean of the norms of their dense gradients"),
    ("grad_cosine", "", "mean cosine of their dense gradients before reduction, over all pairs"),
    ("grad_cosine_min", "", "least cosine of a pair"),
    ("expert_grad_norm_dispersion", "", "of the expert gradients of the edp replicas; likewise:"),
    ("expert_grad_cosine", "", "mean cosine"),
    ("expert_grad_cosine_min", "", "least cosine"),
)

OFFLOAD = _definitions(
    ("stored_gib", "GiB", "offloaded activations, summed over ranks"),
    ("kept_gib", "GiB", "activations that stayed for lack of space or bandwidth, summed over ranks"),
    ("io_s", "s", "transfers in both directions, mean over ranks"),
    ("waited_s", "s", "of it, time that training waited, mean over ranks"),
)

MEMORY = _definitions(
    ("peak_bytes", "bytes", "for each part and rank: at the peak of the rank in forward and backward pass"),
    ("current_bytes", "bytes", "for each part and rank: after the backward pass, before the update"),
    ("*.*", "bytes", "a part: a list of one number for each rank"),
)

RANK_TIMES = _definitions(
    ("own_min_s", "s", "time outside collectives up to the gradients, least of the ranks; on CUDA of the step before"),
    ("own_median_s", "s", "the same, median of the ranks"),
    ("own_max_s", "s", "the same, largest of the ranks"),
    ("slowest_rank", "", "the rank of `own_max_s`"),
    ("data_max_s", "s", "loading the rank's shard of the batch, largest of the ranks"),
    ("wait_min_s", "s", "time in collectives, least of the ranks: of the rank for which the others wait"),
    ("wait_median_s", "s", "time in collectives, median of the ranks"),
)

LOSS_METRICS = _definitions(
    ("chosen_reward", "nats", "beta x score of the chosen completion, mean over pairs", "rewards/chosen (TRL)"),
    ("rejected_reward", "nats", "beta x score of the rejected completion, mean over pairs", "rewards/rejected (TRL)"),
    ("margin", "nats", "chosen minus rejected reward, mean over pairs", "rewards/margins (TRL)"),
    ("accuracy", "", "share of pairs with a positive margin", "rewards/accuracies (TRL)"),
    ("desirable_reward", "nats", "kto: beta x score, mean over desirable completions", "rewards/chosen (TRL)"),
    ("undesirable_reward", "nats", "kto: beta x score, mean over the others", "rewards/rejected (TRL)"),
    ("kl", "nats", "kto: z, the estimate of the KL divergence from the reference", "kl (TRL)"),
    ("*", "", "what a loss of a program declares"),
)

RL = _definitions(
    (
        "reward",
        "",
        "mean of what the reward function returned, or of the weighted sum of several, over the rollouts that are "
        "trained on: with `rl.mixed_only` only of groups that were kept, which is biased; null if none has one",
        "reward (TRL)",
    ),
    ("reward_std", "", "their standard deviation over all rollouts", "reward_std (TRL) is a mean over groups"),
    ("rewards", "", "with several reward functions: the mean of each, see below; null with one"),
    ("solved", "", "share of the trained groups whose rewards are all 1"),
    (
        "mixed_groups",
        "",
        "share of groups with two different rewards, of all that were sampled",
        "1 - frac_reward_zero_std (TRL)",
    ),
    ("truncated", "", "share of the rollouts that reached `rollout.max_tokens`", "completions/clipped_ratio (TRL)"),
    (
        "length_mean",
        "tokens",
        "sampled tokens of a rollout, its end mark included, mean",
        "completions/mean_length (TRL)",
    ),
    ("length_max", "tokens", "the largest", "completions/max_length (TRL)"),
    ("dropped", "groups", "sampled and without a reward"),
    ("rollout_s", "s", "sampling of the round, of the slowest rank; scoring is in `reward_s`"),
    ("reward_s", "s", "from then until all ranks have the rewards"),
    (
        "rollout_tokens_per_s",
        "tokens/s",
        "sampled tokens of all ranks, of replaced groups too, over `rollout_s`",
        "generation throughput (vLLM)",
    ),
    ("reshard_s", "s", "copying the weights to the mapping or the ranks that sample; 0 if there is none"),
    ("weights_wait_s", "s", "with `rollout.ranks`: wait of a rank that samples for new weights"),
    ("rollout_wait_s", "s", "wait of rank 0 for rollouts"),
    ("staleness", "steps", "between the weights that sampled the rollouts and those that are trained"),
    ("eval_reward", "", "mean reward of greedy completions of held-out prompts; null between evaluations"),
    ("entropy", "nats", "of the policy, mean over trained tokens", "entropy (TRL)"),
    ("ratio_max", "", "largest ratio of the trained policy to the sampler"),
    ("clipped", "", "share of trained tokens whose ratio is clipped", "clip_ratio/region_mean (TRL)"),
    ("kl", "nats", "estimate of the KL divergence from the reference, before its coefficient", "kl (TRL)"),
    (
        "mismatch_mean",
        "nats",
        "absolute difference of log-probabilities between sampler and training, mean over trained tokens; with "
        "`rl.updates` above 1 or `rl.staleness` training has newer weights",
        "sampling/sampling_logp_difference/mean (TRL)",
    ),
    ("mismatch_max", "nats", "the largest", "sampling/sampling_logp_difference/max (TRL)"),
    ("mismatch_equal", "", "share of trained tokens where both are equal to the bit"),
    ("corrected", "", "with `rl.correction`: share of tokens whose importance weight is limited or masked"),
)

REWARDS = _definitions(
    (
        "*",
        "",
        "a reward function, by its name: mean of what it returned, without `reward.weights`, over the rollouts for "
        "which it was not None; null if it was None for all",
        "rewards/*/mean (TRL)",
    ),
)

SITES = _definitions(
    ("fragment", "", "its number; -1: all"),
    ("members", "sites", "that exchanged with each other; 0 if the round was skipped, 1 if the site rested"),
    ("skipped", "", "why the round was skipped, else null"),
    ("difference", "", "norm of D over the norm of phi; of what this site sends"),
    ("gap", "", "with the penalty of `sites.method = 'co2'`: norm of the last outer step over the norm of g"),
    (
        "agreement",
        "",
        "cosine of D and the mean g (in pairs g + phi - mean(phi)); 1 if all sites moved alike; without experts that "
        "sites own",
    ),
    (
        "routing_overlap",
        "",
        "share of the top-k choices of experts that another site makes too, for the same token, mean over the other "
        "sites: before the first round, every 10th and the last one, on 8 held-out samples; null if the sites have "
        "different held-out samples or batch sizes, or no evaluation",
    ),
    (
        "router_distance",
        "",
        "norm of the difference between this site's routers and their mean over the sites, over the norm of phi's",
    ),
    ("merged", "", "share alpha of the merging of experts, if they were merged after the round"),
    ("spike", "nats", "change of the mean loss by the round before: up to 5 steps after it minus as many before it"),
    ("eval_loss", "nats", "validation loss of phi; `eval_loss` of the step is the loss of the site's weights"),
    ("sent_bytes", "bytes", "that the ranks of this site sent to other sites"),
    ("exchange_s", "s", "time of the exchange"),
    ("wait_s", "s", "part of it that training waited for"),
    ("round_s", "s", "from taking the difference to the end of the vote"),
    ("rounds", "rounds", "applied in the whole run"),
    ("num_skipped", "rounds", "skipped since the start of the job"),
)

CONSOLE = _definitions(
    ("step", "steps", "`step` and the last one, `run.steps`"),
    ("loss", "nats", "`loss`"),
    ("indexer", "nats", "`indexer_loss`, if it is not 0"),
    ("eval", "nats", "the last `eval_loss`"),
    ("reward", "", "`rl.reward`"),
    ("acc", "", "of preferences: `loss_metrics.accuracy`"),
    ("margin", "nats", "of preferences: `loss_metrics.margin`"),
    ("lr", "", "`lr`"),
    ("grad norm", "", "`grad_norm`"),
    ("left", "time", "mean wall time of the last 50 steps, evaluation and saving included, x the steps to come"),
    ("tokens/s", "tokens/s", "`tokens_per_s`; of all ranks"),
    ("TFLOP/s", "TFLOP/s", "on a GPU of unknown peak: `tflops_per_rank`"),
    ("MFU", "", "on a GPU: `mfu`"),
    ("GiB", "GiB", "on a GPU: `memory_gib`"),
    ("load", "", "largest of `expert_load`"),
    ("dropped", "", "`dropped_fraction`, if it is not 0"),
    ("parameters", "", "of the model; 4.19G are 4.19 billion", '"4.19B"'),
    ("active for each token", "", "parameters that a token uses: embedding, head and top-k experts included", '"A3B"'),
    ("tokens to train on", "tokens", "input tokens of an epoch without padding"),
    ("checkpointing blocked training", "s", "sum of `save_s` of this process, not of earlier ones of the run"),
)

INSPECT = _definitions(
    ("run", "", "the folder"),
    ("source", "", "file or folder that the loads were read from"),
    ("first_step", "", "first recorded step"),
    ("last_step", "", "last recorded step"),
    ("recorded_steps", "steps", "with a record of the loads"),
    ("cut_short", "", "why the record ends early; empty if it does not"),
    ("num_experts", "experts", "of each MoE layer; null if it is unknown"),
    ("layers", "", "one record for each MoE layer:"),
    ("layers.layer", "", "its number in the model"),
    ("layers.load_start", "", "`moe_layers.load`, mean over the first tenth of the recorded steps"),
    ("layers.load_end", "", "the same over the last tenth"),
    ("layers.load_worst", "", "largest of all recorded steps"),
    ("layers.worst_step", "", "the step of `load_worst`"),
    ("layers.load_cv", "", "`moe_layers.load_cv`, mean over the last tenth; null without counts"),
    ("layers.dead_experts", "", "numbers of the experts without a routed token in the last tenth; null without counts"),
    ("layers.dropped_fraction", "", "`moe_layers.dropped_fraction`, mean over the last tenth; null if unknown"),
    ("layers.router_entropy", "nats", "`moe_layers.router_entropy`, mean over the last tenth; null if unknown"),
    ("layers.share", "", "routed tokens of each expert over the mean, in the last tenth; null without counts"),
    ("rl.*", "", "of reinforcement learning: the curve of a number of `rl`, as four numbers:"),
    ("preferences.*", "", "of preferences: the curve of a number of `loss_metrics`"),
    ("attention.*", "", "of planned attention: the curve of a number `attention_*`"),
    ("sites.*", "", "of a site: the curve of a number of `sites`"),
    ("*.*.start", "", "mean over the first tenth of the values"),
    ("*.*.end", "", "mean over the last tenth"),
    ("*.*.min", "", "the smallest"),
    ("*.*.max", "", "the largest"),
)

ELSEWHERE = _definitions(
    (
        "checkpoint: samples",
        "samples",
        "read by the steps so far, skipped updates included",
        "consumed samples",
    ),
    (
        "checkpoint: tokens, tokens_consumed",
        "tokens",
        "as above; in checkpoints without tokens_consumed, of earlier versions, tokens counted padding and skips",
    ),
    ("eval: loss, perplexity", "nats", "mean cross-entropy of the predicted tokens, and its exponential"),
    ("eval: tokens", "tokens", "that were predicted: the first of a sequence is not"),
    ("rollouts.jsonl, rollout: tokens", "tokens", "sampled, the end mark included", "completion_tokens (vLLM)"),
    ("generate: tokens", "ids", "of the continuation, without the end mark"),
    ("serve: prompt_tokens", "tokens", "of the prompt, the template's marks included", "prompt_tokens (vLLM)"),
    ("serve: completion_tokens", "tokens", "without the end mark", "completion_tokens (vLLM): with the end mark"),
    (
        "layout: weights",
        "parameters",
        "on one rank, without data-parallel sharding: sharded over tp, ep and etp where "
        "they are, and whole where each tp rank has all (norms, routers, latent projections)",
    ),
    ("layout: operations", "", "forward FLOPs of a stage over the FLOPs of the busiest stage"),
    ("plan: step_time_s", "s", "predicted `step_time_s`"),
    (
        "plan: mfu, tflops_per_gpu",
        "",
        "predicted `mfu` and `tflops_per_rank`, by the same FLOPs unless --flops says others",
    ),
    (
        "plan: tokens_per_s_per_gpu",
        "tokens/s",
        "predicted tokens of a step, without padding as all samples are full, over its time and the GPUs",
    ),
    ("plan: memory_gib", "GiB", "predicted peak of the fullest rank, the reserve left out"),
)

GROUPS = (
    DefinitionGroup(
        "A step",
        "`metrics.jsonl` has one line for each step. Metrics of the global batch are equal under "
        "every mapping, apart from rounding.",
        "",
        STEP,
    ),
    DefinitionGroup("An MoE layer", "`moe_layers`, over the global batch.", "moe_layers.", LAYER),
    DefinitionGroup(
        "A loss", "`loss_metrics`: of preferences ([alignment.md](alignment.md)).", "loss_metrics.", LOSS_METRICS
    ),
    DefinitionGroup("Reinforcement learning", "`rl` ([rl.md](rl.md)).", "rl.", RL),
    DefinitionGroup("Reward functions", "`rl.rewards` ([rl.md](rl.md#rewards)).", "rl.rewards.", REWARDS),
    DefinitionGroup(
        "Rounds of sites",
        "`sites` ([sites.md](sites.md)): D is the difference of this site, g the mean of "
        "all, phi the outer weights. A round that began before a resume has fewer keys.",
        "sites.",
        SITES,
    ),
    DefinitionGroup("Replicas", "`replicas` ([silent-faults.md](silent-faults.md)).", "replicas.", REPLICAS),
    DefinitionGroup(
        "Times of ranks", "`rank_times` ([silent-faults.md](silent-faults.md#slow-ranks)).", "rank_times.", RANK_TIMES
    ),
    DefinitionGroup("Memory by part", "`memory_by_part` ([memory.md](memory.md)).", "memory_by_part.", MEMORY),
    DefinitionGroup("Activation offload", "`offload` ([memory.md](memory.md)).", "offload.", OFFLOAD),
    DefinitionGroup("The log", "The line of a step, and lines at the start and the end.", "log.", CONSOLE),
    DefinitionGroup(
        "inspect --json", "`moefold inspect RUN --json`; its tables have the same numbers.", "inspect.", INSPECT
    ),
    DefinitionGroup("Other commands", "", "commands.", ELSEWHERE),
)


def definitions_text() -> str:
    """Return all definitions, formatted for a terminal."""
    lines = ["Often misread:", "", *(f"  {text}" for text in MISREAD), ""]
    for group in GROUPS:
        lines += [group.title, ""]
        for one in group.definitions:
            unit = f"  ({one.unit})" if one.unit else ""
            other = f"; elsewhere: {one.elsewhere}" if one.elsewhere else ""
            lines += [f"  {one.name}{unit}", f"      {one.counts}{other}"]
        lines.append("")
    return "\n".join(lines)
