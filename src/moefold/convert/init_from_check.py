"""Whether the weights that a run is to start with are of its model. Torch-free."""

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
    """The folder that a user means by a path: of Hugging Face, a checkpoint, or the newest one of a run.

    Raises:
        ConfigError: it is none of these.
    """
    if is_hf_folder(path):
        return path
    if not path.exists() and (advice := download_advice(str(path))):
        raise ConfigError(f"{str(path)!r} does not exist; {advice}")
    return locate_checkpoint(path)


def read_model(path: Path) -> ModelConfig:
    """The section [model] of the folder that a user means by a path.

    Raises:
        ConfigError: there is none, or of a kind or version that this one does not know.
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
    """Why a recipe cannot start with the weights of a folder; empty if it can.

    Raises:
        ConfigError: the folder holds no weights that moefold knows.
    """
    if not path.is_dir():
        advice = download_advice(str(path)) if not path.exists() else ""
        return "it does not exist or is no folder" + (f"; {advice}" if advice else "")
    theirs = read_model(path)
    if cfg.model.upcycle_from:
        return upcycle_unsupported_reason(theirs, cfg.model)
    different = model_differences(model_sizes(theirs), cfg.model)
    return f"it is of another model: {different}; give the recipe its sizes" if different else ""
