"""The checkpoint folder: list, describe, validate, commit and remove checkpoints; choose the one to resume. Torch-free.

A checkpoint is written under a temporary name and renamed once complete, so `step-000100` is complete or absent. A
remote folder has no rename of folders: a checkpoint is written under its name, its manifest last, and counts as one
once it has the manifest.
"""

import json
import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.bounded_read import MAX_CONFIG_BYTES, MAX_DESCRIPTION_BYTES, format_json, read_json
from moefold.checkpoint.manifest import MANIFEST_FILE, read_manifest, regular_file, validate_hashes, validate_sizes
from moefold.config.bounds import keys_with
from moefold.config.checkpoint import CheckpointConfig
from moefold.config.data import DataConfig
from moefold.config.field import SAME_TENSORS
from moefold.config.find import built_in_kinds, find_part
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.layer_words import parse_layers, spell_layers
from moefold.config.model import ModelConfig, has_dense_layers, has_moe_layers
from moefold.config.part import keys_of, without_source
from moefold.config.part_table import NONE, known_parts
from moefold.config.rl import RLConfig
from moefold.config.run import RunConfig
from moefold.config.schema import Config
from moefold.config.suggestions import nearest_numbers, part_keys, tables
from moefold.config.tree import value_at
from moefold.config.upgrade import FORMAT, flat_settings, states_by_object, upgraded, upgraded_keys
from moefold.data.fingerprint import LOCATION_KEYS, comparable, data_files, names_now, unmatched_locations
from moefold.data.input_paths import SKIPPED, check_data_file_names, file_differences, separate_dropped_files
from moefold.errors import ConfigError, format_list
from moefold.optim.lr_schedule import check_schedule_settings
from moefold.remote_path import HUB_SCHEME, RemotePath, is_remote, to_path
from moefold.topology.layout import divisors

if TYPE_CHECKING:
    from moefold.comm.groups import World


META_FILE = "moefold.json"
_STEP_FOLDER_PATTERN = re.compile(r"step-(\d{6,})")


States = dict[str, dict[str, Any]]
"""State of each object of a run by its name, as JSON values: see `save_load.RunStates`."""


def counted(*, step: int = 0, samples: int = 0, tokens: int = 0) -> States:
    """Return the states of a run of which only its progress is known."""
    return {"position": {"step": step, "samples": samples, "tokens": tokens, "skipped": []}}


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """State of a run after a step. The properties are what commands read of it; whoever owns a state loads it."""

    states: States

    def state_of(self, name: str) -> dict[str, Any]:
        """Return the state of an object; empty if there is none."""
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
        """Tokens of applied updates, padding aside. Without `tokens_consumed`: with padding, and of skipped updates."""
        return int(self.state_of("position")["tokens"])

    @property
    def data_files(self) -> dict[str, str]:
        """Fingerprints of the data files at the start of the run, see `data.fingerprint`; empty if none were taken."""
        return self.state_of("data").get("data_files", {})

    @property
    def data_tokens(self) -> dict[str, int]:
        """Number of tokens in each token file at the start of the run; empty for other data, and in old checkpoints."""
        return self.state_of("data").get("data_tokens", {})

    @property
    def data_lost(self) -> dict[str, str]:
        """Token files that the run has dropped since, each with the reason."""
        return self.state_of("data").get("data_lost", {})

    @property
    def lora(self) -> dict[str, Any]:
        """Settings of adapters (`adapter_settings`) trained alone; empty if the checkpoint has all weights."""
        return self.state_of("lora")

    @property
    def eval_loss(self) -> float | None:
        """Held-out loss of these weights; None if they were not evaluated, or it is not finite."""
        return self.state_of("evaluation").get("eval_loss")


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
    """run.dtype of the run that wrote it; empty if no run did, or in checkpoints of old versions."""
    origin: str = ""
    """Source of weights that no run trained: "import" or "upcycle" and a folder. Such checkpoints have no moments."""

    @property
    def dp(self) -> int | None:
        """Data-parallel degree of the mapping that wrote the checkpoint; None if it is unknown."""
        try:
            world_size, tp, cp, pp = (int(self.parallel[name]) for name in ("world_size", "tp", "cp", "pp"))
        except KeyError:
            return None
        return world_size // (tp * cp * pp)


def checkpoint_folder(run: RunConfig, checkpoint: CheckpointConfig) -> Path:
    """Return the folder that contains the checkpoints of a run."""
    return to_path(checkpoint.dir) if checkpoint.dir else Path(run.dir) / "checkpoints"


def checkpoint_folder_key(checkpoint: CheckpointConfig) -> str:
    """Return the recipe key that determines `checkpoint_folder`."""
    return "checkpoint.dir" if checkpoint.dir else "run.dir"


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the complete checkpoint of a step."""
    return folder / f"step-{step:06d}"


def unfinished_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of a local folder to which a save was begun and not ended."""
    return list(folder.glob(".step-*.partial"))


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name, -1 for another name."""
    match = _STEP_FOLDER_PATTERN.fullmatch(path.name)
    return int(match[1]) if match else -1


def model_sizes(model: ModelConfig) -> dict[str, Any]:
    """Return the section [model] as JSON reads it, with its layers in the shortest words."""
    sizes: dict[str, Any] = json.loads(
        json.dumps({key: without_source(value, "file") for key, value in keys_of(model).items()})
    )
    return sizes | {"layers": spell_layers(model.layer_words)}


SampleOrder = dict[str, Any]
"""The settings that determine the text of sample n; the batch size is not among them."""


def sample_order(cfg: Config) -> SampleOrder:
    """Return the order of the samples of a recipe."""
    order = {"seed": cfg.run.seed, "seq_len": cfg.train.seq_len, **keys_of(cfg.data)}
    # Site n of several reads every count-th sample.
    order |= {"sites.count": cfg.sites.count, "sites.number": cfg.sites.number if cfg.sites.count > 1 else -1}
    order[AlignmentPart.key] = _method_of_samples(without_source(keys_of(cfg.align)["method"]))
    # The list of dropped files is compared instead.
    del order["corrupt"]
    plain: dict[str, Any] = json.loads(json.dumps(order))
    return plain


def _method_of_samples(method: Any) -> Any:
    """Return what samples depend on of a method of alignment, a kind or a table.

    The settings of a built-in preference loss may change between the steps of a run.
    """
    group = AlignmentPart.group
    kind = method.get("kind") if isinstance(method, dict) else method
    is_loss = kind in built_in_kinds(group) and not find_part(group, kind)().reward_column
    return kind if is_loss else method


def data_order_change(
    meta: CheckpointMeta,
    order: SampleOrder,
    fingerprints: Mapping[str, str] | None = None,
    *,
    drops_files: bool = False,
) -> str:
    """Describe how the samples of a checkpoint's run differ from the samples of a recipe; empty if they are the same.

    Files count by their content, wherever they are: other names with the same fingerprints are no difference.

    Args:
        meta: metadata of the checkpoint.
        order: `sample_order` of the recipe.
        fingerprints: current fingerprints of the data files; None: compare the settings alone.
        drops_files: token files that have become corrupt or missing since are no difference (data.corrupt="skip"): see
            `dropped_files`.
    """
    ours = _without_want(order)
    theirs = _recorded_order(meta)
    if not meta.data_files:
        return _differences(theirs, ours)
    settings = {key: value for key, value in theirs.items() if key not in LOCATION_KEYS}
    if _differences(settings, ours):
        return _differences(theirs, ours)
    if fingerprints is None:
        return ""
    moved = {key: theirs[key] for key in LOCATION_KEYS}
    then = data_files(theirs, meta.data_files)
    now = data_files(ours, fingerprints)
    if wrong := unmatched_locations(then, now, theirs, ours):
        return _differences({key: theirs[key] for key in wrong}, ours)
    fingerprints = comparable(then, now, fingerprints)
    meta = relocated(meta, order, fingerprints)
    lost, others = _classify_differences(meta, fingerprints)
    if theirs["path"] != ours["path"]:
        # A file that is damaged keeps its place: another one in a new place is no damage.
        changed = [name for name in lost if name not in meta.data_lost and fingerprints.get(name, SKIPPED) != SKIPPED]
        others |= {name: lost.pop(name) for name in changed}
    if drops_files and any(name not in lost for name in meta.data_tokens):
        lost = {}
    wrong = [*lost.values(), *others.values()]
    return "; ".join(filter(None, [_differences(moved, ours), format_list(wrong)])) if wrong else ""


def relocated(meta: CheckpointMeta, order: SampleOrder, fingerprints: Mapping[str, str]) -> CheckpointMeta:
    """Return the metadata of a checkpoint with the names that its data files have in the recipe.

    Args:
        meta: metadata of the checkpoint.
        order: `sample_order` of the recipe.
        fingerprints: current fingerprints of the data files.
    """
    then = data_files(_recorded_order(meta), meta.data_files)
    now = data_files(order, fingerprints)
    names = names_now(then, meta.data_files, now, fingerprints)

    data = {
        field: {names.get(name, name): value for name, value in getattr(meta, field).items()}
        for field in ("data_files", "data_tokens", "data_lost")
    }
    return replace(meta, states=meta.states | {"data": meta.state_of("data") | data})


def moved_data_message(meta: CheckpointMeta, order: SampleOrder) -> str:
    """Return a message about data of the same content at other paths than in a checkpoint; empty if none moved.

    Args:
        meta: metadata of the checkpoint.
        order: `sample_order` of the recipe; `data_order_change` returns "" for it.
    """
    theirs = _recorded_order(meta)
    moved = [key for key in LOCATION_KEYS if theirs[key] != order[key]]
    names = {"path": "data", "tokenizer": "data.tokenizer", "chat_template": "data.chat_template"}
    said = [f"{names[key]} at {order[key]!r} has the same content as {theirs[key]!r}" for key in moved]
    return f"{'; '.join(said)}: continuing at sample {meta.samples}" if said else ""


def _recorded_order(meta: CheckpointMeta) -> dict[str, Any]:
    """Return `sample_order` of a checkpoint's run."""
    # Keys that are missing in a checkpoint of an older version had their defaults.
    return _without_want(sample_order(Config()) | meta.order)


def _without_want(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return an order without what generation asks for, which changes no sample."""
    method = order[AlignmentPart.key]
    if isinstance(method, dict) and "template" in method:
        method = {key: value for key, value in method.items() if key != "want"}
    return {**order, AlignmentPart.key: method}


def dropped_files(meta: CheckpointMeta, fingerprints: Mapping[str, str]) -> dict[str, str]:
    """Return the token files that the run can no longer read as before, and those it dropped earlier; with reasons."""
    lost = _classify_differences(meta, fingerprints)[0] | meta.data_lost
    return {name: why for name, why in lost.items() if name in meta.data_tokens}


def _classify_differences(
    meta: CheckpointMeta, fingerprints: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the lost token files and the other differences, each as {name: description}."""
    lost, others = separate_dropped_files(
        meta.data_files, file_differences(meta.data_files, fingerprints), meta.data_tokens
    )
    return lost | {name: f"data file {name} was left out ({why})" for name, why in meta.data_lost.items()}, others


def named_checkpoints(folder: Path) -> list[Path]:
    """Return all folders named like a checkpoint, oldest first.

    Each was complete once (see `commit.commit`), so one that lacks a file is damaged. In a remote folder, those
    without a manifest were never complete, and are left out.
    """
    if isinstance(folder, RemotePath):
        return [path for path in remote_step_folders(folder) if (path / MANIFEST_FILE).is_file()]
    return sorted((path for path in folder.glob("step-*") if step_of(path) >= 0 and path.is_dir()), key=step_of)


def has_unfinished_checkpoint(folder: Path) -> bool:
    """Return whether a save into a folder was begun and not ended."""
    if isinstance(folder, RemotePath):
        return len(remote_step_folders(folder)) > len(named_checkpoints(folder))
    return bool(unfinished_checkpoints(folder))


def remote_step_folders(folder: RemotePath) -> list[RemotePath]:
    """Return all folders of a remote folder that are named like a checkpoint, finished or not, oldest first."""
    try:
        entries = folder.entries()
    except FileNotFoundError:
        return []
    return sorted(
        (folder / entry.name for entry in entries if entry.is_dir and step_of(folder / entry.name) >= 0), key=step_of
    )


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder that have a description, oldest first."""
    return [path for path in named_checkpoints(folder) if (path / META_FILE).is_file()]


def locate_folder(path: Path) -> Path:
    """Return the folder of checkpoints for a path: the path itself, or the checkpoint folder of a run.

    Raises:
        ConfigError: there is none.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ConfigError(f"{str(path)!r} {what}; name a run, or a folder of checkpoints")
    inside = path / "checkpoints"
    if named_checkpoints(path) or named_checkpoints(inside):
        return inside if named_checkpoints(inside) else path
    return _configured_checkpoint_folder(path) or (inside if inside.is_dir() else path)


BEST_NAME = "best"
"""Last part of the path RUN/best, which names the checkpoint of a run with the lowest held-out loss."""


def best_of(checkpoints: Sequence[Path]) -> Path | None:
    """Return the checkpoint with the lowest held-out loss, the first one of equal ones; None if none has a loss."""
    losses: dict[Path, float] = {}
    for path in checkpoints:
        try:
            loss = read_meta(path).eval_loss
        except ConfigError:
            # It is damaged, which its loading reports.
            continue
        if loss is not None:
            losses[path] = loss
    return min(losses, key=lambda path: losses[path]) if losses else None


def names_best(path: Path) -> bool:
    """Return whether a path is RUN/best or the same of a folder of checkpoints, and not a folder of that name."""
    return path.name == BEST_NAME and not path.exists() and path.parent.is_dir()


def best_checkpoint(path: Path) -> Path:
    """Return the checkpoint that RUN/best names.

    Raises:
        ConfigError: no complete checkpoint of the run has a held-out loss.
    """
    best = best_of(complete_checkpoints(locate_folder(path.parent)))
    if best is None:
        raise ConfigError(
            f"{str(path)!r}: no complete checkpoint of {str(path.parent)!r} has a held-out loss; a run has them with "
            "train.eval_every, and checkpoint.every as a multiple of it"
        )
    return best


def newest_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint for a path: the path itself, or the newest complete one of a run or checkpoint folder.

    RUN/best is the one with the lowest held-out loss.

    Raises:
        ConfigError: there is no such folder.
    """
    if (path / META_FILE).is_file():
        return path
    if names_best(path):
        return best_checkpoint(path)
    complete = complete_checkpoints(locate_folder(path))
    return complete[-1] if complete else None


def skipped_checkpoints(given: Path, found: Path) -> list[str]:
    """Return the later checkpoints without a description that `newest_checkpoint` skipped, each with the reason.

    Args:
        given: the path that the user named.
        found: the checkpoint that `newest_checkpoint` returned for it.
    """
    if (given / META_FILE).is_file() or step_of(found) < 0 or names_best(given):
        return []
    later = [path for path in named_checkpoints(found.parent) if step_of(path) > step_of(found)]
    return [
        f"{path.name}: {format_list(quick_validate(path) or [f'it has no {META_FILE}'])}" for path in reversed(later)
    ]


def _configured_checkpoint_folder(run_dir: Path) -> Path | None:
    """Return checkpoint.dir from the config.json of a run folder; None if it is not set or not a folder."""
    try:
        tree = read_json(run_dir / "config.json", MAX_CONFIG_BYTES)
        named = tree["checkpoint"]["dir"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(named, str) or not named or named.startswith(HUB_SCHEME):
        return None
    folder = to_path(named)
    # Whether a remote folder exists is asked when its checkpoints are listed, with an error if it cannot be.
    return folder if is_remote(folder) or folder.is_dir() else None


def locate_checkpoint(path: Path) -> Path:
    """Return `newest_checkpoint`, or raise if there is none.

    Raises:
        ConfigError: there is no complete checkpoint.
    """
    if (found := newest_checkpoint(path)) is None:
        damaged = [f"{one.name}: {format_list(quick_validate(one))}" for one in named_checkpoints(locate_folder(path))]
        why = f" ({format_list(damaged)})" if damaged else ""
        raise ConfigError(
            f"{str(path)!r} is no complete checkpoint and holds none{why}; name a checkpoint, or a run that saved one "
            "(checkpoint.at_end=true, the default, or checkpoint.every)"
        )
    return found


def write_meta(path: Path, meta: CheckpointMeta) -> None:
    """Write `META_FILE` of a checkpoint folder; a ValueError says why `read_meta` could not read it."""
    (path / META_FILE).write_text(format_json(asdict(meta), MAX_DESCRIPTION_BYTES), encoding="utf-8")


def read_meta(path: Path) -> CheckpointMeta:
    """Read `META_FILE` of a checkpoint folder.

    Raises:
        ConfigError: the folder is no moefold checkpoint, or has a format that this version cannot read.
    """
    try:
        meta = CheckpointMeta(**_of_format(read_json(regular_file(path, META_FILE), MAX_DESCRIPTION_BYTES)))
        _check_meta(meta)
    except FileNotFoundError:
        raise ConfigError(f"checkpoint {str(path)!r} is no moefold checkpoint: it has no {META_FILE}") from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"checkpoint {str(path)!r} has a broken {META_FILE}: {error}") from None
    if meta.format != FORMAT:
        raise ConfigError(
            f"checkpoint {str(path)!r} has format {meta.format}, and this version reads up to {FORMAT}; update moefold"
        )
    return meta


def _of_format(fields: Any) -> dict[str, Any]:
    """Return the fields of a `META_FILE`, with flat keys of earlier versions in their tables.

    Raises:
        TypeError: it holds something else.
    """
    if not isinstance(fields, dict):
        raise TypeError("it has no fields")
    found = dict(fields) if "states" in fields else states_by_object(fields)
    if fields.get("format", 1) == 1:
        found["format"] = FORMAT
    if isinstance(model := fields.get("model"), dict):
        found["model"] = upgraded({"model": model})[0]["model"]
    if isinstance(order := fields.get("order"), dict) and AlignmentPart.key in order:
        align = upgraded_keys({key: value for key, value in order.items() if key.startswith("align.")})
        align[AlignmentPart.key] = _method_of_samples(align[AlignmentPart.key])
        found["order"] = {key: value for key, value in order.items() if not key.startswith("align.")} | align
    return found


def _check_meta(meta: CheckpointMeta) -> None:
    """Raise TypeError for values of types that a run never writes; the contents of the sections are checked later."""
    for name, state in {"states": meta.states, **(meta.states if isinstance(meta.states, dict) else {})}.items():
        if not isinstance(state, dict):
            raise TypeError(f"{name} is no object")
    if meta.eval_loss is not None and not (type(meta.eval_loss) in (int, float) and math.isfinite(meta.eval_loss)):
        raise TypeError(f"eval_loss is {meta.eval_loss!r}")
    if not all(type(value) is int for value in meta.state_of("sites").values()):
        raise TypeError(f"sites is {meta.state_of('sites')!r}")
    if (rl := meta.state_of("data").get("rl")) is not None:
        from moefold.rl.plateau import Plateau
        from moefold.rl.table import table_headers

        Plateau.from_json(rl)
        table_headers(rl)
    if meta.lora != {}:
        from moefold.checkpoint.adapter_settings import check_adapter_settings

        check_adapter_settings(meta.lora)
    for name in ("order", "model", "parallel", "data_files", "data_tokens", "data_lost"):
        if not isinstance(getattr(meta, name), dict):
            raise TypeError(f"{name} is no object")
    check_schedule_settings(meta.state_of("schedule"))
    sizes = meta.model
    try:
        _model_of(sizes)
    except ConfigError as error:
        raise TypeError("; ".join(map(str.strip, str(error).splitlines()))) from None
    if sizes and "layers" not in sizes:
        raise TypeError("model has no layers")
    layers = sizes.get("layers", ModelConfig.layers)
    try:
        parse_layers(layers)
    except ValueError as error:
        raise TypeError(f"model.layers={layers!r} {error}") from None
    if not all(type(degree) in (int, float, str, bool) for degree in meta.parallel.values()):
        raise TypeError("parallel is no mapping of ranks")
    position = meta.state_of("position")
    counts = {"format": meta.format} | {name: position.get(name) for name in ("step", "samples", "tokens")}
    optional = {"checked_step": "replica_check", "moment_updates": "weights", "tokens_consumed": "position"}
    counts |= {name: meta.state_of(owner).get(name, 0) for name, owner in optional.items()}
    degrees = {f"parallel.{name}": meta.parallel.get(name, 1) for name in ("world_size", "tp", "cp", "pp")}
    for least, numbers in ((0, counts), (1, degrees | {"order.seq_len": meta.order.get("seq_len", 1)})):
        for name, value in numbers.items():
            if type(value) is not int or not least <= value < 2**63:
                raise TypeError(f"{name} is {value!r}")
    if not all(type(count) is int and count > 0 for count in meta.data_tokens.values()):
        raise TypeError("data_tokens are no counts")
    if not all(isinstance(words, str) for words in [*meta.data_files.values(), *meta.data_lost.values()]):
        raise TypeError("data_files or data_lost hold no text")
    check_data_file_names(meta.order.get("path"), meta.data_files, meta.data_tokens, meta.data_lost)
    for name in ("dtype", "origin"):
        if not isinstance(getattr(meta, name), str):
            raise TypeError(f"{name} is no text")


def find_resume(cfg: Config) -> Path | None:
    """Return the checkpoint that a run resumes from, or None for a new run; checks file sizes, not hashes.

    Raises:
        ConfigError: see `check_compatible`.
    """
    damaged: list[str] = []
    path = resume_candidate(cfg.run, cfg.checkpoint)
    while path is not None and cfg.checkpoint.resume == "auto" and quick_validate(path):
        damaged.append(str(path))
        path = resume_candidate(cfg.run, cfg.checkpoint, damaged)
    check_compatible(path, cfg)
    return path


def resume_candidate(run: RunConfig, checkpoint: CheckpointConfig, ignored: Container[str] = ()) -> Path | None:
    """Return the checkpoint that the recipe names, or under "auto" the newest whose path is not among the ignored."""
    if checkpoint.resume == "never":
        return None
    if checkpoint.resume != "auto":
        return to_path(checkpoint.resume)
    named = named_checkpoints(checkpoint_folder(run, checkpoint))
    return next((path for path in reversed(named) if str(path) not in ignored), None)


def quick_validate(path: Path) -> list[str]:
    """Return the defects of a checkpoint that file sizes and the content of `META_FILE` reveal."""
    try:
        manifest = read_manifest(path)
    except OSError as error:
        return [f"its {MANIFEST_FILE} cannot be read: {error.strerror}"]
    except ValueError as error:
        return [f"its {MANIFEST_FILE} cannot be read: {error}"]
    if META_FILE not in manifest:
        return [f"its {MANIFEST_FILE} does not name {META_FILE}"]
    return validate_sizes(path, manifest) or validate_hashes(path, manifest, [META_FILE])


def check_compatible(path: Path | None, cfg: Config, fingerprints: Mapping[str, str] | None = None) -> None:
    """Check that a run can continue from a checkpoint (None: start from scratch).

    Args:
        path: the checkpoint.
        cfg: the recipe.
        fingerprints: see `data_order_change`.

    Raises:
        ConfigError: it is of another model, of another step than its name, or ends no round of rl.updates; "auto" found
            one of other data; a named one is of data that has lost files, and could continue without them; or the
            folder already has checkpoints of later steps, which a later "auto" would take for checkpoints of this run.
    """
    wish = cfg.checkpoint.resume
    meta = None if path is None else read_meta(path)
    if path is not None and meta is not None:
        if meta.origin:
            raise ConfigError(
                f"checkpoint {str(path)!r} holds weights alone ({meta.origin}), no run to resume; "
                f"set checkpoint.init_from={str(path)!r} and checkpoint.resume='auto'"
            )
        if step_of(path) not in (meta.step, -1):
            right = step_path(path.parent, meta.step).name
            raise ConfigError(f"checkpoint {str(path)!r} is of step {meta.step}; rename it to {right!r}")
        _check_same_model(path, meta, cfg.model)
        if meta.lora or cfg.lora.rank:
            from moefold.checkpoint.adapter_settings import adapters_unsupported_reason

            if reason := adapters_unsupported_reason(meta.lora, cfg.lora, str(path)):
                raise ConfigError(f"checkpoint {str(path)!r} {reason}")
        order = sample_order(cfg)
        if wish == "auto" or _can_skip_corrupt(meta, cfg.data, order, fingerprints):
            _check_same_data(path, meta, cfg.data, order, fingerprints)
        _check_whole_rounds(path, meta, cfg.rl)
    if wish != "auto" and cfg.checkpoint.saves:
        step = meta.step if meta else 0
        named = named_checkpoints(checkpoint_folder(cfg.run, cfg.checkpoint))
        if later := [other for other in named if step_of(other) > step]:
            raise ConfigError(
                f"checkpoint.resume={wish!r} starts after step {step}, but there are checkpoints of later steps, such "
                f"as {str(later[-1])!r}, which would count as this run's; move them away, or set another "
                f"{checkpoint_folder_key(cfg.checkpoint)}"
            )


def model_differences(stored: dict[str, Any], model: ModelConfig, reader: ModelConfig | None = None) -> str:
    """Describe how a stored model (`model_sizes`) computes something else than `model`; empty if it does not.

    Args:
        stored: sizes in a checkpoint.
        model: the model that it is compared with.
        reader: the model whose layers read the weights, if it has other layers than `model`; its keys count too.
    """
    there = _model_of(stored)
    theirs, ours = (_settings_of_layers(sizes) for sizes in (stored, model_sizes(model)))
    # Keys that are missing in a checkpoint of an older version had their defaults, except in a part of another package.
    defaults = _settings_of_layers(model_sizes(there))
    outside = tuple(f"{key}." for key, kind in theirs.items() if key in defaults and _is_outside(key, kind))
    defaults = {key: value for key, value in defaults.items() if not key.startswith(outside)}
    theirs = defaults | {key: value for key, value in theirs.items() if value != GIVEN}
    unread = _unread_tables(there) & _unread_tables(reader or model)
    free = keys_with("model", SAME_TENSORS)
    for sizes, layers in ((theirs, there.decoder_layers), (ours, model.decoder_layers)):
        heads = [layer.attention for layer in layers if not layer.attention.is_recurrent]
        if "attention.head_dim" in sizes and heads and not (sizes is theirs and "attention." in outside):
            sizes["attention.head_dim"] = getattr(heads[0], "head_dim", 0)
        sizes["layer_windows"] = [layer.window for layer in layers]
        sizes["layer_chunks"] = [layer.chunk for layer in layers]
    named = [key for key in (*theirs, *ours) if key not in free and not any(key.startswith(table) for table in unread)]
    return _differences({key: theirs.get(key) for key in named}, ours)


def _is_outside(key: str, kind: Any) -> bool:
    """Return whether the value of a key of [model] is the kind of a part that is not of this package."""
    group = part_keys().get(f"model.{key}")
    return group is not None and kind not in (*built_in_kinds(group), NONE, GIVEN)


GIVEN = "given"
"""Value of a table without kinds that is there, in a message."""


def _settings_of_layers(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a stored model by their paths in [model]."""
    plain = {f"model.{key}": without_source(value) for key, value in sizes.items()}
    found = flat_settings(plain) | {
        name: GIVEN for name in tables() if isinstance(value_at(name, {"model": sizes}), dict)
    }
    found |= {name: kind for name, kind in flat_settings(plain).items() if name in part_keys()}
    return {name.removeprefix("model."): NONE if value is None else value for name, value in found.items()}


def _model_of(sizes: Mapping[str, Any]) -> ModelConfig:
    """Return a stored model with its layers; parts that are not of this package are as in a recipe without them.

    Raises:
        ConfigError: it is no model.
    """
    # The loader of recipes is no module of a training process.
    from moefold.config.load import config_from_dict

    known = {key: value for key, value in sizes.items() if key in ModelConfig.__dataclass_fields__}
    return config_from_dict({"model": known_parts("model", known) | {"preset": "", "mtp_layers": 0}}).model


def _unread_tables(model: ModelConfig) -> set[str]:
    """Return the keys, and the beginnings of keys, that nothing in the layers of a model reads."""
    absent = {
        "attention.": model.has_softmax_attention,
        "linear_attention": model.has_linear_attention,
        "rope.": model.has_rope,
        "ffn.dense": has_dense_layers(model),
        "ffn.moe": has_moe_layers(model),
    }
    return {name for name, is_there in absent.items() if not is_there}


def _check_same_model(path: Path, meta: CheckpointMeta, model: ModelConfig) -> None:
    wrong = model_differences(meta.model, model)
    if wrong:
        raise ConfigError(
            f"checkpoint {str(path)!r} is of another model: {wrong}; give the recipe its sizes, or set another run.dir"
        )


def _check_whole_rounds(path: Path, meta: CheckpointMeta, rl: RLConfig) -> None:
    """Check that rounds of rollouts end at the steps that are saved: they start at multiples of rl.updates."""
    updates = rl.updates
    if rl.is_on and meta.step % updates:
        raise ConfigError(
            f"rl.updates={updates} must divide step {meta.step} of checkpoint {str(path)!r}: saves would come within "
            f"rounds of rollouts; choose updates {nearest_numbers(updates, divisors(meta.step))}, or start a new run "
            f"with checkpoint.init_from={str(path)!r} in another run.dir"
        )


def _check_same_data(
    path: Path, meta: CheckpointMeta, data: DataConfig, order: SampleOrder, fingerprints: Mapping[str, str] | None
) -> None:
    if wrong := data_order_change(meta, order, fingerprints, drops_files=data.drops_files):
        way_out = (
            "set data.corrupt='skip' to continue without the broken or missing files, restore them, or start the data "
            f"from the beginning in another run.dir with checkpoint.init_from={str(path)!r}"
            if _can_skip_corrupt(meta, data, order, fingerprints)
            else f"{_remedy(meta, data, order)}, set checkpoint.resume={str(path)!r} to continue with the new data "
            "from its start, or set another run.dir"
        )
        raise ConfigError(f"checkpoint {str(path)!r} took its samples from other data: {wrong}; {way_out}")


def _remedy(meta: CheckpointMeta, data: DataConfig, order: SampleOrder) -> str:
    """Return advice on how to restore the run's own samples."""
    if data_order_change(meta, order):
        return "give the recipe its settings"
    rule = "" if data.kind == "tokens" else f" (with data.kind={data.kind!r} none can be left out later)"
    return f"restore the files as they were{rule}"


def _can_skip_corrupt(
    meta: CheckpointMeta, data: DataConfig, order: SampleOrder, fingerprints: Mapping[str, str] | None
) -> bool:
    """Return whether data.corrupt="skip" would remove all differences of the data."""
    if data.corrupt == "skip" or not data_order_change(meta, order, fingerprints):
        return False
    return not data_order_change(meta, order, fingerprints, drops_files=True)


def _differences(stored: dict[str, Any], current: dict[str, Any]) -> str:
    wrong = {key: (value, current.get(key)) for key, value in stored.items() if current.get(key) != value}
    if "layers" in wrong:
        for key in ("layer_windows", "layer_chunks"):
            wrong.pop(key, None)
    # A table that differs is named without its settings.
    wrong = {key: pair for key, pair in wrong.items() if not any(key.startswith(f"{table}.") for table in wrong)}
    return "; ".join(f"{key} {there!r} there, {here!r} here" for key, (there, here) in wrong.items())


def check_file_sizes(path: Path) -> None:
    """Compare the file sizes of a checkpoint with its manifest; needs no torch.

    Raises:
        ConfigError: a file is missing or has another size, or there is no manifest.
    """
    if faults := quick_validate(path):
        raise ConfigError(f"checkpoint {str(path)!r} is damaged: {format_list(faults)}")


def check_integrity(path: Path, world: "World", *, checks_hashes: bool = True) -> None:
    """Compare the files of a checkpoint with its manifest; collective over `world`, which shares the reading.

    Args:
        path: the checkpoint.
        world: all processes; each reads a part of the files, a block at a time.
        checks_hashes: compare hashes; else only sizes and the content of `META_FILE`.

    Raises:
        ConfigError: a file is missing or differs, or there is no manifest; raised on every process.
    """
    found = world.all_gather_object(validate_files(path, world, checks_hashes=checks_hashes))
    if faults := list(dict.fromkeys(fault for faults in found for fault in faults)):
        raise ConfigError(f"checkpoint {str(path)!r} is damaged: {format_list(faults)}")


def validate_files(path: Path, world: "World", *, checks_hashes: bool) -> list[str]:
    """Return the defects that this process finds: sizes of all files, and hashes of its part of them."""
    if faults := quick_validate(path):
        return faults
    manifest = read_manifest(path)
    return validate_hashes(path, manifest, list(manifest)[world.rank :: world.size]) if checks_hashes else []
