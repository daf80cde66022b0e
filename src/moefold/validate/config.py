"""Validation of a config before any rank starts, without torch.

`check_config` uses the settings only. Functions named `check_..._device` compare settings with a type of device, and
`memory_need.py` with the memory that its caller found. `train/machine_checks.py` checks the machine itself. A rule is a
function that yields one message per violation: key, value, rule and the nearest legal settings. Rules on one key are in
the annotation of its field (`config/base/field.py`). Rules between keys are in a file for each subject, settings
without effect in `unused.py`.
"""

from collections.abc import Iterator
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
from moefold.message_text import Problem, spelled_as
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
