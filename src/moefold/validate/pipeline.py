"""Rules on the pipeline: schedule, virtual stages, micro-batches and layout."""

from collections.abc import Iterator

from moefold.config.schema import Config
from moefold.config.suggestions import nearest_numbers
from moefold.errors import ConfigError
from moefold.topology.pipeline_layout import parse_layout, validate_layout
from moefold.topology.schedule_tables import SCHEDULES, stage_ranks


def validate_schedule(cfg: Config) -> Iterator[str]:
    """Check the schedule against virtual_stages and pp."""
    p = cfg.parallel
    minimum, maximum = SCHEDULES[p.schedule].virtual_stage_bounds
    if p.virtual_stages < minimum:
        alternative = "schedule='1f1b'" if p.schedule == "interleaved" else "schedule='zero-bubble'"
        needs = f"{minimum}" if maximum == minimum else f"{minimum} or more"
        yield (
            f"parallel.schedule={p.schedule!r} needs parallel.virtual_stages of {needs}, and it is {p.virtual_stages}; "
            f"choose virtual_stages={minimum}, or {alternative}"
        )
    elif maximum == 1 and p.virtual_stages > 1:
        yield (
            f"parallel.virtual_stages={p.virtual_stages} needs parallel.schedule='interleaved', and it is "
            f"{p.schedule!r}; choose schedule='interleaved' or 'zero-bubble', or virtual_stages=1"
        )
    elif maximum is not None and p.virtual_stages > maximum:
        yield (
            f"parallel.schedule={p.schedule!r} has exactly {maximum} stages on each rank, and "
            f"parallel.virtual_stages={p.virtual_stages}; choose virtual_stages={maximum}, or schedule='zero-bubble'"
        )
    elif p.pp == 1 and p.virtual_stages > 1:
        yield (
            f"parallel.schedule={p.schedule!r} needs parallel.pp of 2 or more, and it is 1; "
            "choose schedule='1f1b' with virtual_stages=1, or pp=2"
        )
    if p.schedule == "csv" and not p.schedule_csv:
        yield "parallel.schedule='csv' needs parallel.schedule_csv, the path of its file; or choose 'zero-bubble'"
    if p.schedule == "csv" and p.pp == 1:
        yield "parallel.schedule='csv' needs parallel.pp of 2 or more, and it is 1; choose schedule='1f1b', or pp=2"


def validate_micro_batch_count(cfg: Config) -> Iterator[str]:
    """Check that the schedule supports the number of micro-batches."""
    p = cfg.parallel
    batch = cfg.train.global_batch_size
    step = cfg.train.micro_batch_size * p.dp
    if p.pp == 1 or batch % step:
        return
    count = cfg.num_micro_batches
    found = f"and train.global_batch_size={batch} gives each data-parallel rank {count}"
    # torch's interleaved schedules run in equal rounds of about pp micro-batches.
    rounds = max(1, count // p.pp)
    if p.schedule in ("interleaved", "zero-bubble") and count % rounds:
        # Multiples of pp are legal, so the nearest legal numbers are within pp.
        near = range(max(1, count - p.pp), count + p.pp + 1)
        legal = [other for other in near if other % max(1, other // p.pp) == 0]
        batches = nearest_numbers(batch, [other * step for other in legal], count=2)
        yield (
            f"parallel.schedule={p.schedule!r} with pp={p.pp} runs micro-batches in {rounds} equal rounds, {found}; "
            f"choose train.global_batch_size={batches}"
        )
    if p.schedule == "dualpipev" and count < 2 * p.pp:
        yield (
            f"parallel.schedule='dualpipev' needs at least 2*pp={2 * p.pp} micro-batches, {found}; "
            f"choose train.global_batch_size={step * 2 * p.pp}, or schedule='zbv'"
        )


def validate_pipeline_layout(cfg: Config) -> Iterator[str]:
    """Check that the layout parses, fits the model, and gives every rank weights."""
    p = cfg.parallel
    model = cfg.model
    num_stages = p.pp * p.virtual_stages
    text = p.pipeline_layout
    if text == "":
        return
    if text == "auto":
        if num_stages > model.num_layers + 2:
            yield (
                f"parallel.pipeline_layout='auto' splits the embedding, model.num_layers={model.num_layers} layers "
                f"and the loss, and parallel.pp*parallel.virtual_stages={num_stages} are more; choose "
                f"model.num_layers={num_stages - 2}, or fewer stages"
            )
        return
    messages = list(
        validate_layout(text, num_layers=model.num_layers, num_mtp_layers=model.mtp_layers, num_stages=num_stages)
    )
    for message in messages:
        yield f"parallel.pipeline_layout={text!r}: {message}"
    if (
        messages
        or SCHEDULES[p.schedule].virtual_stage_bounds[0] > p.virtual_stages
        or SCHEDULES[p.schedule].placement == "file"
    ):
        return
    yield from _validate_no_empty_ranks(cfg, stage_ranks(p))


def check_schedule_file(cfg: Config) -> None:
    """Check that the schedule file is complete, does not deadlock, and gives every rank weights.

    Raises:
        ConfigError: it is not valid.
    """
    p = cfg.parallel
    if p.schedule != "csv":
        return
    from moefold.topology.schedule_csv import read_schedule

    ranks = read_schedule(p.schedule_csv, p.pp, p.virtual_stages, cfg.num_micro_batches).stage_to_rank
    if p.pipeline_layout not in ("", "auto"):
        for message in _validate_no_empty_ranks(cfg, ranks):
            raise ConfigError(message)


def _validate_no_empty_ranks(cfg: Config, ranks: tuple[int, ...]) -> Iterator[str]:
    text = cfg.parallel.pipeline_layout
    stages = parse_layout(text)
    for rank in range(cfg.parallel.pp):
        stage_numbers = [number for number, pp_rank in enumerate(ranks) if pp_rank == rank]
        if all(stages[number].is_empty for number in stage_numbers):
            yield (
                f"parallel.pipeline_layout={text!r} leaves pipeline rank {rank} without weights (stages "
                f"{', '.join(map(str, stage_numbers))}, counted from 0); "
                "give it a layer, or choose a smaller parallel.pp"
            )


PIPELINE_RULES = (validate_schedule, validate_micro_batch_count, validate_pipeline_layout)
