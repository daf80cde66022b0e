"""Start of a training run, up to the moment when its ranks begin. Torch-free on the CPU.

`moefold train` and the Python API take these steps in the same order: `set_up_run`, `choose_training_device`,
`prepare_data`, and then the ranks run `train_worker` or `train_on_rank`.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from moefold.checkpoint.checkpoint_dir import check_compatible, find_resume, read_meta
from moefold.checkpoint.manifest import read_manifest, validate_hashes
from moefold.config.load import config_from_dict, config_to_dict
from moefold.config.schema import Config
from moefold.host.rank_env import RankEnv, check_world_size
from moefold.launch.fitting import check_training, choose_checked_device
from moefold.recipe import LoadedRecipe, with_world_size
from moefold.terminal import print_escaped
from moefold.train.preflight import check_machine, check_replay_content
from moefold.train.run_folder import RunFolder, choose_run_folder
from moefold.validate.config import check_config
from moefold.validate.memory import check_memory_device, check_offload_device
from moefold.validate.moe import check_dispatch_device
from moefold.validate.train import check_kernel_device


class RunSetup(NamedTuple):
    """A checked recipe with its run folder."""

    cfg: Config
    """Recipe with run.dir as the user wrote it: the ranks make the final choice of the folder."""
    messages: tuple[str, ...]
    """Startup messages for the run log."""
    folder: RunFolder
    """Provisional choice of the run folder."""
    resume: Path | None
    """Checkpoint to resume from."""
    store: object
    """Rendezvous store of the ranks that planned together; it must outlive their next rendezvous."""

    @property
    def is_finished(self) -> bool:
        """Return whether an intact checkpoint has all steps; the ranks report a damaged one and resume earlier."""
        cfg = self.folder.cfg
        if self.resume is None or read_meta(self.resume).step < cfg.run.steps:
            return False
        manifest = read_manifest(self.resume)
        return not cfg.checkpoint.verify or not validate_hashes(self.resume, manifest, manifest)


def set_up_run(recipe: LoadedRecipe, rank_env: RankEnv | None) -> RunSetup:
    """Plan the mapping if the recipe leaves it open, check the recipe, and choose the run folder.

    Args:
        recipe: the recipe.
        rank_env: environment of this process, if a launcher started it.

    Raises:
        ConfigError: the recipe cannot be trained here.
    """
    cfg = recipe.cfg
    store = None
    if cfg.parallel.mapping == "auto":
        cfg, store = _plan_mapping(cfg, recipe.explicit_keys, rank_env)
    if rank_env is not None and cfg.parallel.elastic:
        cfg = with_world_size(cfg, rank_env.world_size)
    check_config(cfg)
    if rank_env is not None:
        check_world_size(rank_env, cfg.parallel.world_size)
    # Provisional: the ranks make the final choice under the lock of the folder.
    folder = choose_run_folder(cfg)
    check_machine(folder.cfg)
    return RunSetup(cfg, recipe.messages, folder, find_resume(folder.cfg), store)


def choose_training_device(setup: RunSetup, rank_env: RankEnv | None) -> str:
    """Return the device type, after a check of what it supports and of its memory.

    Raises:
        ConfigError: the device cannot run the recipe.
    """
    cfg = setup.folder.cfg
    check = partial(_check_device, cfg, rank_env)
    return choose_checked_device(cfg.run.device, cfg.parallel.world_size, rank_env, check)


def prepare_data(setup: RunSetup, rank_env: RankEnv | None) -> None:
    """Prepare the data and check the checkpoint to resume from, on one rank of each machine.

    Raises:
        ConfigError: the data cannot be read, or the checkpoint does not fit the recipe.
    """
    from moefold.data import prepare
    from moefold.data.fingerprint import fingerprint

    cfg = setup.folder.cfg
    if rank_env is not None and rank_env.local_rank != 0:
        return
    check_replay_content(cfg)
    if cfg.data.kind != "tokens" or cfg.data.corrupt == "fatal":
        # The ranks agree on which corrupt token files to skip, and the checkpoint records the choice.
        prepare(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
    check_compatible(setup.resume, cfg, None if setup.resume is None else fingerprint(cfg.data))


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


def _check_device(cfg: Config, rank_env: RankEnv | None, device_type: str) -> None:
    """Reject settings that the device does not support, and a step that does not fit into its memory."""
    check_dispatch_device(cfg, device_type)
    check_kernel_device(cfg, device_type)
    check_offload_device(cfg, device_type)
    check_memory_device(cfg, device_type)
    check_training(cfg, device_type, rank_env)
