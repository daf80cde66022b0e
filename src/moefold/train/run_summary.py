"""First and last lines of a run's log: its settings, how it ended, and the next command to type."""

import shlex
from pathlib import Path
from signal import Signals

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.find_checkpoint import BEST_NAME, best_of, checkpoint_folder, complete_checkpoints, step_of
from moefold.config.base.part import parts_in
from moefold.config.base.plugins import origin_of
from moefold.config.chosen import chosen_in
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig, RolloutConfig
from moefold.config.sections.run import SECTIONS_OF_USE, RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.adapter_spec import adapter_weights
from moefold.cost.flops import count_parameters
from moefold.data.sampler import SampleCatalog
from moefold.errors import SIGNAL_STATUS
from moefold.optim.lr_schedule import continuation
from moefold.units import format_count

MIN_UNBOUNDED_SAMPLES = 2**39
"""A sampler of at least this many samples is a stream or synthetic data, whose length is not reported."""


def startup_lines(
    cfg: Config, device_type: str, train_sampler: SampleCatalog, validation_sampler: SampleCatalog
) -> list[str]:
    """Return the lines that describe the run before its first step."""
    optimizer = chosen_in(cfg.train, OptimizerPart).kind
    return [
        f"run    {cfg.run.dir}, {cfg.run.steps:,} steps",
        f"model  {_describe_model(cfg.model, cfg.lora)}",
        f"data   {_describe_data(cfg.run, cfg.train, cfg.data, cfg.rl, train_sampler, validation_sampler)}",
        f"batch  {_describe_batch(cfg.parallel, cfg.train, cfg.rl, cfg.rollout, train_sampler.fill_fraction)}, "
        f"learning rate {cfg.train.lr:g}, {cfg.train.warmup_steps:,} steps of warm-up, {optimizer}",
        f"ranks  {cfg.parallel.world_size} on {device_type}, {cfg.run.dtype}"
        + (f"; {_describe_mapping(cfg.parallel)}" if cfg.parallel.world_size > 1 else ""),
        *_loss_lines(cfg.train, device_type, cp=cfg.parallel.cp, vocab_rows=cfg.vocab_rows),
        *(_sampling_lines(cfg.parallel, cfg.rl, cfg.rollout) if cfg.is_rl else []),
        f"saves  {_describe_saves(cfg.checkpoint)}",
        *([f"sites  {_describe_sites(cfg.run, cfg.model, cfg.sites)}"] if cfg.sites.is_active else []),
        *([INDEXERS_ALONE] if cfg.model.trains_indexers_only(cfg.train) else []),
    ]


def _loss_lines(train: TrainConfig, device_type: str, *, cp: int, vocab_rows: int) -> list[str]:
    """Return the line about a loss whose logits are computed in chunks, if the recipe leaves the choice open."""
    chunk = train.loss_chunk_tokens(device_type, cp=cp, vocab_rows=vocab_rows)
    tokens = train.loss_tokens(cp)
    if train.loss_chunk >= 0 or not 0 < chunk < tokens:
        return []
    gib = tokens * vocab_rows * 4 / 2**30
    return [
        f"loss   logits of {chunk:,} of {tokens:,} tokens at a time, recomputed in the backward pass; all "
        f"would be {gib:.1f} GiB in float32 (train.loss_chunk=-1)"
    ]


INDEXERS_ALONE = "note   train.indexer_stage='warmup' trains the indexers alone; other losses are reported only"
MIN_ROUNDS_OF_MOMENTUM = 100
"""Rounds below which an outer momentum above 0.5 does harm: docs/log.md#2026-11-26-sites."""


def _describe_sites(run: RunConfig, model: ModelConfig, sites: SitesConfig) -> str:
    from moefold.topology.fragments import RoundCalendar, recipe_fragments

    count = recipe_fragments(model, sites)
    # The last round has all fragments.
    num_rounds = 1 + -(-(RoundCalendar(run, model, sites).rounds_until(run.steps) - 1) // count)
    number = f"number {sites.number} of {sites.count}, " if sites.count > 1 else ""
    fragments = f" for each of {count} fragments" if count > 1 else ""
    pairs = " of random pairs" if sites.part.in_pairs else ""
    resting = ", in which one site rests" if pairs and sites.count % 2 else ""
    text = f"{number}a round{pairs} every {sites.every} steps{fragments}{resting}, learning rate {sites.lr:g}"
    if sites.momentum:
        text += f", momentum {sites.momentum:g}"
    if sites.momentum > 0.5 and num_rounds < MIN_ROUNDS_OF_MOMENTUM:
        text += f"; with only {num_rounds} rounds this momentum does harm, sites.method='mean' does not"
    return text


def _sampling_lines(parallel: ParallelConfig, rl: RLConfig, rollout: RolloutConfig) -> list[str]:
    if not rl.is_on:
        return []
    from moefold.topology.rollout_mapping import has_rollout_mapping, rollout_parallel

    if not has_rollout_mapping(parallel, rl, rollout):
        return []
    ranks = rollout.ranks
    further = f"{ranks} further rank{'s' * (ranks > 1)}; " if ranks else ""
    return [f"sample {further}{_describe_mapping(rollout_parallel(parallel, rollout))}"]


def _describe_batch(
    parallel: ParallelConfig, train: TrainConfig, rl: RLConfig, rollout: RolloutConfig, fill_fraction: float
) -> str:
    size = train.global_batch_size
    if rl.is_on:
        return (
            f"{size} rollouts a step, {rl.group_size} for each of {size // rl.group_size} prompts, of at most "
            f"{rollout.max_tokens:,} tokens"
        )
    text = f"{size} x {train.seq_len} = {train.tokens_per_step:,} tokens a step"
    if fill_fraction < 1:
        text += f", {1 - fill_fraction:.1%} of them padding"
    if padding := train.num_padding_micro_batches(parallel.dp):
        count = train.num_micro_batches(parallel.dp) * parallel.dp
        text += f" (of {count} micro-batches on all ranks, {padding} hold padding alone: dp does not divide the batch)"
    return text


def _describe_model(model: ModelConfig, lora_config: LoraConfig) -> str:
    count = count_parameters(model)
    name = f"{model.preset}, " if model.preset else ""
    active = f", {format_count(count.active)} active for each token" if count.active != count.total else ""
    experts = ""
    if part := model.routed:
        zero = f" and {part.zero_experts} without computation" if part.zero_experts else ""
        experts = f", {part.num_experts} experts{zero}, top {part.top_k}"
    adapters = adapter_weights(model, lora_config)
    trained = sum(weight.numel for weight in adapters.values())
    lora = (
        f"; {format_count(trained)} parameters in adapters of rank {lora_config.rank} are trained" if adapters else ""
    )
    layers = f"{model.num_layers} layer{'s' * (model.num_layers > 1)}"
    return f"{name}{format_count(count.total)} parameters{active}; {layers}{experts}{lora}"


def _describe_data(
    run: RunConfig,
    train: TrainConfig,
    data: DataConfig,
    rl: RLConfig,
    train_sampler: SampleCatalog,
    validation_sampler: SampleCatalog,
) -> str:
    seq_len = train.seq_len
    name = data.task if data.kind == "task" else ", ".join(data.paths)
    parts = [f"{data.kind} {name}".strip()]
    if rl.is_on and len(train_sampler) < MIN_UNBOUNDED_SAMPLES:
        return f"{parts[0]}, {len(train_sampler):,} prompts to train on, {len(validation_sampler):,} held out"
    if len(train_sampler) < MIN_UNBOUNDED_SAMPLES:
        parts.append(f"{format_count(len(train_sampler) * seq_len * train_sampler.fill_fraction)} tokens to train on")
        parts.append(
            f"{format_count(len(validation_sampler) * seq_len * validation_sampler.fill_fraction)} held out"
            if len(validation_sampler)
            else "none held out"
        )
        epochs = run.steps * train.global_batch_size / len(train_sampler)
        parts.append(f"{epochs:.2f} epochs in all" if epochs >= 0.01 else "less than 0.01 epochs in all")
    return ", ".join(parts)


def _describe_mapping(parallel: ParallelConfig) -> str:
    shared = f" x pp{parallel.pp}" if parallel.pp > 1 else ""
    attention = f"tp{parallel.tp} x cp{parallel.cp} x dp{parallel.dp}{shared}"
    experts = f"etp{parallel.etp} x ep{parallel.ep} x edp{parallel.edp}{shared}"
    return f"attention {attention}, experts {experts}"


def _describe_saves(checkpoint: CheckpointConfig) -> str:
    if not checkpoint.saves:
        return "no model is saved (checkpoint.every=0, checkpoint.at_end=false)"
    every = [f"every {checkpoint.every:,} steps"] if checkpoint.every else []
    when = " and ".join([*every, *(["at the end"] if checkpoint.at_end else [])])
    retained = f", the newest {checkpoint.keep} stay" if checkpoint.keep else ", all stay"
    best = ", and the one with the lowest held-out loss" if checkpoint.keep and checkpoint.keep_best else ""
    extra = f", and one every {checkpoint.keep_every:,} steps" if checkpoint.keep and checkpoint.keep_every else ""
    return f"{when}{retained}{extra}{best}"


EXAMPLE_PROMPTS = {
    "python-docs": "The for statement",
    "text": "The",
    "huggingface": "The",
    "sft": "Hello",
    "preference": "Hello",
}
"""Example prompt for each kind of text data."""


def closing_lines(cfg: Config, status: int, step: int) -> list[str]:
    """Return the last lines of a run's log.

    Args:
        status: 0, or 128 plus the number of the signal that stopped the run.
    """
    complete = complete_checkpoints(checkpoint_folder(cfg.run, cfg.checkpoint))
    newest = complete[-1] if complete else None
    if status:
        place = f"step {step} of {cfg.run.steps}{', before its evaluation' if step == cfg.run.steps else ''}"
        last = _describe_last_save(cfg.checkpoint, newest, step)
        return [f"stopped by {Signals(status - SIGNAL_STATUS).name} after {place}; {last}"]
    done = f"done: {step} steps, in {cfg.run.dir}; "
    if newest is None:
        return [
            done + f"no model was saved, as {_not_saved_reason(cfg.checkpoint)}; set checkpoint.at_end=true to save one"
        ]
    if step_of(newest) < step:
        done += f"not saved since step {step_of(newest)}, as {_not_saved_reason(cfg.checkpoint)}; "
    lines = [f"{done}model in {newest}"]
    if cfg.checkpoint.keep_best and (best := best_of(complete)) is not None:
        loss = read_meta(best).eval_loss
        lines.append(f"best: {best.name}, held-out loss {loss:.4f}; {best.parent / BEST_NAME} names it")
    return lines + next_commands(cfg)


def next_commands(cfg: Config) -> list[str]:
    """Return commands to suggest once the run has a model."""
    run_dir = shlex.quote(cfg.run.dir)
    overrides, effect = continuation(cfg.run, cfg.train, 2 * cfg.run.steps)
    train_on = f"or train on: the same command with {' '.join(overrides)}{f' ({effect})' if effect else ''}"
    prompt = EXAMPLE_PROMPTS.get(cfg.data.kind)
    chat = " --chat" if cfg.data.has_conversations else ""
    if cfg.data.has_prompts:
        return [f"next: {_rollout_command(cfg)}{_part_options(cfg)}", train_on]
    command = f"moefold checkpoint show {run_dir}"
    if prompt:
        command = f"moefold generate {run_dir} {shlex.quote(prompt)}{chat}{_part_options(cfg)}"
    return [f"next: {command}", train_on]


def _part_options(cfg: Config) -> str:
    """Return the options that name the files of parts, which commands need to use the model."""
    origins = (origin_of(type(part)) for section in SECTIONS_OF_USE for part in parts_in(getattr(cfg, section)))
    files = (f"{origin.file}:{kind.rpartition(':')[2]}" for kind, origin in origins if origin.file)
    return "".join(f" --part {shlex.quote(file)}" for file in dict.fromkeys(files))


def _rollout_command(cfg: Config) -> str:
    """Return the command that samples and scores completions of a run's prompts."""
    data = cfg.data
    if data.kind == "task":
        prompts = f"--task {data.task} --task-size {data.task_size} --held-out"
    else:
        prompts = " ".join(f"--prompts {shlex.quote(path)}" for path in data.paths)
        prompts += "".join(f" --reward {shlex.quote(name)}" for name in cfg.reward.functions)
        prompts += "".join(f" --reward-weight {weight:g}" for weight in cfg.reward.weights)
    limit = f" --max-tokens {cfg.rollout.max_tokens}" if cfg.is_rl else ""
    return f"moefold rollout {shlex.quote(cfg.run.dir)} {prompts}{limit} --out scored.jsonl"


def _describe_last_save(checkpoint: CheckpointConfig, newest: Path | None, step: int) -> str:
    if newest is None and not step:
        return "there is nothing to save"
    if newest is None:
        return f"nothing was saved, as {_not_saved_reason(checkpoint)}"
    missing = f", which lacks the last {step - step_of(newest)} steps" if step_of(newest) < step else ""
    return f"saved in {newest}{missing}; the same command goes on from there"


def _not_saved_reason(checkpoint: CheckpointConfig) -> str:
    return f"checkpoint.every={checkpoint.every} and checkpoint.at_end={str(checkpoint.at_end).lower()} say"
