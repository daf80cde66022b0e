"""Check that a run's initial weights match its model. Torch-free."""

from pathlib import Path

from moefold.checkpoint.checkpoint_dir import locate_checkpoint, model_differences, model_sizes, read_meta
from moefold.config.load import config_from_dict
from moefold.config.schema import Config, ModelConfig
from moefold.config.suggestions import download_advice
from moefold.convert.hf_config import is_hf_folder, read_model_config
from moefold.convert.upcycle_check import upcycle_unsupported_reason
from moefold.errors import ConfigError
from moefold.validate.config import check_model

DERIVED_MODEL_KEYS = ("preset", "layer_kinds")


def resolve_weights_folder(path: Path) -> Path:
    """Resolve a user's path to a Hugging Face folder, a checkpoint, or the newest checkpoint of a run.

    Raises:
        ConfigError: the path is none of these.
    """
    if is_hf_folder(path):
        return path
    if not path.exists() and (advice := download_advice(str(path))):
        raise ConfigError(f"{str(path)!r} does not exist; {advice}")
    return locate_checkpoint(path)


def read_model(path: Path) -> ModelConfig:
    """Return the section [model] of the weights at a user's path.

    Raises:
        ConfigError: there are no weights, or their kind or version is unknown.
    """
    path = resolve_weights_folder(path)
    if is_hf_folder(path):
        return read_model_config(path)
    keys = {key: value for key, value in read_meta(path).model.items() if key not in DERIVED_MODEL_KEYS}
    try:
        model = config_from_dict({"model": keys}).model
        check_model(model)
    except ConfigError as error:
        raise ConfigError(f"checkpoint {str(path)!r} has a model that this version does not know: {error}") from None
    return model


def init_from_unsupported_reason(cfg: Config, path: Path) -> str:
    """Return why a recipe cannot start with the weights of a folder; empty if it can.

    Raises:
        ConfigError: the folder holds no weights that moefold knows.
    """
    if not path.is_dir():
        advice = download_advice(str(path)) if not path.exists() else ""
        return "it does not exist or is no folder" + (f"; {advice}" if advice else "")
    weights_model = read_model(path)
    if cfg.model.upcycle_from:
        return upcycle_unsupported_reason(weights_model, cfg.model)
    different = model_differences(model_sizes(weights_model), cfg.model)
    return f"it is of another model: {different}; give the recipe its sizes" if different else ""
