"""Model card of an exported folder, from the checkpoint and the run that wrote it.

It depends only on files of the run, so that two exports are equal, and names no path of this machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold import __version__
from moefold.checkpoint.checkpoint_meta import CheckpointMeta, read_meta
from moefold.checkpoint.find_checkpoint import locate_checkpoint
from moefold.config.base.part import without_source
from moefold.config.base.part_registry import built_in_kinds
from moefold.config.keys.paths import default_of, part_keys
from moefold.config.model import ModelConfig
from moefold.config.schema import config_to_dict
from moefold.config.tables.build import build_part
from moefold.config.tables.toml_text import minimal_form, toml_value
from moefold.convert.families.hf_config import is_hf_folder
from moefold.convert.preflight import read_model
from moefold.convert.run_config import find_run_config
from moefold.cost.flops import count_parameters
from moefold.data.input_paths import CONFIG_FILE
from moefold.errors import ConfigError
from moefold.hub import CARD_FILE, is_hub_url, parse_hub_url, repo_of_snapshot
from moefold.metrics.reader import read_records
from moefold.remote_path import is_remote
from moefold.topology.layout import DEGREES

CARD_SECTIONS = ("parallel", "moe", "train", "align", "rl", "rollout", "lora")
"""Sections of the recipe whose differences from the defaults a card shows."""
ALWAYS_SHOWN = ("train.seq_len", "train.global_batch_size", "train.lr", "train.optimizer")
MAX_ANCESTORS = 16
"""Maximum number of runs in the chain of initial weights."""
_LOAD_MODEL = """\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH_OR_NAME_OF_THIS_FOLDER")"""
_LOAD_ADAPTERS = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("BASE_MODEL")
model = PeftModel.from_pretrained(base, "PATH_OR_NAME_OF_THIS_FOLDER")"""
_HOW_TO_LOAD = """\
## How to load it

```python
{}
```

`moefold generate`, `moefold serve` and `moefold import` read the folder as well.

Before you publish this model, add the data it was trained on, its evaluation, its limits and its licence.
"""


@dataclass(frozen=True)
class TrainingRun:
    """Known facts of the run that trained the weights."""

    meta: CheckpointMeta
    settings: Mapping[str, Mapping[str, Any]]
    """Keys of the run's recipe by section, or empty if config.json is not next to the checkpoint."""
    temperature: float | None
    """Temperature of the run's rollouts, or None without reinforcement learning."""
    loss: float | None
    """Training loss of the checkpoint's step, or None if it is unknown."""
    eval_loss: tuple[int, float] | None
    """Step and value of the last evaluation before or at the checkpoint."""
    base_model: str
    """ORG/NAME on the hub of the first run's initial weights, or empty if unknown, or if there were none."""


def read_training_run(checkpoint: Path, model: ModelConfig, meta: CheckpointMeta) -> TrainingRun:
    """Collect the known facts of the run that wrote a checkpoint. Raise ConfigError if a file of the run is damaged."""
    cfg = find_run_config(checkpoint, model)
    loss, eval_loss = None, None
    run_dir = checkpoint.parent.parent
    # The folder above a remote folder is not the folder of a run.
    if not is_remote(checkpoint) and (run_dir / CONFIG_FILE).is_file():
        for record in read_records(run_dir):
            step = record["step"]
            if step > meta.step:
                continue
            loss = record["loss"] if step == meta.step and isinstance(record.get("loss"), float) else loss
            if isinstance(record.get("eval_loss"), float):
                eval_loss = (step, record["eval_loss"])
    base = "" if cfg is None else _base_model(cfg.checkpoint.start)
    settings = {} if cfg is None else config_to_dict(cfg)
    temperature = cfg.rollout.temperature if cfg is not None and cfg.is_rl else None
    return TrainingRun(meta, settings, temperature, loss, eval_loss, base)


def _base_model(start: str) -> str:
    """Return the hub name of a run's initial weights, following earlier runs, or empty if unknown."""
    for _ in range(MAX_ANCESTORS):
        if is_hub_url(start):
            return parse_hub_url(start, "model").repo
        if repo := repo_of_snapshot(start):
            return repo
        path = Path(start)
        try:
            if not start or is_remote(start) or not path.is_dir() or is_hf_folder(path):
                return ""
            checkpoint = locate_checkpoint(path)
            if origin := read_meta(checkpoint).origin:
                # "import of FOLDER" or "upcycle of FOLDER".
                start = origin.partition(" of ")[2]
                continue
            cfg = find_run_config(checkpoint, read_model(checkpoint))
        except ConfigError:
            # The earlier weights are missing, or were replaced: their source is unknown.
            return ""
        start = "" if cfg is None else cfg.checkpoint.start
    return ""


def write_model_card(
    folder: Path, family: str, model: ModelConfig, run: TrainingRun, *, is_adapter: bool = False
) -> None:
    """Write README.md, the model card: the sizes, the training and the loading of the model."""
    header = [
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags:",
        "- moefold",
    ]
    header += ["- mixture-of-experts"] if model.ffn.moe.num_experts else []
    header += [f"base_model: {run.base_model}"] if run.base_model else []
    count = count_parameters(model)
    sizes = f"{count.total:,} parameters"
    if model.ffn.moe.num_experts:
        experts = model.ffn.moe
        sizes += f", {count.active:,} of them active for each token ({experts.top_k} of {experts.num_experts} experts)"
    lines = [
        f"# {f'Low-rank adapters of a {family} model' if is_adapter else f'{family} model'} trained with moefold",
        "",
        f"- architecture: `{family}`, {model.num_layers} layers, hidden size {model.hidden_size:,}",
        f"- size: {sizes}",
        *([f"- base model: {run.base_model}"] if run.base_model else []),
        *_training_lines(run),
        "",
    ]
    if settings := _settings_text(run.settings):
        text = f"With moefold {__version__}; settings that differ from its defaults, and the main ones:"
        lines += ["## How it was trained", "", text, "", "```toml", *settings, "```", ""]
    lines += [_HOW_TO_LOAD.format(_LOAD_ADAPTERS if is_adapter else _LOAD_MODEL)]
    (folder / CARD_FILE).write_text("\n".join(["---", *header, "---", *lines]), encoding="utf-8")


def _training_lines(run: TrainingRun) -> list[str]:
    meta = run.meta
    lines = [f"- training: {meta.step:,} optimizer steps, {meta.tokens:,} tokens"]
    if run.loss is not None:
        lines.append(f"- training loss of the last step: {run.loss:.4f}")
    if run.eval_loss is not None:
        lines.append(f"- loss on held-out data: {run.eval_loss[1]:.4f}, after step {run.eval_loss[0]:,}")
    names = ("world_size", *DEGREES)
    mapping = ", ".join(f"{name}={meta.parallel[name]}" for name in names if name in meta.parallel)
    return [*lines, f"- parallel mapping: {mapping}{f', {meta.dtype}' if meta.dtype else ''}"] if mapping else lines


def _settings_text(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the settings that differ from the defaults as TOML, without texts with a slash, which may be paths."""
    lines: list[str] = []
    for section in CARD_SECTIONS if settings else ():
        short = {key: _shortest(f"{section}.{key}", value) for key, value in settings[section].items()}
        entries = [
            f"{key} = {toml_value(value)}"
            for key, value in short.items()
            if (toml_value(value) != toml_value(default_of(section, key)) or f"{section}.{key}" in ALWAYS_SHOWN)
            and not _may_be_path(value)
        ]
        lines += [f"[{section}]", *entries] if entries else []
    return lines


def _shortest(name: str, value: Any) -> Any:
    """Return the value of a key, a part without its defaults and its file."""
    if not isinstance(value, dict):
        return value
    is_ours = value.get("kind") in built_in_kinds(part_keys()[name])
    return minimal_form(build_part(name, value)) if is_ours else without_source(value)


def _may_be_path(value: Any) -> bool:
    entries = value if isinstance(value, list) else [value]
    return any(isinstance(entry, str) and ("/" in entry or "\\" in entry) for entry in entries)
