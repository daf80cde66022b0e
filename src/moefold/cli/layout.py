"""`moefold layout`: show the position of each rank in both views, and its stage, as table, JSON or picture."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moefold.cli.command_parser import CommandParser
from moefold.config.base.limits import MAX_RANKS, parse_count
from moefold.config.keys.suggestions import DERIVED
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.cost.stage_balance import plan_stages, stage_cost
from moefold.errors import ConfigError, raise_all
from moefold.host.output_file import check_writable, refuse_existing
from moefold.message_text import closest_match
from moefold.recipe import load_config
from moefold.terminal import print_escaped
from moefold.topology.layout import DEGREES, Layout, fold_mapping
from moefold.topology.pipeline_layout import LayoutSyntaxError, StagePlan, expand_layout
from moefold.validate.parallel import DEGREE_RULES
from moefold.validate.pipeline import validate_pipeline_layout, validate_schedule

PIPELINE_KEYS = ("schedule", "schedule.path", "virtual_stages", "pipeline_layout")
FOLD_KEYS = ("world_size", *DEGREES, "order", "moe_order")
NODE_KEY = "gpus_per_node"
LEGAL_KEYS = (*FOLD_KEYS, *PIPELINE_KEYS, NODE_KEY)
DEFAULT_GPUS_PER_NODE = 8
MAX_SHOWN_CHARS = 60
"""Characters of a wrong value that a message repeats."""

EPILOG = f"""keys: {", ".join(LEGAL_KEYS)}
  degrees are 1 where they are left out, {NODE_KEY} is {DEFAULT_GPUS_PER_NODE}; dp and edp follow from world_size

examples:
  moefold layout world_size=8 tp=2 cp=2 pp=2 ep=4
  moefold layout recipes/quickstart.toml tp=4 cp=1 --picture layout.png
  moefold layout recipes/quickstart.toml pipeline_layout=auto
  moefold layout world_size=4 pp=4 'pipeline_layout=Et*3|t*4|t*4|t*3L'
"""


def run(argv: list[str]) -> int:
    """Print the layout that the arguments describe."""
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.picture is not None:
        check_writable("--picture", arguments.picture)
        refuse_existing("--picture", arguments.picture, force=arguments.force)
    cfg, gpus_per_node, has_recipe = parse_arguments(arguments.words)
    layout = fold_mapping(cfg.parallel)
    pipeline = stages_from_config(cfg) if layout.pp > 1 and (has_recipe or cfg.parallel.pipeline_layout) else None
    stages = pipeline.stages if pipeline is not None and has_recipe else ()
    costs = [stage_cost(cfg, stage.parts) for stage in stages] or None
    if arguments.picture is not None:
        from moefold.cli.layout_picture import save_picture

        model = cfg.model if has_recipe else None
        save_picture(layout, gpus_per_node, arguments.picture, pipeline, model, costs)
        print_escaped(f"wrote {arguments.picture}", file=sys.stderr)
    if arguments.json:
        check_listable(layout)
        print(json.dumps(layout.as_dict | ({} if pipeline is None else stages_as_dict(pipeline))))
    else:
        from moefold.cli.layout_table import print_layout
        from moefold.console import PrintableConsole

        print_layout(PrintableConsole(), layout, gpus_per_node)
        if pipeline is not None:
            from moefold.cli.layout_table import print_stages

            print_stages(PrintableConsole(), pipeline, costs)
    return 0


def check_listable(layout: Layout) -> None:
    """Check that the ranks are few enough to list all groups. Raise ConfigError if there are too many ranks."""
    from moefold.cli.layout_table import MAX_LISTED_RANKS

    if layout.world_size > MAX_LISTED_RANKS:
        raise ConfigError(
            f"world_size={layout.world_size} must be at most {MAX_LISTED_RANKS} for --json, which lists every rank of "
            "every group; leave --json out for the pattern, which repeats itself"
        )


def parse_arguments(arguments: Sequence[str]) -> tuple[Config, int, bool]:
    """Parse `key=value` or `parallel.key=value`, after an optional recipe.

    Returns:
        The config, the number of ranks per node, and whether a recipe describes the model.
    """
    recipe = Path(arguments[0]) if arguments and "=" not in arguments[0] else None
    gpus_per_node = DEFAULT_GPUS_PER_NODE
    overrides = []
    for word in arguments if recipe is None else arguments[1:]:
        key, value = _parse_key_value(word)
        if key == NODE_KEY:
            gpus_per_node = _parse_node_size(value)
        else:
            overrides.append(f"parallel.{key}={value}")
    cfg = load_config(recipe, overrides)
    text = cfg.parallel.pipeline_layout
    if recipe is None and text == "auto":
        raise ConfigError("pipeline_layout=auto balances a model: name a recipe first")
    if recipe is None and text:
        cfg = replace(cfg, model=_model_from_pipeline_layout(cfg.model, text))
    return cfg, gpus_per_node, recipe is not None


def stages_from_config(cfg: Config) -> StagePlan:
    """Return the pipeline stages of a config. Raise ConfigError if the schedule, the layout or its file is wrong."""
    wrong_pp = DEGREE_RULES["pp"](cfg, cfg.parallel.pp)
    raise_all([*validate_schedule(cfg.parallel), *wrong_pp, *validate_pipeline_layout(cfg.model, cfg.parallel)])
    return plan_stages(cfg)


def stages_as_dict(plan: StagePlan) -> dict[str, object]:
    """Return the stages in the form that `moefold layout --json` prints."""
    return {
        "pipeline_layout": plan.layout,
        "stages": [
            {
                "stage": stage.index,
                "pp_rank": stage.pp_rank,
                "embedding": stage.parts.has_embedding,
                "layers": list(stage.parts.layers),
                "mtp_layers": stage.parts.num_mtp_layers,
                "loss": stage.parts.has_loss,
            }
            for stage in plan.stages
        ],
    }


def _model_from_pipeline_layout(model: ModelConfig, text: str) -> ModelConfig:
    """Return the model with the number of layers in a pipeline layout. Their sizes are unknown and unused."""
    try:
        kinds = [part.kind for part in expand_layout(text)]
    except LayoutSyntaxError as error:
        raise ConfigError(f"pipeline_layout={text!r}: {error}") from None
    return replace(model, layers=max(1, kinds.count("t")), mtp_layers=kinds.count("m"))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold layout", "Show the position of each rank in the attention view and in the MoE view.", EPILOG
    )
    parser.settings("a recipe, then keys that override it", "RECIPE.toml | key=value", "words", "+")
    parser.flag("--json", "print the rank groups of both views as one JSON object")
    parser.option("--picture", Path, "FILE", "also draw views and stages into FILE (.png, .svg or .pdf)")
    parser.flag("--force", "replace files that exist")
    return parser


def _parse_key_value(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    key = name.strip().removeprefix("parallel.")
    legal = f"the keys are {', '.join(LEGAL_KEYS)}"
    if not equals:
        raise ConfigError(f"{word!r} must be key=value, such as tp=2 (a recipe comes first); {legal}")
    if f"parallel.{key}" in DERIVED:
        raise ConfigError(f"{word!r}: {DERIVED[f'parallel.{key}']}")
    if key not in LEGAL_KEYS:
        guess = closest_match(key, LEGAL_KEYS, cutoff=0.5)
        raise ConfigError(f"{word!r} is not a key of a layout{f'; did you mean {guess}?' if guess else ''}; {legal}")
    return key, value.strip()


def _parse_node_size(text: str) -> int:
    size = parse_count(text)
    if size is None or not 1 <= size <= MAX_RANKS:
        raise ConfigError(
            f"{NODE_KEY}={text[:MAX_SHOWN_CHARS]} must be an integer of 1 to {MAX_RANKS}; leave it out for "
            f"{DEFAULT_GPUS_PER_NODE}"
        )
    return size
