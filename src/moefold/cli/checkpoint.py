"""`moefold checkpoint`: list, show, verify, compare and remove checkpoints."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from moefold.checkpoint.checkpoint_meta import META_FILE, CheckpointMeta, read_meta
from moefold.checkpoint.find_checkpoint import (
    best_of,
    locate_checkpoint,
    locate_folder,
    named_checkpoints,
    names_best,
    step_of,
    wrong_name_reason,
)
from moefold.checkpoint.integrity import quick_validate, validate_content
from moefold.checkpoint.manifest import MANIFEST_FILE, file_sizes, read_manifest, validate_hashes
from moefold.checkpoint.retention import remove_checkpoint
from moefold.cli.command_parser import CommandParser, add_part_option
from moefold.cli.inference_options import report_skipped_for
from moefold.config.keys.paths import flat_settings, value_at
from moefold.config.sections.lora import LoraConfig
from moefold.errors import ConfigError
from moefold.message_text import format_list
from moefold.remote_path import to_path
from moefold.terminal import print_escaped, printable
from moefold.topology.layout import DEGREES

if TYPE_CHECKING:
    from moefold.checkpoint.stored_tensors import StoredTensor


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint of a folder, as `moefold checkpoint list` shows it."""

    path: Path
    meta: CheckpointMeta | None
    """Metadata of the checkpoint, or None if it cannot be read."""
    size_bytes: int
    faults: list[str]
    is_best: bool = False
    """True if the checkpoint has the lowest held-out loss of the folder."""


def print_checkpoints(console: Console, folder: Path, rows: Sequence[CheckpointRow]) -> None:
    """Print the checkpoints of a folder, oldest first, with the faults of their files."""
    if not rows:
        way_out = "a run saves with checkpoint.at_end=true, the default, or checkpoint.every"
        console.print(printable(f"{folder} holds no checkpoint ({way_out})"), soft_wrap=True)
        return
    has_losses = any(row.is_best for row in rows)
    titles = ("checkpoint", "tokens", "samples", *(["eval loss"] if has_losses else []), "MiB", "written by", "files")
    table = Table(*titles, box=None, pad_edge=False)
    for row in rows:
        state = "; ".join(row.faults) if row.faults else "there"
        size_mib = f"{row.size_bytes / 2**20:,.1f}"
        counts = ("?", "?") if row.meta is None else (f"{row.meta.tokens:,}", f"{row.meta.samples:,}")
        writer = "?" if row.meta is None else describe_mapping(row.meta)
        loss = "" if row.meta is None or row.meta.eval_loss is None else f"{row.meta.eval_loss:.4f}"
        losses = (loss + " (best)" * row.is_best,) if has_losses else ()
        table.add_row(*map(printable, (row.path.name, *counts, *losses, size_mib, writer, state)))
    console.print(table)


def print_content(
    console: Console, path: Path, meta: CheckpointMeta, tensors: "Sequence[StoredTensor]", *, lists_tensors: bool
) -> None:
    """Print the metadata and tensors of a checkpoint."""
    # Weights that no run trained have no step, and name their source instead.
    state = f"after step {meta.step:,}, {meta.samples:,} samples and {meta.tokens:,} tokens"
    console.print(printable(f"{path}: {f'weights alone, {meta.origin}' if meta.origin else state}"), soft_wrap=True)
    if not meta.origin:
        console.print(printable(f"written by {describe_mapping(meta)}"))
    if lora := meta.lora:
        text = f"adapters of rank {lora['rank']}, alpha {lora['alpha']:g}, of {', '.join(lora['targets'])}"
        console.print(printable(f"{text}; base: {lora['base'] or 'random weights'}"), soft_wrap=True)
    sizes = ("layers", "hidden_size", "ffn.moe.num_experts", "ffn.moe.top_k", "vocab_size")
    values = {key: value for key in sizes if (value := value_at(key, meta.model)) is not None}
    console.print(printable("model: " + ", ".join(f"{key} {value}" for key, value in values.items())), soft_wrap=True)
    table = Table("tensors", "shape", "type", "MiB", "parts", box=None, pad_edge=False)
    groups: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.name.split(".", 1)[0], []).append(tensor)
    for name, group in groups.items():
        size_mib = f"{sum(tensor.size_bytes for tensor in group) / 2**20:,.1f}"
        num_chunks = str(sum(tensor.num_chunks for tensor in group))
        table.add_row(printable(f"{name}: {len(group)}"), "", "", size_mib, num_chunks)
        for tensor in group if lists_tensors else ():
            shape = "x".join(map(str, tensor.shape))
            size_mib = f"{tensor.size_bytes / 2**20:,.2f}"
            table.add_row(printable(f"  {tensor.name}"), shape, tensor.dtype, size_mib, str(tensor.num_chunks))
    console.print(table)


def describe_mapping(meta: CheckpointMeta) -> str:
    """Return the mapping of the run that wrote a checkpoint, in one line."""
    parallel = meta.parallel
    if not parallel:
        return "no training run"
    degrees = " ".join(f"{name}={parallel[name]}" for name in DEGREES if parallel.get(name, 1) != 1)
    return f"{parallel.get('world_size', 1)} rank{'s' if parallel.get('world_size', 1) != 1 else ''} {degrees}".rstrip()


MAX_SHOWN_DIFFERENCES = 20
"""Tensors that `diff` prints without --json."""
MAX_VALUE_CHARS = 60
"""Characters of a metadata value that `diff` prints without --json."""

EPILOG = """CKPT: a folder step-000100, or a run or its checkpoints folder, which means its newest complete checkpoint;
RUN/best means the one with the lowest held-out loss

examples:
  moefold checkpoint list runs/quickstart
  moefold checkpoint verify runs/quickstart
  moefold checkpoint diff runs/a/checkpoints/step-000100 runs/b/checkpoints/step-000100
"""


def run(argv: list[str]) -> int:
    """Run one action. Return 0 for done, intact or equal, and 1 for damaged or different."""
    arguments = _parser().parse_args(argv)
    action: Callable[[argparse.Namespace], int] = arguments.action
    return action(arguments)


def _list(arguments: argparse.Namespace) -> int:
    folder = locate_folder(arguments.folder)
    # `import` writes a single checkpoint into a folder without a step in its name.
    paths = [folder] if (folder / META_FILE).is_file() else named_checkpoints(folder)
    best = best_of(paths)
    rows = [replace(_checkpoint_row(path), is_best=path == best) for path in paths]
    if arguments.json:
        print(json.dumps([asdict(row) | {"path": str(row.path)} for row in rows]))
        return 0
    from moefold.console import PrintableConsole

    print_checkpoints(PrintableConsole(highlight=False, markup=False), folder, rows)
    return 0


def _checkpoint_row(path: Path) -> CheckpointRow:
    faults = quick_validate(path)
    try:
        meta = read_meta(path)
    except ConfigError as error:
        return CheckpointRow(path, None, _size_bytes(path), faults or [str(error)])
    return CheckpointRow(path, meta, _size_bytes(path), faults or _faults_of_name(path, meta))


def _show(arguments: argparse.Namespace) -> int:
    path = locate_checkpoint(arguments.checkpoint)
    report_skipped_for(arguments.checkpoint, path)
    meta = read_meta(path)
    from moefold.checkpoint.stored_tensors import stored_tensors

    tensors = stored_tensors(path)
    if arguments.json:
        print(json.dumps({"path": str(path), **asdict(meta), "tensors": [asdict(tensor) for tensor in tensors]}))
        return 0
    from moefold.console import PrintableConsole

    print_content(PrintableConsole(highlight=False, markup=False), path, meta, tensors, lists_tensors=arguments.tensors)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    status = 0
    for path in _resolve_checkpoints(arguments.checkpoint):
        faults = _validate_checkpoint(path)
        print(printable(f"{path}: {'; '.join(faults) if faults else 'sound' + _note_on_other_files(path)}"))
        status |= bool(faults)
    return int(status)


def _diff(arguments: argparse.Namespace) -> int:
    paths = locate_checkpoint(arguments.checkpoint), locate_checkpoint(arguments.other)
    for requested, opened in zip((arguments.checkpoint, arguments.other), paths, strict=True):
        report_skipped_for(requested, opened)
    metas = read_meta(paths[0]), read_meta(paths[1])
    from moefold.checkpoint.stored_tensors import differing_tensors

    described = _meta_differences(*metas)
    tensors = differing_tensors(*paths, prefix="model." if arguments.weights else "")
    if arguments.json:
        print(json.dumps({"description": described, "tensors": [asdict(difference) for difference in tensors]}))
        return int(bool(described or tensors))
    for key, (left, right) in described.items():
        print(printable(f"{key}: {_shorten(left)} | {_shorten(right)}"))
    for difference in tensors[:MAX_SHOWN_DIFFERENCES]:
        print(printable(f"{difference.name}: {difference.what}"))
    if len(tensors) > MAX_SHOWN_DIFFERENCES:
        print_escaped(f"and {len(tensors) - MAX_SHOWN_DIFFERENCES} more tensors; --json lists them")
    if not tensors:
        print("all tensors are equal")
    return int(bool(described or tensors))


def _rm(arguments: argparse.Namespace) -> int:
    # Check all paths before removing anything.
    for path in arguments.checkpoints:
        if step_of(path.resolve()) < 0:
            raise ConfigError(f"{str(path)!r} is not named like a checkpoint, step-000100; name the folder itself")
        if path.is_symlink():
            raise ConfigError(f"{str(path)!r} is a link; name the folder that it leads to, or remove the link itself")
        if not path.is_dir():
            raise ConfigError(f"{str(path)!r} does not exist")
    to_remove = {path.resolve() for path in arguments.checkpoints}
    for folder in sorted({path.parent for path in to_remove}):
        # Newest first: runs resume from it, and the check stops at the first intact checkpoint.
        kept_checkpoints = [path for path in reversed(named_checkpoints(folder)) if path not in to_remove]
        if not arguments.force and all(map(_validate_checkpoint, kept_checkpoints)):
            raise ConfigError(f"that would leave no sound checkpoint in {str(folder)!r}; add --force if you mean it")
    for path in sorted(to_remove):
        remove_checkpoint(path)
        print(printable(f"removed {path}"))
    return 0


def _note_on_other_files(path: Path) -> str:
    """Return a note on files, except hidden ones, that the manifest of a sound checkpoint does not name, or ""."""
    unnamed = file_sizes(path).keys() - read_manifest(path).keys() - {MANIFEST_FILE}
    others = sorted(name for name in unnamed if not name.startswith("."))
    return f"; not in its {MANIFEST_FILE}, and not read: {format_list(others)}" if others else ""


def _validate_checkpoint(path: Path) -> list[str]:
    """List the faults of a checkpoint. Hash every file unless the file sizes are wrong already.

    Intact files may still not form a checkpoint, so the index, each part and the description are checked as well.
    """
    if faults := quick_validate(path):
        return faults
    manifest = read_manifest(path)
    if faults := validate_hashes(path, manifest, manifest):
        return faults
    return validate_content(path) or _loading_faults(path) or _faults_of_name(path, read_meta(path))


_WEIGHTS_PREFIX = "model."
"""Prefix of weights and buffers in the index of a checkpoint."""


def _loading_faults(path: Path) -> list[str]:
    """Return the reasons why a checkpoint with intact files cannot be loaded: a change may precede the manifest."""
    from moefold.checkpoint.stored_tensors import stored_tensors
    from moefold.convert.preflight import read_model
    from moefold.convert.weight_sources import parameter_shapes
    from moefold.cost.adapter_spec import adapter_weights
    from moefold.inference.source import checkpoint_source

    try:
        meta = read_meta(path)
        model = read_model(path)
        checkpoint_source(path)
        stored = {tensor.name: tensor.shape for tensor in stored_tensors(path)}
        if model.num_layers > len(stored):
            return [f"its {META_FILE} describes {model.num_layers} layers, and it has {len(stored)} tensors"]
        if meta.lora:
            lora = LoraConfig(rank=meta.lora["rank"], alpha=meta.lora["alpha"], targets=meta.lora["targets"])
            shapes = {name: weight.shape for name, weight in adapter_weights(model, lora).items()}
        else:
            shapes = parameter_shapes(model)
    except ConfigError as error:
        return [str(error)]
    differing = [
        f"{name} of shape {list(shape)}"
        for name, shape in shapes.items()
        if stored.get(_WEIGHTS_PREFIX + name) != tuple(shape)
    ]
    return [f"its {META_FILE} describes tensors that it does not have: {format_list(differing)}"] if differing else []


def _faults_of_name(path: Path, meta: CheckpointMeta) -> list[str]:
    reason = "" if meta.origin else wrong_name_reason(path, meta.step)
    return [f"it {reason}"] if reason else []


def _resolve_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint at a path, or all checkpoints of a folder."""
    if names_best(path):
        return [locate_checkpoint(path)]
    if path.is_dir() and (step_of(path.resolve()) >= 0 or (path / META_FILE).is_file()):
        return [path]
    if not (checkpoints := named_checkpoints(locate_folder(path))):
        raise ConfigError(f"{str(path)!r} holds no complete checkpoint")
    return checkpoints


def _meta_differences(left: CheckpointMeta, right: CheckpointMeta) -> dict[str, tuple[object, object]]:
    trees = [{name: value for name, value in asdict(meta).items() if name != "states"} for meta in (left, right)]
    flat = [flat_settings(_flatten(tree | meta.states)) for tree, meta in zip(trees, (left, right), strict=True)]
    keys = sorted(flat[0].keys() | flat[1].keys())
    return {key: (flat[0].get(key), flat[1].get(key)) for key in keys if flat[0].get(key) != flat[1].get(key)}


def _shorten(value: object) -> str:
    """Return a value as text. A long value is truncated, with its length."""
    text = str(value)
    if len(text) <= MAX_VALUE_CHARS:
        return text
    return f"{text[:MAX_VALUE_CHARS]}... ({len(text)} characters; --json has all)"


def _flatten(tree: dict[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[key] = value
    return flat


def _size_bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.iterdir())


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("moefold checkpoint", "List, show, verify, compare and remove checkpoints.", EPILOG)
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def add(name: str, action: Callable[[argparse.Namespace], int], text: str) -> CommandParser:
        action_parser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action_parser.set_defaults(action=action)
        return action_parser

    text = "list the checkpoints of a run: step, size, the mapping that wrote it, missing files"
    list_parser = add("list", _list, text)
    list_parser.add_argument("folder", type=to_path, metavar="RUN", help="a run, or a folder of checkpoints")
    list_parser.flag("--json", "print one JSON array")
    show_parser = add("show", _show, "show the contents of one checkpoint")
    show_parser.add_argument("checkpoint", type=to_path, metavar="CKPT", help="a folder such as step-000100")
    show_parser.flag("--tensors", "list every tensor, not only the sums")
    show_parser.flag("--json", "print one JSON object, every tensor included")
    text = "check the hash of every file, the index, the parts and the description; exit 1 if one is wrong"
    verify_parser = add("verify", _verify, text)
    verify_parser.add_argument("checkpoint", type=to_path, metavar="CKPT|RUN", help="one checkpoint, or all of a run")
    add_part_option(verify_parser)
    diff_parser = add("diff", _diff, "compare the metadata and values of two checkpoints; exit 1 if they differ")
    diff_parser.add_argument("checkpoint", type=to_path, metavar="CKPT", help="a folder such as step-000100")
    diff_parser.add_argument("other", type=to_path, metavar="OTHER", help="the checkpoint to compare it with")
    diff_parser.flag("--weights", "compare weights and buffers, not the optimizer")
    diff_parser.flag("--json", "print one JSON object")
    rm_parser = add("rm", _rm, "remove checkpoints, but not the last sound one")
    rm_parser.add_argument("checkpoints", type=to_path, nargs="+", metavar="CKPT", help="folders step-000100")
    rm_parser.flag("--force", "remove the last sound one too")
    add_part_option(rm_parser)
    return parser
