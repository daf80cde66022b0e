"""The first lines of a run's log: folder, model, data, batch, ranks and saves, before the first step. Torch-free."""

from moefold.config.schema import Config
from moefold.data.sampling import Sampler
from moefold.metrics.flops import count_parameters
from moefold.metrics.progress import format_count

MIN_UNBOUNDED_SAMPLES = 2**39
"""A row of at least so many samples is a stream or made up: nothing is known of its length."""


def startup_lines(cfg: Config, device_type: str, train_sampler: Sampler, validation_sampler: Sampler) -> list[str]:
    """Return the lines that say what is about to run.

    Args:
        cfg: the recipe, as it runs.
        device_type: "cpu" or "cuda".
        train_sampler: the samples to train on.
        validation_sampler: those to evaluate on; may be empty.
    """
    return [
        f"run    {cfg.run.dir}, {cfg.run.steps:,} steps",
        f"model  {_describe_model(cfg)}",
        f"data   {_describe_data(cfg, train_sampler, validation_sampler)}",
        f"batch  {cfg.train.global_batch_size} x {cfg.train.seq_len} = {cfg.tokens_per_step:,} tokens a step, "
        f"learning rate {cfg.train.lr:g}, {cfg.train.warmup_steps:,} steps of warm-up, {cfg.train.optimizer}",
        f"ranks  {_describe_ranks(cfg, device_type)}",
        f"saves  {_describe_saves(cfg)}",
    ]


def _describe_model(cfg: Config) -> str:
    model, count = cfg.model, count_parameters(cfg.model)
    name = f"{model.preset}, " if model.preset else ""
    active = f", {format_count(count.active)} active for each token" if count.active != count.total else ""
    experts = f", {model.num_experts} experts, top {model.top_k}" if "M" in model.layer_kinds else ""
    return f"{name}{format_count(count.total)} parameters{active}; {model.num_layers} layers{experts}"


def _describe_data(cfg: Config, train_sampler: Sampler, validation_sampler: Sampler) -> str:
    data, seq_len = cfg.data, cfg.train.seq_len
    paths = data.path if isinstance(data.path, str) else ", ".join(data.path)
    parts = [f"{data.kind} {paths}".strip()]
    if len(train_sampler) < MIN_UNBOUNDED_SAMPLES:
        parts.append(f"{format_count(len(train_sampler) * seq_len)} tokens to train on")
        parts.append(
            f"{format_count(len(validation_sampler) * seq_len)} held out"
            if len(validation_sampler)
            else "none held out"
        )
        epochs = cfg.run.steps * cfg.train.global_batch_size / len(train_sampler)
        parts.append(f"{epochs:.2f} epochs in all" if epochs >= 0.01 else "less than 0.01 epochs in all")
    return ", ".join(parts)


def _describe_ranks(cfg: Config, device_type: str) -> str:
    parallel = cfg.parallel
    where = f"{parallel.world_size} on {device_type}, {cfg.run.dtype}"
    if parallel.world_size == 1:
        return where
    shared = f" x pp{parallel.pp}" if parallel.pp > 1 else ""
    attention = f"tp{parallel.tp} x cp{parallel.cp} x dp{parallel.dp}{shared}"
    experts = f"etp{parallel.etp} x ep{parallel.ep} x edp{parallel.edp}{shared}"
    return f"{where}; attention {attention}, experts {experts}"


def _describe_saves(cfg: Config) -> str:
    checkpoint = cfg.checkpoint
    if not checkpoint.saves:
        return "no model is saved (checkpoint.every=0, checkpoint.at_end=false)"
    every = [f"every {checkpoint.every:,} steps"] if checkpoint.every else []
    when = " and ".join([*every, *(["at the end"] if checkpoint.at_end else [])])
    kept = f", the newest {checkpoint.keep} stay" if checkpoint.keep else ", all stay"
    more = f", and those of every {checkpoint.keep_every:,} steps" if checkpoint.keep and checkpoint.keep_every else ""
    return f"{when}{kept}{more}"
