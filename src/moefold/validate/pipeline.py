"""Rules on the pipeline: schedule, virtual stages, number of micro-batches, and layout of the stages."""

from collections.abc import Iterator, Sequence
from math import gcd

from moefold.config.base.layer_words import repeat_layers, spell_layers
from moefold.config.base.part import describe_part
from moefold.config.base.part_registry import is_built_in
from moefold.config.base.pipeline_actions import SlotRow, find_swapped
from moefold.config.chosen import chosen_in
from moefold.config.groups.router import BalanceScopePart, aux_loss_depends_on_dp
from moefold.config.groups.schedule import SchedulePart
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting, nearest_numbers
from moefold.topology.pipeline_layout import parse_layout, validate_layout
from moefold.topology.schedules import runtime_slots, stage_ranks


def validate_schedule(parallel: ParallelConfig) -> Iterator[Problem]:
    """Check the schedule against virtual_stages and pp."""
    p = parallel
    spec = chosen_in(parallel, SchedulePart)
    minimum, maximum = spec.virtual_stage_bounds
    if p.virtual_stages < minimum:
        needs = f"{minimum}" if maximum == minimum else f"{minimum} or more"
        rule = f"needs parallel.virtual_stages of {needs}, and it is {p.virtual_stages}"
        way_out = f"choose virtual_stages={minimum}, or schedule={spec.with_other_virtual_stages!r}"
        yield Problem("parallel.schedule", spec.kind, rule, way_out)
    elif maximum == 1 and p.virtual_stages > 1:
        rule = f"needs parallel.schedule={spec.with_other_virtual_stages!r}, and it is {spec.kind!r}"
        way_out = f"choose schedule={spec.with_other_virtual_stages!r} or 'zero-bubble', or virtual_stages=1"
        yield Problem("parallel.virtual_stages", p.virtual_stages, rule, way_out)
    elif maximum is not None and p.virtual_stages > maximum:
        rule = f"has exactly {maximum} stages on each rank, and parallel.virtual_stages={p.virtual_stages}"
        way_out = f"choose virtual_stages={maximum}, or schedule={spec.with_other_virtual_stages!r}"
        yield Problem("parallel.schedule", spec.kind, rule, way_out)
    elif p.pp == 1 and p.virtual_stages > 1:
        rule = f"needs {Setting('parallel.pp')} of 2 or more, and it is 1"
        yield Problem("parallel.schedule", spec.kind, rule, "choose schedule='1f1b' with virtual_stages=1, or pp=2")


def validate_micro_batch_count(parallel: ParallelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Check that the schedule supports the number of micro-batches."""
    p = parallel
    batch = train.global_batch_size
    samples_per_pass = train.micro_batch_size * p.dp
    if p.pp == 1 or (batch % samples_per_pass and not p.may_pad_batch):
        return
    count = train.num_micro_batches(p.dp)
    reason = f"and train.global_batch_size={batch} gives each data-parallel rank {count}"
    spec = chosen_in(parallel, SchedulePart)
    rounds = max(1, count // p.pp)
    if spec.runs_equal_rounds and count % rounds:
        # Multiples of pp are legal, so the nearest legal numbers are within pp.
        near = range(max(1, count - p.pp), count + p.pp + 1)
        legal = [candidate for candidate in near if candidate % max(1, candidate // p.pp) == 0]
        batches = nearest_numbers(batch, [candidate * samples_per_pass for candidate in legal], count=2)
        rule = f"with pp={p.pp} runs micro-batches in {rounds} equal rounds, {reason}"
        yield Problem("parallel.schedule", spec.kind, rule, f"choose train.global_batch_size={batches}")
    factor = spec.min_micro_batches_per_rank
    minimum = factor * p.pp
    if count < minimum:
        micro = train.micro_batch_size
        smaller = f", micro_batch_size={gcd(micro, batch // (p.dp * minimum))}" if batch % (p.dp * minimum) == 0 else ""
        rule = f"needs at least {f'{factor}*' if factor > 1 else ''}pp={minimum} micro-batches, {reason}"
        enough = f"train.global_batch_size={samples_per_pass * minimum}{smaller}"
        way_out = f"choose {enough}, or schedule={spec.with_fewer_micro_batches!r}"
        yield Problem("parallel.schedule", spec.kind, rule, way_out)


def validate_rows(
    model: ModelConfig, moe: MoEConfig, parallel: ParallelConfig, train: TrainConfig
) -> Iterator[Problem]:
    """Check the rows of a schedule from another package, for a recipe that passed all other rules."""
    if parallel.pp == 1 or is_built_in(type(chosen_in(parallel, SchedulePart))):
        return
    try:
        rows = runtime_slots(model, parallel, train)
    except ConfigError as error:
        yield from error.problems
    else:
        yield from _validate_order(model, moe, parallel, rows)


def _validate_order(
    model: ModelConfig, moe: MoEConfig, parallel: ParallelConfig, rows: Sequence[SlotRow]
) -> Iterator[Problem]:
    """Check that micro-batches run in order where each counts the tokens of all before it."""
    if (swapped := find_swapped(rows)) and model.has_moe_layers and aux_loss_depends_on_dp(moe):
        aux_kind = Setting("moe.aux_kind", chosen_in(moe, BalanceScopePart).kind)
        rule = (
            f"{describe_part(chosen_in(parallel, SchedulePart))} runs {swapped[0]} before {swapped[1]}, and {aux_kind} "
            "counts the tokens of the micro-batches before each one"
        )
        way_out = "order the forward passes of a stage by micro-batch, or choose aux_kind='micro_batch'"
        yield Problem("", None, rule, way_out)


def validate_pipeline_layout(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Check that the layout parses, fits the model, and gives every rank weights."""
    num_stages = parallel.pp * parallel.virtual_stages
    text = parallel.pipeline_layout
    if text == "":
        return
    if text == "auto":
        yield from auto_layout_errors(model, parallel)
        return
    messages = list(
        validate_layout(text, num_layers=model.num_layers, num_mtp_layers=model.mtp_layers, num_stages=num_stages)
    )
    for message in messages:
        yield Problem("parallel.pipeline_layout", text, f": {message}")
    spec = chosen_in(parallel, SchedulePart)
    if messages or spec.virtual_stage_bounds[0] > parallel.virtual_stages or spec.is_for_one_mapping:
        return
    yield from _validate_no_empty_ranks(parallel, stage_ranks(parallel))


def auto_layout_errors(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Check that an automatic layout has a unit for each stage."""
    num_stages = parallel.pp * parallel.virtual_stages
    if num_stages > model.num_layers + 2:
        rule = (
            f"splits the embedding, {model.num_layers} layers and the loss, and "
            f"{Setting('parallel.pp')}*parallel.virtual_stages={num_stages} are more"
        )
        way_out = f"choose {layers_setting(model, num_stages - 2)}, or fewer stages"
        yield Problem("parallel.pipeline_layout", "auto", rule, way_out)


def check_schedule_file(model: ModelConfig, moe: MoEConfig, parallel: ParallelConfig, train: TrainConfig) -> None:
    """Check that the schedule file is complete, does not deadlock, suits the losses, and gives every rank weights.

    Raises:
        ConfigError: it is not valid.
    """
    schedule = chosen_in(parallel, SchedulePart)
    if not schedule.is_for_one_mapping:
        return
    for problem in _validate_order(model, moe, parallel, runtime_slots(model, parallel, train)):
        raise ConfigError(problem)
    ranks = schedule.stage_ranks(parallel.pp, parallel.virtual_stages)
    if parallel.pipeline_layout not in ("", "auto"):
        for message in _validate_no_empty_ranks(parallel, ranks):
            raise ConfigError(message)


def _validate_no_empty_ranks(parallel: ParallelConfig, ranks: tuple[int, ...]) -> Iterator[Problem]:
    text = parallel.pipeline_layout
    stages = parse_layout(text)
    for rank in range(parallel.pp):
        stage_numbers = [number for number, pp_rank in enumerate(ranks) if pp_rank == rank]
        if all(stages[number].is_empty for number in stage_numbers):
            rule = (
                f"leaves pipeline rank {rank} without weights (stages {', '.join(map(str, stage_numbers))}, "
                "counted from 0)"
            )
            way_out = f"give it a layer, or choose a smaller {Setting('parallel.pp')}"
            yield Problem("parallel.pipeline_layout", text, rule, way_out)


PIPELINE_RULES = (validate_schedule, validate_micro_batch_count, validate_pipeline_layout)


def layers_setting(model: ModelConfig, count: int) -> str:
    """Return the setting of model.layers for `count` layers in the same order of kinds."""
    return f"model.layers={spell_layers(repeat_layers(model.layer_words, count))!r}"
