"""A planned mapping as a recipe that trains. Torch-free."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from moefold.config.checks import check_config
from moefold.config.keys import default_of, sections
from moefold.config.load import load_config
from moefold.config.pipeline_layout import write_layout
from moefold.config.presets import load_preset
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.plan.legality import Legality
from moefold.plan.mapping import OPTIMIZER, Mapping
from moefold.plan.shape import shape_of
from moefold.plan.space import HOST
from moefold.plan.stages import RecipeSplit

DERIVED_DISPATCHERS = {"deepep": "auto", "hybridep": "auto"}
"""The recipe leaves kernels that may not be installed to the run: auto takes them where they can run."""
ALWAYS = ("parallel.world_size", "train.seq_len", "train.micro_batch_size", "train.global_batch_size")
"""Keys that a planned recipe says even where they are the default."""


def config_under(legality: Legality, mapping: Mapping) -> Config:
    """The recipe under a mapping. Stages that are not even are balanced, as they were priced.

    Raises:
        ConfigError: the runtime refuses it.
    """
    m = mapping
    cfg = legality.config_of(
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
            "dispatcher": DERIVED_DISPATCHERS.get(m.dispatcher, m.dispatcher),
            "recompute": m.recompute,
            "overlap": m.overlap,
            "offload": tuple(part for part in m.offload if part != OPTIMIZER),
            "moments": HOST if OPTIMIZER in m.offload else "none",
        }
    )
    uneven = cfg.model.num_layers % (m.pp * m.vpp) or cfg.model.mtp_layers
    if m.pp > 1 and (uneven or cfg.parallel.pipeline_layout == "auto"):
        # The very stages that were priced: "auto" also looks at what tp and ep leave of the weights.
        parts = RecipeSplit(legality.base, shape_of(cfg.model)).parts(m.pp * m.vpp)
        cfg = replace(cfg, parallel=replace(cfg.parallel, pipeline_layout=write_layout(parts)))
    if cfg.train.offload:
        # Memory was counted as if all that leaves had left.
        cfg = replace(cfg, train=replace(cfg.train, offload_waits=True))
    check_config(cfg)
    return cfg


def write_recipe(cfg: Config, path: Path, remarks: list[str]) -> None:
    """Write a recipe, and make sure that it says what the config says.

    Args:
        cfg: a config that passes `check_config`.
        path: the file, ending in .toml.
        remarks: comments at its top.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path.suffix != ".toml":
        raise ConfigError(f"--recipe {path} must end in .toml")
    try:
        path.write_text(recipe_text(cfg, remarks), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--recipe {path} cannot be written: {error.strerror}") from None
    check_config(load_config(path))


def recipe_text(cfg: Config, remarks: list[str]) -> str:
    """The keys that differ from the defaults, or from the preset."""
    lines = [f"# {remark}".rstrip() for remark in remarks]
    for section in sections():
        lines += _section_lines(cfg, section)
    return "\n".join(lines) + "\n"


def _section_lines(cfg: Config, section: str) -> list[str]:
    part = getattr(cfg, section)
    preset = load_preset(cfg.model.preset) if section == "model" and cfg.model.preset else {}
    lines = []
    for key in part.__dataclass_fields__:
        value = getattr(part, key)
        if f"{section}.{key}" in ALWAYS or value != preset.get(key, default_of(section, key)):
            lines.append(f"{key} = {_toml(value)}")
    return ["", f"[{section}]", *lines] if lines else []


def _toml(value: Any) -> str:
    """Strings, numbers, booleans and lists of them are spelled in TOML as in JSON."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
