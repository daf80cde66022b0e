"""`moefold push`: upload a model to the Hugging Face hub."""

import argparse
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moefold.cache_dir import cache_folders
from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.find_checkpoint import locate_checkpoint
from moefold.cli.command_parser import CommandParser, add_part_option
from moefold.convert.families.hf_config import is_hf_folder
from moefold.convert.preflight import check_export, weights_path
from moefold.data.input_paths import ADAPTER_CONFIG_FILE
from moefold.errors import ConfigError
from moefold.hub import check_hub_package, check_repo_name, files_to_push, push_folder
from moefold.terminal import print_escaped

"""Settings of a folder of PEFT."""


def run(argv: list[str]) -> int:
    """Run `moefold push` and return the exit status."""
    args = _parser().parse_args(argv)
    repo = check_repo_name(args.repo)
    check_hub_package(repo)
    path = weights_path(args.model)
    with _hf_folder(path) as folder:
        files = files_to_push(folder)
        for name, size_bytes in files.items():
            print_escaped(f"{size_bytes / 1e6:12,.3f} MB  {name}")
        target = f"{repo}{f' ({args.revision})' if args.revision else ''}, {'public' if args.public else 'private'}"
        total = f"{len(files)} files, {sum(files.values()) / 1e9:.3g} GB"
        if args.dry_run:
            print_escaped(f"would push {total} to {target}; nothing was sent")
            return 0
        pushed = push_folder(
            folder,
            repo,
            public=args.public,
            revision=args.revision,
            message=args.message,
            overwrites_card=args.overwrite,
        )
        if pushed.keeps_card:
            print_escaped("note: the README.md of the repository stays; --overwrite replaces it")
        print_escaped(f"pushed {total} to {target}: {pushed.url}")
    return 0


@contextmanager
def _hf_folder(path: Path) -> Iterator[Path]:
    """Yield a folder of Hugging Face or PEFT: the given folder, or an export that is deleted at the end."""
    if is_hf_folder(path) or (path / ADAPTER_CONFIG_FILE).is_file():
        yield path
        return
    if read_meta(locate_checkpoint(path)).lora:
        raise ConfigError(
            f"{str(path)!r} has adapters: write them with moefold export, or the merged weights with --merge, and "
            "push that folder"
        )
    root = cache_folders(None)[0] / "upload"
    out = root / uuid.uuid4().hex
    check_export(path, out, None)
    # torch takes seconds to import: a wrong argument is reported without it.
    from moefold.comm.groups import current_world
    from moefold.convert.export_folder import ExportOptions, export_folder

    try:
        conversion = export_folder(path, out, current_world(), ExportOptions(), on_bytes=lambda _: None)
        for message in conversion.messages:
            print_escaped(f"note: {message}")
        yield out
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold push",
        "Upload a model to the Hugging Face hub by one commit. A checkpoint or a run is exported first, "
        "with the defaults of moefold export. The repository is created, private, if it does not exist.",
        "Log in with `hf auth login`, or set HF_TOKEN. An upload that stops is continued by the same command.\n"
        "\nexample:\n  moefold push runs/chat my-org/my-model --dry-run",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder, a checkpoint, a run: its newest one, or RUN/best"
    )
    parser.add_argument("repo", metavar="ORG/NAME", help="the repository to write to")
    parser.flag("--public", "let everyone read the repository (default: private)")
    parser.option("--revision", "", "BRANCH", "commit to this branch (default: main)")
    parser.option("--message", "Upload by moefold", "TEXT", "message of the commit")
    parser.flag("--overwrite", "replace a README.md that the repository has already")
    parser.flag("--dry-run", "list the files and their sizes, and send nothing")
    add_part_option(parser)
    return parser
