"""Table of every reported number: name, unit, definition, name in other frameworks, and places where it is shown.

metrics.jsonl, the line of a step, the trackers, `moefold inspect`, the board and the page docs/metrics.md (`python -m
tools.metrics_page > docs/metrics.md`) read this table.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

from moefold.errors import ConfigError, RunError
from moefold.metrics.reader import NONFINITE
from moefold.units import format_count


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a number."""

    name: str
    """Key of a record. "*" stands for any key."""
    unit: str
    """Unit, or empty for a ratio, a label or a number without a unit."""
    counts: str
    elsewhere: str = ""
    """Name and, if different, definition in Megatron-LM, torchtitan, transformers, TRL or vLLM. It may be empty."""
    reduce: Literal["", "sum", "mean", "max", "min"] = ""
    """Reduction of the values of all ranks. Empty: every rank has the same value, or it is already reduced."""


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Numbers that are reported together."""

    title: str
    intro: str
    prefix: str
    """Path of the record of the numbers, with a dot at its end: "rl.", or empty for the record itself."""
    metrics: tuple[Metric, ...]


def _metrics(*rows: tuple[str, ...]) -> tuple[Metric, ...]:
    """Make a table from rows of name, unit, definition and an optional name elsewhere."""
    return tuple(Metric(row[0], row[1], row[2], "".join(row[3:])) for row in rows)


COUNTS = frozenset({"steps", "tokens", "rows", "bytes", "experts", "groups", "rounds", "sites"})
"""Units of whole numbers."""
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
"""Definitions that differ from what a reader may expect. The page and the help of `moefold inspect` begin with them."""

STEP = _metrics(
    (
        "step",
        "steps",
        "optimizer step, from 1; skipped updates count. 0: only `eval_loss`, of the weights before the first step",
        "iteration (Megatron), global_step (HF)",
    ),
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
    (NONFINITE, "", 'only if a number is not finite: its name, and "nan", "inf" or "-inf"; the number is null'),
)

LAYER = _metrics(
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

REPLICAS = _metrics(
    ("loss_dispersion", "", "standard deviation over mean of the losses of the dp replicas"),
    ("grad_norm_dispersion", "", "standard deviation over mean of the norms of their dense gradients"),
    ("grad_cosine", "", "mean cosine of their dense gradients before reduction, over all pairs"),
    ("grad_cosine_min", "", "smallest cosine of a pair"),
    ("expert_grad_norm_dispersion", "", "of the expert gradients of the edp replicas; likewise:"),
    ("expert_grad_cosine", "", "mean cosine"),
    ("expert_grad_cosine_min", "", "smallest cosine"),
)

OFFLOAD = _metrics(
    ("stored_gib", "GiB", "offloaded activations, summed over ranks"),
    ("kept_gib", "GiB", "activations that stayed for lack of space or bandwidth, summed over ranks"),
    ("io_s", "s", "transfers in both directions, mean over ranks"),
    ("waited_s", "s", "of it, time that training waited, mean over ranks"),
)

MEMORY = _metrics(
    ("peak_bytes", "bytes", "for each part and rank: at the peak of the rank in forward and backward pass"),
    ("current_bytes", "bytes", "for each part and rank: after the backward pass, before the update"),
    ("*.*", "bytes", "a part: a list of one number for each rank"),
)

RANK_TIMES = _metrics(
    ("own_min_s", "s", "time outside collectives up to the gradients, minimum of ranks; on CUDA of the step before"),
    ("own_median_s", "s", "the same, median of the ranks"),
    ("own_max_s", "s", "the same, largest of the ranks"),
    ("slowest_rank", "", "the rank of `own_max_s`"),
    ("data_max_s", "s", "loading the rank's shard of the batch, largest of the ranks"),
    ("wait_min_s", "s", "time in collectives, smallest of the ranks: of the rank for which the others wait"),
    ("wait_median_s", "s", "time in collectives, median of the ranks"),
)

LOSS_METRICS = _metrics(
    ("chosen_reward", "nats", "beta x score of the chosen completion, mean over pairs", "rewards/chosen (TRL)"),
    ("rejected_reward", "nats", "beta x score of the rejected completion, mean over pairs", "rewards/rejected (TRL)"),
    ("margin", "nats", "chosen minus rejected reward, mean over pairs", "rewards/margins (TRL)"),
    ("accuracy", "", "share of pairs with a positive margin", "rewards/accuracies (TRL)"),
    ("desirable_reward", "nats", "kto: beta x score, mean over desirable completions", "rewards/chosen (TRL)"),
    ("undesirable_reward", "nats", "kto: beta x score, mean over the others", "rewards/rejected (TRL)"),
    ("kl", "nats", "kto: z, the estimate of the KL divergence from the reference", "kl (TRL)"),
    ("*", "", "what a loss of a program declares"),
)

RL = _metrics(
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

REWARDS = _metrics(
    (
        "*",
        "",
        "a reward function, by its name: mean of what it returned, without `reward.weights`, over the rollouts for "
        "which it was not None; null if it was None for all",
        "rewards/*/mean (TRL)",
    ),
)

SITES = _metrics(
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

CONSOLE = _metrics(
    ("parameters", "", "of the model; 4.19G are 4.19 billion", '"4.19B"'),
    ("active for each token", "", "parameters that a token uses: embedding, head and top-k experts included", '"A3B"'),
    ("tokens to train on", "tokens", "input tokens of an epoch without padding"),
    ("checkpointing blocked training", "s", "sum of `save_s` of this process, not of earlier ones of the run"),
)

INSPECT = _metrics(
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

ELSEWHERE = _metrics(
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
    ("plan: memory_gib", "GiB", "predicted peak of the rank with the most memory, the reserve left out"),
)


def number_of(values: Mapping[str, Any], path: str) -> float | None:
    """Return a number of a step by its path, "rl.reward", for a list the maximum, with NaN. None if absent."""
    value: Any = values
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, list | tuple):
        return max(value, key=lambda value: (math.isnan(value), value), default=None)
    return None if value is None else float(value)


def _loss(loss: float) -> str:
    """Return a loss in seven columns, with four decimals, or two from 100 on."""
    return f"{loss:7.2f}" if abs(loss) >= 100 else f"{loss:7.4f}"


def _norm(norm: float) -> str:
    """Return a norm in six columns."""
    if norm < 10:
        return f"{norm:6.3f}"
    return f"{norm:6.1f}" if norm < 1000 else f"{norm:6.0e}"


@dataclass(frozen=True, slots=True)
class LineColumn:
    """Column of the line of a step."""

    rank: int
    """Columns of a higher rank are dropped first if a line is too short."""
    name: str
    unit: str
    counts: str
    path: str
    """Path of the number. Empty: the line itself has the text."""
    form: Callable[[float], str]
    width: int
    """Width of a blank column."""
    when: Callable[[Mapping[str, Any], bool], Any] = lambda values, is_gpu: True
    """Returns whether a step shows the column."""

    def text(self, values: Mapping[str, Any], *, is_gpu: bool) -> str:
        """Return the text of a step, or empty without a value."""
        value = number_of(values, self.path)
        return self.form(value) if value is not None and self.when(values, is_gpu) else ""


def _on_pairs(values: Mapping[str, Any], is_gpu: bool) -> bool:
    """Return whether the loss compares completions. A loss of a program may also have one of the metrics."""
    return (values["loss_metrics"] or {}).keys() >= {"accuracy", "margin"}


LINE = (
    LineColumn(0, "step", "steps", "`step` and the last one, `run.steps`", "", str, 0),
    LineColumn(0, "loss", "nats", "`loss`", "loss", lambda loss: f"loss {_loss(loss)}", 12),
    LineColumn(
        14, "indexer", "nats", "`indexer_loss`, if it is not 0", "indexer_loss", lambda loss: f"indexer {_loss(loss)}",
        15, lambda values, is_gpu: values["indexer_loss"],
    ),
    LineColumn(1, "eval", "nats", "the last `eval_loss`", "eval_loss", lambda loss: f"eval {_loss(loss)}", 12),
    LineColumn(2, "reward", "", "`rl.reward`", "rl.reward", "reward {:7.3f}".format, 14),
    LineColumn(
        3, "acc", "", "of preferences: `loss_metrics.accuracy`", "loss_metrics.accuracy", "acc {:6.1%}".format, 10,
        _on_pairs,
    ),
    LineColumn(
        4, "margin", "nats", "of preferences: `loss_metrics.margin`", "loss_metrics.margin", "margin {:8.4f}".format,
        15, _on_pairs,
    ),
    LineColumn(11, "lr", "", "`lr`", "lr", "lr {:8.2e}".format, 11),
    LineColumn(5, "grad norm", "", "`grad_norm`", "grad_norm", lambda norm: f"grad norm {_norm(norm)}", 16),
    LineColumn(
        6, "tokens/s", "tokens/s", "`tokens_per_s`; of all ranks", "tokens_per_s",
        lambda rate: f"{format_count(rate):>5} tokens/s", 14,
    ),
    LineColumn(
        7, "TFLOP/s", "TFLOP/s", "on a GPU of unknown peak: `tflops_per_rank`", "tflops_per_rank",
        "{:4.0f} TFLOP/s".format, 12, lambda values, is_gpu: is_gpu and values["mfu"] is None,
    ),
    LineColumn(8, "MFU", "", "on a GPU: `mfu`", "mfu", "MFU {:6.1%}".format, 10, lambda values, is_gpu: is_gpu),
    LineColumn(
        9, "GiB", "GiB", "on a GPU: `memory_gib`", "memory_gib", "{:5.1f} GiB".format, 9, lambda values, is_gpu: is_gpu
    ),
    LineColumn(12, "load", "", "largest of `expert_load`", "expert_load", "load {:5.2f}x".format, 11),
    LineColumn(
        13, "dropped", "", "`dropped_fraction`, if it is not 0", "dropped_fraction", "dropped {:6.1%}".format, 14,
        lambda values, is_gpu: values["dropped_fraction"] > 0,
    ),
    LineColumn(
        10, "left", "time",
        "mean wall time of the last 50 steps, evaluation and saving included, x the steps to come", "", str, 12,
    ),
)  # fmt: skip
"""Columns of the line of a step, from left to right."""


@dataclass(frozen=True, slots=True)
class DisplayPlaces:
    """Places where a number is shown in addition to metrics.jsonl, the line of a step and the page."""

    chart: str
    """Group of the number's chart on the board. Empty: no chart."""
    title: str = ""
    """Title of the chart and in `moefold inspect`. Empty: the number's name."""
    curve: str = ""
    """Curve in trackers. Empty: no curve, or `TRACKED` names the record."""
    table: str = ""
    """Table in `moefold inspect`, a key of `TABLES`. Empty: no table."""


TABLES = {
    "rl": "reinforcement learning",
    "preferences": "preferences",
    "attention": "attention",
    "sites": "rounds of sites",
}
"""Titles of the tables of `moefold inspect` by their keys in `--json`."""
TRACKED = {"loss_terms": "train/loss_terms", "loss_metrics": "train/loss_metrics", "rl": "rl"}
"""Records whose numbers are all curves of trackers, and the prefix of the curves' names."""
_RL = "Reinforcement learning"
_PARTS = "Parts of the loss"
_RANKS = "Memory and ranks"
CHARTS = {
    "rl": _RL, "loss_terms": _PARTS, "loss_metrics": _PARTS, "rank_times": _RANKS, "offload": _RANKS,
    "replicas": "Replicas", "sites": "Sites",
}  # fmt: skip
"""Groups of the charts of records whose numbers are not in `SHOWN`."""
SHOWN = {
    "loss": DisplayPlaces("Training", "loss, nats", "train/loss"),
    "eval_loss": DisplayPlaces("Training", "held-out loss, nats", "eval/loss"),
    "grad_norm": DisplayPlaces("Training", "gradient norm", "train/grad_norm"),
    "lr": DisplayPlaces("Training", "learning rate", "train/lr"),
    "tokens": DisplayPlaces("", curve="train/tokens"),
    "tokens_consumed": DisplayPlaces(""),
    "rl.reward": DisplayPlaces(_RL, table="rl"),
    "rl.eval_reward": DisplayPlaces(_RL, "held-out reward", table="rl"),
    "rl.kl": DisplayPlaces(_RL, "KL to the reference, nats"),
    "rl.length_mean": DisplayPlaces(_RL, "length, tokens", table="rl"),
    "rl.entropy": DisplayPlaces(_RL, "entropy, nats", table="rl"),
    "rl.mismatch_mean": DisplayPlaces(_RL, "mismatch, nats", table="rl"),
    "rl.solved": DisplayPlaces(_RL, "solved groups"),
    "rl.mixed_groups": DisplayPlaces(_RL, "groups with two rewards"),
    "rl.clipped": DisplayPlaces(_RL, "clipped tokens"),
    "rl.ratio_max": DisplayPlaces(_RL, "largest ratio"),
    "rl.rollout_s": DisplayPlaces(_RL, "sampling, s"),
    "rl.rollout_tokens_per_s": DisplayPlaces(_RL, "sampled tokens/s"),
    "step_time_s": DisplayPlaces("Speed", "step, s", "speed/step_time_s"),
    "tokens_per_s": DisplayPlaces("Speed", curve="speed/tokens_per_s"),
    "tflops_per_rank": DisplayPlaces("Speed", "TFLOP/s of a rank", "speed/tflops_per_rank"),
    "mfu": DisplayPlaces("Speed", "MFU", "speed/mfu"),
    "save_s": DisplayPlaces("Speed", "blocked by saving, s"),
    "expert_load": DisplayPlaces("Experts", "busiest expert over mean", "moe/worst_expert_load"),
    "dropped_fraction": DisplayPlaces("Experts", "dropped tokens", "moe/dropped_fraction"),
    "aux_loss": DisplayPlaces("Experts", "load-balancing loss", "train/aux_loss"),
    "z_loss": DisplayPlaces("Experts", "router z-loss", "train/z_loss"),
    "mtp_loss": DisplayPlaces(_PARTS, "multi-token prediction loss, nats", "train/mtp_loss"),
    "indexer_loss": DisplayPlaces(_PARTS, "loss of the indexers, nats", "train/indexer_loss"),
    "projected_gradient": DisplayPlaces(_PARTS),
    "loss_metrics.accuracy": DisplayPlaces(_PARTS, table="preferences"),
    "loss_metrics.margin": DisplayPlaces(_PARTS, "margin, nats", table="preferences"),
    "loss_metrics.chosen_reward": DisplayPlaces(_PARTS, "chosen, nats", table="preferences"),
    "loss_metrics.rejected_reward": DisplayPlaces(_PARTS, "rejected, nats", table="preferences"),
    "loss_metrics.desirable_reward": DisplayPlaces(_PARTS, "desirable, nats", table="preferences"),
    "loss_metrics.undesirable_reward": DisplayPlaces(_PARTS, "undesirable, nats", table="preferences"),
    "memory_gib": DisplayPlaces(_RANKS, "largest peak memory of a rank, GiB", "memory/peak_gib"),
    "rank_times.own_max_s": DisplayPlaces(_RANKS, "work of the slowest rank, s"),
    "rank_times.own_median_s": DisplayPlaces(_RANKS, "work of the median rank, s"),
    "rank_times.own_min_s": DisplayPlaces(_RANKS, "work of the fastest rank, s"),
    "rank_times.wait_median_s": DisplayPlaces(_RANKS, "wait of the median rank, s"),
    "rank_times.wait_min_s": DisplayPlaces(_RANKS, "shortest wait of a rank, s"),
    "rank_times.data_max_s": DisplayPlaces(_RANKS, "longest data loading of a rank, s"),
    "rank_times.slowest_rank": DisplayPlaces(""),
    "offload.stored_gib": DisplayPlaces(_RANKS, "offload: stored, GiB"),
    "offload.kept_gib": DisplayPlaces(_RANKS, "offload: kept, GiB"),
    "offload.io_s": DisplayPlaces(_RANKS, "offload: transfers, s"),
    "offload.waited_s": DisplayPlaces(_RANKS, "offload: waits, s"),
    "attention_max_over_mean": DisplayPlaces("Attention", "busiest rank", "attention/max_over_mean", "attention"),
    "attention_moved_rows": DisplayPlaces("Attention", "moved rows", "attention/moved_rows", "attention"),
    "attention_bytes": DisplayPlaces("Attention", "bytes sent", "attention/bytes", "attention"),
    "sites.difference": DisplayPlaces("Sites", table="sites"),
    "sites.agreement": DisplayPlaces("Sites", table="sites"),
    "sites.routing_overlap": DisplayPlaces("Sites", table="sites"),
    "sites.router_distance": DisplayPlaces("Sites", table="sites"),
    "sites.spike": DisplayPlaces("Sites", "loss spike", table="sites"),
}
"""Places of the numbers of a step, by path, in the order of the charts. Others have a chart under their name."""
LAYER_CURVES = {
    "load": "expert_load", "load_cv": "expert_load_cv", "dead_experts": "dead_experts",
    "dropped_fraction": "dropped_fraction", "zero_fraction": "zero_expert_fraction", "router_entropy": "router_entropy",
    "aux_loss": "router_aux_loss", "z_loss": "router_z_loss", "bias_min": "expert_bias_min",
    "bias_max": "expert_bias_max",
}  # fmt: skip
"""Curves of the numbers of an MoE layer in trackers."""
_UNITS = {"_per_s": "/s", "_s": ", s", "_gib": ", GiB", "_bytes": ", bytes"}
"""Units at the ends of names."""


def title_of(path: str) -> str:
    """Return the title of a number in a chart or a table."""
    word = path.partition(".")[2] or path
    ending = next((ending for ending in _UNITS if word.endswith(ending)), "")
    title = SHOWN[path].title if path in SHOWN else ""
    return title or word.removesuffix(ending).replace("_", " ") + _UNITS.get(ending, "")


def charts_of(paths: Iterable[str]) -> list[tuple[int, str, str, str]]:
    """Return place, path, group and title of the charts of some numbers, even if the table lacks a number."""
    places = {path: place for place, path in enumerate(SHOWN)}
    charts = []
    for path in paths:
        group = SHOWN[path].chart if path in SHOWN else CHARTS.get(path.partition(".")[0], "Others")
        if group:
            charts.append((places.get(path, len(places)), path, group, title_of(path)))
    return sorted(charts)


def _propagating_nan(extreme: Callable[[list[float]], float]) -> Callable[[list[float]], float]:
    """Return max or min, or NaN if a value is NaN: with max and min alone, the result depends on the order."""
    return lambda values: math.nan if any(map(math.isnan, values)) else extreme(values)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "": itemgetter(0), "sum": sum, "mean": _mean, "max": _propagating_nan(max), "min": _propagating_nan(min)
}  # fmt: skip


def check_metrics(metrics: Sequence[Metric]) -> None:
    """Check the metrics that the callbacks of a program declare.

    Raises:
        ConfigError: an entry is not a `Metric`, a name has another form or is taken, or a reduction does not exist.
    """
    used_names = {metric.name for metric in STEP}
    for metric in metrics:
        if not isinstance(metric, Metric):
            raise ConfigError(
                f"`metrics` of a callback holds {metric!r:.60}, which is not a moefold.Metric; `metrics` has the "
                "definitions of what `measure` returns, so give an attribute of another kind another name"
            )
        if not metric.name.isidentifier():
            raise ConfigError(
                f"the metric {metric.name!r} of a callback must have a name of letters, digits and _, such as "
                "dead_weights"
            )
        if metric.name in used_names:
            raise ConfigError(f"the metric {metric.name!r} of a callback exists already; give it another name")
        if metric.reduce not in REDUCTIONS:
            raise ConfigError(
                f"the metric {metric.name!r} of a callback has reduce={metric.reduce!r}, which must be one of "
                f"{', '.join(map(repr, REDUCTIONS))}"
            )
        used_names.add(metric.name)


def measured(metrics: Sequence[Metric], values: Any, callback: str) -> dict[str, float | None]:
    """Return the result of a callback's `measure` as Python numbers. Refuse values without a definition.

    Args:
        values: values of this rank by name. A number may be a tensor or an array of one element.
        callback: name of its class, for messages.
    """
    if not isinstance(values, Mapping):
        raise RunError(
            f"`measure` of the callback {callback} returned {values!r:.60}; return a dict of numbers by name"
        )
    if unknown := sorted(map(str, values.keys() - {metric.name for metric in metrics})):
        raise RunError(
            f"the metric {unknown[0]!r}, which `measure` of the callback {callback} returned, has no definition; "
            "declare it in `metrics` of the callback, as Metric(name, unit, definition, reduce=...)"
        )
    return {name: None if value is None else _as_number(name, value, callback) for name, value in values.items()}


def _as_number(name: str, value: Any, callback: str) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise RunError(
        f"the metric {name!r}, which `measure` of the callback {callback} returned, is {value!r:.60}, no number; "
        "return a float, or None for no value"
    )


def reduced(metrics: Sequence[Metric], ranks: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Reduce the values of all ranks by the rules of their definitions. None is ignored, NaN makes the result NaN."""
    values: dict[str, float | None] = {}
    for metric in metrics:
        rank_values = [value for rank in ranks if (value := rank.get(metric.name)) is not None]
        values[metric.name] = REDUCTIONS[metric.reduce](rank_values) if rank_values else None
    return values


def step_values(values: Mapping[str, Any], further: Sequence[Metric] = ()) -> dict[str, Any]:
    """Return the numbers of a step in the order of the table. Refuse a number without a definition."""
    names = [metric.name for metric in (*STEP, *further) if metric.name != NONFINITE]
    if unknown := sorted(values.keys() - set(names)):
        raise RunError(f"the metric {unknown[0]!r} has no definition; add it to STEP in metrics/definitions.py")
    return {name: values.get(name) for name in names}


GROUPS = (
    MetricGroup(
        "A step",
        "`metrics.jsonl` has one line for each step. Metrics of the global batch are equal under "
        "every mapping, apart from rounding.",
        "",
        STEP,
    ),
    MetricGroup("An MoE layer", "`moe_layers`, over the global batch.", "moe_layers.", LAYER),
    MetricGroup(
        "A loss", "`loss_metrics`: of preferences ([alignment.md](alignment.md)).", "loss_metrics.", LOSS_METRICS
    ),
    MetricGroup("Reinforcement learning", "`rl` ([rl.md](rl.md)).", "rl.", RL),
    MetricGroup("Reward functions", "`rl.rewards` ([rl.md](rl.md#rewards)).", "rl.rewards.", REWARDS),
    MetricGroup(
        "Rounds of sites",
        "`sites` ([sites.md](sites.md)): D is the difference of this site, g the mean of "
        "all, phi the outer weights. A round that began before a resume has fewer keys.",
        "sites.",
        SITES,
    ),
    MetricGroup("Replicas", "`replicas` ([silent-faults.md](silent-faults.md)).", "replicas.", REPLICAS),
    MetricGroup(
        "Times of ranks", "`rank_times` ([silent-faults.md](silent-faults.md#slow-ranks)).", "rank_times.", RANK_TIMES
    ),
    MetricGroup("Memory by part", "`memory_by_part` ([memory.md](memory.md)).", "memory_by_part.", MEMORY),
    MetricGroup("Activation offload", "`offload` ([memory.md](memory.md)).", "offload.", OFFLOAD),
    MetricGroup(
        "The log",
        "The line of a step, and lines at the start and the end.",
        "log.",
        (*(Metric(metric.name, metric.unit, metric.counts) for metric in LINE), *CONSOLE),
    ),
    MetricGroup(
        "inspect --json", "`moefold inspect RUN --json`; its tables have the same numbers.", "inspect.", INSPECT
    ),
    MetricGroup("Other commands", "", "commands.", ELSEWHERE),
)


def definitions_text() -> str:
    """Return all definitions, formatted for a terminal."""
    lines = ["Often misread:", "", *(f"  {text}" for text in MISREAD), ""]
    for group in GROUPS:
        lines += [group.title, ""]
        for metric in group.metrics:
            unit = f"  ({metric.unit})" if metric.unit else ""
            elsewhere = f"; elsewhere: {metric.elsewhere}" if metric.elsewhere else ""
            lines += [f"  {metric.name}{unit}", f"      {metric.counts}{elsewhere}"]
        lines.append("")
    return "\n".join(lines)
