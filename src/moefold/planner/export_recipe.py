"""A planned mapping as a recipe that trains. Torch-free.

Checks of a file that a command writes at its end, made before its work. Torch-free.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from moefold.config.presets import load_preset
from moefold.config.schema import Config
from moefold.config.suggestions import default_of, sections
from moefold.errors import ConfigError
from moefold.host.output_file import check_writable
from moefold.planner.mapping import OFFLOADED_OPTIMIZER, ParallelMapping
from moefold.planner.model_spec import model_spec_from_config
from moefold.planner.search.constraints import MappingConstraints
from moefold.planner.search.space import HOST
from moefold.planner.stages import RecipeStageSplitter
from moefold.recipe import load_config
from moefold.topology.pipeline_layout import format_layout
from moefold.validate.config import check_config

RECIPE_DISPATCHERS = {"deepep": "auto", "hybridep": "auto"}
"""The recipe leaves kernels that may not be installed to the run: auto takes them where they can run."""
ALWAYS_WRITTEN = ("parallel.world_size", "train.seq_len", "train.micro_batch_size", "train.global_batch_size")
"""Keys that a planned recipe says even where they are the default."""
PLACEHOLDER_COMMENTS = {
    "run.dir": "your folder for metrics and checkpoints",
    "run.steps": "your tokens / (seq_len * global_batch_size)",
    "train.lr": "your peak learning rate, for this model and batch",
    "train.warmup_steps": "steps of linear warm-up, a few percent of run.steps or more",
    "data.kind": "your data: docs/data.md",
    "data.path": "your file or folder, or a list of them",
    "data.tokenizer": "the tokenizer.json of the model; bytes: one token a byte",
}
"""Keys that a bare model says nothing about, each with a comment on what to change."""


def config_with_mapping(constraints: MappingConstraints, mapping: ParallelMapping) -> Config:
    """The recipe under a mapping. Stages that are not even are balanced, as they were priced.

    Raises:
        ConfigError: the runtime refuses it.
    """
    m = mapping
    cfg = constraints.config_of(
        {
            "tp": m.tp,
            "cp": m.cp,
            "pp": m.pp,
            "ep": m.ep,
            "etp": m.etp,
            "mbs": m.mbs,
            "schedule": m.schedule,
            "vpp": m.vpp,
            "zero": m.zero,
            "dispatcher": RECIPE_DISPATCHERS.get(m.dispatcher, m.dispatcher),
            "recompute": m.recompute,
            "overlap": m.overlap,
            "offload": tuple(part for part in m.offload if part != OFFLOADED_OPTIMIZER),
            "moments": HOST if OFFLOADED_OPTIMIZER in m.offload else "none",
        }
    )
    uneven = cfg.model.num_layers % (m.pp * m.vpp) or cfg.model.mtp_layers
    if m.pp > 1 and (uneven or cfg.parallel.pipeline_layout == "auto"):
        # The very stages that were priced: "auto" also looks at what tp and ep leave of the weights.
        parts = RecipeStageSplitter(constraints.base_config, model_spec_from_config(cfg.model)).parts(m.pp * m.vpp)
        cfg = replace(cfg, parallel=replace(cfg.parallel, pipeline_layout=format_layout(parts)))
    if cfg.train.offload:
        # Memory was counted as if all that leaves had left.
        cfg = replace(cfg, train=replace(cfg.train, offload_waits=True))
    check_config(cfg)
    return cfg


def with_run_defaults(cfg: Config, name: str) -> Config:
    """Return the config of a bare model with a run, a schedule and a place for data, which `PLACEHOLDER_COMMENTS` explains.

    Args:
        cfg: a model under a mapping; the rest is the default.
        name: name of the model, for the folder of the run.
    """
    folder = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip(".-") or "planned"
    return replace(
        cfg,
        run=replace(cfg.run, dir=f"runs/{folder}", steps=1000),
        train=replace(cfg.train, warmup_steps=100),
        data=replace(cfg.data, kind="text", path="path/to/your/text"),
    )


def write_recipe(cfg: Config, path: Path, header_comments: list[str], comments: dict[str, str]) -> None:
    """Write a recipe, and make sure that it says what the config says.

    Args:
        cfg: a config that passes `check_config`.
        path: the file, ending in .toml.
        header_comments: comments at its top.
        comments: comments on its keys, by "section.key"; these keys are written even where they are the default.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path.suffix != ".toml":
        raise ConfigError(f"--recipe {path} must end in .toml")
    try:
        path.write_text(render_recipe(cfg, header_comments, comments), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--recipe {path} cannot be written: {error.strerror}") from None
    check_config(load_config(path))


def render_recipe(cfg: Config, header_comments: list[str], comments: dict[str, str]) -> str:
    """Return the keys that differ from the defaults, or from the preset, and those that have a comment."""
    lines = [f"# {remark}".rstrip() for remark in header_comments]
    for section in sections():
        lines += _section_lines(cfg, section, comments)
    return "\n".join(lines) + "\n"


def _section_lines(cfg: Config, section: str, comments: dict[str, str]) -> list[str]:
    part = getattr(cfg, section)
    preset = load_preset(cfg.model.preset) if section == "model" and cfg.model.preset else {}
    lines = []
    for key in part.__dataclass_fields__:
        value = getattr(part, key)
        name = f"{section}.{key}"
        if name in comments:
            lines.append(f"{key} = {_format_toml(value)}  # {comments[name]}")
        elif name in ALWAYS_WRITTEN or value != preset.get(key, default_of(section, key)):
            lines.append(f"{key} = {_format_toml(value)}")
    return ["", f"[{section}]", *lines] if lines else []


def _format_toml(value: Any) -> str:
    """Strings, numbers, booleans and lists of them are spelled in TOML as in JSON."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def check_output_path(option: str, path: Path, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that cannot be written, before anything is worked out; nothing is created.

    Args:
        option: what names it.
        path: the file.
        suffixes: those that it may have, in small letters.

    Raises:
        ConfigError: it has another ending, its folder is not there, or the place may not be written to.
    """
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"{option} {path} must end in {' or '.join(suffixes)}")
    check_writable(option, path)
