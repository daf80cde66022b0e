"""Settings of the run that wrote a checkpoint, from the config.json next to it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from moefold.bounded_read import MAX_CONFIG_BYTES, read_json_object
from moefold.checkpoint.checkpoint_meta import model_sizes
from moefold.checkpoint.model_differences import model_differences
from moefold.config.base.plugins import MissingPartError
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.upgrade.recipe import upgraded
from moefold.data.input_paths import CONFIG_FILE
from moefold.errors import ConfigError
from moefold.message_text import Setting
from moefold.validate.config import check_model


def read_settings(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file. Return {} if the file does not exist. Raise ConfigError for other content."""
    try:
        return read_json_object(path, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); repair it or copy it again") from error


def config_of_run(option: str, run_dir: Path) -> Config:
    """Return the config of the run that an option names.

    Raises:
        ConfigError: the folder holds no run, or another version's recipe.
    """
    path = run_dir / CONFIG_FILE
    tree = read_settings(path)
    if not tree:
        setting = Setting(option, str(run_dir))
        raise ConfigError(f"{setting} holds no run: {path} is missing; name the run.dir of a training run")
    return parse_run_config(tree, path)


def find_run_config(path: Path, model: ModelConfig, sections: Collection[str] = ()) -> Config | None:
    """Return the config of the run that wrote a checkpoint, if a parent folder contains it and the model matches.

    Args:
        sections: the sections to read, [model] among them. The parts of others need not be there. Empty: all.
    """
    for folder in (path.parent.parent, path.parent):
        tree = read_settings(folder / CONFIG_FILE)
        if "model" in tree and "run" in tree:
            wanted = {name: keys for name, keys in tree.items() if not sections or name in sections}
            cfg = parse_run_config(wanted, folder / CONFIG_FILE)
            if not model_differences(model_sizes(model), cfg.model):
                return cfg
    return None


def missing_parts(path: Path, error: MissingPartError) -> str:
    """Return the missing parts of a checkpoint: all missing parts of its run, if the run's config is available."""
    try:
        config_from_dict(upgraded(read_settings(path.parent.parent / CONFIG_FILE))[0])
    except ConfigError as run_error:
        error = run_error if isinstance(run_error, MissingPartError) else error
    return str(error)


def parse_run_config(tree: Mapping[str, Any], file: Path) -> Config:
    """Parse the settings of a run from a file. Raise ConfigError if they are not settings of this version."""
    try:
        cfg = config_from_dict(upgraded(tree)[0])
        check_model(cfg.model)
    except MissingPartError as error:
        text = error if file.name == CONFIG_FILE else missing_parts(file.parent, error)
        raise ConfigError(f"{file}: {text}") from error
    except ConfigError as error:
        raise ConfigError(f"{file} is damaged, or of another version of moefold: {error}") from error
    return cfg
