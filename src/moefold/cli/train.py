"""`moefold train`: check the recipe, start or join the ranks, train."""

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from moefold.checkpoint.checkpoint_dir import check_compatible, find_resume, read_meta
from moefold.checkpoint.manifest import read_manifest, validate_hashes
from moefold.cli.command_parser import CommandParser, report_on_local_rank0
from moefold.config.load import config_from_dict, config_to_dict
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv, check_world_size, read_rank_env
from moefold.launch.fitting import check_training, choose_checked_device
from moefold.recipe import load_recipe, with_world_size
from moefold.terminal import MULTILINE_CHARS, print_escaped, printable
from moefold.train.log_lines import next_commands
from moefold.train.preflight import check_machine, check_replay_content
from moefold.train.run_folder import RunFolder, choose_run_folder
from moefold.validate.config import check_config
from moefold.validate.memory import check_memory_device, check_offload_device
from moefold.validate.moe import check_dispatch_device
from moefold.validate.train import check_kernel_device


def run(argv: list[str]) -> int:
    """Run `moefold train` and return the exit status."""
    args = _parser().parse_args(argv)
    if args.keys:
        from moefold.config.reference import keys_text

        print_escaped(keys_text(), end="")
        return 0
    if args.recipe is None:
        raise ConfigError("a recipe is missing: moefold train RECIPE.toml [section.key=value ...]")
    rank_env = read_rank_env()
    with report_on_local_rank0(rank_env):
        cfg, given, notes = load_recipe(Path(args.recipe), args.overrides)
        if cfg.parallel.mapping == "auto":
            cfg, _store = _plan_mapping(cfg, given, rank_env)
        if rank_env is not None and cfg.parallel.elastic:
            cfg = with_world_size(cfg, rank_env.world_size)
        check_config(cfg)
        if rank_env is not None:
            check_world_size(rank_env, cfg.parallel.world_size)
        # Provisional: the ranks make the final choice under the lock of the folder.
        folder = choose_run_folder(cfg)
        check_machine(folder.cfg)
        resume = find_resume(folder.cfg)
    if resume is not None and read_meta(resume).step >= cfg.run.steps and _is_intact(resume, folder.cfg):
        if rank_env is None or rank_env.rank == 0:
            _report_finished(folder, resume)
        return 0
    return _start_training(_TrainRequest(cfg, notes), folder.cfg, rank_env, resume)


def _report_finished(folder: RunFolder, checkpoint: Path) -> None:
    lines = [folder.message] if folder.message else []
    lines.append(f"{checkpoint} has all {folder.cfg.run.steps} steps of run.steps; nothing to do")
    print(
        printable(
            "\n".join(
                [*lines, *next_commands(folder.cfg), "or start a new run: the same command with run.dir=ANOTHER_FOLDER"]
            ),
            MULTILINE_CHARS,
        )
    )


def _plan_mapping(cfg: Config, given: frozenset[str], rank_env: RankEnv | None) -> tuple[Config, object]:
    """Plan the parallel mapping; return the new config and the rendezvous store, which must outlive the rendezvous.

    With several ranks, rank 0 plans for the slowest machine and broadcasts its answer.
    """
    # Detecting the devices imports torch.
    from moefold.launch.hardware import DetectedMachine, detect_machine, slowest_machine
    from moefold.planner.auto_parallel import plan_mapping

    machine = detect_machine(cfg.run.device, rank_env)
    if rank_env is None or rank_env.world_size == 1:
        planned, report = plan_mapping(cfg, given, machine)
        print_escaped(report)
        return planned, None
    from moefold.launch.compute_on_rank0 import JsonDict, compute_on_rank0

    def answer(machines: list[JsonDict]) -> JsonDict:
        planned, report = plan_mapping(cfg, given, slowest_machine([DetectedMachine(**facts) for facts in machines]))
        tree = config_to_dict(planned)
        return {"parallel": tree["parallel"], "train": tree["train"], "words": report}

    found, store = compute_on_rank0(rank_env, cfg.faults.timeout_s, asdict(machine), answer)
    if rank_env.rank == 0:
        print_escaped(found["words"])
    sections = {section: found[section] for section in ("parallel", "train")}
    return config_from_dict({**config_to_dict(cfg), **sections}), store


def _is_intact(checkpoint: Path, cfg: Config) -> bool:
    """Return whether a finished checkpoint is intact; if not, the ranks report it and resume from an earlier one."""
    manifest = read_manifest(checkpoint)
    return not cfg.checkpoint.verify or not validate_hashes(checkpoint, manifest, manifest)


class _TrainRequest(NamedTuple):
    """Arguments that every rank receives."""

    cfg: Config
    """Recipe, with run.dir as the user wrote it."""
    messages: tuple[str, ...]
    """Startup messages for the run log."""


def _start_training(request: _TrainRequest, cfg: Config, rank_env: RankEnv | None, resume: Path | None) -> int:
    """Start or join the ranks.

    Args:
        request: arguments of the ranks, which make the final choice of the run folder.
        cfg: the recipe, with the run folder that was chosen provisionally.
        rank_env: environment of this process, if a launcher started it.
        resume: the checkpoint to resume from.
    """
    from moefold.data import prepare
    from moefold.data.fingerprint import fingerprint

    world_size = cfg.parallel.world_size
    with report_on_local_rank0(rank_env):
        device_type = choose_checked_device(cfg.run.device, world_size, rank_env, partial(_check_device, cfg, rank_env))
    if rank_env is None or rank_env.local_rank == 0:
        check_replay_content(cfg)
        if cfg.data.kind != "tokens" or cfg.data.corrupt == "fatal":
            # The ranks agree on which corrupt token files to skip, and the checkpoint records the choice.
            prepare(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
        check_compatible(resume, cfg, None if resume is None else fingerprint(cfg.data))
    # torch takes seconds to import: without a GPU, every error above is reported without it.
    from moefold.launch.ranks import run_ranks
    from moefold.train.worker import train_worker

    return run_ranks(partial(train_worker, request.cfg, request.messages), world_size, device_type, rank_env)


def _check_device(cfg: Config, rank_env: RankEnv | None, device_type: str) -> None:
    """Reject settings that the device does not support, and a step that does not fit into its memory."""
    check_dispatch_device(cfg, device_type)
    check_kernel_device(cfg, device_type)
    check_offload_device(cfg, device_type)
    check_memory_device(cfg, device_type)
    check_training(cfg, device_type, rank_env)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold train",
        description="Train a model from a recipe. "
        "Starts the ranks itself on one machine; joins them under torchrun or srun.",
        epilog="Ctrl-C finishes the step, saves, and exits 130; the same command resumes.",
    )
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE.toml", help="the recipe, for example recipes/quickstart.toml"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that override the recipe")
    parser.add_argument("--keys", action="store_true", help="list every key of a recipe, with its default")
    return parser
