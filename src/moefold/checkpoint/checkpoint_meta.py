"""Read and write the description of a checkpoint, `moefold.json`, in the formats of this and earlier versions."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moefold.bounded_read import MAX_DESCRIPTION_BYTES, format_json, read_json
from moefold.checkpoint.manifest import regular_file
from moefold.config.base.layer_words import parse_layers, spell_layers
from moefold.config.base.limits import FORMAT
from moefold.config.base.part import keys_of, without_source
from moefold.config.base.part_registry import built_in_kinds, find_part
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.model import ModelConfig
from moefold.data.input_paths import check_data_file_names
from moefold.errors import ConfigError
from moefold.optim.lr_schedule import check_schedule_settings

META_FILE = "moefold.json"

States = dict[str, dict[str, Any]]
"""State of each object of a run by its name, as JSON values: see `run_states.RunStates`."""


def counted(*, step: int = 0, samples: int = 0, tokens: int = 0) -> States:
    """Return the states of a run that consist only of its progress, in which every step has updated the weights."""
    position = {"step": step, "samples": samples, "tokens": tokens, "skipped": []}
    return {"position": position, "weights": {"moment_updates": step}}


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """State of a run after a step. The properties are for commands. Each object loads its own state."""

    states: States

    def state_of(self, name: str) -> dict[str, Any]:
        """Return the state of an object, or empty if there is none."""
        return self.states.get(name, {})

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return int(self.state_of("position")["step"])

    @property
    def samples(self) -> int:
        """Training samples consumed."""
        return int(self.state_of("position")["samples"])

    @property
    def tokens(self) -> int:
        """Tokens of applied updates, without padding. Without `tokens_consumed`: with padding and skipped updates."""
        return int(self.state_of("position")["tokens"])

    @property
    def data_files(self) -> dict[str, str]:
        """Fingerprints (`data.fingerprint`) of the data files at the start of the run, or empty if none were taken."""
        return self.state_of("data").get("data_files", {})

    @property
    def data_tokens(self) -> dict[str, int]:
        """Number of tokens in each token file at the start of the run. Empty for other data, and in old checkpoints."""
        return self.state_of("data").get("data_tokens", {})

    @property
    def data_lost(self) -> dict[str, str]:
        """Token files dropped by the run, each with the reason."""
        return self.state_of("data").get("data_lost", {})

    @property
    def lora(self) -> dict[str, Any]:
        """Settings of adapters (`adapter_settings`) if only these were trained, or empty if all weights are saved."""
        return self.state_of("lora")

    @property
    def eval_loss(self) -> float | None:
        """Held-out loss of these weights, or None if they were not evaluated, or it is not finite."""
        return self.state_of("evaluation").get("eval_loss")

    @property
    def is_evaluated(self) -> bool:
        """False if a signal has prevented the evaluation of this step: a resumed run makes it up."""
        return bool(self.state_of("evaluation").get("is_evaluated", True))


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta(TrainState):
    """Metadata of a checkpoint, stored next to the tensors in `META_FILE`."""

    format: int
    order: dict[str, Any]
    """Settings that map sample numbers to text: `sample_order`."""
    model: dict[str, Any]
    parallel: dict[str, Any]
    """The parallel mapping that wrote the checkpoint, for information: any other mapping can load it."""
    dtype: str = ""
    """run.dtype of the run that wrote it, or empty if no run did, or in checkpoints of old versions."""
    origin: str = ""
    """Source of weights that no run trained: "import" or "upcycle" and a folder. Such checkpoints have no moments."""


def model_sizes(model: ModelConfig) -> dict[str, Any]:
    """Return the section [model] as JSON values, with its layers in the shortest form."""
    sizes: dict[str, Any] = json.loads(
        json.dumps({key: without_source(value, "file") for key, value in keys_of(model).items()})
    )
    return sizes | {"layers": spell_layers(model.layer_words)}


def method_of_samples(method: Any) -> Any:
    """Return the settings of a method of alignment, a kind or a table, that determine samples.

    The settings of a built-in preference loss may change between the steps of a run.
    """
    group = AlignmentPart.group
    kind = method.get("kind") if isinstance(method, dict) else method
    is_loss = kind in built_in_kinds(group) and not find_part(group, kind)().reward_column
    return kind if is_loss else method


def write_meta(path: Path, meta: CheckpointMeta) -> None:
    """Write `META_FILE` of a checkpoint folder. Raise ValueError with the reason if `read_meta` cannot read it."""
    (path / META_FILE).write_text(format_json(asdict(meta), MAX_DESCRIPTION_BYTES), encoding="utf-8")


def read_meta(path: Path) -> CheckpointMeta:
    """Read `META_FILE` of a checkpoint folder.

    Raises:
        ConfigError: the folder is not a moefold checkpoint, or has a format that this version cannot read.
    """
    try:
        fields = read_json(regular_file(path, META_FILE), MAX_DESCRIPTION_BYTES)
        newer = fields.get("format") if isinstance(fields, dict) else 0
        # A later version wrote other fields.
        if type(newer) is not int or newer <= FORMAT:
            meta = CheckpointMeta(**_current_fields(fields))
            _check_meta(meta)
            return meta
    except FileNotFoundError:
        raise ConfigError(f"checkpoint {str(path)!r} is not a moefold checkpoint: it has no {META_FILE}") from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"checkpoint {str(path)!r} has a broken {META_FILE}: {error}") from None
    raise ConfigError(
        f"checkpoint {str(path)!r} has format {newer}, and this version reads up to {FORMAT}; update moefold"
    )


def _current_fields(fields: Any) -> dict[str, Any]:
    """Return the fields of a `META_FILE`, with flat keys of earlier versions moved to tables.

    Raises:
        TypeError: the file has other contents.
    """
    from moefold.config.upgrade.recipe import upgraded, upgraded_keys

    if not isinstance(fields, dict):
        raise TypeError("it has no fields")
    current = dict(fields) if "states" in fields else _states_by_object(fields)
    if fields.get("format", 1) == 1:
        current["format"] = FORMAT
    if isinstance(model := fields.get("model"), dict):
        current["model"] = upgraded({"model": model})[0]["model"]
    if isinstance(order := fields.get("order"), dict) and AlignmentPart.key in order:
        align = upgraded_keys({key: value for key, value in order.items() if key.startswith("align.")})
        align[AlignmentPart.key] = method_of_samples(align[AlignmentPart.key])
        current["order"] = {key: value for key, value in order.items() if not key.startswith("align.")} | align
    return current


_FORMER_STATES = {
    "position": ("step", "samples", "tokens", "tokens_consumed"),
    "weights": ("moment_updates",),
    "evaluation": ("eval_loss",),
    "replica_check": ("checked_step",),
    "data": ("stream", "data_files", "data_tokens", "data_lost", "rl"),
}
"""Fields of checkpoints up to 0.2.0 by the object whose state they are now."""


def _states_by_object(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a checkpoint up to 0.2.0, with the state of each object moved to its name in "states".

    Raises:
        TypeError: a field has another type.
    """
    from moefold.config.upgrade.recipe import upgraded_keys

    flat = {name: value for name, value in fields.items() if value is not None}
    states = {name: {key: flat.pop(key) for key in keys if key in flat} for name, keys in _FORMER_STATES.items()}
    states |= {name: flat.pop(name) for name in ("guard", "schedule", "lora", "sites") if name in flat}
    for name in ("guard", "schedule"):
        if not isinstance(states.get(name, {}), dict):
            raise TypeError(f"{name} is not an object")
    guard = states.get("guard", {})
    states["position"]["skipped"] = guard.get("left_out", [])
    states["weights"].setdefault("moment_updates", states["position"].get("step", 0) - guard.get("num_skipped", 0))
    return flat | {"states": states | {"schedule": upgraded_keys(states.get("schedule", {}))}}


def _check_meta(meta: CheckpointMeta) -> None:
    """Raise TypeError for values of types that a run never writes. The contents of the sections are checked later."""
    for name, state in {"states": meta.states, **(meta.states if isinstance(meta.states, dict) else {})}.items():
        if not isinstance(state, dict):
            raise TypeError(f"{name} is not an object")
    for name, type_, words in _FIELD_TYPES:
        if not isinstance(getattr(meta, name), type_):
            raise TypeError(f"{name} is not {words}")
    for name, check in _STATE_CHECKS.items():
        check(meta.state_of(name))
    _check_model(meta.model)
    if not all(type(degree) in (int, float, str, bool) for degree in meta.parallel.values()):
        raise TypeError("parallel is not a mapping of ranks")
    _check_counts(meta)
    _check_data_files(meta)


_FIELD_TYPES = (
    *((name, dict, "an object") for name in ("order", "model", "parallel", "data_files", "data_tokens", "data_lost")),
    *((name, str, "a text") for name in ("dtype", "origin")),
)


def _check_evaluation(state: Mapping[str, Any]) -> None:
    loss = state.get("eval_loss")
    if loss is not None and not (type(loss) in (int, float) and math.isfinite(loss)):
        raise TypeError(f"eval_loss is {loss!r}")


def _check_sites(state: Mapping[str, Any]) -> None:
    if not all(type(value) is int for value in state.values()):
        raise TypeError(f"sites is {state!r}")


def _check_rollouts(state: Mapping[str, Any]) -> None:
    if (rl := state.get("rl")) is not None:
        from moefold.rl.plateau import Plateau
        from moefold.rl.rollout_table import table_headers

        Plateau.from_json(rl)
        table_headers(rl)


def _check_adapters(state: Mapping[str, Any]) -> None:
    if state:
        from moefold.checkpoint.adapter_settings import check_adapter_settings

        check_adapter_settings(state)


_STATE_CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "evaluation": _check_evaluation,
    "sites": _check_sites,
    "data": _check_rollouts,
    "lora": _check_adapters,
    "schedule": check_schedule_settings,
}
"""Checks of states by the name in `RunStates`. A checkpoint is read without the objects that own its states."""


def _check_model(sizes: dict[str, Any]) -> None:
    try:
        model_of(sizes)
    except ConfigError as error:
        raise TypeError("; ".join(map(str.strip, str(error).splitlines()))) from None
    if sizes and "layers" not in sizes:
        raise TypeError("model has no layers")
    layers = sizes.get("layers", ModelConfig.layers)
    try:
        parse_layers(layers)
    except ValueError as error:
        raise TypeError(f"model.layers={layers!r} {error}") from None


def _check_counts(meta: CheckpointMeta) -> None:
    position = meta.state_of("position")
    counts = {name: position.get(name) for name in ("step", "samples", "tokens")}
    if meta.format != FORMAT:
        raise TypeError(f"format is {meta.format!r}")
    optional = {"checked_step": "replica_check", "moment_updates": "weights", "tokens_consumed": "position"}
    counts |= {name: meta.state_of(owner).get(name, 0) for name, owner in optional.items()}
    degrees = {f"parallel.{name}": meta.parallel.get(name, 1) for name in ("world_size", "tp", "cp", "pp")}
    for minimum, numbers in ((0, counts), (1, degrees | {"order.seq_len": meta.order.get("seq_len", 1)})):
        for name, value in numbers.items():
            if type(value) is not int or not minimum <= value < 2**63:
                raise TypeError(f"{name} is {value!r}")
    if meta.step and not meta.origin and "moment_updates" not in meta.state_of("weights"):
        raise TypeError("it has no weights.moment_updates: the number of updates that the optimizer has counted")


def _check_data_files(meta: CheckpointMeta) -> None:
    if not all(type(count) is int and count > 0 for count in meta.data_tokens.values()):
        raise TypeError("data_tokens are not counts")
    if not all(isinstance(words, str) for words in [*meta.data_files.values(), *meta.data_lost.values()]):
        raise TypeError("data_files or data_lost hold no text")
    check_data_file_names(meta.order.get("path"), meta.data_files, meta.data_tokens, meta.data_lost)


def model_of(sizes: Mapping[str, Any]) -> ModelConfig:
    """Return a stored model with its layers. Parts from outside of this package get their defaults.

    Raises:
        ConfigError: the values are not a model.
    """
    # A training process does not import the loader of recipes.
    from moefold.config.load import config_from_dict
    from moefold.config.tables.part_class import without_outside_parts

    fields = {key: value for key, value in sizes.items() if key in ModelConfig.__dataclass_fields__}
    return config_from_dict({"model": without_outside_parts("model", fields) | {"preset": "", "mtp_layers": 0}}).model
