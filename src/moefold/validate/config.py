"""Validation of a config before any rank starts, without torch.

`check_config` uses the settings only. Functions named `check_..._device` compare settings with a type of device, and
`memory_need.py` with the memory that its caller found. `train/machine_checks.py` checks the machine itself. A rule is a
function that yields one message per violation: key, value, rule and the nearest legal settings. Rules on one key are in
the annotation of its field (`config/base/field.py`). Rules between keys are in a file for each subject, settings
without effect in `unused.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from typing import Any

from moefold.config.base.layer_words import parse_layers
from moefold.config.base.part import Part, describe_part
from moefold.config.chosen import chosen_parts, tables_in
from moefold.config.keys.annotations import range_problems
from moefold.config.keys.paths import group_at
from moefold.config.keys.suggestions import part_class_problem, wrong_kind
from moefold.config.model import ModelConfig
from moefold.config.rule import apply_rule, part_problems
from moefold.config.schema import Config
from moefold.errors import ConfigError, raise_all
from moefold.message_text import Problem, nearest_numbers, spelled_as
from moefold.topology.layout import Layout, fold_mapping
from moefold.topology.rollout_mapping import ROLLOUT_DEGREES, has_rollout_mapping, rollout_config, rollout_degrees
from moefold.validate.checkpoint import validate_keep_every
from moefold.validate.cuda_graphs import CUDA_GRAPH_RULES
from moefold.validate.data import DATA_RULES, validate_alignment
from moefold.validate.faults import FAULT_RULES, REGROUP_RULES
from moefold.validate.lora import LORA_RULES
from moefold.validate.memory_savings import OFFLOAD_RULES, validate_memory, validate_recompute
from moefold.validate.moe import TRAINING_ONLY_RULES, validate_capacity, validate_routing, validate_shortcut
from moefold.validate.parallel import OVERLAP_RULES, PARALLEL_RULES, validate_collective_order
from moefold.validate.pipeline import validate_rows
from moefold.validate.rl import RL_RULES, validate_rollout_experts, validate_vllm
from moefold.validate.sites import SITES_RULES
from moefold.validate.sparse import SPARSE_ATTENTION_RULES, SPARSE_TRAINING_RULES, validate_selection_stages
from moefold.validate.train import KERNEL_RULES, TRAIN_RULES


def validate_layer_words(model: ModelConfig) -> Iterator[Problem]:
    """Check the names and the number of the layers."""
    try:
        parse_layers(model.layers)
    except ValueError as error:
        yield Problem("model.layers", model.layers, str(error))


def layer_problems(cfg: Config) -> Iterator[Problem]:
    """Yield the violations of the rules of the layers' parts."""
    parts = dict.fromkeys(part for layer in dict.fromkeys(cfg.model.all_layers) for part in layer.parts())
    for part in parts:
        if isinstance(part, Part):
            yield from part_problems(part, cfg)


def validate_layers(cfg: Config) -> Iterator[Problem]:
    """Check the parts of the layers."""
    yield from {str(problem): problem for problem in layer_problems(cfg)}.values()


MODEL_RULES = (validate_layers, *SPARSE_ATTENTION_RULES)
RULES = (
    *MODEL_RULES,
    validate_routing,
    validate_capacity,
    validate_shortcut,
    validate_selection_stages,
    *PARALLEL_RULES,
    *TRAIN_RULES,
    validate_recompute,
    *OFFLOAD_RULES,
    *OVERLAP_RULES,
    *DATA_RULES,
    *FAULT_RULES,
    *KERNEL_RULES,
    *CUDA_GRAPH_RULES,
)
# Inference reads the data section of the training, which names the tokenizer.
TRAINING_RULES = (
    validate_alignment,
    validate_keep_every,
    *TRAINING_ONLY_RULES,
    *SPARSE_TRAINING_RULES,
    *LORA_RULES,
    *RL_RULES,
    validate_rollout_experts,
    validate_vllm,
    *SITES_RULES,
    *REGROUP_RULES,
)


def check_config(cfg: Config, *, is_training: bool = True) -> Layout:
    """Check every setting and combination, and return the rank layout.

    Args:
        is_training: whether the model is trained. Inference also allows settings without a gradient.

    Raises:
        ConfigError: one line for each violation. Rules between keys run only if every key is in its range and the
            degrees fold.
    """
    raise_all(_slot_problems(cfg))
    raise_all(range_problems(cfg))
    raise_all(validate_layer_words(cfg.model))
    layout = fold_mapping(cfg.parallel)
    rules = (*RULES, *TRAINING_RULES) if is_training else RULES
    messages = [message for rule in rules for message in apply_rule(rule, cfg)]
    parts = [part for part in chosen_parts(cfg) if is_training or not part.is_for_training]
    raise_all((*messages, *(problem for part in parts for problem in part_problems(part, cfg))))
    raise_all(validate_rows(cfg.model, cfg.moe, cfg.parallel, cfg.train))
    raise_all(validate_collective_order(cfg))
    if is_training:
        raise_all(validate_memory(cfg))
        check_rollout_mapping(cfg)
    return layout


def is_legal(cfg: Config) -> bool:
    """Return whether `check_config` accepts a recipe for training."""
    try:
        check_config(cfg)
    except ConfigError:
        return False
    return True


def _slot_problems(cfg: Config) -> Iterator[Problem]:
    """Yield the keys with a part of an unknown or a wrong kind, in a recipe that a program made."""
    for name, value in tables_in(cfg):
        owner: Any = type(value)
        if not isinstance(value, str | Part) or group_at(name) is None:
            # A table, or a key of a part that is not allowed here.
            continue
        if isinstance(value, str):
            yield wrong_kind(name, value)
        elif fault := part_class_problem(name, owner):
            yield Problem("", None, f"{describe_part(value)} {fault}")


def check_rollout_mapping(cfg: Config) -> None:
    """Check the mapping that samples rollouts, if it differs from the mapping of training.

    Raises:
        ConfigError: the mapping does not fit the ranks or the model.
    """
    if not has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout):
        return
    names = {f"parallel.{axis}": f"rollout.{axis}" for axis in ROLLOUT_DEGREES}
    if cfg.rollout.ranks:
        names["parallel.world_size"] = "rollout.ranks"
    try:
        with spelled_as(names):
            check_config(rollout_config(cfg), is_training=False)
    except ConfigError as error:
        degrees = " ".join(f"{axis}={degree}" for axis, degree in rollout_degrees(cfg.parallel, cfg.rollout).items())
        raise error.with_start(f"rollouts cannot be sampled under {degrees}: ") from None


def check_model(model: ModelConfig) -> None:
    """Check the [model] section alone.

    Raises:
        ConfigError: one line for each violation.
    """
    cfg = Config(model=model)
    raise_all(range_problems(cfg))
    raise_all(validate_layer_words(cfg.model))
    messages = [message for rule in MODEL_RULES if rule is not validate_layers for message in apply_rule(rule, cfg)]
    parts = [part for part in chosen_parts(cfg) if part.key.startswith("model.")]
    problems = [*layer_problems(cfg), *(problem for part in parts for problem in part_problems(part, cfg))]
    # The other sections have defaults, not the settings of the run, and a part may refuse defaults.
    refused = (*messages, *(problem for problem in problems if problem.key.startswith("model.")))
    raise_all({str(problem): problem for problem in refused}.values())


NEAR_WORLD_SIZES = 8
"""Limit of the world sizes in messages, as a multiple of the available ranks."""


def with_world_size(cfg: Config, world_size: int) -> Config:
    """Return the recipe for another number of ranks: dp and edp change, other degrees and global batch stay.

    Raises:
        ConfigError: the recipe does not fit that number. The message names numbers that fit.
    """
    changed = replace(cfg, parallel=replace(cfg.parallel, world_size=world_size))
    try:
        check_config(changed)
    except ConfigError as error:
        p = cfg.parallel
        fitting = fitting_world_sizes(cfg, largest=NEAR_WORLD_SIZES * world_size)
        if not fitting:
            raise
        raise ConfigError(
            f"parallel.elastic=true: the launcher started {world_size} processes, and the recipe with tp={p.tp}, "
            f"cp={p.cp}, pp={p.pp}, ep={p.ep}, etp={p.etp} and train.global_batch_size={cfg.train.global_batch_size} "
            f"fits {nearest_numbers(world_size, fitting)}: {error}"
        ) from None
    return changed


def fitting_world_sizes(cfg: Config, largest: int | None = None) -> list[int]:
    """Return the world sizes that the recipe fits, ascending.

    All degrees except dp and edp are fixed, so that a world size is a multiple of tp*cp*pp and of ep*etp*pp. The number
    of micro-batches of the global batch must be a multiple of dp, unless `ParallelConfig.may_pad_batch`.

    Args:
        largest: largest world size to consider, or None if there is no limit.
    """
    p = cfg.parallel
    count = max(1, cfg.train.global_batch_size // cfg.train.micro_batch_size)
    dense = p.tp * p.cp * p.pp
    multiple = lcm(dense, p.ep * p.etp * p.pp)
    limit = count * dense if largest is None else min(largest, count * dense)
    return [
        number
        for number in range(multiple, limit + 1, multiple)
        if (cfg.parallel.may_pad_batch or count % (number // dense) == 0)
        and is_legal(replace(cfg, parallel=replace(cfg.parallel, world_size=number)))
    ]


def without_lost_ranks(cfg: Config, world_size: int) -> Config:
    """Return the recipe for the remaining ranks. The last of them may have padding, as in elastic jobs.

    The rules on `faults.on_loss` apply to the start of a job, so its keys have their defaults.
    """
    parallel = replace(cfg.parallel, world_size=world_size, elastic=True)
    changed = replace(cfg, parallel=parallel, faults=replace(cfg.faults, on_loss="stop", min_ranks=1))
    if changed.parallel.dp > 1:
        return changed
    # A single replica has no peers.
    return replace(changed, checkpoint=replace(changed.checkpoint, peer_every=0))


def world_sizes_after_rank_loss(cfg: Config) -> list[int]:
    """Return the numbers of ranks that can continue a job which has lost ranks, ascending. See faults.on_loss."""
    limit = cfg.parallel.world_size - 1
    sizes = fitting_world_sizes(without_lost_ranks(cfg, cfg.parallel.world_size), largest=limit)
    return [size for size in sizes if size >= cfg.faults.min_ranks]
