"""Export of a planned mapping as a recipe for training."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from moefold.config.base.limits import FORMAT, FORMAT_KEY
from moefold.config.base.part_registry import built_in_kinds, find_part
from moefold.config.chosen import chosen_in, read_key, with_key
from moefold.config.groups.context import ContextPart
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.keys.paths import default_of, sections
from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.config.tables.toml_text import minimal_form, toml_value
from moefold.errors import ConfigError
from moefold.planner.mapping import OFFLOADED_OPTIMIZER, ParallelMapping
from moefold.planner.model_spec import model_spec_from_config
from moefold.planner.search.constraints import MappingConstraints
from moefold.planner.search.space import HOST
from moefold.planner.stage_splitter import RecipeStageSplitter, placed_ranks
from moefold.recipe import load_config
from moefold.topology.pipeline_layout import even_stages, format_layout
from moefold.topology.rollout_mapping import ROLLOUT_DEGREES
from moefold.validate.config import check_config
from moefold.validate.unused import idle_keys

SAME_AXES = ("tp", "cp", "pp", "ep", "etp", "mbs", "schedule", "vpp", "zero", "recompute", "overlap")
"""Axes with equal values in a mapping and in the search."""
ALWAYS_WRITTEN = ("parallel.world_size", "train.seq_len", "train.micro_batch_size", "train.global_batch_size")
"""Keys that a planned recipe contains even where they are the default."""
PLACEHOLDER_COMMENTS = {
    "run.dir": "your folder for metrics and checkpoints",
    "run.steps": "your tokens / (seq_len * global_batch_size)",
    "train.lr": "your peak learning rate, for this model and batch",
    "train.warmup_steps": "steps of linear warm-up, a few percent of run.steps or more",
    "data.kind": "your data: docs/data.md",
    "data.path": "your file or folder, or a list of them",
    "data.tokenizer": "the tokenizer.json of the model; bytes: one token a byte",
}
"""Keys that a bare model does not determine, each with a comment on what to change."""


def _written_kind(part: DispatcherPart) -> str:
    """Return the kind of a dispatcher in a recipe: whether its package is installed is known where the recipe runs."""
    resolved = {kind: find_part(part.group, kind).resolves_to for kind in built_in_kinds(part.group)}
    return next((kind for kind, taken in resolved.items() if taken and taken[0] == part.kind), part.kind)


def config_with_mapping(constraints: MappingConstraints, mapping: ParallelMapping) -> Config:
    """Return the recipe with a mapping. Uneven stages are balanced, as they were priced.

    Raises:
        ConfigError: the runtime rejects the recipe.
    """
    m = mapping
    cfg = constraints.config_with(
        {axis: getattr(m, axis) for axis in SAME_AXES}
        | {
            # The kind, or the recipe's part of that kind with its settings.
            "dispatcher": m.dispatcher
            if m.dispatcher == constraints.base_config.parallel.dispatcher
            else _written_kind(m.dispatcher),
            "offload": tuple(part for part in m.offload if part != OFFLOADED_OPTIMIZER),
            "moments": HOST if OFFLOADED_OPTIMIZER in m.offload else "none",
        }
    )
    if m.pp > 1 and cfg.parallel.pipeline_layout in ("", "auto"):
        # Write the priced stages: "auto" would also consider how tp and ep shard the weights.
        parts = RecipeStageSplitter(constraints.base_config, model_spec_from_config(cfg.model)).parts(
            placed_ranks(m.schedule, m.pp, m.vpp)
        )
        stages = m.pp * m.vpp
        # An empty layout has a layer on each stage.
        is_even = stages <= cfg.model.num_layers and parts == even_stages(
            cfg.model.num_layers, cfg.model.mtp_layers, stages
        )
        if cfg.parallel.pipeline_layout == "auto" or not is_even:
            cfg = replace(cfg, parallel=replace(cfg.parallel, pipeline_layout=format_layout(parts)))
    if cfg.train.offload:
        # The memory model assumes that every offload copy has finished.
        cfg = replace(cfg, train=replace(cfg.train, offload_waits=True))
    cfg = _without_idle_keys(cfg)
    check_config(cfg)
    return cfg


def _without_idle_keys(cfg: Config) -> Config:
    """Return a recipe without those settings of its mapping that have no effect and would be refused."""
    names = [f"rollout.{key}" for key in (*ROLLOUT_DEGREES, "experts")]
    context = chosen_in(cfg.parallel, ContextPart)
    names += [f"{ContextPart.key}.{field.name}" for field in fields(context)]
    before = {name: default_of(*name.split(".", 1)) for name in names}
    changed = [name for name in names if read_key(cfg, name) != before[name]]
    idle = [name for name in changed if name in idle_keys(cfg)]
    for name in idle:
        cfg = with_key(cfg, name, before[name])
    # Without a placement there may be nothing to split.
    return _without_idle_keys(cfg) if idle else cfg


def with_run_defaults(cfg: Config, name: str) -> Config:
    """Return the config of a bare model with defaults for a run, a learning-rate schedule and data.

    `PLACEHOLDER_COMMENTS` explains them.
    """
    folder = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip(".-") or "planned"
    return replace(
        cfg,
        run=replace(cfg.run, dir=f"runs/{folder}", steps=1000),
        train=replace(cfg.train, warmup_steps=100),
        data=replace(cfg.data, kind="text", path="path/to/your/text"),
    )


def write_recipe(text: str, path: Path) -> None:
    """Write a recipe, and check that the file loads.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--recipe {path} cannot be written: {error.strerror}") from None
    check_config(load_config(path))


def render_recipe(cfg: Config, header_comments: list[str], comments: dict[str, str]) -> str:
    """Render the keys that differ from the defaults, or from the preset, and those with a comment.

    Args:
        cfg: a config that passes `check_config`.
        comments: comments on keys, by "section.key". These keys are written even where they are the default.
    """
    lines = [f"# {remark}".rstrip() for remark in header_comments]
    lines += [*([""] if lines else []), f"{FORMAT_KEY} = {FORMAT}"]
    for section in sections():
        lines += _section_lines(cfg, section, comments)
    return "\n".join(lines) + "\n"


def _section_lines(cfg: Config, section: str, comments: dict[str, str]) -> list[str]:
    part = getattr(cfg, section)
    base: Any = sections()[section]()
    if section == "model" and cfg.model.preset:
        base = replace(config_from_dict({"model": {"preset": cfg.model.preset}}).model, preset="")
    lines = []
    for key in part.__dataclass_fields__:
        value = getattr(part, key)
        name = f"{section}.{key}"
        before = getattr(base, key)
        if name in comments:
            lines.append(f"{key} = {toml_value(value)}  # {comments[name]}")
        elif name in ALWAYS_WRITTEN or value != before:
            lines.append(f"{key} = {toml_value(minimal_form(value, before))}")
    return ["", f"[{section}]", *lines] if lines else []
